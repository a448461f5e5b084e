"""Medians, their confidence intervals, and the word that says whether a difference is real.

Samples are step times grouped in repeats (separate starts of the workers). Steps of one repeat
share its luck, so they are not independent; the bootstrap therefore draws repeats first and steps
within them second (Davison and Hinkley 1997, section 3.8). The repeats of compared trials are
interleaved in time, so the ratio draws the same repeats for both: what slows the machine for a
while slows both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtri, stdtrit

Repeats = Sequence[Sequence[float]]
"""Step times in seconds: one sequence per repeat."""

RESAMPLES = 2000
CONFIDENCE = 0.95
# A difference below this is not worth a word, however certain.
NOTABLE = 0.02
# Intervals within this of 1 are called SAME.
EQUAL = 0.05
# Fewer repeats than this cannot tell luck from speed.
MIN_REPEATS = 3


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A value with its 95 % confidence interval."""

    value: float
    low: float
    high: float
    n: int
    """Number of steps behind it."""


def median_step_s(repeats: Repeats) -> Estimate:
    """Median step time in seconds."""
    draws = _medians(repeats, _picks(len(repeats)), seed=1)
    return _estimate(_median(repeats), draws, sum(map(len, repeats)), len(repeats))


def throughput(repeats: Repeats, samples_per_step: int) -> Estimate:
    """Samples per second: samples of all workers in a step, over the median step time."""
    step = median_step_s(repeats)
    value, low, high = (samples_per_step / one for one in (step.value, step.high, step.low))
    return Estimate(value=value, low=low, high=high, n=step.n)


def speedup(repeats: Repeats, base: Repeats) -> Estimate:
    """How many times faster than `base`: the ratio of median step times, base over this."""
    paired = len(repeats) == len(base)
    picks = _picks(len(repeats))
    ours = _medians(repeats, picks, seed=1)
    theirs = _medians(base, picks if paired else _picks(len(base), seed=3), seed=2)
    value = _median(base) / _median(repeats)
    fewer = min(len(repeats), len(base))
    return _estimate(value, theirs / ours, sum(map(len, repeats)), fewer)


def verdict(ratio: Estimate, repeats: int) -> str:
    """FASTER, SLOWER, SAME, or UNSURE where the measurement does not allow a word.

    Args:
        ratio: from `speedup`.
        repeats: the smaller number of repeats of the two.
    """
    if repeats < MIN_REPEATS:
        return "UNSURE"
    if ratio.low > 1 and ratio.value >= 1 + NOTABLE:
        return "FASTER"
    if ratio.high < 1 and ratio.value <= 1 / (1 + NOTABLE):
        return "SLOWER"
    if ratio.low >= 1 / (1 + EQUAL) and ratio.high <= 1 + EQUAL:
        return "SAME"
    return "UNSURE"


def _median(repeats: Repeats) -> float:
    return float(np.median(np.concatenate([np.asarray(repeat) for repeat in repeats])))


def _picks(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(count, size=(RESAMPLES, count))


def _medians(repeats: Repeats, picks: np.ndarray, seed: int) -> np.ndarray:
    """One median per row of `picks`, each over resampled steps of the picked repeats."""
    rng = np.random.default_rng(seed)
    longest = max(map(len, repeats))
    rows, slots = picks.shape
    drawn = np.full((rows, slots, longest), np.inf)  # unequal lengths: infinities sort last
    for index, repeat in enumerate(repeats):
        places = np.nonzero(picks == index)
        steps = rng.integers(len(repeat), size=(len(places[0]), len(repeat)))
        drawn[places[0], places[1], : len(repeat)] = np.asarray(repeat)[steps]
    drawn = np.sort(drawn.reshape(rows, -1), axis=1)
    counts = np.isfinite(drawn).sum(axis=1)
    row = np.arange(rows)
    return (drawn[row, (counts - 1) // 2] + drawn[row, counts // 2]) / 2


def _estimate(value: float, draws: np.ndarray, n: int, repeats: int) -> Estimate:
    tail = (1 - CONFIDENCE) / 2
    low, high = np.log(np.quantile(draws, [tail, 1 - tail]) / value)
    # A bootstrap of few repeats is too narrow: by sqrt((n - 1) / n), and by as much as a normal
    # interval is narrower than a t interval (Hesterberg 2015, "What Teachers Should Know About the
    # Bootstrap"). More extreme percentiles could not reach beyond the repeats seen, so the interval
    # itself is widened, on the scale of ratios.
    if repeats > 1:
        wider = (repeats / (repeats - 1)) ** 0.5 * stdtrit(repeats - 1, tail) / ndtri(tail)
        low, high = low * wider, high * wider
    low, high = (value * math.exp(end) for end in (min(low, 0.0), max(high, 0.0)))
    return Estimate(value=value, low=low, high=high, n=n)
