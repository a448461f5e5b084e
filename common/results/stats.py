"""Step times, their intervals, and the word that says whether a difference is real.

Samples are step times grouped in repeats (separate starts of the workers). All intervals are t
intervals on the log scale over repeats, of which each gives one value, its elapsed time per step:
steps of one repeat share its luck, and what noise they have of their own is in that value already.
Repeats of compared trials take turns in rounds, so the ratio is taken round by round: what slows
the machine for a round slows both.

The interval of a step time or a throughput alone is of *this run*: in 95 of 100 runs it holds what
half of the repeats stay below, on the machine as it was meanwhile. What is rarer than the repeats
were many, and what the machine does at another hour, no repeat has shown (`bench/words.py`).
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from scipy.special import gammaincinv, ndtr, stdtr, stdtrit

from common.results.records.trust import elapsed_per_step_s

Repeats = Sequence[Sequence[float]]
"""Step times in seconds: one sequence per repeat."""

# One in 20: of intervals that miss, and of tables of equal trials that get a word.
ALPHA = 0.05
POWER = 0.8
"""How likely a difference that is said to be detectable would have been found."""
# A difference below this is not worth a word, however certain.
NOTABLE = 0.02
# Intervals within this of 1 are called SAME.
EQUAL = 0.05
# Fewer repeats than this cannot tell luck from speed.
MIN_REPEATS = 3
PRECISE = 0.02
"""Half width of the interval of a ratio that is asked for where nobody says another one."""
MOST_REPEATS = 1000
"""More would be needed: that is not worth saying as a number."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A value with its 95 % confidence interval; one repeat alone has none."""

    value: float
    low: float | None
    high: float | None
    n: int
    """Number of steps behind it."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How many times faster one trial is than another, on the log scale."""

    log_ratio: float
    """Of step times, the other one's over this one's: positive is faster."""
    error: float | None
    """Its standard error; None with a single repeat."""
    freedom: float
    """Degrees of freedom behind `error`."""
    repeats: int
    """The smaller number of both."""
    n: int
    """Number of steps of both."""
    paired: bool
    """Taken round by round."""

    @property
    def half_width(self) -> float:
        """Of the 95 % interval, on the log scale; infinite with a single repeat."""
        return _half_width(self.error, self.freedom)

    @property
    def ratio(self) -> Estimate:
        """The speed-up."""
        return _around(math.exp(self.log_ratio), self.half_width, self.n)

    @property
    def p_value(self) -> float:
        """Probability of a log ratio at least this far from 0 between equal trials."""
        if self.error is None:
            return 1.0
        if self.error == 0:
            return 0.0 if self.log_ratio else 1.0
        return 2 * float(stdtr(self.freedom, -abs(self.log_ratio) / self.error))

    def with_repeats(self, count: int) -> Difference:
        """What so many repeats of each side would probably say: the same ratio, the same spread.

        Only of one that has an error.
        """
        return dataclasses.replace(
            self,
            error=self.error * (self.repeats / count) ** 0.5,
            freedom=self.freedom * (count - 1) / (self.repeats - 1),
            repeats=count,
        )

    def repeats_to(self, precision: float) -> int | None:
        """How many more repeats would probably make the interval so narrow; 0: it is.

        None where that is more than `MOST_REPEATS`, or nothing is known of the spread.

        Args:
            precision: half width of the interval, relative to the ratio.
        """
        if self.error is None:
            return None
        counts = range(self.repeats, MOST_REPEATS + 1)
        place = bisect.bisect_left(counts, True, key=partial(self._is_narrow, precision))
        return place if place < len(counts) else None

    def _is_narrow(self, precision: float, count: int) -> bool:
        return self.with_repeats(count).half_width <= math.log1p(precision)


def step_s(repeats: Repeats) -> Estimate:
    """Elapsed time per step in seconds, the mean over the repeats; its interval is of this run."""
    times = _times(repeats)
    error = _error(list(map(math.log, times)))
    width = _half_width(error, len(times) - 1)
    return _around(statistics.fmean(times), width, sum(map(len, repeats)))


def throughput(repeats: Repeats, samples_per_step: int) -> Estimate:
    """Samples per second: samples of all workers in a step, over the elapsed time per step.

    The interval is of this run.
    """
    step = step_s(repeats)
    low, high = (end and samples_per_step / end for end in (step.high, step.low))
    return Estimate(value=samples_per_step / step.value, low=low, high=high, n=step.n)


def percentile_step_s(repeats: Repeats, share: float) -> float:
    """The time in seconds that a `share` of all steps does not exceed (linear interpolation)."""
    steps = sorted(step for repeat in repeats for step in repeat)
    place = share * (len(steps) - 1)
    below = steps[math.floor(place)]
    return below + (place % 1) * (steps[math.ceil(place)] - below)


def compare(repeats: Repeats, base: Repeats, paired: bool) -> Difference:
    """How many times faster a trial is than `base`.

    Args:
        paired: whether repeats of the same index ran in the same round; then the difference is
            taken round by round. Else it is Welch's, for unequal variances.
    """
    ours, theirs = (list(map(math.log, _times(one))) for one in (repeats, base))
    if paired:
        rounds = [b - a for a, b in zip(ours, theirs, strict=True)]
        log_ratio, error, freedom = statistics.fmean(rounds), _error(rounds), len(rounds) - 1.0
    else:
        log_ratio = statistics.fmean(theirs) - statistics.fmean(ours)
        error, freedom = _welch(ours, theirs)
    return Difference(
        log_ratio=log_ratio,
        error=error,
        freedom=freedom,
        repeats=min(len(ours), len(theirs)),
        n=sum(map(len, repeats)) + sum(map(len, base)),
        paired=paired,
    )


def shift(repeats: Repeats, others: Repeats) -> Estimate:
    """By how much the mean step of others is off that of `repeats`, as a share, either way.

    The interval is that of a difference of means whose repeats scatter alike (Student's, pooled):
    so a single repeat of the others has one, too. Its lower end is 0 where chance explains all.
    """
    groups = [list(map(math.log, _times(given))) for given in (repeats, others)]
    value = abs(statistics.fmean(_times(others)) / statistics.fmean(_times(repeats)) - 1)
    n = sum(map(len, (*repeats, *others)))
    freedom = sum(len(logs) - 1 for logs in groups)
    if not freedom:
        return Estimate(value=value, low=None, high=None, n=n)
    means = list(map(statistics.fmean, groups))
    squares = math.fsum((log - mean) ** 2 for mean, logs in zip(means, groups, strict=True)
                        for log in logs)  # fmt: skip
    error = (squares / freedom * sum(1 / len(logs) for logs in groups)) ** 0.5
    width = math.expm1(_half_width(error, freedom))
    return Estimate(value=value, low=max(0.0, value - width), high=value + width, n=n)


def verdicts(differences: Sequence[Difference]) -> list[str]:
    """A word for each: FASTER, SLOWER, SAME, or UNSURE where nothing can be said.

    Args:
        differences: all comparisons of a cell. FASTER and SLOWER are corrected for their number
            (Holm 1979), so that at most one table in 20 of equal trials has a false one.
    """
    enough = [one for one in differences if one.repeats >= MIN_REPEATS]
    adjusted = iter(holm([one.p_value for one in enough]))
    return [
        _word(one, next(adjusted)) if one.repeats >= MIN_REPEATS else "UNSURE"
        for one in differences
    ]


def holm(p_values: Sequence[float]) -> list[float]:
    """Each p value as it counts beside the others (Holm, Scandinavian J. of Statistics 1979)."""
    adjusted, least = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        least = max(least, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = least
    return adjusted


def leaders(trials: Sequence[Repeats], paired: Callable[[int, int], bool]) -> list[int]:
    """The fastest of all trials of a cell and those that cannot be told from it, by index.

    Which one is fastest depends on luck, so the differences from it count as what they are among
    those of all pairs (Holm again).

    Args:
        paired: whether the repeats of two trials, given by index, ran in the same rounds.
    """
    times = [step_s(one).value for one in trials]
    best = min(range(len(trials)), key=times.__getitem__)
    pairs = list(itertools.combinations(range(len(trials)), 2))
    found = [compare(trials[i], trials[j], paired(i, j)) for i, j in pairs]
    adjusted = holm([one.p_value if one.repeats >= MIN_REPEATS else 1.0 for one in found])
    alike = [pair for pair, p in zip(pairs, adjusted, strict=True) if best in pair and p > ALPHA]
    return [best, *(i + j - best for i, j in alike)]


def detectable(difference: Difference, comparisons: int) -> float | None:
    """The true difference that had got its word with a probability of 80 %; 0.05 is 5 %.

    It follows from the noise that the repeats show. None with too few of them.

    Args:
        comparisons: of the same cell, among which the word had to hold (the strictest step of
            Holm's, as if all others were equal).
    """
    if difference.repeats < MIN_REPEATS or difference.error is None:
        return None
    error, freedom = difference.error, difference.freedom
    # What the error would be estimated as in other sweeps: quantiles of chi over its freedom.
    chance = np.sqrt(2 * gammaincinv(freedom / 2, (np.arange(200) + 0.5) / 200) / freedom)
    critical = -stdtrit(freedom, ALPHA / 2 / comparisons) * error * chance
    needed = np.maximum(critical, math.log(1 + NOTABLE))

    low, high = 0.0, math.log(1 + NOTABLE) + 2 * error + critical.max()
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        found = ndtr((middle - needed) / error).mean() if error else middle > needed[0]
        low, high = (low, middle) if found >= POWER else (middle, high)
    return math.expm1(high)


def precise_enough(
    trials: Sequence[Repeats], precision: float, base: Repeats | None = None
) -> bool:
    """Whether more repeats are not needed: a rule that looks at widths only, never at results.

    Args:
        trials: that took turns, each with the repeats that it has.
        precision: the largest half width of a 95 % interval, relative to its value: of every
            trial's ratio to `base`, or of its own step where there is no base.
        base: the repeats of what the others are compared with.
    """

    def width(repeats: Repeats) -> float:
        if base is None:
            return _half_width(_error(list(map(math.log, _times(repeats)))), len(repeats) - 1)
        return compare(repeats, base, paired=len(repeats) == len(base)).half_width

    return all(width(one) <= math.log1p(precision) for one in trials)


def _times(repeats: Repeats) -> list[float]:
    """Elapsed time per step of each repeat."""
    return list(map(elapsed_per_step_s, repeats))


def _error(logs: Sequence[float]) -> float | None:
    if len(logs) < 2:
        return None
    mean = statistics.fmean(logs)
    return (math.fsum((log - mean) ** 2 for log in logs) / (len(logs) - 1) / len(logs)) ** 0.5


def _welch(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float | None, float]:
    """Standard error and degrees of freedom of the difference (Welch and Satterthwaite)."""
    errors = [_error(ours), _error(theirs)]
    if None in errors:
        return None, 0.0
    parts = [(error**2, len(logs) - 1) for error, logs in zip(errors, (ours, theirs), strict=True)]
    total = sum(part for part, _ in parts)
    if not total:
        return 0.0, float(sum(freedom for _, freedom in parts))
    return total**0.5, total**2 / sum(part**2 / freedom for part, freedom in parts)


def _half_width(error: float | None, freedom: float) -> float:
    if error is None:
        return math.inf
    return float(-stdtrit(freedom, ALPHA / 2)) * error


def _around(value: float, half_width: float, n: int) -> Estimate:
    """With an interval of that half width on the log scale."""
    if math.isinf(half_width):
        return Estimate(value=value, low=None, high=None, n=n)
    wide = math.exp(half_width)
    return Estimate(value=value, low=value / wide, high=value * wide, n=n)


def _word(difference: Difference, p_value: float) -> str:
    far, near = math.log(1 + NOTABLE), math.log(1 + EQUAL)
    if p_value <= ALPHA and abs(difference.log_ratio) >= far:
        return "FASTER" if difference.log_ratio > 0 else "SLOWER"
    # Two one-sided tests at half the level that they need: the interval that is shown.
    if abs(difference.log_ratio) + difference.half_width <= near:
        return "SAME"
    return "UNSURE"
