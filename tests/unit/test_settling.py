"""Steps in which an algorithm still looks for its settings are not timed."""

from __future__ import annotations

import pytest

from common.harness.trial import BASELINE, MeasureConfig
from common.harness.worker.training import untimed_steps
from dear.training.algorithm import algorithm_options
from tests.system.made_trials import make_trial

STEPS = [
    ("allreduce", {}, 0),
    ("dear", {}, 0),
    ("dear", {"fusion": "wait_time"}, 5),
    ("dear", {"fusion": "tuned"}, 52),
    ("dear", {"compression": "eftopk", "density_warmup_steps": 7}, 7),
    ("wfbp", {"compression": "topk", "density_warmup_steps": 9}, 9),
    ("mgwfbp", {}, 2),
    ("mgwfbp", {"profile_steps": 4}, 4),
    ("mgs", {"profile_steps": 3, "density_warmup_steps": 8}, 8),
    ("bytescheduler", {"profile_steps": 5}, 5),
    ("dadt", {"delay": 3}, 3),
]


@pytest.mark.parametrize(("algorithm", "options", "steps"), STEPS)
def test_steps_in_which_an_algorithm_settles(algorithm, options, steps):
    assert algorithm_options(algorithm, options).settling_steps() == steps


@pytest.mark.parametrize(
    ("algorithm", "options", "warmup_steps", "untimed"),
    [
        (BASELINE, {}, 3, 3),
        ("ddp", {}, 3, 3),
        ("ddp", {}, 0, 0),
        # One step more: the first with the new groups is no fair sample.
        ("dear", {"fusion": "tuned"}, 3, 53),
        ("dear", {"fusion": "tuned"}, 60, 60),
        ("mgwfbp", {}, 2, 3),
    ],
)
def test_the_harness_times_none_of_them(algorithm, options, warmup_steps, untimed):
    measure = MeasureConfig(warmup_steps=warmup_steps)
    assert untimed_steps(make_trial(algorithm, options=options, measure=measure)) == untimed
