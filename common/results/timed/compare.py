"""Comparison of two sweeps, trial by trial.

A pair is a trial of the first sweep and its counterpart in the second. The ratio, its interval and
the verdict are computed as in a sweep's table (`rows.difference`), with Holm's correction over all
pairs. Only trials of one run took turns; they are compared per round. The table also shows Mann and
Whitney's U test over the repeats.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from scipy.stats import mannwhitneyu

from common.results import stats
from common.results.records import Record
from common.results.records.card import flat_card
from common.results.records.reading import JsonObject
from common.results.stats import Difference, Repeats
from common.results.tables.cells import Cell, Column, number, numbers, texts
from common.results.tables.fields import AXES, NOTES, PLACE, Identity, Validity
from common.results.tables.table import Table
from common.results.timed.rows import difference
from common.results.validity import flag, flag_text
from dear.errors import UserError

MOST_REPEATS = 100
"""Largest number of further repeats that a table shows."""
Worse = Literal["slower", "failed", "incorrect", "flagged", "missing"]
Matched = tuple[Record, Record | None]
"""Trial of the first sweep, and its counterpart in the second (None: there is none)."""


@dataclass(frozen=True, kw_only=True)
class Pair(Validity, Identity):
    """Row of a pair. If the algorithms differ, the label is `A -> B`. Model, batch size, workers,
    network and fault are those of the first sweep's trial."""

    batch_size: int
    across: str | None = None
    """Values of the keys in which the user allows the two to differ, as `key A -> B`."""
    before: float | None = None
    """Samples per second in the first sweep."""
    after: float | None = None
    unit: str | None = None
    ratio: float | None = None
    """Throughput of the second, divided by that of the first; above 1: the second is faster."""
    ratio_low: float | None = None
    """Ends of the 95 % interval; a single repeat has none."""
    ratio_high: float | None = None
    u_test: float | None = None
    """p value of Mann and Whitney's U test over the repeats, two-sided."""
    verdict: str | None = None
    """Verdict on the second sweep's trial."""
    more_repeats: int | None = None
    """Number of further repeats of each trial after which the verdict would probably not be UNSURE;
    None if it is not UNSURE, or if the number is too large."""
    worse: Worse | None = None
    """State of the second trial if only the first is valid; or slower than allowed."""

    @property
    def batch(self) -> int:
        return self.batch_size


def pairs(
    before: Sequence[Record],
    after: Sequence[Record],
    across: Iterable[str] = (),
    *,
    other_labels: bool = True,
) -> list[Matched]:
    """Returns the trials of the first sweep with their counterparts in the second.

    Trials are matched by identity, or else by cell and label. If both sweeps have a single trial in
    a cell, these two are a pair. `across` has keys of `AXES` in which the trials of a pair may
    differ; if there are any, trials are not matched by identity. With `other_labels`, trials with
    different labels may be a pair."""
    left, matched = list(after), dict[int, Record]()
    place = [key for key in AXES if key not in across]
    keys: list[Callable[[Record], Hashable]] = [_key([*place, "label"])]
    if len(place) == len(AXES):
        keys.insert(0, lambda record: record.hash)
    if other_labels:
        keys.append(_key(place))
    for key in keys:
        for record in [record for record in before if id(record) not in matched]:
            fitting = [other for other in left if key(other) == key(record)]
            if len(fitting) == 1 and sum(key(other) == key(record) for other in before) == 1:
                matched[id(record)] = fitting[0]
                left = [other for other in left if other is not fitting[0]]
    return [(record, matched.get(id(record))) for record in before]


def _key(names: Sequence[str]) -> Callable[[Record], Hashable]:
    return lambda record: tuple(str(record.trial.get(name)) for name in names)


def why_unmatched(before: Sequence[Record], after: Sequence[Record], across: Sequence[str]) -> str:
    """Returns the reason why no trial has a counterpart in the other sweep."""
    if not after:
        return "the second sweep has no record of such a trial"
    differ, texts = [], []
    for key in AXES:
        values = [{record.setting(key) for record in side} for side in (before, after)]
        if key not in across and values[0].isdisjoint(values[1]):
            differ.append(key)
            texts.append(f"{key} {' -> '.join(', '.join(sorted(side)) for side in values)}")
    if differ:
        pairing = ",".join([*across, *differ])
        return f"the sweeps differ in {'; '.join(texts)}; --across {pairing} compares them"
    return "several trials could be counterparts of one; SWEEP@key=value chooses some of them"


def rows(matched: Sequence[Matched], across: Sequence[str] = ()) -> list[Pair]:
    """Returns a row for each match; verdicts are corrected for the number of valid pairs."""
    rows = [_pair(first, second, across) for first, second in matched]
    valid = {
        index: (first, second)
        for index, (first, second) in enumerate(matched)
        if second is not None and rows[index].flag is None
    }
    differences = [_difference(*pair) for pair in valid.values()]
    for i, measured, verdict in zip(valid, differences, stats.verdicts(differences), strict=True):
        rows[i] = dataclasses.replace(
            rows[i],
            **measured.ratio.fields("ratio"),
            u_test=u_test(*map(_per_sample, valid[i])),
            verdict=verdict,
            more_repeats=more_repeats(measured, len(differences)) if verdict == "UNSURE" else None,
        )
    return rows


def _pair(first: Record, second: Record | None, across: Sequence[str]) -> Pair:
    pair = Pair(**vars(Identity.of(first)), batch_size=first.trial["batch_size"])
    if second is None:
        known = _flag("first", first)
        worse: Worse | None = None if known else "missing"
        reason = known or "the second sweep has no such trial"
        return dataclasses.replace(pair, status="missing", flag=reason, reason=reason, worse=worse)
    reason = _flag("first", first) or _flag("second", second)
    failed = [record.status for record in (first, second) if not record.ok]
    label = first.label if first.label == second.label else f"{first.label} -> {second.label}"
    changed = [f"{key} {first.setting(key)} -> {second.setting(key)}" for key in across]
    pair = dataclasses.replace(
        pair,
        algorithm=label,
        status=failed[0] if failed else "ok",
        across=", ".join(changed) or None,
        flag=reason,
        reason=reason,
        worse=_worse(first, second),
    )
    if first.throughput is None or second.throughput is None:
        return pair
    others = _other_settings(first, second, across)
    if others and reason is None:
        pair = dataclasses.replace(pair, reason=f"also different: {', '.join(others)}")
    units = dict.fromkeys(record.throughput.unit for record in (first, second))
    unit = next(iter(units)) if len(units) == 1 else "samples/s"
    return dataclasses.replace(pair, before=_rate_of(first), after=_rate_of(second), unit=unit)


_ASIDE = {"label", "measure", "seed", "twin", "plugin", "brought", "data_digest", *AXES}
"""Settings of which no note is needed: shown anyway, or without influence on a step."""
_FOLLOWS = {
    "model": ("profile_digest", "sentence_len", "learn"),
    "batch_size": ("profile_digest",),
    "world_size": ("ranks_per_host",),
    "network": ("network_digest",),
}
"""Settings that follow from one in which the two may differ."""


def _other_settings(first: Record, second: Record, across: Iterable[str]) -> list[str]:
    """Returns `key A -> B` for each setting, apart from the place and the label, that differs."""
    aside = _ASIDE | {key for axis in across for key in _FOLLOWS.get(axis, ())}
    if first.label != second.label:
        aside |= {"algorithm", "options"}
    before, after = (
        flat_card({key: value for key, value in record.trial.items() if key not in aside})
        for record in (first, second)
    )
    return [
        f"{key} {before.get(key, '-')} -> {after.get(key, '-')}"
        for key in dict.fromkeys([*before, *after])
        if before.get(key) != after.get(key)
    ]


def _flag(side: str, record: Record) -> str | None:
    text = flag_text(record)
    if text is None and not record.timed:
        return f"the {side} has timed no steps"
    return text and f"the {side}: {text}"


def _worse(first: Record, second: Record) -> Worse | None:
    problem = flag(second)
    if flag(first) is not None or problem is None:
        return None
    return problem.kind if problem.kind in ("failed", "incorrect") else "flagged"


def _samples(record: Record) -> int:
    return record.trial["batch_size"] * record.trial["world_size"]


def _per_sample(record: Record) -> Repeats:
    return [[step / _samples(record) for step in repeat] for repeat in record.repeats]


def _difference(first: Record, second: Record) -> Difference:
    """Returns the difference of the throughputs; trials of a pair may differ in their samples."""
    measured, more = difference(second, first), _samples(second) / _samples(first)
    return dataclasses.replace(measured, log_ratio=measured.log_ratio + math.log(more))


def _rate_of(record: Record) -> float:
    if not record.timed:
        return record.throughput.value
    return stats.throughput(record.repeats, _samples(record)).value


def u_test(before: Repeats, after: Repeats) -> float | None:
    """Returns the p value of Mann and Whitney's U test of step times; None for a single repeat."""
    if min(len(before), len(after)) < 2:
        return None
    times = [[statistics.fmean(repeat) for repeat in repeats] for repeats in (before, after)]
    return float(mannwhitneyu(*times).pvalue)


def more_repeats(measured: Difference, comparisons: int) -> int | None:
    """Returns how many more repeats of each trial would probably give a verdict; None: too many.
    `comparisons` is the number of verdicts, for Holm's correction as in `detectable`."""
    if measured.error is None or measured.repeats < 2:
        return max(1, stats.MIN_REPEATS - measured.repeats)
    for count in range(max(measured.repeats, stats.MIN_REPEATS), MOST_REPEATS + 1):
        likely = measured.with_repeats(count)
        verdict, *_ = stats.verdicts([likely] * comparisons)
        if verdict == "SAME" or (
            verdict != "UNSURE"
            and stats.detectable(likely, comparisons) < math.expm1(abs(likely.log_ratio))
        ):
            return max(1, count - measured.repeats)
    return None


def geometric_mean(compared: Iterable[Pair]) -> tuple[float, int] | None:
    """Returns the geometric mean of the valid ratios, and their number."""
    logs = [math.log(pair.ratio) for pair in compared if pair.ratio is not None]
    return (math.exp(statistics.fmean(logs)), len(logs)) if logs else None


def environment(before: Sequence[Record], after: Sequence[Record]) -> list[str]:
    """Returns a line `name: A -> B` for each difference between the machines; records of a sweep
    that was continued may have several values."""
    if not (before and after):
        return []
    first, second = (
        [flat_card(machine) for machine in _distinct(record.machine for record in records)]
        for records in (before, after)
    )
    lines = []
    for name in dict.fromkeys(name for card in [*first, *second] for name in card):
        sides = [
            ", ".join(dict.fromkeys(str(card.get(name, "-")) for card in side))
            for side in (first, second)
        ]
        if sides[0] != sides[1]:
            lines.append(f"{name}: {sides[0]} -> {sides[1]}")
    return lines


def _distinct(machines: Iterable[JsonObject]) -> list[JsonObject]:
    distinct: list[JsonObject] = []
    for machine in machines:
        if machine not in distinct:
            distinct.append(machine)
    return distinct


def refuse_mixed(before: Sequence[Record], after: Sequence[Record]) -> None:
    """Raises `UserError` if the sweeps are from different machines or kinds of cluster."""
    for what, of in (
        ("fabrics", lambda record: record.fabric.kind),
        ("machines", lambda record: (record.machine.get("cpu"), record.machine.get("cores"))),
    ):
        kinds = [sorted({str(of(record)) for record in records}) for records in (before, after)]
        if kinds[0] != kinds[1]:
            raise UserError(
                f"compare: different {what}: {', '.join(kinds[0])} and {', '.join(kinds[1])}; "
                "--force compares them nevertheless"
            )


def table(compared: Sequence[Pair], across: Iterable[str] = ()) -> Table[Pair]:
    """Returns the table of the pairs; one column shows all keys that differ within pairs."""
    differ = [AXES[key] for key in across]
    place = [column for column in PLACE if column.title not in differ]
    return Table(compared, (*place[:-1], _ACROSS, place[-1], *_COLUMNS))


def _more(row: Pair) -> Cell:
    missing = "many" if row.verdict == "UNSURE" else ""
    return number(row.more_repeats, "{} more".format, missing=missing)


_ACROSS = texts("across", sparse=True, weight=0, role="place")
_COLUMNS: tuple[Column[Pair], ...] = (
    numbers("first", "before", unit=True, weight=1),
    numbers("second", "after", unit=True, weight=1),
    numbers("second / first (95 % CI)", "ratio", "{:.3f}".format, weight=1),
    texts("verdict", word=True, weight=1),
    Column(title="repeats to decide", cell=_more, sparse=True, weight=3),
    numbers("U test", "u_test", "p = {:.2g}".format, weight=4),
    NOTES,
)
