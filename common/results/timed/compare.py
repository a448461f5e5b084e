"""Two sweeps, trial by trial: is the second one faster, by how much, and is that luck?

The ratio, its interval and the word are those of a table (`rows.difference`), with Holm's
correction over all pairs. Trials of one run took turns and are compared round by round; those of
two never did. Mann and Whitney's U over the repeats stands beside it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from scipy.stats import mannwhitneyu

from common.results import stats
from common.results.records import Record
from common.results.records.card import flat_card
from common.results.stats import Difference, Repeats
from common.results.tables.table import PLACE, Column, Table, doubted, identity, significant
from common.results.timed.rows import difference
from common.results.validity import flag_text
from dear.errors import UserError

MOST_REPEATS = 100
"""More would be needed: that is not worth saying as a number."""
_PLACE = ("model", "batch_size", "world_size", "network", "fault")


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One trial in both sweeps, and a line of the CSV file."""

    model: str
    batch_size: int
    world_size: int
    network: str | None
    fault: str | None
    algorithm: str
    """Of both; `A -> B` where they are two."""
    status: str
    before: float | None = None
    """Samples per second, as the next."""
    after: float | None = None
    unit: str | None = None
    ratio: float | None = None
    """Step time of the first over that of the second: above 1 the second is faster."""
    ratio_low: float | None = None
    """Ends of the 95 % interval; a single repeat has none."""
    ratio_high: float | None = None
    u_test: float | None = None
    """p value of Mann and Whitney's U over the repeats, two-sided."""
    verdict: str | None = None
    """Of the second sweep."""
    more_repeats: int | None = None
    """Of each side, which would probably decide; None where there is a word, or too many."""
    flag: str | None = None
    reason: str | None = None

    @property
    def batch(self) -> int:
        return self.batch_size


def pairs(before: Sequence[Record], after: Sequence[Record]) -> list[tuple[Record, Record]]:
    """The trials that both have: of the same identity, else of the same place and label; else,
    where each side has one trial in a place, those two.

    Raises:
        UserError: there is none.
    """
    left = list(after)
    found = []
    by_label = (*_PLACE, "label")
    for same in (_hash, _key(by_label), _key(_PLACE)):
        for one in [record for record in before if all(record is not pair[0] for pair in found)]:
            own = [r for r in before if same(r) == same(one)]
            fitting = [other for other in left if same(other) == same(one)]
            if len(fitting) == 1 and len(own) == 1:
                found.append((one, fitting[0]))
                left = [other for other in left if other is not fitting[0]]
    if not found:
        raise UserError("compare: no trial of the one is one of the other")
    order = {id(record): place for place, record in enumerate(before)}
    return sorted(found, key=lambda pair: order[id(pair[0])])


def _hash(record: Record) -> Any:
    return record.hash


def _key(names: Sequence[str]) -> Any:
    def key(record: Record) -> Any:
        return tuple(str(record.trial.get(name)) for name in names)

    return key


def rows(found: Sequence[tuple[Record, Record]]) -> list[Pair]:
    """A row for each pair; words are corrected for the number of pairs that are believed."""
    why = [_why(*pair) for pair in found]
    believed = [pair for pair, reason in zip(found, why, strict=True) if reason is None]
    differences = [difference(b, a) for a, b in believed]
    words = iter(zip(differences, stats.verdicts(differences), strict=True))
    made = []
    for (a, b), reason in zip(found, why, strict=True):
        label = a.label if a.label == b.label else f"{a.label} -> {b.label}"
        known = {**identity(a), "algorithm": label, "batch_size": a.trial["batch_size"]}
        if reason is not None:
            status = "ok" if a.ok and b.ok else next(r.status for r in (a, b) if not r.ok)
            made.append(
                Pair(**{**known, "status": status}, flag=reason, reason=reason, **_rates(a, b))
            )
            continue
        measured, word = next(words)
        ratio = measured.ratio
        more = more_repeats(measured) if word == "UNSURE" else None
        made.append(
            Pair(
                **known,
                **_rates(a, b),
                ratio=ratio.value,
                ratio_low=ratio.low,
                ratio_high=ratio.high,
                u_test=u_test(a.repeats, b.repeats),
                verdict=word,
                more_repeats=more,
            )
        )
    return made


def _rates(a: Record, b: Record) -> dict[str, Any]:
    if not (a.throughput and b.throughput):
        return {}
    return {"before": _rate_of(a), "after": _rate_of(b), "unit": a.throughput.unit}


def _rate_of(record: Record) -> float:
    """As tables have it, also of records from before throughput was taken from elapsed time."""
    if not any(record.repeats):  # it learns
        return record.throughput.value
    samples = record.trial["batch_size"] * record.trial["world_size"]
    return stats.throughput(record.repeats, samples).value


def _why(a: Record, b: Record) -> str | None:
    """Why a pair is not compared."""
    for side, record in (("first", a), ("second", b)):
        found = flag_text(record)
        if found is not None:
            return f"the {side}: {found}"
        if not any(record.repeats):
            return f"the {side} has timed no steps"
    return None


def u_test(before: Repeats, after: Repeats) -> float | None:
    """p of Mann and Whitney's U over the repeats' times per step; None with a single repeat."""
    if min(len(before), len(after)) < 2:
        return None
    times = [[statistics.fmean(repeat) for repeat in one] for one in (before, after)]
    return float(mannwhitneyu(*times).pvalue)


def more_repeats(measured: Difference) -> int | None:
    """How many more of each side would probably give a word, if the noise and the ratio stay."""
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


def geometric_mean(found: Iterable[Pair]) -> tuple[float, int] | None:
    """Of the ratios that are believed, and how many there are."""
    logs = [math.log(pair.ratio) for pair in found if pair.ratio is not None]
    return (math.exp(statistics.fmean(logs)), len(logs)) if logs else None


def environment(before: Sequence[Record], after: Sequence[Record]) -> list[str]:
    """What differs between the machines, a line each: `name: A -> B`."""
    found = [flat_card(records[0].machine) for records in (before, after)]
    return [
        f"{name}: {found[0].get(name, '-')} -> {found[1].get(name, '-')}"
        for name in dict.fromkeys([*found[0], *found[1]])
        if found[0].get(name) != found[1].get(name)
    ]


def refuse_mixed(before: Sequence[Record], after: Sequence[Record]) -> None:
    """Raises `UserError` if the two were measured on different machines or fabrics."""
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


def table(found: Sequence[Pair]) -> Table:
    """The rows as they are shown."""
    return Table(found, (*PLACE, *_COLUMNS))


def regressions(found: Iterable[Pair], share: float) -> list[Pair]:
    """The pairs whose second trial is SLOWER by more than this share of the throughput."""
    return [one for one in found if one.verdict == "SLOWER" and one.ratio < 1 - share]


def _rate(field: str) -> Any:
    def text(row: Pair) -> str:
        value = getattr(row, field)
        return "" if value is None else doubted(row, f"{significant(value)} {row.unit}")

    return text


def _ratio(row: Pair) -> str:
    if row.ratio is None:
        return ""
    ends = "" if row.ratio_low is None else f" ({row.ratio_low:.3f}-{row.ratio_high:.3f})"
    return f"{row.ratio:.3f}{ends}"


def _word(row: Pair) -> str:
    return row.verdict or ""


def _more(row: Pair) -> str:
    if row.verdict != "UNSURE":
        return ""
    return "many" if row.more_repeats is None else f"{row.more_repeats} more"


_COLUMNS = (
    Column(title="first", text=_rate("before"), weight=1),
    Column(title="second", text=_rate("after"), weight=1),
    Column(title="second / first (95 % CI)", text=_ratio, weight=1),
    Column(title="verdict", text=_word, numeric=False, weight=1),
    Column(title="repeats to decide", text=_more, sparse=True, weight=3),
    Column(
        title="U test",
        text=lambda row: "" if row.u_test is None else f"p = {row.u_test:.2g}",
        weight=4,
    ),
    Column(title="notes", text=lambda row: row.reason or "", numeric=False, weight=9, sparse=True),
)
