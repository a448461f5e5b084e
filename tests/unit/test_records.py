"""The file of records, of which nothing is lost, and the intervals and verdicts made of them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.results.records import SCHEMA, Check, Record, append, latest, load, mend
from common.results.stats import Estimate, median_step_s, speedup, throughput, verdict
from dear.errors import UserError

ROOT = Path(__file__).parents[2]
COMMITTED = sorted((ROOT / "docs" / "records").glob("**/records.jsonl"))


def record(digest, **more):
    made = {"id": digest, "trial": {}, "status": "ok", "started": "now", "duration_s": 1.0}
    return Record(hash=digest, machine={}, **made, **more)


ONE, TWO = record("a", iters=[[[0.1, 1 / 3]]]), record("b", notes=["ü\n|"])
THREE = record("a", parameters=2)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "records.jsonl"


def test_records_come_back_as_they_were_appended_each_one_line(path):
    assert load(path) == []
    for each in (ONE, TWO, THREE):
        append(path, each)
    assert load(path) == [ONE, TWO, THREE]
    text = path.read_text()
    assert text.endswith("\n")
    found = [json.loads(line) for line in text.splitlines()]
    assert found == [each.to_json() for each in (ONE, TWO, THREE)]
    assert found[0]["repeats"] == [[0.1, 1 / 3]]


def test_a_number_that_json_does_not_know_is_refused_before_anything_is_written(path):
    append(path, ONE)
    with pytest.raises(ValueError, match="JSON compliant"):
        append(path, record("b", loss=float("nan")))
    assert load(path) == [ONE]


@pytest.mark.parametrize("cut", range(40))
def test_a_truncated_last_line_is_left_out_and_cut_off(path, cut):
    append(path, ONE)
    append(path, TWO)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) - cut])
    kept = [ONE, TWO] if cut < 2 else [ONE]  # the first byte is only the newline
    assert load(path) == kept
    mend(path)
    assert whole.startswith(path.read_bytes().rstrip(b"\n"))
    append(path, THREE)
    assert load(path) == [*kept, THREE]
    # Cut in its first line a file becomes empty, and one that is not there stays so.
    path.write_text('{"schema"')
    mend(path)
    assert path.read_bytes() == b"" and load(path) == []
    path.unlink()
    mend(path)
    assert not path.exists()


@pytest.mark.parametrize(
    "damage", [b'{"schema"', b"null", b"5", b"[]", b"\xff\xfe", b"\0\0\0", b'{"schema":1,"id":"a"}']
)
def test_a_damaged_line_in_the_middle_is_named(path, damage):
    lines = [json.dumps(ONE.to_json()).encode(), damage, json.dumps(TWO.to_json()).encode(), b""]
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(UserError, match=r"records\.jsonl line 2 is damaged") as caught:
        load(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("schema", [SCHEMA + 1, 0, None, str(SCHEMA)])
def test_a_foreign_schema_is_named(path, schema):
    append(path, ONE)
    append(path, dataclasses.replace(TWO, schema=schema))
    with pytest.raises(UserError, match="line 2 has schema") as caught:
        load(path)
    assert f"this version reads {SCHEMA}" in str(caught.value)
    path.write_text('{"hash": "a"}\n')
    with pytest.raises(UserError, match="line 1 has schema None"):
        load(path)


def test_latest_is_the_newest_record_of_each_trial_in_order_of_appearance():
    found = latest([ONE, TWO, THREE])
    assert found == {"a": THREE, "b": TWO}
    assert list(found) == ["a", "b"]
    assert latest([]) == {}


def _holds(found, written):
    """Whether all that was written is in what was found, which may have more keys."""
    if isinstance(written, dict):
        return all(key in found and _holds(found[key], written[key]) for key in written)
    if isinstance(written, list):
        return all(map(_holds, found, written)) and len(found) == len(written)
    return found == written


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.parent.name)
def test_records_of_every_age_are_read_whole(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = load(path)
    assert len(found) == len(lines)
    for each, written in zip(found, lines, strict=True):
        assert _holds(json.loads(json.dumps(each.to_json())), written)
        assert Record.from_json(each.to_json()) == each


REPEATS = st.lists(st.lists(st.floats(1e-4, 1e3), min_size=1, max_size=6), min_size=1, max_size=4)
TIGHT = [[0.100, 0.101, 0.099, 0.100], [0.101, 0.100, 0.100, 0.099], [0.099, 0.100, 0.101, 0.102]]


def half_width(estimate):
    """Half of the interval's width relative to the value."""
    return (estimate.high - estimate.low) / 2 / estimate.value


def scaled(repeats, factor):
    return [[step * factor for step in repeat] for repeat in repeats]


def starts(rng, drift, own_luck, noise, steps):
    """One repeat per value of `drift`, with luck of its own start and noise of each step."""
    return [
        list(common * (1 + own_luck * rng.standard_normal()) * rng.normal(1, noise, steps))
        for common in drift
    ]


@settings(max_examples=25, deadline=None)
@given(REPEATS, REPEATS)
def test_estimates_lie_within_their_intervals(repeats, base):
    for estimate in (median_step_s(repeats), throughput(repeats, 8), speedup(repeats, base)):
        assert estimate.low <= estimate.value <= estimate.high
        assert estimate.n == sum(map(len, repeats))


def test_estimates_are_over_the_steps_of_all_repeats():
    medians = [([[3.0, 1.0, 2.0]], 2.0), ([[1.0, 2.0], [3.0, 4.0]], 2.5), ([[1.0], [2.0] * 9], 2.0)]
    for repeats, median in medians:
        assert median_step_s(repeats).value == median
    step, rate = median_step_s(TIGHT), throughput(TIGHT, 64)
    assert rate.value == 64 / step.value
    assert (rate.low, rate.high) == (64 / step.high, 64 / step.low)
    constant, double = median_step_s([[0.5] * 2, [0.5] * 7, [0.5]]), median_step_s(scaled(TIGHT, 2))
    assert (constant.low, constant.value, constant.high) == (0.5, 0.5, 0.5)
    assert (double.low, double.high) == (2 * step.low, 2 * step.high)
    assert median_step_s(TIGHT) == step


def test_a_clear_difference_of_enough_repeats_has_a_word_both_ways():
    slow = scaled(TIGHT, 1.3)
    for ours, theirs, ratio, word in (
        (TIGHT, slow, 1.3, "FASTER"),
        (slow, TIGHT, 1 / 1.3, "SLOWER"),
    ):
        found = speedup(ours, theirs)
        assert found.value == pytest.approx(ratio) and verdict(found, 3) == word
        assert verdict(speedup(ours, theirs * 2), 3) == word
        for few in (1, 2):
            assert verdict(speedup(ours[:few], theirs[:few]), few) == "UNSURE"
    assert verdict(speedup(TIGHT, TIGHT), 3) == "SAME"
    wide = starts(np.random.default_rng(1), [1, 1, 1], 0, 0.1, 10)
    assert verdict(speedup(wide, wide), 3) == "UNSURE"


def test_luck_of_a_start_widens_the_interval_more_than_noise_of_its_steps():
    times = [0.100 + 0.002 * k for k in range(10)]
    between, within = [[time] * 10 for time in times], [times] * 10
    assert half_width(median_step_s(between)) > 1.5 * half_width(median_step_s(within))


@pytest.mark.parametrize(
    ("value", "low", "high", "word"),
    [
        (1.30, 1.25, 1.35, "FASTER"),
        (1.02, 1.001, 1.04, "FASTER"),
        (0.77, 0.70, 0.80, "SLOWER"),
        (1.01, 1.005, 1.015, "SAME"),  # certain, but not worth a word
        (0.99, 0.985, 0.995, "SAME"),
        (1.00, 0.96, 1.04, "SAME"),
        (1.00, 0.90, 1.04, "UNSURE"),
        (1.00, 0.96, 1.10, "UNSURE"),
        (1.30, 0.99, 1.60, "UNSURE"),
        (0.70, 0.50, 1.01, "UNSURE"),
    ],
)
def test_verdict_of_an_interval(value, low, high, word):
    assert verdict(Estimate(value=value, low=low, high=high, n=30), 3) == word


def test_what_slows_both_in_the_same_repeats_does_not_blur_the_ratio():
    ours = [scaled([row], slow)[0] for row, slow in zip(TIGHT, (1, 2, 3), strict=True)]
    together, apart = scaled(ours, 1.3), scaled(ours[::-1], 1.3)
    assert verdict(speedup(ours, together), 3) == "FASTER"
    assert half_width(speedup(ours, together)) < 0.05
    assert verdict(speedup(ours, apart), 3) == "UNSURE"


@pytest.mark.parametrize(
    ("own_luck", "noise", "most"),
    [
        (0.0, 0.02, 0.05),
        # 5 % is what the interval promises; two standard errors of 200 sweeps come on top.
        (0.05, 0.01, 0.08),
    ],
    ids=["drift-of-the-machine", "and-luck-of-each-start"],
)
def test_equal_algorithms_rarely_get_a_word(own_luck, noise, most):
    rng = np.random.default_rng(20240501)
    words = []
    for _ in range(200):
        drift = 1 + 0.1 * rng.standard_normal(3)
        ours, theirs = (starts(rng, drift, own_luck, noise, 5) for _ in range(2))
        words.append(verdict(speedup(ours, theirs), 3))
    assert (words.count("FASTER") + words.count("SLOWER")) / len(words) <= most


def test_interval_covers_the_true_median_about_as_often_as_it_says():
    rng = np.random.default_rng(7)
    found = [median_step_s(starts(rng, [1, 1, 1], 0.1, 0.02, 10)) for _ in range(200)]
    assert np.mean([each.low <= 1 <= each.high for each in found]) >= 0.9
    assert np.mean([half_width(each) for each in found]) < 0.3  # nor by being very wide


@pytest.mark.parametrize(
    ("agree", "matches", "verdict"),
    [
        (True, True, "yes"),
        (False, True, "NO"),
        (True, False, "NO"),
        (None, False, "NO"),
        (True, None, "unchecked"),
        (None, None, "unchecked"),
    ],
)
def test_what_was_not_compared_is_not_right(agree, matches, verdict):
    assert Check(replicas_agree=agree, matches_reference=matches).verdict == verdict
