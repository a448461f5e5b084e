"""What a worker times: which steps, until when, and what each part of one took."""

from __future__ import annotations

import pytest

from common.harness.record import Result, make_record
from common.harness.trial import BASELINE, MeasureConfig
from common.harness.worker.measure import steps_of_all
from common.harness.worker.training import step_parts, typical, untimed_steps
from common.launch.job import Outcome
from common.results.records import Breakdown, Check
from dear.training.algorithm import algorithm_options
from tests.system.made_trials import make_trial

SETTLING = [
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


@pytest.mark.parametrize(("algorithm", "options", "steps"), SETTLING)
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


@pytest.mark.parametrize(
    ("ends", "steps"),
    [
        ([[0, 1, 2, 3], [0, 1.5, 2.0, 3.5]], [1.5, 0.5, 1.5]),
        ([[0, 2]], [2]),
        # They add up to the slowest rank's block, not to the slowest of each step.
        ([[0, 1, 4, 5, 8], [0, 3, 4, 7, 8], [0, 2, 4, 6, 8]], [3, 1, 3, 1]),
    ],
)
def test_a_step_ends_when_the_last_rank_has_done_it(ends, steps):
    assert steps_of_all(ends) == pytest.approx(steps)


def step(forward, backward, update, waiting):
    parts = {"forward_s": forward, "backward_s": backward, "update_s": update}
    total = forward + backward + update + (waiting or 0.0)
    return Breakdown(**parts, exposed_comm_s=waiting, step_s=total)


def test_waiting_is_taken_out_of_the_part_that_it_happened_in():
    # 1 s of waiting in the forward pass, none in the backward pass, 2 s in the update.
    parts = step_parts((10.0, 5.0), (13.0, 6.0), (17.0, 6.0), (20.0, 8.0))
    assert parts == step(2.0, 4.0, 1.0, 3.0)
    assert parts.step_s == 10.0


def test_a_straggler_does_not_count_and_the_parts_add_up():
    steps = [step(1.0, 2.0, 0.5, 0.5), step(1.0, 2.2, 0.5, 0.3), step(9.0, 9.0, 9.0, 9.0)]
    steps.append(step(0.1, 0.1, 0.1, 0.1))
    found = typical(steps, 2.0, waits_seen=True)
    assert vars(found) == pytest.approx(vars(step(0.5, 1.05, 0.25, 0.2)))
    assert typical(steps[:1], 1.0, waits_seen=True) == steps[0]
    # Waits that an algorithm hides are unknown and stay in the other parts.
    found = typical([step(1.0, 2.0, 0.5, 0.0)], 1.0, waits_seen=False)
    assert found == step(1.0, 2.0, 0.5, None)


def test_the_recorded_breakdown_is_that_of_the_repeat_in_the_middle():
    facts = {"iters": [[0.5]], "loss": 1.0, "check": Check(replicas_agree=True)}
    results = [
        Result(cpu_s_per_s=1.0, foreign_cpu_s_per_s=0.0, breakdown=step(s, 0, 0, 0), **facts)
        for s in (0.9, 0.4, 0.5)
    ]
    made = make_record(make_trial("dear"), results, Outcome(status="ok"), {"cores": 64}, "now", 1.0)
    assert made.breakdown.step_s == 0.5
