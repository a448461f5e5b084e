"""Step times, intervals and words: what they are made of, and how often they tell the truth."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.rig.coverage import ENOUGH, MACHINES, cover
from bench.rig.tables import COVERAGE, EMULATED, FALSE_WORDS, NOISES, Plan, Tally
from bench.words import DEFAULT
from common.harness.experiment_file import load
from common.results.stats import (
    Difference,
    compare,
    detectable,
    holm,
    leaders,
    percentile_step_s,
    precise_enough,
    shift,
    step_s,
    throughput,
    verdicts,
)
from tests.contract.pairs import one_in

REPEATS = st.lists(st.lists(st.floats(1e-3, 1e2), min_size=1, max_size=6), min_size=1, max_size=4)
TIGHT = [[0.100, 0.101, 0.099, 0.100], [0.101, 0.100, 0.100, 0.099], [0.099, 0.100, 0.101, 0.102]]


@pytest.fixture
def undetected(monkeypatch):
    """Leaves out a number of each row that costs most of its time, and that no tally reads."""
    monkeypatch.setattr("common.results.stats.detectable", lambda *_: None)


def scaled(repeats, factor):
    return [[step * factor for step in repeat] for repeat in repeats]


def words(*pairs, paired=True):
    return verdicts([compare(ours, base, paired) for ours, base in pairs])


def made(log_ratio, error, repeats=5):
    return Difference(
        log_ratio=log_ratio, error=error, freedom=repeats - 1, repeats=repeats, n=9, paired=True
    )


@settings(max_examples=25, deadline=None)
@given(REPEATS, REPEATS)
def test_estimates_lie_within_their_intervals(repeats, base):
    ratio = compare(repeats, base, paired=False).ratio
    for estimate, runs in (
        (step_s(repeats), repeats),
        (throughput(repeats, 8), repeats),
        (ratio, repeats + base),
    ):
        assert estimate.n == sum(map(len, runs))
        if estimate.low is not None:
            assert estimate.low <= estimate.value <= estimate.high
    assert (step_s(repeats).low is None) == (len(repeats) == 1)


def test_a_step_takes_elapsed_time_over_steps_in_the_mean_of_the_repeats():
    # Every fourth step waits: a median would not see it.
    periodic = [0.75, 0.25, 0.25, 0.25]
    assert step_s([periodic, periodic]).value == pytest.approx(0.375)
    assert throughput([periodic] * 3, 30).value == pytest.approx(80)
    # Each repeat counts the same, however many steps it has.
    assert step_s([[1.0] * 9, [2.0]]).value == pytest.approx(1.5)
    step, rate = step_s(TIGHT), throughput(TIGHT, 64)
    assert (rate.value, rate.low, rate.high) == (64 / step.value, 64 / step.high, 64 / step.low)
    assert step_s([[0.5], [0.5, 0.5]]).low == step_s([[0.5], [0.5, 0.5]]).high == 0.5
    assert percentile_step_s([[1.0, 2.0], [3.0, 4.0]], 0.5) == 2.5
    assert percentile_step_s([list(range(101))], 0.95) == 95


def test_intervals_are_t_intervals_of_logs():
    three = step_s([[1.0], [math.e], [math.e**2]])
    # The quantile of t with 2 degrees of freedom, times 1 / sqrt(3).
    assert math.log(three.high / three.value) == pytest.approx(4.302653 / 3**0.5, rel=1e-5)
    assert three.value / three.low == pytest.approx(three.high / three.value)
    pair = compare([[1.0], [1.0], [1.0]], [[1.0], [math.e], [math.e**2]], paired=True)
    assert (pair.log_ratio, pair.freedom) == (1.0, 2)
    assert pair.half_width == pytest.approx(4.302653 / 3**0.5, rel=1e-5)
    # Welch: 1 / 3 from the noisy side, nothing from the other.
    loose = compare([[1.0], [1.0], [1.0]], [[1.0], [math.e], [math.e**2]], paired=False)
    assert (loose.log_ratio, loose.freedom) == (1.0, pytest.approx(2))
    assert loose.error == pytest.approx(pair.error)
    with pytest.raises(ValueError, match="shorter"):
        compare(TIGHT, TIGHT[:2], paired=True)


def test_what_slows_both_in_the_same_round_does_not_blur_the_ratio():
    ours = [scaled([row], slow)[0] for row, slow in zip(TIGHT, (1, 2, 3), strict=True)]
    together, apart = scaled(ours, 1.3), scaled(ours[::-1], 1.3)
    assert words((ours, together)) == ["FASTER"]
    assert compare(ours, together, paired=True).half_width < 0.05
    assert words((ours, apart)) == words((ours, together), paired=False) == ["UNSURE"]


def test_a_clear_difference_of_enough_repeats_has_a_word_both_ways():
    slow = scaled(TIGHT, 1.3)
    assert compare(TIGHT, slow, paired=True).ratio.value == pytest.approx(1.3)
    assert words((TIGHT, slow), (slow, TIGHT), (TIGHT, TIGHT)) == ["FASTER", "SLOWER", "SAME"]
    assert words((TIGHT, slow * 2), paired=False) == ["FASTER"]
    for few in (1, 2):
        assert words((TIGHT[:few], slow[:few])) == ["UNSURE"]
        assert words((TIGHT[:few], slow), paired=False) == ["UNSURE"]
    # The best leads with all that cannot be told from it.
    ours = [TIGHT, scaled(TIGHT, 0.8), scaled(TIGHT[::-1], 0.801)]
    assert leaders(ours, lambda i, j: True) == [1, 2]
    assert leaders([item[:2] for item in ours], lambda i, j: True) == [1, 0, 2]


@pytest.mark.parametrize(
    ("log_ratio", "error", "word"),
    [
        (0.30, 0.01, "FASTER"),
        (-0.30, 0.01, "SLOWER"),
        (0.021, 0.001, "FASTER"),
        (0.019, 0.001, "SAME"),  # certain, but not worth a word
        (-0.019, 0.001, "SAME"),
        (0.0, 0.017, "SAME"),  # 2.78 x 0.017 is just within log(1.05)
        (0.0, 0.018, "UNSURE"),
        (0.04, 0.005, "FASTER"),
        (0.04, 0.02, "UNSURE"),
    ],
)
def test_the_word_of_a_difference(log_ratio, error, word):
    assert verdicts([made(log_ratio, error)]) == [word]


def test_many_comparisons_need_more_certainty_each():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.6, 0.5]) == [1.0, 1.0]
    assert holm([]) == []
    item = made(0.05, 0.015)
    assert item.p_value == pytest.approx(0.0290, abs=1e-4)
    assert verdicts([item]) == ["FASTER"]
    assert verdicts([item, made(0.0, 0.03)]) == ["UNSURE", "UNSURE"]
    # One that is certain leaves the others their chance, and one without repeats counts for none.
    assert verdicts([item, made(0.5, 0.01)]) == ["FASTER", "FASTER"]
    assert verdicts([item, made(0.0, 0.01, repeats=2)]) == ["FASTER", "UNSURE"]


def test_detectable_is_the_difference_that_gets_its_word_four_times_in_five():
    rng = np.random.default_rng(3)
    noise, count = 0.02, 6
    error = noise / count**0.5
    wanted = detectable(made(0.0, error, count), comparisons=1)
    for effect, low, high in ((wanted, 0.77, 0.83), (wanted / 2, 0.0, 0.45)):
        result = 0
        for rounds in rng.normal(math.log1p(effect), noise, (2000, count)):
            ours, base = [[1.0]] * count, [[math.exp(item)] for item in rounds]
            result += words((ours, base)) == ["FASTER"]
        assert low <= result / 2000 <= high
    assert detectable(made(0.0, error, count), comparisons=9) > wanted
    # What is not worth a word gets none.
    assert detectable(made(0.0, 1e-9), comparisons=1) == pytest.approx(0.02, abs=1e-6)
    assert detectable(made(0.0, 0.01, repeats=2), comparisons=1) is None


def test_a_shift_has_the_interval_of_two_means_also_with_one_repeat_beside():
    rng = np.random.default_rng(5)
    for beside in (1, 2):
        held = 0
        for logs in rng.normal(0, 0.02, (2000, 4 + beside)):
            logs[4:] += 0.05
            repeats = [[math.exp(log)] for log in logs]
            result = shift(repeats[:4], repeats[4:])
            assert result.low <= result.value <= result.high and result.n == 4 + beside
            held += result.low <= math.expm1(0.05) <= result.high
        assert 0.935 <= held / 2000 <= 0.965
    equal = shift(TIGHT, TIGHT[:1])
    assert equal.low == 0.0 and 0.0 < equal.high < 0.03
    slower, faster = (shift([[0.1], [0.1]], [[0.1 * factor]]) for factor in (1.02, 0.98))
    assert slower.value == pytest.approx(0.02) == faster.value == slower.low
    assert shift([[0.1, 0.2]], [[0.1]]).low is None


def test_how_many_repeats_a_ratio_needs_follows_from_its_spread():
    few = made(0.3, 0.02, repeats=3)
    more = few.repeats_to(0.02)
    assert few.with_repeats(3 + more).half_width <= math.log1p(0.02)
    assert few.with_repeats(3 + more - 1).half_width > math.log1p(0.02)
    # The square of 1.96 x 0.02 x sqrt(3) / 0.0198 is 11.7, and t asks for three more.
    assert 3 + more == 15
    assert made(0.3, 0.001).repeats_to(0.02) == 0
    assert made(0.3, 0.5, repeats=3).repeats_to(0.02) is None, "more than 1000"
    assert made(0.3, None, repeats=1).repeats_to(0.02) is None
    welch = compare(TIGHT, [[0.1], [0.12], [0.09]], paired=False)
    assert welch.with_repeats(3) == welch
    assert welch.with_repeats(5).freedom == pytest.approx(2 * welch.freedom)


def test_repeats_are_enough_when_all_intervals_are_narrow_whatever_they_say():
    noisy = [[0.1], [0.12], [0.09]]
    assert precise_enough([TIGHT, scaled(TIGHT, 1.3)], 0.02, base=TIGHT)
    assert precise_enough([TIGHT, scaled(TIGHT, 1.0)], 0.02, base=TIGHT)
    assert precise_enough([TIGHT], 0.02) and not precise_enough([TIGHT], 0.005)
    assert not precise_enough([TIGHT, noisy], 0.02, base=TIGHT)
    assert not precise_enough([TIGHT, noisy], 0.02)
    assert precise_enough([noisy, scaled(noisy, 1.1)], 0.02, base=noisy)
    assert not precise_enough([TIGHT[:1]], 0.02)


@pytest.mark.usefixtures("undetected")
@pytest.mark.parametrize("noise", one_in(2, NOISES), ids=lambda noise: noise.name)
def test_intervals_cover_and_false_words_are_rare(noise):
    tally = Tally.of(noise, Plan((4, 4), 2), 200, effects=())
    assert COVERAGE[0] <= tally.coverage <= COVERAGE[1]
    chance = 2 * (0.05 * 0.95 / tally.tables) ** 0.5
    assert tally.false_words <= FALSE_WORDS + chance
    assert tally.false_leaders <= FALSE_WORDS + chance


@pytest.mark.usefixtures("undetected")
@pytest.mark.parametrize("noise", one_in(3, NOISES[:3]), ids=lambda noise: noise.name)
def test_the_default_sweep_finds_5_percent_and_stopping_keeps_what_an_interval_promises(noise):
    plan = Plan.of(load(DEFAULT).measure)
    assert plan.precision is not None
    tally = Tally.of(noise, plan, 120, effects=(0.0, 0.05))
    assert COVERAGE[0] <= tally.coverage <= COVERAGE[1]
    assert tally.false_words <= FALSE_WORDS
    assert tally.power[0.05] >= 0.8
    assert tally.power[0.0] <= FALSE_WORDS
    if noise is EMULATED:
        assert tally.repeats < 7


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_the_interval_of_a_throughput_covers_its_run(machine):
    for repeats, precision in (((3, 3), None), ((5, 12), 0.02)):
        for seed in (1, 2):
            result = cover(machine, repeats, precision, runs=2000, seed=seed)
            assert result.this_run >= ENOUGH and not result.missed


@pytest.mark.parametrize(
    ("name", "most"),
    [("2 % of steps 30 % longer", 0.8), ("drifts by 3 %, slowly", 0.8), ("0.3 % slower", 0.2)],
)
def test_what_no_repeat_has_shown_is_in_no_interval(name, most):
    """Coverage is what the documents say: else the column's title would be too modest."""
    (machine,) = (machine for machine in MACHINES if machine.name.startswith(name))
    assert cover(machine, (5, 5), None, runs=1000).any_hour < most
    steady = cover(MACHINES[0], (5, 5), None, runs=1000)
    assert abs(steady.any_hour - 0.95) < 0.02
