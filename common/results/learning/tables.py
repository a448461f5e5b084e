"""The table of trials that train for a time, and what is said below it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from common.results.learning.summary import LearnRow
from common.results.records import Record
from common.results.tables.table import PLACE, Column, Table, doubted, significant


def table(rows: Sequence[LearnRow], compare_to: str = "the base") -> Table:
    """The rows as they are shown."""
    ratio = _shown(f"vs {compare_to} (95 % CI)", _speedup_text, weight=2)
    return Table(rows, (*PLACE, *_REACHED, ratio, *_COLUMNS))


def _interval(low: float | None, high: float | None, form: Callable[[float], str]) -> str:
    return "" if low is None or high is None else f" ({form(low)}-{form(high)})"


def _reached(fields: str, form: Callable[[float], str], unit: str = "") -> Callable[[Any], str]:
    """The text of a value until the target, by the name of its field as in `_ends`."""

    def text(row: LearnRow) -> str:
        if row.target is None:
            return ""
        value, low, high = (getattr(row, fields.format(end)) for end in ("", "_low", "_high"))
        ends = _interval(low, high, form)
        if row.reached != row.runs and not unit:
            return ""
        if row.reached != row.runs:
            ends = f" ({row.reached} of {row.runs})" if row.reached else ""
        return "not reached" + ends if value is None else f"{form(value)}{unit}{ends}"

    return text


def _speedup_text(row: LearnRow) -> str:
    """A ratio, or the end of it that is known."""
    if row.speedup is not None:
        ends = _interval(row.speedup_low, row.speedup_high, "{:.2f}".format)
        return f"{row.speedup:.2f}{ends}"
    if row.speedup_low is not None:
        return f"over {row.speedup_low:.2f}"
    return "" if row.speedup_high is None else f"below {row.speedup_high:.2f}"


def _accuracy_text(row: LearnRow) -> str:
    if row.accuracy is None:
        return ""
    error = "" if row.accuracy_error is None else f" ±{100 * row.accuracy_error:.1f}"
    ends = _interval(row.accuracy_low, row.accuracy_high, lambda end: f"{100 * end:.1f}")
    return f"{row.accuracy:.1%}{error}{ends}"


def _ranks(row: LearnRow) -> str:
    if row.accuracy is None or row.accuracy_min == row.accuracy_max:
        return ""
    return f"{row.accuracy_min:.1%}-{row.accuracy_max:.1%}"


def _rate(row: LearnRow) -> str:
    ends = _interval(row.steps_per_s_low, row.steps_per_s_high, significant)
    return significant(row.steps_per_s) + ends


def _kept(row: LearnRow) -> str:
    ends = _interval(row.kept_low, row.kept_high, "{:.2f}".format)
    return "" if row.kept is None else f"{row.kept:.2f}{ends}"


def _stale(row: LearnRow) -> str:
    if row.staleness_mean is None:
        return ""
    return f"{row.staleness_mean:.1f}, max {row.staleness_max:g}"


def _shown(
    title: str, text: Callable[[LearnRow], str], numeric: bool = True, weight: int = 5
) -> Column:
    return Column(title=title, text=text, numeric=numeric, sparse=True, weight=weight)


def _number(title: str, text: Callable[[LearnRow], str], weight: int = 5) -> Column:
    return _shown(title, lambda row: doubted(row, text(row)), weight=weight)


_REACHED = (
    _number("to target (95 % CI)", _reached("to_target{}_s", "{:.1f}".format, " s"), 1),
    _number("steps (95 % CI)", _reached("steps_to_target{}", "{:.0f}".format)),
)
_COLUMNS = (
    _shown("verdict", lambda row: row.verdict or "", numeric=False, weight=2),
    _number("accuracy (95 % CI)", _accuracy_text, 1),
    _number("of single ranks", _ranks),
    _number("top 5", lambda row: "" if row.accuracy_top5 is None else f"{row.accuracy_top5:.1%}"),
    _number("loss", lambda row: significant(row.loss)),
    _number("perplexity", lambda row: significant(row.perplexity)),
    _number("training loss", lambda row: significant(row.train_loss)),
    _number("throughput", lambda row: f"{significant(row.samples_per_s)} {row.unit}"),
    _number("steps/s (95 % CI)", _rate),
    _number("on the slow host", lambda row: significant(row.slowed_steps_per_s)),
    _shown("kept (95 % CI)", _kept),
    _number(
        "consensus", lambda row: f"{row.consensus_distance:.1e}" if row.consensus_distance else ""
    ),
    _number("staleness", _stale),
    _shown("lost", lambda row: row.lost_ranks or "", numeric=False),
    _shown("notes", lambda row: row.reason or "", numeric=False, weight=9),
)


def summary(rows: Sequence[LearnRow]) -> list[str]:
    """Who is first at the target, or fastest, in a sentence per model, world and fault."""
    lines = []
    for place in dict.fromkeys(row.place for row in rows):
        rivals = [row for row in rows if row.place == place and row.runs and row.flag is None]
        if len(rivals) < 2:
            continue
        leaders = sorted((row for row in rivals if row.leads), key=_seconds)
        where = "".join(f", {name}" for name in place[3:] if name)
        text = f"{place[0]}, {place[2]} workers{where}: "
        goal, there = rivals[0].target, [row for row in rivals if row.reached == row.runs]
        if leaders:
            first, *others = leaders
            text += f"{first.algorithm} "
            text += "is the fastest" if goal is None else f"is the first at {goal:.0%}"
            text += f", after {_REACHED[0].text(first)}" if goal is not None else ""
            if others:
                names = ", ".join(row.algorithm for row in others)
                text += f"; not distinguishable from it: {names}"
        elif goal is not None and not any(row.reached for row in rivals):
            text += f"none reaches {goal:.0%} in {rivals[0].limit}"
        else:
            continue
        if leaders and goal is not None:
            text += f"; {len(there)} of {len(rivals)} get there in every run"
        lines.append(text)
    return lines


def _seconds(row: LearnRow) -> float:
    """What the first has least of."""
    return (row.to_target_s or 0.0) if row.target is not None else 1 / (row.steps_per_s or math.inf)


def remarks(records: Iterable[Record]) -> list[str]:
    """What the table's numbers are of: data, runs, intervals."""
    found = []
    for record in records:
        data = record.first and record.first.data
        if data is None or not record.learning:
            continue
        seeds = {run.seed for run in record.learning}
        found.append(
            f"{data.name}: trained on {data.title}; {len(seeds)} "
            f"{'seed' if len(seeds) == 1 else 'seeds'}; accuracy ±: standard error by the number "
            "of test images, the same ones for all"
        )
    return list(dict.fromkeys(found))
