"""Tests of races to a target: crossings of noisy curves, their intervals, and runs that fall short.

The simulations have 5 seeds, as the shipped experiments. Every run has a pace of its own, a part of
which it shares with all runs of its seed, and evaluations that are as noisy as MNIST's.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from common.results import stats
from common.results.learning import race
from common.results.learning.race import Finish, crossing, smoothed

TARGET, AT_S, SEEDS = 0.95, 10.0, 5
SHARED, OWN, NOISE = 0.05, 0.08, 0.005
"""Standard deviations: of log pace, of a seed and of a run, and of an evaluation's accuracy."""


def accuracy(seconds):
    """Curve without noise: 90 % after 4 s, the target after 10."""
    error = 0.1 * (np.maximum(seconds, 0.02) / 4) ** -(math.log(2) / math.log(2.5))
    return 1 - np.minimum(0.9, error)


def finish(rng, seed: int, pace: float = 1.0, *, budget_s=24.0, every_s=0.5, noise=NOISE) -> Finish:
    """A run that needs `pace` times as long as the curve says."""
    seconds = np.arange(0, budget_s + 1e-9, every_s)
    result = accuracy(seconds / pace) + np.where(
        seconds == 0, 0, rng.normal(0, noise, len(seconds))
    )
    at = crossing(seconds.tolist(), result.tolist(), TARGET)
    if at is None:
        return Finish(seconds=budget_s, there=False, seed=seed)
    return Finish(seconds=at, seed=seed)


def sweep(rng, slower: list[float], **how) -> list[list[Finish]]:
    """Runs of algorithms that need so many times as long."""
    shared = rng.normal(0, SHARED, SEEDS)
    paces = np.exp(shared + rng.normal(0, OWN, (len(slower), SEEDS)))
    return [
        [finish(rng, seed, factor * paces[i, seed], **how) for seed in range(SEEDS)]
        for i, factor in enumerate(slower)
    ]


def test_a_rising_curve_is_left_as_it_is_and_interpolated():
    times, values = [0.0, 1.0, 3.0, 4.0], [0.1, 0.5, 0.9, 0.92]
    assert smoothed(times, values) == list(zip(times, values, strict=True))
    assert crossing(times, values, 0.7) == pytest.approx(2.0)
    assert crossing(times, values, 0.9) == pytest.approx(3.0)
    assert crossing(times, values, 0.93) is None
    assert crossing(times, values, 0.1) == 0.0
    assert crossing([], [], 0.5) is None


def test_what_falls_is_pooled_and_joined_through_its_centre():
    times, values = [0.0, 1.0, 2.0, 3.0, 4.0], [0.0, 0.6, 0.4, 0.8, 0.7]
    corners = smoothed(times, values)
    assert corners == [(0.0, 0.0), (1.5, pytest.approx(0.5)), (3.5, pytest.approx(0.75))]
    # The first evaluation at 0.55 is at 1 s, by luck.
    assert crossing(times, values, 0.55) == pytest.approx(1.5 + 2 * 0.2)
    # One at the target, and all later ones below it: it has not been reached.
    assert crossing([0.0, 1.0, 2.0, 3.0], [0.0, 0.9, 0.5, 0.6], 0.8) is None


@pytest.mark.parametrize("every_s", [0.25, 0.5, 1.0])
def test_the_crossing_hardly_depends_on_how_often_is_judged(every_s):
    rng = np.random.default_rng(7)
    runs = [finish(rng, 0, every_s=every_s, noise=0.01) for _ in range(300)]
    assert all(run.there for run in runs)
    mean = np.mean([math.log(run.seconds / AT_S) for run in runs])
    assert abs(mean) < 0.05, mean


def test_the_first_evaluation_at_the_target_would():
    """Smoothing is needed: of four times as many evaluations one is lucky earlier."""
    rng, first = np.random.default_rng(7), {}
    for every_s in (0.25, 1.0):
        seconds = np.arange(0, 24, every_s)
        result = accuracy(seconds) + rng.normal(0, 0.01, (300, len(seconds)))
        first[every_s] = np.mean(np.log(seconds[np.argmax(result >= TARGET, axis=1)] / AT_S))
    assert first[1.0] - first[0.25] > 0.12


def simulated(**how) -> tuple[float, float, float, float]:
    """Simulates tables of 4 equal algorithms and a baseline. Returns the shares of intervals that
    hold the truth, of times and of ratios, and of tables and rows with a false verdict.
    """
    rng = np.random.default_rng(11)
    times, ratios, words = [], [], []
    for _ in range(400):
        base, *others = trials = sweep(rng, [1.0] * 5, **how)
        for runs in trials:
            result = race.typical([run.seconds for run in runs])
            times.append(result.low <= AT_S <= result.high)
        races = [race.race(runs, base) for runs in others]
        ratios += [item.difference.ratio.low <= 1 <= item.difference.ratio.high for item in races]
        words.append([word in ("FASTER", "SLOWER") for word in race.verdicts(races)])
    false = np.array(words)
    return np.mean(times), np.mean(ratios), false.any(axis=1).mean(), false.mean()


def test_intervals_hold_the_truth_in_95_of_100_cases_and_one_table_of_20_has_a_false_word():
    times, ratios, tables, rows = simulated()
    assert 0.93 <= times <= 0.97, times
    assert 0.93 <= ratios <= 0.97, ratios
    assert tables <= 0.075 and rows <= 0.03  # 5 % and three standard errors of 400 tables


def test_a_third_longer_is_found():
    rng = np.random.default_rng(3)
    result = []
    for _ in range(200):
        base, slow, fast = sweep(rng, [1.0, 4 / 3, 3 / 4])
        result.append(race.verdicts([race.race(slow, base), race.race(fast, base)]))
    assert np.mean([words == ["SLOWER", "FASTER"] for words in result]) > 0.8
    assert not any("FASTER" in words[:1] or "SLOWER" in words[1:] for words in result)


def runs(*seconds: float | None) -> list[Finish]:
    """None: not there after 20 s."""
    return [
        Finish(seconds=20.0 if s is None else s, there=s is not None, seed=seed)
        for seed, s in enumerate(seconds)
    ]


def test_runs_that_fall_short_count_as_longer_and_leave_no_interval():
    whole = race.typical([8.0, 10.0, 12.5])
    assert whole.value == pytest.approx(10.0) and whole.low < 8.5 and whole.high > 11.5
    some = race.typical([8.0, 10.0, 12.0], missing=2)
    assert (some.value, some.low, some.high) == (12.0, None, None)
    assert race.typical([8.0, 10.0], missing=3) is None
    assert race.typical([]) is None
    assert race.typical([9.0]).low is None


def test_against_runs_that_fall_short_only_the_word_in_their_disfavour_is_said():
    quick, slow = runs(8, 9, 8.5, 9.2, 8.8), runs(18, None, 17, None, 19)
    ahead, behind = race.race(quick, slow), race.race(slow, quick)
    assert race.verdicts([ahead]) == ["FASTER"] and race.verdicts([behind]) == ["SLOWER"]
    assert not ahead.base_there and not behind.there
    # Counted with the 20 s that it had: at least that much faster.
    assert ahead.difference.ratio.value < 19.4 / 8.7
    # Later than runs of which some have not got there at all: who knows.
    late = runs(19.9, 19.8, 19.9, 19.7, 19.9)
    early = runs(12, 12.1, None, 12.2, 12)
    assert stats.verdicts([race.race(late, early).difference]) != ["FASTER"]
    assert race.verdicts([race.race(late, early)]) == ["UNSURE"]
    assert race.race(slow, runs(None, 9, 9, 9, 9)) is None
    assert race.verdicts([None, ahead]) == ["UNSURE", "FASTER"]


def test_a_target_out_of_reach_of_some_makes_no_false_words():
    """A budget that ends where the target is: half of the runs get there, of all algorithms."""
    rng, words = np.random.default_rng(5), []
    for _ in range(300):
        base, *others = sweep(rng, [1.0] * 5, budget_s=10.5)
        words.append(race.verdicts([race.race(item, base) for item in others]))
    false = [any(word in ("FASTER", "SLOWER") for word in table) for table in words]
    assert np.mean(false) <= 0.08


def test_runs_are_paired_by_seed():
    base, ours = runs(10, 20, 5, 8, 16), runs(9.5, 19, 4.75, 7.6, 15.2)
    result = race.race(ours, base).difference
    assert result.paired and result.ratio.value == pytest.approx(1 / 0.95)
    assert result.half_width < 1e-6
    turned = race.race(list(reversed(ours)), base).difference
    assert turned.paired and turned.half_width < 1e-6
    strange = (
        [dataclasses.replace(item, seed=item.seed + 1) for item in ours],
        [dataclasses.replace(item, seed=7) for item in ours],
    )
    for item in strange:
        other = race.race(item, base).difference
        assert not other.paired and other.half_width > 0.5


def test_the_first_is_told_with_those_that_cannot_be_told_from_it():
    quick, near, far = runs(8, 9, 8.5, 9.2, 8.8), runs(9, 8, 8.6, 9.3, 8.9), runs(*[15, 16] * 2, 15)
    assert race.leaders([far, near, quick]) in ([1, 2], [2, 1])
    assert race.leaders([far, runs(*[None] * 5)]) == [0]
    # Who has not got there cannot be first.
    assert race.leaders([runs(*[None] * 5), runs(*[None] * 5)]) == []
    assert race.leaders([]) == []
