"""Comparison of trials that learn, run by run: time to the target accuracy, or time of a step.

Runs with the same seed have the same initial weights and the same order of the data, so they are
compared in pairs. A run that misses the target counts with the time for which it trained. This is
less than the time to the target, so the trial can only get the verdict SLOWER, or UNSURE. If runs
of both trials miss the target, there is no verdict.

The time to the target is where the smoothed curve of accuracy crosses the target. The first
evaluation above the target would depend on how often the model is evaluated: each evaluation is one
more chance of a lucky value. The smoothed curve is the rising curve with the least squared distance
to the evaluations (isotonic regression by pooling adjacent violators). Straight lines join the
centres of its steps (Oron and Flournoy 2017, "Centered Isotonic Regression"), so that the crossing
may lie between evaluations. If the accuracies always rise, the curve goes through them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from common.results import stats
from common.results.records import JsonObject, Record
from common.results.records.learned import Learning
from common.results.stats import Difference, Estimate


@dataclass(frozen=True, kw_only=True)
class Finish:
    """Result of one run."""

    seconds: float
    """Time to the target; if it is missed, the whole time; without a target, the time of a step."""
    steps: float | None = None
    """Steps to the target, as the mean over ranks."""
    there: bool = True
    """False: the run missed the target."""
    seed: int


@dataclass(frozen=True, kw_only=True)
class Race:
    """Comparison of two trials by the times of their runs."""

    difference: Difference
    there: bool
    """False: a run missed the target, and the ratio is an upper limit."""
    base_there: bool
    """False: a run of the baseline missed the target, and the ratio is a lower limit."""


def finishes(record: Record) -> list[Finish]:
    """Returns the result of each run: when the mean of the ranks' models reached the target.
    Without a target, it is the step time of the slowest rank that no fault slowed."""
    target = record.trial["learn"]["target_accuracy"]
    if target is not None:
        return [_finish(run, target) for run in record.learning]
    slowed = slowed_ranks(record.trial)
    rates = ((_rate(run, slowed), run.seed) for run in record.learning)
    return [Finish(seconds=1 / rate, seed=seed) for rate, seed in rates if rate]


def _finish(run: Learning, target: float) -> Finish:
    accuracies = [each.accuracy or 0.0 for each in run.evaluations]
    seconds = [each.seconds for each in run.evaluations]
    steps = [each.mean_steps for each in run.evaluations]
    reached = crossing(seconds, accuracies, target)
    if reached is None:
        return Finish(seconds=seconds[-1], steps=steps[-1], there=False, seed=run.seed)
    return Finish(seconds=reached, steps=crossing(steps, accuracies, target), seed=run.seed)


def rates(record: Record, leave_out: Sequence[int]) -> list[float]:
    """Returns steps per second by run, of the slowest rank that did not die and is not left out."""
    rates = (_rate(run, leave_out) for run in record.learning)
    return [rate for rate in rates if rate is not None]


def _rate(run: Learning, leave_out: Sequence[int]) -> float | None:
    paces = (pace for i, pace in enumerate(run.ranks) if i not in leave_out)
    return min((pace.steps_per_s for pace in paces if pace), default=None)


def slowed_ranks(trial: JsonObject) -> list[int]:
    """Returns the ranks on the host that a fault slows."""
    fault = trial.get("fault") or {}
    if fault.get("kind") != "slow_host":
        return []
    per_host = trial["ranks_per_host"]
    first = fault["host"] * per_host
    return list(range(first, min(first + per_host, trial["world_size"])))


def typical(values: Sequence[float], missing: int = 0) -> Estimate | None:
    """Returns the geometric mean over runs with its interval. `missing` is the number of runs whose
    values are unknown, but larger than all `values`. If there are any, the result is the median of
    all runs, without an interval; None if the median is one of the unknown values."""
    if missing or min(values, default=0.0) <= 0:
        every = [*values, *[math.inf] * missing]
        median = statistics.median(every) if every else math.inf
        if math.isinf(median):
            return None
        return Estimate(value=median, low=None, high=None, n=len(every))
    alone = [[1.0]] * len(values)
    return stats.compare(alone, [[value] for value in values], paired=True).ratio


def race(ours: Sequence[Finish], others: Sequence[Finish]) -> Race | None:
    """Compares two trials; None if both have runs that missed the target, or one has no runs."""
    there, base_there = (all(finish.there for finish in side) for side in (ours, others))
    if not (ours and others) or not (there or base_there):
        return None
    difference = stats.compare(_seconds(ours), _seconds(others), paired=_paired(ours, others))
    return Race(difference=difference, there=there, base_there=base_there)


def verdicts(races: Sequence[Race | None]) -> list[str]:
    """Returns a verdict for each race, corrected for the number of races (`stats.verdicts`)."""
    differences = [race.difference for race in races if race is not None]
    unlimited = iter(stats.verdicts(differences))
    return ["UNSURE" if race is None else _allowed(next(unlimited), race) for race in races]


def _allowed(verdict: str, race: Race) -> str:
    if race.there and race.base_there:
        return verdict
    return verdict if verdict == ("FASTER" if race.there else "SLOWER") else "UNSURE"


def leaders(rivals: Sequence[Sequence[Finish]]) -> list[int]:
    """Returns the indices of the fastest trial and of those not distinguishable from it. The list
    is empty if a run of the fastest trial missed the target."""
    if not rivals or not all(rivals):
        return []
    seconds = list(map(_seconds, rivals))
    first, *others = stats.leaders(seconds, lambda i, j: _paired(rivals[i], rivals[j]))
    return [first, *others] if all(finish.there for finish in rivals[first]) else []


def _seconds(runs: Sequence[Finish]) -> list[list[float]]:
    by_seed = sorted(runs, key=lambda finish: finish.seed)
    # If a target is reached at once, the time is 0, which has no logarithm.
    return [[max(finish.seconds, 1e-9)] for finish in by_seed]


def _paired(ours: Sequence[Finish], others: Sequence[Finish]) -> bool:
    seeds = {finish.seed for finish in ours}
    same = seeds == {finish.seed for finish in others}
    return same and len(seeds) == len(ours) == len(others)


def smoothed(times: Sequence[float], values: Sequence[float]) -> list[tuple[float, float]]:
    """Returns the corners (time, value) of the rising curve nearest to `values`. The curve is
    straight between corners. A corner is the centre of pooled values, so the first corner may be
    later than the first time, and the last corner earlier than the last time. `times` has the time
    of each value, ascending."""
    blocks: list[tuple[float, float, int]] = []  # sums of times and of values, and their number
    for time, value in zip(times, values, strict=True):
        block = time, value, 1
        while blocks and block[1] / block[2] <= blocks[-1][1] / blocks[-1][2]:
            before = blocks.pop()
            block = tuple(a + b for a, b in zip(before, block, strict=True))
        blocks.append(block)
    return [(time / count, value / count) for time, value, count in blocks]


def crossing(times: Sequence[float], values: Sequence[float], target: float) -> float | None:
    """Returns the time at which the smoothed curve reaches `target`; None if it does not. `times`
    are the times of the evaluations, ascending, or another measure of progress such as steps.
    `values` are the evaluated values."""
    corners = smoothed(times, values)
    if corners and corners[0][1] >= target:
        return corners[0][0]
    for (before, low), (after, high) in pairwise(corners):
        if low < target <= high:
            return before + (after - before) * (target - low) / (high - low)
    return None
