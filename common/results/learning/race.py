"""Who is sooner at the target, or steps faster: trials that learn compared run by run.

Runs of the same seed have the same first weights and the same order of the data, so they are
compared in pairs. A run that has not got to the target would have needed longer than it had: it
counts with the time that it had, so that the difference is understated, and only the word in its
disfavour is said. Where runs of both sides have not got there, nothing can be.

A run is at the target when its curve crosses it. The first evaluation at the target would be a
multiple of the time between evaluations, and earlier the more of them there are, since each is one
more chance to be lucky. So the curve is smoothed first. Accuracy should rise with training: the
smoothing is the rising curve with the least squared distance to the evaluations (isotonic
regression, by pooling adjacent violators), which has no width to choose. Its steps are joined by
straight lines through their centres (Oron and Flournoy 2017, "Centered Isotonic Regression"), so
that the crossing lies between evaluations. A curve that rises anyway is left as it is, and
interpolated linearly.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from common.results import stats
from common.results.records import Record
from common.results.records.learned import Learning
from common.results.stats import Difference, Estimate


@dataclass(frozen=True, kw_only=True)
class Finish:
    """Of one run."""

    seconds: float
    """Until the target, or of a step where there is none; all of its time if it is not there."""
    steps: float | None = None
    """Of one rank, the mean of all."""
    there: bool = True
    seed: int | None = None


@dataclass(frozen=True, kw_only=True)
class Race:
    """How many times sooner a trial is than another one."""

    difference: Difference
    there: bool
    """Whether all of its runs have got there; else the ratio is at most this."""
    base_there: bool
    """Whether all of the other one's have; else it is at least this."""


def finishes(record: Record) -> list[Finish]:
    """By run: when its mean model was as good as wanted; without a target how long a step took, of
    the slowest rank that no fault has slowed.
    """
    target = record.trial["learn"]["target_accuracy"]
    if target is not None:
        return [_finish(run, target) for run in record.learning]
    slowed = slowed_ranks(record.trial)
    found = ((_rate(run, slowed), run.seed) for run in record.learning)
    return [Finish(seconds=1 / rate, seed=seed) for rate, seed in found if rate]


def _finish(run: Learning, target: float) -> Finish:
    accuracies = [one.accuracy or 0.0 for one in run.evaluations]
    seconds = [one.seconds for one in run.evaluations]
    steps = [one.mean_steps for one in run.evaluations]
    found = crossing(seconds, accuracies, target)
    if found is None:
        return Finish(seconds=seconds[-1], steps=steps[-1], there=False, seed=run.seed)
    return Finish(seconds=found, steps=crossing(steps, accuracies, target), seed=run.seed)


def rates(record: Record, leave_out: Sequence[int]) -> list[float]:
    """By run: steps per second of the slowest rank that lives and is not left out."""
    found = (_rate(run, leave_out) for run in record.learning)
    return [rate for rate in found if rate is not None]


def _rate(run: Learning, leave_out: Sequence[int]) -> float | None:
    left = (one.steps_per_s for i, one in enumerate(run.ranks) if one and i not in leave_out)
    return min(left, default=None)


def slowed_ranks(trial: dict[str, Any]) -> list[int]:
    """The ranks on the host that a fault slows."""
    fault = trial.get("fault") or {}
    if fault.get("kind") != "slow_host":
        return []
    per_host = trial["ranks_per_host"]
    first = fault["host"] * per_host
    return list(range(first, min(first + per_host, trial["world_size"])))


def typical(values: Sequence[float], missing: int = 0) -> Estimate | None:
    """Over runs: the geometric mean with its interval.

    Args:
        missing: runs of which only is known that theirs is larger. If there are any it is the
            median of all, without an interval, as long as that is not one of them.
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
    """A trial against another one; None if runs of both have not got there, or there are none."""
    there, base_there = (all(one.there for one in side) for side in (ours, others))
    if not (ours and others) or not (there or base_there):
        return None
    return Race(difference=_difference(ours, others), there=there, base_there=base_there)


def words(races: Sequence[Race | None]) -> list[str]:
    """A word for each, corrected for their number (`stats.verdicts`)."""
    found = iter(stats.verdicts([one.difference for one in races if one is not None]))
    return ["UNSURE" if one is None else _allowed(next(found), one) for one in races]


def _allowed(word: str, of: Race) -> str:
    if of.there and of.base_there:
        return word
    return word if word == ("FASTER" if of.there else "SLOWER") else "UNSURE"


def leaders(rivals: Sequence[Sequence[Finish]]) -> list[int]:
    """The first and those that cannot be told from it, by index; none if not all of its runs have
    got there.
    """
    if not rivals or not all(rivals):
        return []
    seconds = list(map(_seconds, rivals))
    first, *others = stats.leaders(seconds, lambda i, j: _paired(rivals[i], rivals[j]))
    return [first, *others] if all(one.there for one in rivals[first]) else []


def _difference(ours: Sequence[Finish], others: Sequence[Finish]) -> Difference:
    return stats.compare(_seconds(ours), _seconds(others), paired=_paired(ours, others))


def _seconds(runs: Sequence[Finish]) -> list[list[float]]:
    """In the order of seeds, whichever order the runs were made in."""
    by_seed = sorted(runs, key=lambda one: (one.seed is None, one.seed or 0))
    return [[_positive(one.seconds)] for one in by_seed]


def _paired(ours: Sequence[Finish], others: Sequence[Finish]) -> bool:
    """Whether each run has one of its own seed on the other side, and that is known."""
    seeds = {one.seed for one in ours}
    same = seeds == {one.seed for one in others} and None not in seeds
    return same and len(seeds) == len(ours) == len(others)


def _positive(seconds: float) -> float:
    """A target that is met from the start has no logarithm."""
    return max(seconds, 1e-9)


def smoothed(times: Sequence[float], values: Sequence[float]) -> list[tuple[float, float]]:
    """The corners of the rising curve nearest to `values` at `times`, which ascend.

    Between corners it is straight. It begins and ends with the first and the last corner: centres
    of what was pooled, which may be later than the first time and earlier than the last.
    """
    blocks: list[tuple[float, float, int]] = []  # sums of times and of values, and how many
    for time, value in zip(times, values, strict=True):
        block = time, value, 1
        while blocks and block[1] / block[2] <= blocks[-1][1] / blocks[-1][2]:
            before = blocks.pop()
            block = tuple(a + b for a, b in zip(before, block, strict=True))
        blocks.append(block)
    return [(time / count, value / count) for time, value, count in blocks]


def crossing(times: Sequence[float], values: Sequence[float], target: float) -> float | None:
    """When the smoothed curve reaches `target`; None if it does not.

    Args:
        times: of the evaluations, ascending (or any measure of progress, as steps).
        values: what was found at these times.
    """
    corners = smoothed(times, values)
    if corners and corners[0][1] >= target:
        return corners[0][0]
    for (before, low), (after, high) in pairwise(corners):
        if low < target <= high:
            return before + (after - before) * (target - low) / (high - low)
    return None
