"""Invariants of asynchronous algorithms, on recordings that are made up."""

from __future__ import annotations

import numpy as np
import pytest

from common.harness.worker.checking.invariants import check_invariants
from common.harness.worker.checking.recording import Recording
from common.harness.worker.checking.serial import RecordedJob
from common.results.records.trust import Check
from tests.system.made import make_trial

STEPS = 24
ELEMENTS = 8


def _checked(age: int, *, told: float, pull: float = 0.0, deaf: bool = False) -> Check:
    """Two ranks that average with each other's values of `age` steps ago, as `win-put` does.

    Args:
        told: age that the algorithm's counts tell.
        pull: part of the way back to the start that a rank goes in each step, by mistake.
        deaf: True if rank 0 averages with nobody, by mistake.
    """
    trial = make_trial("win-put", 2)
    random = np.random.default_rng(1)
    gradients = 1 + 0.3 * random.standard_normal((2, STEPS, ELEMENTS))
    path = [np.zeros((2, ELEMENTS))]
    for step in range(STEPS):
        theirs = path[max(0, step - age)][::-1]
        mixed = (1 - pull) * (path[-1] + theirs) / 2
        if deaf:
            mixed[0] = path[-1][0]
        path.append(mixed - trial.optimizer.lr * gradients[:, step])
    recordings = [
        Recording(
            names=("weight",),
            ends=(ELEMENTS,),
            start=path[0][rank].astype(np.float32),
            gradients=gradients[rank].astype(np.float32),
            reads={},
            buffers={},
            end=path[-1][rank].astype(np.float32),
            end_buffers=np.zeros(0),
        )
        for rank in range(2)
    ]
    job = RecordedJob(trial, recordings, 2, STEPS)
    counts = [{"staleness": {str(1 - rank): {"uses": 9, "mean": told}}} for rank in range(2)]
    return check_invariants(job, None, 2 * STEPS * 100, 100, counts)


@pytest.mark.parametrize("age", [0, 1, 5])
def test_ranks_that_average_with_old_values_train_right_or_are_not_judged(age: int):
    check = _checked(age, told=age)
    assert check.matches_reference == (True if age < 2 else None), check
    assert age < 2 or check.finding == "values were 5.0 steps old, too old to check their mean"


def test_a_mean_that_goes_astray_is_wrong_unless_old_values_explain_it():
    for check in (_checked(0, told=0.0, pull=0.3), _checked(5, told=0.5)):
        assert check.matches_reference is False
        assert check.finding == "the mean of weight over ranks is not where gradients moved it"


def test_a_rank_that_averages_with_nobody_is_not_right_though_the_others_do():
    check = _checked(0, told=0.0, deaf=True)
    assert check.matches_reference is None
    assert "rank 0 has the values of training alone" in check.finding
