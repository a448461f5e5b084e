"""Comparison of trials that learn, run by run: time to the target accuracy, or time of a step.

Runs of the same seed have the same initial weights and the same order of the data, so they are
compared in pairs. A run that misses the target counts with the time that it had. This understates
its time, so only the verdict against it is given. If runs of both sides miss the target, there is
no verdict.

A run reaches the target where its smoothed curve crosses it. The first evaluation above the target
would be a multiple of the time between evaluations, and it would come earlier with more
evaluations, because each is one more chance of a lucky value. Accuracy should rise with training.
So the smoothed curve is the rising curve with the least squared distance to the evaluations
(isotonic regression by pooling adjacent violators), which has no width to choose. Straight lines
join the centres of its steps (Oron and Flournoy 2017, "Centered Isotonic Regression"), so that the
crossing lies between evaluations. A curve that rises already stays as it is.
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
    """End of one run."""

    seconds: float
    """Time to the target, or of a step without a target; the whole time if the target is missed."""
    steps: float | None = None
    """Steps of a rank to the target, as the mean of all ranks."""
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
    """Returns the end of each run: the time of its mean model to the target accuracy.

    Without a target it is the step time of the slowest rank that no fault slowed.
    """
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
    """Returns steps per second by run, of the slowest rank that lives and is not left out."""
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
    """Returns the geometric mean over runs with its interval.

    Args:
        missing: number of runs whose value is only known to be larger than all others. If there are
            any, the result is the median of all runs, without an interval; None if that is one of
            them.
    """
    if missing or min(values, default=0.0) <= 0:
        every = [*values, *[math.inf] * missing]
        median = statistics.median_high(every) if every else math.inf
        if math.isinf(median):
            return None
        return Estimate(value=median, low=None, high=None, n=len(every))
    alone = [[1.0]] * len(values)
    return stats.compare(alone, [[value] for value in values], paired=True).ratio


def race(ours: Sequence[Finish], others: Sequence[Finish]) -> Race | None:
    """Compares two trials; None if runs of both missed the target, or one has no runs."""
    there, base_there = (all(finish.there for finish in side) for side in (ours, others))
    if not (ours and others) or not (there or base_there):
        return None
    return Race(difference=_difference(ours, others), there=there, base_there=base_there)


def verdicts(races: Sequence[Race | None]) -> list[str]:
    """Returns a verdict for each, corrected for their number (`stats.verdicts`)."""
    differences = [race.difference for race in races if race is not None]
    unlimited = iter(stats.verdicts(differences))
    return ["UNSURE" if race is None else _allowed(next(unlimited), race) for race in races]


def _allowed(verdict: str, race: Race) -> str:
    if race.there and race.base_there:
        return verdict
    return verdict if verdict == ("FASTER" if race.there else "SLOWER") else "UNSURE"


def leaders(rivals: Sequence[Sequence[Finish]]) -> list[int]:
    """Returns the index of the fastest trial, and of those not distinguishable from it.

    Returns none if a run of the fastest trial missed the target.
    """
    if not rivals or not all(rivals):
        return []
    seconds = list(map(_seconds, rivals))
    first, *others = stats.leaders(seconds, lambda i, j: _paired(rivals[i], rivals[j]))
    return [first, *others] if all(finish.there for finish in rivals[first]) else []


def _difference(ours: Sequence[Finish], others: Sequence[Finish]) -> Difference:
    return stats.compare(_seconds(ours), _seconds(others), paired=_paired(ours, others))


def _seconds(runs: Sequence[Finish]) -> list[list[float]]:
    """Returns the times in the order of seeds."""
    by_seed = sorted(runs, key=lambda finish: finish.seed)
    # A target that is reached at once has no logarithm.
    return [[max(finish.seconds, 1e-9)] for finish in by_seed]


def _paired(ours: Sequence[Finish], others: Sequence[Finish]) -> bool:
    """Returns whether each run has a run of the same seed on the other side."""
    seeds = {finish.seed for finish in ours}
    same = seeds == {finish.seed for finish in others}
    return same and len(seeds) == len(ours) == len(others)


def smoothed(times: Sequence[float], values: Sequence[float]) -> list[tuple[float, float]]:
    """Returns the corners of the rising curve nearest to `values` at `times`, which ascend.

    The curve is straight between corners. A corner is the centre of pooled values, so the first
    corner may come after the first time, and the last corner before the last time.
    """
    blocks: list[tuple[float, float, int]] = []  # sums of times and of values, and their number
    for time, value in zip(times, values, strict=True):
        block = time, value, 1
        while blocks and block[1] / block[2] <= blocks[-1][1] / blocks[-1][2]:
            before = blocks.pop()
            block = tuple(a + b for a, b in zip(before, block, strict=True))
        blocks.append(block)
    return [(time / count, value / count) for time, value, count in blocks]


def crossing(times: Sequence[float], values: Sequence[float], target: float) -> float | None:
    """Returns the time at which the smoothed curve reaches `target`; None if it does not.

    Args:
        times: times of the evaluations, ascending, or another measure of progress such as steps.
        values: values at these times.
    """
    corners = smoothed(times, values)
    if corners and corners[0][1] >= target:
        return corners[0][0]
    for (before, low), (after, high) in pairwise(corners):
        if low < target <= high:
            return before + (after - before) * (target - low) / (high - low)
    return None
