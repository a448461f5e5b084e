"""Table of training trials, and the sentences below it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from common.results.learning.summary import LearnRow
from common.results.records import Record
from common.results.records.record import Throughput
from common.results.tables.cells import (
    Cell,
    Column,
    Form,
    interval,
    number,
    numbers,
    percent,
    significant,
    texts,
)
from common.results.tables.fields import NOTES, PLACE, USE
from common.results.tables.table import Table

_two: Form = "{:.2f}".format
_one_percent: Form = "{:.1%}".format


def table(rows: Sequence[LearnRow], compare_to: str = "the base") -> Table[LearnRow]:
    """Returns the table of rows."""
    ratio = _column(f"vs {compare_to} (95 % CI)", _speedup, 2)
    return Table(rows, (*PLACE, *_REACHED, ratio, *_COLUMNS))


def with_runs(table: Table[LearnRow], runs: Mapping[int, Throughput]) -> Table[LearnRow]:
    """Returns the table with the number of runs, and the range of their throughput. `runs` has the
    throughput by `id` of the row."""

    def ends(row: LearnRow) -> Cell:
        rate = runs.get(id(row))
        return (
            Cell(interval(rate.ci_low, rate.ci_high, significant), rate.ci_low) if rate else Cell()
        )

    return table.after(
        "throughput",
        (
            Column(title="throughput: lowest and highest run", cell=ends),
            Column(title="runs", cell=lambda row: number(row.runs, str)),
        ),
    )


def _to_target(row: LearnRow) -> Cell:
    if row.target is None:
        return Cell()
    some = f"{row.reached} of {row.runs}" if row.reached != row.runs and row.reached else ""
    seconds: Form = "{:.1f}".format
    ends = some or interval(row.to_target_low_s, row.to_target_high_s, seconds)
    missing = "not reached" + (f" ({some})" if some else "")
    missing = f"({missing})" if row.flag else missing
    return number(row.to_target_s, seconds, unit=" s", ends=ends, flag=row.flag, missing=missing)


def _steps(row: LearnRow) -> Cell:
    if row.target is None or row.reached != row.runs:
        return Cell()
    whole: Form = "{:.0f}".format
    ends = interval(row.steps_to_target_low, row.steps_to_target_high, whole)
    return number(row.steps_to_target, whole, ends=ends, flag=row.flag, missing="not reached")


def _speedup(row: LearnRow) -> Cell:
    if row.speedup is not None:
        ends = interval(row.speedup_low, row.speedup_high, _two)
        return number(row.speedup, _two, ends=ends)
    if row.speedup_low is not None:
        return number(row.speedup_low, "over {:.2f}".format)
    return number(row.speedup_high, "below {:.2f}".format)


def _accuracy(row: LearnRow) -> Cell:
    error = "" if row.accuracy_error is None else f" ±{100 * row.accuracy_error:.1f}"
    ends = interval(row.accuracy_low, row.accuracy_high, lambda end: f"{100 * end:.1f}")
    return number(row.accuracy, _one_percent, unit=error, ends=ends, flag=row.flag)


def _ranks(row: LearnRow) -> Cell:
    if row.accuracy is None or row.accuracy_min == row.accuracy_max:
        return Cell()
    unit = f"-{row.accuracy_max:.1%}"
    return number(row.accuracy_min, _one_percent, unit=unit, flag=row.flag)


def _consensus(row: LearnRow) -> Cell:
    return number(row.consensus_distance or None, "{:.1e}".format, flag=row.flag)


def _staleness(row: LearnRow) -> Cell:
    unit = f", max {row.staleness_max:g}" if row.staleness_max is not None else ""
    return number(row.staleness_mean, "{:.1f}".format, unit=unit, flag=row.flag)


def _column(title: str, cell: Callable[[LearnRow], Cell], weight: int = 5) -> Column[LearnRow]:
    return Column(title=title, cell=cell, sparse=True, weight=weight)


_REACHED = (_column("to target (95 % CI)", _to_target, 1), _column("steps (95 % CI)", _steps))
_COLUMNS: tuple[Column[LearnRow], ...] = (
    texts("verdict", word=True, sparse=True, weight=2),
    _column("accuracy (95 % CI)", _accuracy, 1),
    _column("of single ranks", _ranks),
    numbers("top 5", "accuracy_top5", _one_percent, sparse=True),
    numbers("loss", "loss", sparse=True),
    numbers("perplexity", "perplexity", sparse=True),
    numbers("training loss", "train_loss", sparse=True),
    numbers("throughput", "samples_per_s", unit=True, sparse=True),
    numbers("steps/s (95 % CI)", "steps_per_s", sparse=True),
    numbers("on the slow host", "slowed_steps_per_s", sparse=True),
    numbers("kept (95 % CI)", "kept", _two, sparse=True),
    _column("consensus", _consensus),
    _column("staleness", _staleness),
    texts("lost", "lost_ranks", sparse=True),
    *USE,
    NOTES,
)


def summary(rows: Sequence[LearnRow]) -> list[str]:
    """Returns a sentence about the fastest trials for each model, world size and fault."""
    lines = []
    for place in dict.fromkeys(row.place for row in rows):
        rivals = [row for row in rows if row.place == place and row.runs and row.flag is None]
        if len(rivals) < 2:
            continue
        leaders = sorted((row for row in rivals if row.leads), key=_seconds)
        text, goal = f"{rivals[0].where}: ", rivals[0].target
        there = [row for row in rivals if row.reached == row.runs]
        if leaders:
            first, *others = leaders
            text += f"{first.algorithm} "
            text += "is the fastest" if goal is None else f"is the first at {percent(goal)}"
            text += f", after {_to_target(first).text}" if goal is not None else ""
            if others:
                names = ", ".join(row.algorithm for row in others)
                text += f"; not distinguishable from it: {names}"
        elif goal is not None and not any(row.reached for row in rivals):
            text += f"none reaches {percent(goal)} in {rivals[0].limit}"
        elif goal is not None:
            text += f"no first at {percent(goal)}: "
            text += ", ".join(
                f"{row.algorithm} gets there in {row.reached or 0} of {row.runs} runs"
                for row in rivals
                if row.reached != row.runs
            )
            text += f" of {rivals[0].limit}"
        else:
            continue
        if leaders and goal is not None:
            text += f"; {len(there)} of {len(rivals)} get there in every run"
        lines.append(text)
    return lines


def _seconds(row: LearnRow) -> float:
    """Returns the sort key of trials: the time to the target, or the time of a step. Trials of
    which a run missed the target come last."""
    if row.target is None:
        return 1 / row.steps_per_s if row.steps_per_s else math.inf
    return row.to_target_s if row.to_target_s and row.reached == row.runs else math.inf


def remarks(records: Iterable[Record]) -> list[str]:
    """Returns remarks on the data, runs and intervals of a table."""
    lines = []
    for record in records:
        data = record.first and record.first.data
        if data is None or not record.learning:
            continue
        seeds = {run.seed for run in record.learning}
        samples = "words" if record.trial["learn"]["data"] == "text" else "images"
        lines.append(
            f"{data.name}: trained on {data.title}; {len(seeds)} "
            f"{'seed' if len(seeds) == 1 else 'seeds'}; accuracy ±: standard error by the number "
            f"of test {samples}, the same ones for all"
        )
    return list(dict.fromkeys(lines))
