"""Statistics of step times: intervals, verdicts, and the repeats that a verdict needs.

Samples are step times grouped in repeats (separate starts of the workers). Each repeat gives one
value, its elapsed time per step, because the steps of one repeat are not independent. All intervals
are t intervals over these values on the log scale. Trials that are compared (a cell) take turns: a
round runs one repeat of each. Ratios are computed per round, so that a slow period of the machine
affects both trials.

The interval of a single step time or throughput describes *this run*: in 95 of 100 runs it contains
the median of very many repeats on the machine as it was during the run. Events that are too rare
for the number of repeats, and the machine at another hour, are not covered (`bench/words.py`).
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import gammaincinv, ndtr, stdtr, stdtrit

from common.results.records.trust import elapsed_per_step_s

Repeats = Sequence[Sequence[float]]
"""Step times in seconds: one sequence per repeat."""

ALPHA = 0.05
"""Share of intervals that do not contain the true value, and of tables of equal trials with a false
verdict."""
POWER = 0.8
"""Probability with which a detectable difference gets the verdict FASTER or SLOWER."""
NOTABLE = 0.02
"""Smallest relative difference that gets the verdict FASTER or SLOWER."""
EQUAL = 0.05
"""Largest distance from 1 that the interval of a ratio with the verdict SAME may have."""
MIN_REPEATS = 3
"""Smallest number of repeats for a verdict."""
PRECISE = 0.02
"""Default of the requested half width of a ratio's interval, relative to the ratio."""
MOST_REPEATS = 1000
"""Largest number of repeats that `Difference.repeats_to` returns."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Value with its 95 % confidence interval; a single repeat has no interval."""

    value: float
    low: float | None
    high: float | None
    n: int
    """Number of steps."""

    def fields(self, name: str) -> dict[str, float | None]:
        """Returns the fields `NAME`, `NAME_low` and `NAME_high` of a row."""
        return {name: self.value, f"{name}_low": self.low, f"{name}_high": self.high}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Ratio of two trials' speeds, on the log scale."""

    log_ratio: float
    """log(step time of the baseline / step time of the trial); positive: the trial is faster."""
    error: float | None
    """Standard error of `log_ratio`; None with a single repeat."""
    freedom: float
    """Degrees of freedom of `error`."""
    repeats: int
    """Smaller number of repeats of the two trials."""
    n: int
    """Number of steps of both trials."""
    paired: bool
    """True: repeats of the same round were compared."""

    @property
    def half_width(self) -> float:
        """Half width of the 95 % interval, on the log scale; infinite with a single repeat."""
        return _half_width(self.error, self.freedom)

    @property
    def ratio(self) -> Estimate:
        """Speed-up with its interval."""
        return _around(math.exp(self.log_ratio), self.half_width, self.n)

    @property
    def p_value(self) -> float:
        """Probability that equal trials have a log ratio at least this far from 0."""
        if self.error is None:
            return 1.0
        if self.error == 0:
            return 0.0 if self.log_ratio else 1.0
        return 2 * float(stdtr(self.freedom, -abs(self.log_ratio) / self.error))

    def fields(self, comparisons: int, precision: float) -> dict[str, float | int | None]:
        """Returns the fields of a row: the speed-up, and what more repeats could show.
        `comparisons` is as for `detectable`. `precision` is as for `repeats_to`."""
        return self.ratio.fields("speedup") | {
            "detectable": detectable(self, comparisons),
            "precision": precision,
            "more_repeats": self.repeats_to(precision),
        }

    def with_repeats(self, count: int) -> Difference:
        """Returns the expected difference for `count` repeats with the same ratio and spread.
        `error` must not be None."""
        return dataclasses.replace(
            self,
            error=self.error * (self.repeats / count) ** 0.5,
            freedom=self.freedom * (count - 1) / (self.repeats - 1),
            repeats=count,
        )

    def repeats_to(self, precision: float) -> int | None:
        """Returns how many more repeats would probably narrow the interval to `precision`. Returns
        0 if it is narrow enough, and None for more than `MOST_REPEATS` or an unknown spread.
        `precision` is the half width of the interval, relative to the ratio."""
        if self.error is None:
            return None
        counts = range(self.repeats, MOST_REPEATS + 1)
        most = math.log1p(precision)
        place = bisect.bisect_left(
            counts, True, key=lambda count: self.with_repeats(count).half_width <= most
        )
        return place if place < len(counts) else None


def step_s(repeats: Repeats) -> Estimate:
    """Returns the elapsed time per step in seconds: the mean over the repeats of this run."""
    times = _times(repeats)
    error = _error(list(map(math.log, times)))
    width = _half_width(error, len(times) - 1)
    return _around(statistics.fmean(times), width, sum(map(len, repeats)))


def throughput(repeats: Repeats, samples_per_step: int) -> Estimate:
    """Returns samples per second of this run: samples of all workers over elapsed time."""
    step = step_s(repeats)
    low, high = (end and samples_per_step / end for end in (step.high, step.low))
    return Estimate(value=samples_per_step / step.value, low=low, high=high, n=step.n)


def percentile_step_s(repeats: Repeats, share: float) -> float:
    """Returns the quantile `share` of all steps in seconds, with linear interpolation."""
    return float(np.quantile([step for repeat in repeats for step in repeat], share))


def compare(repeats: Repeats, base: Repeats, paired: bool) -> Difference:
    """Compares a trial with its baseline. If `paired` is True, repeats with the same number ran in
    the same round, and the difference is computed per round; else by Welch's comparison of means
    with unequal variances."""
    ours, theirs = (list(map(math.log, _times(trial))) for trial in (repeats, base))
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
    """Returns the relative distance of the mean step times of `others` and `repeats`. The interval
    is Student's with pooled variance, so it exists for a single repeat of `others`, too. The lower
    end is 0 if sampling error explains the distance."""
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
    """Returns a verdict for each difference: FASTER, SLOWER, SAME or UNSURE. `differences` are all
    comparisons of a cell. FASTER and SLOWER are corrected for the number of comparisons (Holm
    1979): of 20 tables of equal trials, at most one has a false verdict."""
    enough = [difference for difference in differences if difference.repeats >= MIN_REPEATS]
    adjusted = iter(holm([difference.p_value for difference in enough]))
    return [
        _verdict(difference, next(adjusted)) if difference.repeats >= MIN_REPEATS else "UNSURE"
        for difference in differences
    ]


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusts p values for multiple comparisons (Holm, Scandinavian J. of Statistics 1979)."""
    adjusted, least = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        least = max(least, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = least
    return adjusted


def leaders(trials: Sequence[Repeats], paired: Callable[[int, int], bool]) -> list[int]:
    """Returns the indices of the fastest trial and of those not distinguishable from it. Which
    trial is the fastest depends on sampling error. So the differences from this trial are corrected
    for the number of all pairs of the cell (Holm). `paired` returns whether the repeats of two
    trials, given by index, ran in the same rounds."""
    times = [step_s(trial).value for trial in trials]
    best = min(range(len(trials)), key=times.__getitem__)
    pairs = list(itertools.combinations(range(len(trials)), 2))
    differences = [compare(trials[i], trials[j], paired(i, j)) for i, j in pairs]
    adjusted = holm([d.p_value if d.repeats >= MIN_REPEATS else 1.0 for d in differences])
    alike = [pair for pair, p in zip(pairs, adjusted, strict=True) if best in pair and p > ALPHA]
    return [best, *(i + j - best for i, j in alike)]


def detectable(difference: Difference, comparisons: int) -> float | None:
    """Returns the smallest relative difference that gets a verdict with a probability of 80 %.
    Computed from the spread of the repeats; None for too few repeats. `comparisons` is the number
    of comparisons in the cell. Holm's correction is taken at its strictest, as if all other trials
    were equal."""
    if difference.repeats < MIN_REPEATS or difference.error is None:
        return None
    error, freedom = difference.error, difference.freedom
    # Errors that other sweeps would estimate: quantiles of chi over its degrees of freedom.
    chance = np.sqrt(2 * gammaincinv(freedom / 2, (np.arange(200) + 0.5) / 200) / freedom)
    critical = -stdtrit(freedom, ALPHA / 2 / comparisons) * error * chance
    needed = np.maximum(critical, math.log(1 + NOTABLE))

    low, high = 0.0, math.log(1 + NOTABLE) + 2 * error + critical.max()
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        power = ndtr((middle - needed) / error).mean() if error else middle > needed[0]
        low, high = (low, middle) if power >= POWER else (middle, high)
    return math.expm1(high)


def precise_enough(
    trials: Sequence[Repeats], precision: float, base: Repeats | None = None
) -> bool:
    """Returns True if the intervals are narrow enough; which trial is faster has no influence.

    Args:
        trials: repeats of trials that took turns.
        precision: largest half width of a 95 % interval, relative to the value. The value is each
            trial's ratio to `base`, or its step time if there is no baseline.
        base: repeats of the baseline; None: there is no baseline.
    """

    def width(repeats: Repeats) -> float:
        if base is None:
            return _half_width(_error(list(map(math.log, _times(repeats)))), len(repeats) - 1)
        return compare(repeats, base, paired=len(repeats) == len(base)).half_width

    return all(width(repeats) <= math.log1p(precision) for repeats in trials)


def _times(repeats: Repeats) -> list[float]:
    return list(map(elapsed_per_step_s, repeats))


def _error(logs: Sequence[float]) -> float | None:
    if len(logs) < 2:
        return None
    mean = statistics.fmean(logs)
    return (math.fsum((log - mean) ** 2 for log in logs) / (len(logs) - 1) / len(logs)) ** 0.5


def _welch(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float | None, float]:
    """Returns standard error and degrees of freedom of a difference (Welch, Satterthwaite)."""
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


def t_half_width(values: Sequence[float]) -> float:
    """Returns the half width of the 95 % t interval of a mean; infinite for a single value."""
    return _half_width(_error(values), len(values) - 1)


def _around(value: float, half_width: float, n: int) -> Estimate:
    """Returns an estimate with that half width on the log scale."""
    if math.isinf(half_width):
        return Estimate(value=value, low=None, high=None, n=n)
    wide = math.exp(half_width)
    return Estimate(value=value, low=value / wide, high=value * wide, n=n)


def _verdict(difference: Difference, p_value: float) -> str:
    far, near = math.log(1 + NOTABLE), math.log(1 + EQUAL)
    if p_value <= ALPHA and abs(difference.log_ratio) >= far:
        return "FASTER" if difference.log_ratio > 0 else "SLOWER"
    # Two one-sided tests at half of the needed level are equivalent to the interval that is shown.
    if abs(difference.log_ratio) + difference.half_width <= near:
        return "SAME"
    return "UNSURE"
