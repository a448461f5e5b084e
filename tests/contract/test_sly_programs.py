"""The harness's own check of what goes wrong behind the first steps."""

from __future__ import annotations

import pytest

from common.harness.settings import OptimizerConfig
from tests.contract.pairs import one_in
from tests.contract.sly_programs import SLY, buffers, catching_up, own_reference, sly, stale
from tests.contract.test_wrong_programs import ADAMW, check_of

DECAYING = OptimizerConfig(lr=0.01, momentum=0.9, weight_decay=0.01)


@pytest.mark.parametrize("program", one_in(3, SLY))
def test_what_goes_wrong_behind_the_first_steps_is_found(world, program):
    check = check_of(world(2), "allreduce", "mnist_cnn", spoil=(sly, program), optimizer=DECAYING)
    assert check.matches_reference is False and check.finding
    assert check.reference_error < 2e-3  # they were right


def test_gradients_are_taken_at_their_word_in_all_steps_but_one(world):
    """Limit that docs/methodology.md names: the check cannot see this."""
    program = "other labels for some steps"
    check = check_of(world(2), "allreduce", "mnist_cnn", spoil=(sly, program), optimizer=DECAYING)
    assert check.verdict == "yes"


@pytest.mark.parametrize("key", one_in(2, ["betas", "eps", "lr", "weight_decay"]))
def test_an_adam_with_older_settings_is_found(world, key):
    check = check_of(world(2), "allreduce", "mnist_cnn", spoil=(sly, f"old {key}"), optimizer=ADAMW)
    assert check.verdict == "NO" and check.reference_error < 2e-3


@pytest.mark.parametrize("layers", one_in(2, ["", "5.conv2"]))
def test_forward_passes_that_become_stale_are_found(world, layers):
    check = check_of(world(2), "allreduce", "resnet20", spoil=(stale, layers))
    assert check.verdict == "NO" and "forward pass" in check.finding


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("watched", "in timed steps all ranks together sent"),
        pytest.param("all", "forward pass of step", marks=pytest.mark.full),
        ("never", "at the end"),
    ],
)
def test_who_sends_nothing_until_somebody_looks_is_found(world, how, words):
    check = check_of(world(2), "allreduce", "resnet20", spoil=(catching_up, how))
    assert check.verdict == "NO" and words in check.finding and check.replicas_agree


@pytest.mark.parametrize(
    ("when", "words"),
    [
        pytest.param("at once", "after the first steps the buffer", marks=pytest.mark.full),
        pytest.param("late", "buffers changed after the forward pass", marks=pytest.mark.full),
        ("rank", "rank 1's buffers changed after"),
        ("inside", "buffers differ from plain training"),
        pytest.param("end", "buffers changed after the forward pass", marks=pytest.mark.full),
    ],
)
def test_spoilt_running_statistics_are_found(world, when, words):
    check = check_of(world(2), "allreduce", "resnet20", spoil=(buffers, when))
    assert check.verdict == "NO" and words in check.finding


def test_who_promises_an_average_is_held_to_it_whatever_its_own_reference_says(world):
    check = check_of(world(2), "allreduce", "mnist_cnn", spoil=(own_reference, ""))
    assert check.verdict == "NO" and "its own reference is not the average" in check.finding
