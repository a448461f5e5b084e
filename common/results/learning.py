"""Trials that train for a time, as rows: how soon and how well they learn, and at what pace."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from common.emulation.config import Fault
from common.results.records import Record


@dataclass(frozen=True, kw_only=True)
class LearnRow:
    """One trial; medians over its repeats, None where there is nothing to say."""

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


def is_learning(records: Iterable[Record]) -> bool:
    """Whether these are records of trials that train for a time."""
    return any(record["trial"].get("learn") for record in records)


def rows(records: Iterable[Record]) -> list[LearnRow]:
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


def fault_title(trial: dict[str, Any]) -> str | None:
    """What was done to the cluster, in a few words; None for nothing."""
    return Fault(**trial["fault"]).title if trial.get("fault") else None


def _row(record: Record, records: Sequence[Record]) -> LearnRow:
    trial = record["trial"]
    learn = trial["learn"]
    known: dict[str, Any] = {
        "model": trial["model"],
        "batch": ",".join(map(str, learn.get("batch_sizes") or [trial["batch_size"]])),
        "world_size": trial["world_size"],
        "network": trial.get("network"),
        "fault": fault_title(trial),
        "algorithm": trial["label"],
        "status": record["status"],
        "budget_s": learn["budget_s"],
        "target": learn["target_accuracy"],
    }
    if record["status"] != "ok":
        return LearnRow(**known, reason=(record["error"] or {}).get("message"))
    repeats = record["learning"]
    last = [repeat["evaluations"][-1] for repeat in repeats]
    for key in ("accuracy", "accuracy_min", "accuracy_max", "loss", "consensus_distance"):
        known[key] = _median(one.get(key) for one in last)
    reached = [repeat["to_target"] or {} for repeat in repeats]
    slowed = slowed_ranks(trial)
    stale = list(staleness(record))
    lost = sorted({rank for repeat in repeats for rank in _lost(repeat)})
    rate = unslowed_rate(record)
    known |= {
        "to_target_s": _median(one.get("seconds", math.inf) for one in reached),
        "steps_to_target": _median(one.get("steps", math.inf) for one in reached),
        "samples_per_s": record["throughput"]["value"],
        "unit": record["throughput"]["unit"],
        "steps_per_s": rate,
        "slowed_steps_per_s": _rate(record, lambda rank: rank in slowed),
        "staleness_mean": max((mean for mean, _ in stale), default=None),
        "staleness_max": max((most for _, most in stale), default=None),
        "lost_ranks": ", ".join(map(str, lost)) or None,
        "repeats": len(repeats),
        "reason": "; ".join(record["notes"]) or None,
    }
    calm = _undisturbed(record, records)
    if calm is not None and rate is not None:
        before = _rate(calm, lambda rank: rank not in slowed and rank not in lost)
        known["kept"] = rate / before if before else None
    return LearnRow(**known)


def unslowed_rate(record: Record) -> float | None:
    """Steps per second of the slowest rank that no fault has slowed or killed."""
    slowed = slowed_ranks(record["trial"])
    return _rate(record, lambda rank: rank not in slowed)


def _rate(record: Record, wanted: Callable[[int], bool]) -> float | None:
    """Of the slowest of the ranks that are `wanted`, in the median repeat."""
    rates = [
        min(
            (
                pace["steps"] / pace["elapsed_s"]
                for rank, pace in enumerate(repeat["ranks"])
                if pace is not None and wanted(rank)
            ),
            default=None,
        )
        for repeat in record["learning"]
    ]
    return _median(rates)


def _lost(repeat: dict[str, Any]) -> Iterator[int]:
    yield from (rank for rank, pace in enumerate(repeat["ranks"]) if pace is None)


def staleness(record: Record) -> Iterator[tuple[float, float]]:
    """Mean and most, per rank and neighbour, as far as the algorithm counts them.

    Some count by how many steps a neighbour's values are behind; others say only how long nothing
    has come, which is no mean.
    """
    for rank in record.get("statistics") or ():
        for age in ((rank or {}).get("staleness") or {}).values():
            if isinstance(age, dict) and age["mean"] is not None:
                yield age["mean"], age["max"]


def _undisturbed(record: Record, records: Sequence[Record]) -> Record | None:
    if not record["trial"].get("fault"):
        return None
    for other in records:
        same = _as_one(other["trial"]) == _as_one(record["trial"])
        if same and other["status"] == "ok" and not other["trial"].get("fault"):
            return other
    return None


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
