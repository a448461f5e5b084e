"""Rows of training trials: time to the target, accuracy, and speed.

A trial has one run per repeat. Each run has another seed; all algorithms have the same seeds. Most
values are means or medians over the runs. Trials are compared by the time to the target accuracy,
or by the time of a step if there are no data to learn.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from common.results import stats
from common.results.learning import race
from common.results.records import Record
from common.results.records.learned import Evaluation
from common.results.tables.fields import Compared, Identity, Use, Validity, with_lengths
from common.results.timed.rows import asked_precision, base_of
from common.results.validity import flag, flag_text

_MEDIANS = ("accuracy_min", "accuracy_max", "accuracy_top5", "loss", "train_loss")
_MEDIANS += ("consensus_distance",)


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Results of the last evaluation, over the runs."""

    accuracy: float | None = None
    """Accuracy of the mean model of all ranks; mean over the runs."""
    accuracy_low: float | None = None
    accuracy_high: float | None = None
    accuracy_error: float | None = None
    """Standard error due to the number of test samples, which are the same in all runs."""
    accuracy_min: float | None = None
    """Accuracy of the rank with the worst model. This value and the next six are medians over the
    runs."""
    accuracy_max: float | None = None
    accuracy_top5: float | None = None
    loss: float | None = None
    train_loss: float | None = None
    """Mean training loss between the last two evaluations."""
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
    """`steps_per_s`, divided by that of the same trial without the fault."""
    kept_low: float | None = None
    kept_high: float | None = None
    staleness_mean: float | None = None
    """Age of a neighbour's values in steps, as the mean over time; for the pair of rank and
    neighbour with the largest mean. Negative: the neighbour is ahead."""
    staleness_max: float | None = None
    lost_ranks: str | None = None
    """Ranks that were killed while the others went on."""


@dataclass(frozen=True, kw_only=True)
class LearnRow(Validity, Rate, Quality, Use, Compared):
    """Row of a training trial, in the table and in the CSV file. If the
    trial has a result, `samples_per_s`, `unit` and `runs` are set. `_low` and `_high` are the ends
    of 95 % intervals."""

    batch: str
    """Samples per step and rank; a list by rank if they differ."""
    budget_s: float | None = None
    """None if the training counts epochs."""
    epochs: int | None = None
    target: float | None = None
    runs: int | None = None
    reached: int | None = None
    to_target_s: float | None = None
    """Time to the target accuracy: the geometric mean if all runs reached it. If some runs did not,
    but more than half did: the median of all runs, without an interval."""
    to_target_low_s: float | None = None
    to_target_high_s: float | None = None
    steps_to_target: float | None = None
    """Steps to the target, as the mean over ranks; mean or median over runs like `to_target_s`."""
    steps_to_target_low: float | None = None
    steps_to_target_high: float | None = None

    @property
    def limit(self) -> str:
        """Length of the training, for readers."""
        return limit({"budget_s": self.budget_s, "epochs": self.epochs})

    @property
    def place(self) -> tuple[object, ...]:
        return (self.model, self.batch, self.world_size, self.network, self.fault)


def make_rows(records: Iterable[Record], compare_to: str | None = None) -> list[LearnRow]:
    """Returns one row per record; speed-ups are relative to the trial `compare_to` of its cell.
    Raises `UserError` if `compare_to` is no label, but an algorithm with several variants."""
    records = list(records)
    rows = with_lengths([_row(record, records) for record in records], records)
    for place in dict.fromkeys(row.place for row in rows):
        here = [index for index, row in enumerate(rows) if row.place == place]
        _compare(here, records, compare_to, rows)
        _lead(here, records, rows)
    return rows


def _row(record: Record, records: Sequence[Record]) -> LearnRow:
    trial = record.trial
    learn = trial["learn"]
    row = LearnRow(
        **vars(Identity.of(record)),
        batch=",".join(map(str, learn.get("batch_sizes") or [trial["batch_size"]])),
        budget_s=None if learn.get("epochs") else learn["budget_s"],
        epochs=learn.get("epochs"),
        target=learn["target_accuracy"],
        reason=record.error and record.error.message,
    )
    runs = record.learning
    if record.throughput is None or not runs:
        return row
    row = _with_quality(_with_target(row, record), record)
    if learn["data"] == "text" and row.loss is not None:
        row = dataclasses.replace(row, perplexity=math.exp(row.loss) if row.loss < 700 else None)
    stale = list(staleness(record))
    lost = sorted({rank for run in runs for rank in run.lost})
    why = flag_text(record)
    notes = dict.fromkeys(filter(None, [why, *(note.text for note in record.notes)]))
    row = dataclasses.replace(
        row,
        samples_per_s=record.throughput.value,
        unit=record.throughput.unit,
        **vars(Use.of(record, record.throughput.value)),
        staleness_mean=max((mean for mean, _ in stale), default=None),
        staleness_max=max((most for _, most in stale), default=None),
        lost_ranks=", ".join(map(str, lost)) or None,
        runs=len(runs),
        flag=why,
        reason="; ".join(notes) or None,
    )
    return _with_rate(row, record, _without_fault(record, records), lost)


def limit(learn: Mapping[str, float | None]) -> str:
    """Describes how long a trial trains, from its setting `learn`."""
    epochs = learn.get("epochs")
    if epochs is None:
        return f"{learn['budget_s']:g} s"
    return f"{epochs} {'epoch' if epochs == 1 else 'epochs'}"


def _with_target(row: LearnRow, record: Record) -> LearnRow:
    if row.target is None:
        return row
    finishes = race.finishes(record)
    there = [finish for finish in finishes if finish.there]
    missing = len(finishes) - len(there)
    seconds = race.typical([finish.seconds for finish in there], missing)
    steps = race.typical([finish.steps or 0.0 for finish in there], missing)
    known = {"reached": len(there)} | (steps.fields("steps_to_target") if steps else {})
    if seconds is not None:
        known |= {"to_target_s": seconds.value, "to_target_low_s": seconds.low}
        known["to_target_high_s"] = seconds.high
    return dataclasses.replace(row, **known)


def _with_quality(row: LearnRow, record: Record) -> LearnRow:
    last = [run.evaluations[-1] for run in record.learning]
    row = dataclasses.replace(row, **{name: _median(last, name) for name in _MEDIANS})
    accuracies = [each.accuracy for each in last if each.accuracy is not None]
    if len(accuracies) < len(last):
        return row
    low = high = error = None
    mean = statistics.fmean(accuracies)
    if len(accuracies) > 1:
        half = stats.t_half_width(accuracies)
        low, high = max(0.0, mean - half), min(1.0, mean + half)
    data = record.first and record.first.data
    if data is not None:
        words = record.trial["sentence_len"] if record.trial["learn"]["data"] == "text" else 1
        error = (mean * (1 - mean) / (data.test * words)) ** 0.5
    return dataclasses.replace(
        row, accuracy=mean, accuracy_low=low, accuracy_high=high, accuracy_error=error
    )


def _with_rate(row: LearnRow, record: Record, calm: Record | None, lost: Sequence[int]) -> LearnRow:
    slowed = race.slowed_ranks(record.trial)
    rates = race.rates(record, leave_out=slowed)
    if rate := race.typical(rates):
        row = dataclasses.replace(row, **rate.fields("steps_per_s"))
    if slowed:
        others = [rank for rank in range(row.world_size) if rank not in slowed]
        if slow := race.typical(race.rates(record, leave_out=others)):
            row = dataclasses.replace(row, slowed_steps_per_s=slow.value)
    if calm is None or row.flag is not None:
        return row
    before = race.rates(calm, leave_out=[*slowed, *lost])
    if not (rates and before) or min(rates + before) <= 0:
        return row
    ours, theirs = ([[1 / rate] for rate in side] for side in (rates, before))
    # The comparison is unpaired: the two trials did not take turns.
    kept = stats.compare(ours, theirs, paired=False).ratio
    return dataclasses.replace(row, **kept.fields("kept"))


def _without_fault(record: Record, records: Sequence[Record]) -> Record | None:
    """Returns the record of the same trial without the fault; None if its numbers are not valid."""
    if not record.fault:
        return None
    return next(
        (
            other
            for other in records
            if not other.fault
            and _settings(other.trial) == _settings(record.trial)
            and flag(other) is None
        ),
        None,
    )


def _settings(trial: Mapping[str, object]) -> dict[str, object]:
    """Returns the settings that are equal for a trial with a fault and the same without a fault."""
    settings = {key: value for key, value in trial.items() if key not in ("plugin", "brought")}
    return {**settings, "fault": None}


def _compare(
    here: Sequence[int], records: Sequence[Record], compare_to: str | None, rows: list[LearnRow]
) -> None:
    base = base_of([records[i] for i in here], compare_to) if compare_to is not None else None
    if base is None:
        return
    rivals = [i for i in here if records[i] is not base and _several(records[i])]
    for i in rivals:
        rows[i] = dataclasses.replace(rows[i], compared_to=base.label)
    valid = [i for i in rivals if flag(records[i]) is None and flag(base) is None]
    races = [race.race(race.finishes(records[i]), race.finishes(base)) for i in valid]
    for i, compared, verdict in zip(valid, races, race.verdicts(races), strict=True):
        row = dataclasses.replace(rows[i], verdict=verdict)
        if compared is not None:
            row = _with_speedup(row, compared, len(races), asked_precision(records[i]))
        rows[i] = row


def _with_speedup(
    row: LearnRow, compared: race.Race, comparisons: int, precision: float
) -> LearnRow:
    if compared.there and compared.base_there:
        return dataclasses.replace(row, **compared.difference.fields(comparisons, precision))
    ratio = compared.difference.ratio
    # The true time of a trial that missed the target is longer: one end of the interval is unknown.
    if compared.there:
        return dataclasses.replace(row, speedup_low=ratio.low)
    return dataclasses.replace(row, speedup_high=ratio.high)


def _lead(here: Sequence[int], records: Sequence[Record], rows: list[LearnRow]) -> None:
    rivals = [i for i in here if flag(records[i]) is None and _several(records[i])]
    leaders = race.leaders([race.finishes(records[i]) for i in rivals])
    if leaders and len(rivals) > 1:
        for place, i in enumerate(rivals):
            rows[i] = dataclasses.replace(rows[i], leads=place in leaders)


def _several(record: Record) -> bool:
    return record.trial["algorithm"] != "none"


def staleness(record: Record) -> Iterator[tuple[float, float]]:
    """Yields mean and maximum staleness in steps for each rank and neighbour, if it is counted."""
    counters = record.first and record.first.statistics
    for rank in counters or ():
        for age in ((rank or {}).get("staleness") or {}).values():
            if age["mean"] is not None:
                yield age["mean"], age["max"]


def _median(evaluations: Iterable[Evaluation], field: str) -> float | None:
    values = [getattr(each, field) for each in evaluations]
    if not values or None in values:  # the median of the others would hide runs without a value
        return None
    median = statistics.median(values)
    return median if math.isfinite(median) else None
