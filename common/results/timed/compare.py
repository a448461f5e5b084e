"""Comparison of two sweeps, trial by trial.

The ratio, its interval and the verdict are those of a table (`rows.difference`), with Holm's
correction over all pairs. Trials of one run took turns and are compared by rounds; trials of two
runs never took turns. Mann and Whitney's U test over the repeats is shown beside them.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from scipy.stats import mannwhitneyu

from common.results import stats
from common.results.records import Record
from common.results.records.card import flat_card
from common.results.stats import Difference, Repeats
from common.results.tables.cells import (
    Cell,
    Column,
    interval,
    number,
    word,
)
from common.results.tables.fields import NOTES, PLACE, Identity, Validity, identity
from common.results.tables.table import Table
from common.results.timed.rows import difference
from common.results.validity import flag_text
from dear.errors import UserError

MOST_REPEATS = 100
"""Largest number of further repeats that a table shows."""
_PLACE = ("model", "batch_size", "world_size", "network", "fault")


@dataclass(frozen=True, kw_only=True)
class Pair(Validity, Identity):
    """One trial of both sweeps; its label is `A -> B` for two algorithms."""

    batch_size: int
    before: float | None = None
    """Samples per second in the first sweep."""
    after: float | None = None
    unit: str | None = None
    ratio: float | None = None
    """Step time of the first over that of the second; above 1 the second is faster."""
    ratio_low: float | None = None
    """Ends of the 95 % interval; a single repeat has none."""
    ratio_high: float | None = None
    u_test: float | None = None
    """p value of Mann and Whitney's U test over the repeats, two-sided."""
    verdict: str | None = None
    """Verdict on the second sweep."""
    more_repeats: int | None = None
    """Further repeats of each side that would probably decide; None for a decided pair, or if they
    are too many."""

    @property
    def batch(self) -> int:
        return self.batch_size


def pairs(before: Sequence[Record], after: Sequence[Record]) -> list[tuple[Record, Record]]:
    """Returns the trials that both sweeps have, in the order of the first.

    Trials are matched by identity, or else by place and label. Where each side has one trial of a
    place, these two are a pair.

    Raises:
        UserError: there is no pair.
    """
    left, matched = list(after), dict[int, tuple[Record, Record]]()
    keys: tuple[Callable[[Record], Hashable], ...]
    keys = (lambda record: record.hash, _key((*_PLACE, "label")), _key(_PLACE))
    for key in keys:
        for record in [record for record in before if id(record) not in matched]:
            fitting = [other for other in left if key(other) == key(record)]
            if len(fitting) == 1 and sum(key(other) == key(record) for other in before) == 1:
                matched[id(record)] = (record, fitting[0])
                left = [other for other in left if other is not fitting[0]]
    if not matched:
        raise UserError("compare: the two sweeps have no trial in common")
    return [matched[id(record)] for record in before if id(record) in matched]


def _key(names: Sequence[str]) -> Callable[[Record], Hashable]:
    return lambda record: tuple(str(record.trial.get(name)) for name in names)


def rows(matched: Sequence[tuple[Record, Record]]) -> list[Pair]:
    """Returns a row for each pair; verdicts are corrected for the number of valid pairs."""
    rows = [_pair(first, second) for first, second in matched]
    valid = [index for index, pair in enumerate(rows) if pair.flag is None]
    differences = [difference(matched[i][1], matched[i][0]) for i in valid]
    for i, measured, verdict in zip(valid, differences, stats.verdicts(differences), strict=True):
        ratio = measured.ratio
        rows[i] = dataclasses.replace(
            rows[i],
            ratio=ratio.value,
            ratio_low=ratio.low,
            ratio_high=ratio.high,
            u_test=u_test(matched[i][0].repeats, matched[i][1].repeats),
            verdict=verdict,
            more_repeats=more_repeats(measured) if verdict == "UNSURE" else None,
        )
    return rows


def _pair(first: Record, second: Record) -> Pair:
    """Returns a pair with its rates, or with the reason why it is not compared."""
    reason = _flag("first", first) or _flag("second", second)
    failed = [record.status for record in (first, second) if not record.ok]
    label = first.label if first.label == second.label else f"{first.label} -> {second.label}"
    pair = Pair(**identity(first), batch_size=first.trial["batch_size"], flag=reason, reason=reason)
    pair = dataclasses.replace(pair, algorithm=label, status=failed[0] if failed else "ok")
    if first.throughput is None or second.throughput is None:
        return pair
    unit = first.throughput.unit
    return dataclasses.replace(pair, before=_rate_of(first), after=_rate_of(second), unit=unit)


def _flag(side: str, record: Record) -> str | None:
    """Returns the reason why one side of a pair is not compared."""
    text = flag_text(record)
    if text is None and not record.timed:
        text = "has timed no steps"
        return f"the {side} {text}"
    return text and f"the {side}: {text}"


def _rate_of(record: Record) -> float:
    """Returns the throughput as tables show it; that of a trial that learns is on record."""
    if not record.timed:
        return record.throughput.value
    samples = record.trial["batch_size"] * record.trial["world_size"]
    return stats.throughput(record.repeats, samples).value


def u_test(before: Repeats, after: Repeats) -> float | None:
    """Returns p of Mann and Whitney's U over the times per step; None for a single repeat."""
    if min(len(before), len(after)) < 2:
        return None
    times = [[statistics.fmean(repeat) for repeat in repeats] for repeats in (before, after)]
    return float(mannwhitneyu(*times).pvalue)


def more_repeats(measured: Difference) -> int | None:
    """Returns the further repeats of each side that would probably decide, at the same spread."""
    if measured.error is None or measured.repeats < 2:
        return max(1, stats.MIN_REPEATS - measured.repeats)
    for count in range(max(measured.repeats, stats.MIN_REPEATS), MOST_REPEATS + 1):
        likely = measured.with_repeats(count)
        needed = stats.detectable(likely, 1)
        if stats.verdicts([likely]) != ["UNSURE"] and (
            stats.verdicts([likely]) == ["SAME"] or needed < math.expm1(abs(likely.log_ratio))
        ):
            return max(1, count - measured.repeats)
    return None


def geometric_mean(compared: Iterable[Pair]) -> tuple[float, int] | None:
    """Returns the geometric mean of the valid ratios, and their number."""
    logs = [math.log(pair.ratio) for pair in compared if pair.ratio is not None]
    return (math.exp(statistics.fmean(logs)), len(logs)) if logs else None


def environment(before: Sequence[Record], after: Sequence[Record]) -> list[str]:
    """Returns the differences between the machines, a line each: `name: A -> B`."""
    first, second = (flat_card(records[0].machine) for records in (before, after))
    return [
        f"{name}: {first.get(name, '-')} -> {second.get(name, '-')}"
        for name in {**first, **second}
        if first.get(name) != second.get(name)
    ]


def refuse_mixed(before: Sequence[Record], after: Sequence[Record]) -> None:
    """Raises `UserError` if the sweeps were measured on different machines or fabrics."""
    for what, of in (
        ("fabrics", lambda record: record.fabric.kind),
        ("machines", lambda record: (record.machine.get("cpu"), record.machine.get("cores"))),
    ):
        kinds = [sorted({str(of(record)) for record in records}) for records in (before, after)]
        if kinds[0] != kinds[1]:
            raise UserError(
                f"compare: different {what}: {', '.join(kinds[0])} and {', '.join(kinds[1])}; "
                "--force compares them all the same"
            )


def regressions(compared: Iterable[Pair], share: float) -> list[Pair]:
    """Returns the pairs whose second trial is SLOWER by more than a share of the throughput."""
    return [pair for pair in compared if pair.verdict == "SLOWER" and pair.ratio < 1 - share]


def table(compared: Sequence[Pair]) -> Table[Pair]:
    """Returns the table of the pairs."""
    return Table(compared, (*PLACE, *_COLUMNS))


def _rate(row: Pair, value: float | None) -> Cell:
    return number(value, unit=f" {row.unit}", flag=row.flag)


def _ratio(row: Pair) -> Cell:
    ends = interval(row.ratio_low, row.ratio_high, "{:.3f}".format)
    return number(row.ratio, "{:.3f}".format, ends=ends)


def _more(row: Pair) -> Cell:
    missing = "many" if row.verdict == "UNSURE" else ""
    return number(row.more_repeats, "{} more".format, missing=missing)


_COLUMNS: tuple[Column[Pair], ...] = (
    Column(title="first", cell=lambda row: _rate(row, row.before), weight=1),
    Column(title="second", cell=lambda row: _rate(row, row.after), weight=1),
    Column(title="second / first (95 % CI)", cell=_ratio, weight=1),
    Column(title="verdict", cell=lambda row: word(row.verdict), right=False, weight=1),
    Column(title="repeats to decide", cell=_more, sparse=True, weight=3),
    Column(title="U test", cell=lambda row: number(row.u_test, "p = {:.2g}".format), weight=4),
    NOTES,
)
