"""Trials that train for a time: how soon and how well they learn, and at what pace."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from common.results.records import Record
from common.results.table import PLACE, Column, Table, given, identity, significant


@dataclass(frozen=True, kw_only=True)
class LearnRow:
    """One trial, and a line of its CSV file; medians over its repeats.

    None where there is nothing to say; every trial with a result has `samples_per_s`, `unit` and
    `repeats`.
    """

    model: str
    batch: str
    """Samples per step and rank; of each rank where they differ."""
    world_size: int
    network: str | None = None
    fault: str | None = None
    algorithm: str
    status: str
    budget_s: float
    target: float | None = None
    """The accuracy that was to be reached."""
    to_target_s: float | None = None
    """None if half of the repeats or more did not reach it."""
    steps_to_target: float | None = None
    """Of one rank, the mean of all."""
    accuracy: float | None = None
    """Of the mean model at the end, as the next five."""
    accuracy_min: float | None = None
    """Of the rank whose own model is worst."""
    accuracy_max: float | None = None
    loss: float | None = None
    consensus_distance: float | None = None
    samples_per_s: float | None = None
    unit: str | None = None
    steps_per_s: float | None = None
    """Of the slowest rank that no fault has slowed."""
    slowed_steps_per_s: float | None = None
    """Of the slowest rank on the host that a fault has slowed."""
    kept: float | None = None
    """`steps_per_s` over that of the same trial without the fault."""
    staleness_mean: float | None = None
    """Steps that what a neighbour had sent was behind, on average; of the stalest neighbour of any
    rank, since those that are ahead count below 0."""
    staleness_max: float | None = None
    lost_ranks: str | None = None
    """Ranks that were killed while the others went on."""
    repeats: int | None = None
    reason: str | None = None
    """Why there is no number, or why to doubt it."""

    @property
    def place(self) -> tuple[Any, ...]:
        """What rows that are compared with each other have in common."""
        return (self.model, self.batch, self.world_size, self.network, self.fault)


def is_learning(records: Iterable[Record]) -> bool:
    """Whether these are records of trials that train for a time."""
    return any(record.trial.get("learn") for record in records)


def make_rows(records: Iterable[Record]) -> list[LearnRow]:
    """One row per record."""
    records = list(records)
    return [_row(record, records) for record in records]


def slowed_ranks(trial: dict[str, Any]) -> list[int]:
    """The ranks on the host that a fault slows."""
    fault = trial.get("fault") or {}
    if fault.get("kind") != "slow_host":
        return []
    per_host = trial["ranks_per_host"]
    first = fault["host"] * per_host
    return list(range(first, min(first + per_host, trial["world_size"])))


def _row(record: Record, records: Sequence[Record]) -> LearnRow:
    trial = record.trial
    learn = trial["learn"]
    known: dict[str, Any] = {
        **identity(record),
        "batch": ",".join(map(str, learn.get("batch_sizes") or [trial["batch_size"]])),
        "budget_s": learn["budget_s"],
        "target": learn["target_accuracy"],
    }
    if record.throughput is None or record.learning is None:
        return LearnRow(**known, reason=record.error and record.error.message)
    repeats = record.learning
    last = [repeat.evaluations[-1] for repeat in repeats]
    for key in ("accuracy", "accuracy_min", "accuracy_max", "loss", "consensus_distance"):
        known[key] = _median(getattr(one, key) for one in last)
    reached = [repeat.to_target for repeat in repeats]
    slowed = slowed_ranks(trial)
    stale = list(staleness(record))
    lost = sorted({rank for repeat in repeats for rank in repeat.lost})
    rate = _rate(record, lambda rank: rank not in slowed)
    known |= {
        "to_target_s": _median(one.seconds if one else math.inf for one in reached),
        "steps_to_target": _median(one.steps if one else math.inf for one in reached),
        "samples_per_s": record.throughput.value,
        "unit": record.throughput.unit,
        "steps_per_s": rate,
        "slowed_steps_per_s": _rate(record, lambda rank: rank in slowed),
        "staleness_mean": max((mean for mean, _ in stale), default=None),
        "staleness_max": max((most for _, most in stale), default=None),
        "lost_ranks": ", ".join(map(str, lost)) or None,
        "repeats": len(repeats),
        "reason": "; ".join(record.notes) or None,
    }
    undisturbed = (
        other
        for other in records
        if other.ok and not other.fault and _as_one(other.trial) == _as_one(trial)
    )
    calm = next(undisturbed, None) if record.fault else None
    if calm is not None and rate is not None:
        before = _rate(calm, lambda rank: rank not in slowed and rank not in lost)
        known["kept"] = rate / before if before else None
    return LearnRow(**known)


def _rate(record: Record, wanted: Callable[[int], bool]) -> float | None:
    """Steps per second of the slowest of the ranks that are `wanted`, in the median repeat."""
    return _median(
        min((one.steps_per_s for i, one in enumerate(ranks) if one and wanted(i)), default=None)
        for ranks in (repeat.ranks for repeat in record.learning or ())
    )


def staleness(record: Record) -> Iterator[tuple[float, float]]:
    """Mean and most, per rank and neighbour, as far as the algorithm counts them.

    Records of earlier versions have a number for algorithms with windows: in how many exchanges
    nothing had come, which is no mean.
    """
    for rank in record.statistics or ():
        for age in ((rank or {}).get("staleness") or {}).values():
            if isinstance(age, dict) and age["mean"] is not None:
                yield age["mean"], age["max"]


def _as_one(trial: dict[str, Any]) -> dict[str, Any]:
    """Of a trial with and without a fault, the same; keys that older records lack are left out."""
    learn = {key: value for key, value in trial["learn"].items() if value is not None}
    return {**trial, "fault": None, "learn": learn}


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    median = statistics.median_high(known)
    return median if math.isfinite(median) else None


def table(rows: Sequence[LearnRow]) -> Table:
    """The rows as they are shown."""
    return Table(rows, (*PLACE, *_COLUMNS))


def _target(row: LearnRow) -> str:
    if row.target is None:
        return ""
    return "not reached" if row.to_target_s is None else f"{row.to_target_s:.1f} s"


def _spread(row: LearnRow) -> str:
    if row.accuracy is None or row.accuracy_min == row.accuracy_max:
        return ""
    return f"{row.accuracy_min:.2%}-{row.accuracy_max:.2%}"


def _stale(row: LearnRow) -> str:
    if row.staleness_mean is None:
        return ""
    return f"{row.staleness_mean:.1f}, max {row.staleness_max:g}"


def _shown(title: str, text: Callable[[LearnRow], str], numeric: bool = True) -> Column:
    return Column(title=title, text=text, numeric=numeric, sparse=True)


_COLUMNS = (
    _shown("to target", _target),
    _shown("steps to target", given("steps_to_target", ".0f")),
    _shown("accuracy", given("accuracy", ".2%")),
    _shown("of single ranks", _spread),
    _shown("loss", lambda row: significant(row.loss)),
    _shown("throughput", lambda row: f"{significant(row.samples_per_s)} {row.unit}"),
    _shown("steps/s", lambda row: significant(row.steps_per_s)),
    _shown("on the slow host", lambda row: significant(row.slowed_steps_per_s)),
    _shown("kept", given("kept", ".2f")),
    _shown(
        "consensus", lambda row: f"{row.consensus_distance:.1e}" if row.consensus_distance else ""
    ),
    _shown("staleness", _stale),
    _shown("lost", lambda row: row.lost_ranks or "", numeric=False),
    _shown("notes", lambda row: row.reason or "", numeric=False),
)


def summary(rows: Sequence[LearnRow]) -> list[str]:
    """Which algorithm is first at the target, in a sentence per model, world and fault."""
    lines = []
    places = dict.fromkeys(row.place for row in rows)
    for place in places:
        rivals = [row for row in rows if row.place == place and row.status == "ok"]
        there = [row for row in rivals if row.to_target_s is not None]
        if len(rivals) < 2 or rivals[0].target is None:
            continue
        where = "".join(f", {name}" for name in place[3:] if name)
        text = f"{place[0]}, {place[2]} workers{where}: "
        if there:
            first = min(there, key=lambda row: row.to_target_s or 0.0)
            text += f"{first.algorithm} is the first at {first.target:.0%}, after "
            text += f"{first.to_target_s:.1f} s; {len(there)} of {len(rivals)} get there"
        else:
            text += f"none reaches {rivals[0].target:.0%} in {rivals[0].budget_s:g} s"
        lines.append(text)
    return lines
