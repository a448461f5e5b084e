"""Trials that train for a time: how soon and how well they learn, and at what pace.

Everything is taken over the runs of a trial, which have a seed each, the same ones for all
algorithms. What is compared is the time to the target, or, where nothing is learned, the time of a
step.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scipy.special import stdtrit

from common.results import stats, validity
from common.results.learning import race
from common.results.records import Record
from common.results.stats import Estimate
from common.results.tables.fields import Compared, Identity, Validity
from common.results.tables.table import identity
from common.results.timed.rows import asked_precision, base_of


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Results of the last evaluation, over the runs."""

    accuracy: float | None = None
    """Accuracy of the mean model of all ranks; mean over the runs."""
    accuracy_low: float | None = None
    accuracy_high: float | None = None
    accuracy_error: float | None = None
    """Standard error from the number of test samples alone, which all runs share."""
    accuracy_min: float | None = None
    """Accuracy of the rank with the worst model; median over the runs, as the next six."""
    accuracy_max: float | None = None
    accuracy_top5: float | None = None
    loss: float | None = None
    train_loss: float | None = None
    """Training loss since the second-last evaluation."""
    perplexity: float | None = None
    """e to the power of `loss`, for texts."""
    consensus_distance: float | None = None


@dataclass(frozen=True, kw_only=True)
class Rate:
    """Speed of the training, and the effect of faults on it."""

    samples_per_s: float | None = None
    unit: str | None = None
    steps_per_s: float | None = None
    """Rate of the slowest rank that no fault slowed; geometric mean over the runs."""
    steps_per_s_low: float | None = None
    steps_per_s_high: float | None = None
    slowed_steps_per_s: float | None = None
    """Rate of the slowest rank on the host that a fault slowed."""
    kept: float | None = None
    """`steps_per_s` over that of the same trial without the fault."""
    kept_low: float | None = None
    kept_high: float | None = None
    staleness_mean: float | None = None
    """Mean number of steps by which a neighbour's values are late, for the stalest neighbour of any
    rank. Values of faster neighbours count below 0."""
    staleness_max: float | None = None
    lost_ranks: str | None = None
    """Ranks that were killed while the others went on."""


@dataclass(frozen=True, kw_only=True)
class LearnRow(Validity, Rate, Quality, Compared, Identity):
    """Trial that trains for a time or for epochs, and a line of its CSV file, over its runs.

    A trial with a result has `samples_per_s`, `unit` and `runs`. `_low` and `_high` are the ends of
    95 % intervals.
    """

    batch: str
    """Samples per step and rank; of each rank if they differ."""
    budget_s: float | None = None
    """None if the training counts epochs."""
    epochs: int | None = None
    target: float | None = None
    """Target accuracy."""
    runs: int | None = None
    """Number of runs; each has its own seed if it has data."""
    reached: int | None = None
    """Number of runs that reached the target."""
    to_target_s: float | None = None
    """Geometric mean if all runs reached the target; the median of all runs, without an interval,
    if more than half of them did."""
    to_target_low_s: float | None = None
    to_target_high_s: float | None = None
    steps_to_target: float | None = None
    """Steps of a rank, as the mean of all ranks; over the runs like `to_target_s`."""
    steps_to_target_low: float | None = None
    steps_to_target_high: float | None = None

    @property
    def limit(self) -> str:
        """For people: how long it was trained."""
        return limit({"budget_s": self.budget_s, "epochs": self.epochs})

    @property
    def place(self) -> tuple[Any, ...]:
        """What rows that are compared with each other have in common."""
        return (self.model, self.batch, self.world_size, self.network, self.fault)


def make_rows(records: Iterable[Record], compare_to: str | None = None) -> list[LearnRow]:
    """One row per record; speed-ups are relative to `compare_to` in the same place.

    Raises:
        UserError: `compare_to` is no label, and names several variants of an algorithm.
    """
    records = list(records)
    rows = [_row(record, records) for record in records]
    for place in dict.fromkeys(row.place for row in rows):
        here = [index for index, row in enumerate(rows) if row.place == place]
        peers = [records[index] for index in here]
        known = [_compared(peers, compare_to), _leading(peers)]
        for index in here:
            more = {k: v for one in known for k, v in one.get(records[index].hash, {}).items()}
            rows[index] = dataclasses.replace(rows[index], **more)
    return rows


def _row(record: Record, records: Sequence[Record]) -> LearnRow:
    trial = record.trial
    learn = trial["learn"]
    known: dict[str, Any] = {
        **identity(record),
        "batch": ",".join(map(str, learn.get("batch_sizes") or [trial["batch_size"]])),
        "budget_s": None if learn.get("epochs") else learn["budget_s"],
        "epochs": learn.get("epochs"),
        "target": learn["target_accuracy"],
    }
    if record.throughput is None or not record.learning:
        return LearnRow(**known, reason=record.error and record.error.message)
    runs = record.learning
    last = [run.evaluations[-1] for run in runs]
    known |= _at_target(record) | _accuracy(record)
    for key in _MEDIANS:
        known[key] = _median(getattr(one, key) for one in last)
    if learn["data"] == "text" and known["loss"] is not None:
        known["perplexity"] = math.exp(known["loss"])
    slowed = race.slowed_ranks(trial)
    stale = list(staleness(record))
    lost = sorted({rank for run in runs for rank in run.lost})
    rates = race.rates(record, leave_out=slowed)
    known |= {
        **_ends("steps_per_s{}", race.typical(rates)),
        "samples_per_s": record.throughput.value,
        "unit": record.throughput.unit,
        "staleness_mean": max((mean for mean, _ in stale), default=None),
        "staleness_max": max((most for _, most in stale), default=None),
        "lost_ranks": ", ".join(map(str, lost)) or None,
        "runs": len(runs),
        "flag": validity.flag_text(record),
        "reason": "; ".join(_notes(record)) or None,
    }
    if slowed:
        others = [rank for rank in range(trial["world_size"]) if rank not in slowed]
        found = race.typical(race.rates(record, leave_out=others))
        known["slowed_steps_per_s"] = found and found.value
    calm = _without_fault(record, records)
    if calm is not None and known["flag"] is None:
        before = race.rates(calm, leave_out=[*slowed, *lost])
        if len(before) == len(rates) and min(rates + before, default=0.0) > 0:
            ours, theirs = ([[1 / rate] for rate in one] for one in (rates, before))
            # They took no turns with each other.
            known |= _ends("kept{}", stats.compare(ours, theirs, paired=False).ratio)
    return LearnRow(**known)


def limit(learn: Mapping[str, Any]) -> str:
    """For people: how long a trial trains, by its `learn`."""
    epochs = learn.get("epochs")
    if epochs is None:
        return f"{learn['budget_s']:g} s"
    return f"{epochs} {'epoch' if epochs == 1 else 'epochs'}"


def _notes(record: Record) -> list[str]:
    """Why to doubt the numbers first."""
    texts = [validity.flag_text(record), *(note.text for note in record.notes)]
    return list(dict.fromkeys(filter(None, texts)))


def _at_target(record: Record) -> dict[str, Any]:
    if record.trial["learn"]["target_accuracy"] is None:
        return {}
    found = race.finishes(record)
    there = [one for one in found if one.there]
    missing = len(found) - len(there)
    seconds = race.typical([one.seconds for one in there], missing)
    steps = race.typical([one.steps or 0.0 for one in there], missing)
    known = _ends("to_target{}_s", seconds) | _ends("steps_to_target{}", steps)
    return {**known, "reached": len(there)}


def _accuracy(record: Record) -> dict[str, Any]:
    """The mean over the runs, its t interval, and what the number of test images leaves open."""
    found = [run.evaluations[-1].accuracy for run in record.learning]
    if None in found:
        return {}
    low = high = error = None
    mean = statistics.fmean(found)
    if len(found) > 1:
        quantile = float(-stdtrit(len(found) - 1, stats.ALPHA / 2))
        half = quantile * statistics.stdev(found) / len(found) ** 0.5
        low, high = max(0.0, mean - half), min(1.0, mean + half)
    data = record.first and record.first.data
    if data is not None:
        error = (mean * (1 - mean) / data.test) ** 0.5
    known = {"accuracy": mean, "accuracy_low": low, "accuracy_high": high}
    return {**known, "accuracy_error": error}


def _without_fault(record: Record, records: Sequence[Record]) -> Record | None:
    """The same trial without its fault, if its numbers may be believed."""
    if not record.fault:
        return None
    same = (
        other
        for other in records
        if not other.fault and _as_one(other.trial) == _as_one(record.trial)
    )
    return next((other for other in same if validity.flag(other) is None), None)


def _compared(peers: Sequence[Record], compare_to: str | None) -> dict[str, dict[str, Any]]:
    """By hash: how the trials of a place compare with the base, if both are believed."""
    base = base_of(peers, compare_to) if compare_to is not None else None
    if base is None:
        return {}
    rivals = [one for one in peers if one is not base and one.trial["algorithm"] != "none"]
    known: dict[str, dict[str, Any]] = {one.hash: {"compared_to": base.label} for one in rivals}
    believed = [one for one in rivals if validity.flag(one) is None and validity.flag(base) is None]
    races = [race.race(race.finishes(one), race.finishes(base)) for one in believed]
    for one, found, word in zip(believed, races, race.verdicts(races), strict=True):
        known[one.hash] |= {"verdict": word, **_speedup(found, len(races), asked_precision(one))}
    return known


def _speedup(
    found: race.Race | None, comparisons: int, precision: float
) -> dict[str, float | None]:
    if found is None:
        return {}
    known = _ends("speedup{}", found.difference.ratio)
    if found.there and found.base_there:
        known |= {"detectable": stats.detectable(found.difference, comparisons)}
        more = found.difference.repeats_to(precision)
        return known | {"precision": precision, "more_repeats": more}
    # Which end is known is that of the side which got there.
    return known | {"speedup": None, "speedup_high" if found.there else "speedup_low": None}


def _leading(peers: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """By hash: whether a trial is the first of its place, or cannot be told from it."""
    rivals = [
        one for one in peers if validity.flag(one) is None and one.trial["algorithm"] != "none"
    ]
    found = [race.finishes(one) for one in rivals]
    first, *others = race.leaders(found) or [None]
    if first is None or len(rivals) < 2:
        return {}
    return {one.hash: {"leads": i in (first, *others)} for i, one in enumerate(rivals)}


def _ends(name: str, found: Estimate | None) -> dict[str, float | None]:
    """The fields of a value and its interval: `name` with nothing, _low and _high put in."""
    if found is None:
        return {}
    return {name.format(end): getattr(found, key) for end, key in _ENDS}


_MEDIANS = ("accuracy_min", "accuracy_max", "accuracy_top5", "loss", "train_loss")
_MEDIANS += ("consensus_distance",)
_ENDS = (("", "value"), ("_low", "low"), ("_high", "high"))


def staleness(record: Record) -> Iterator[tuple[float, float]]:
    """Yields mean and maximum per rank and neighbour, where the algorithm counts them."""
    statistics = record.first and record.first.statistics
    for rank in statistics or ():
        for age in ((rank or {}).get("staleness") or {}).values():
            if age["mean"] is not None:
                yield age["mean"], age["max"]


def _as_one(trial: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings that a trial with a fault and the same without one have in common."""
    settings = {key: value for key, value in trial.items() if key not in ("plugin", "brought")}
    return {**settings, "fault": None}


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    median = statistics.median_high(known)
    return median if math.isfinite(median) else None
