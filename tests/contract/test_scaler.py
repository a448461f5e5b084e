"""Tests of the harness's training loop with a GradScaler, against plain averages of gradients."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

import dear
from common.harness.worker.checking.plain_training import plain_steps
from common.harness.worker.training import Training, make_optimizer
from common.models.workload import Workload
from tests.system.made import make_trial

STEPS = 4


def _workload() -> Workload:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    inputs = torch.arange(16.0).reshape(2, 8) / 16 + dear.rank()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    return Workload(model=model, inputs=(inputs,), targets=(), criterion=torch.mean, scaler=scaler)


def _trained(algorithm: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], int]:
    """Returns the states after training and plain training, and how often steps synchronized."""
    trial, plain, workload = make_trial(algorithm, world=2), _workload(), _workload()
    optimizer = make_optimizer(trial.optimizer, plain.model)
    wanted, _ = plain_steps(plain, optimizer, STEPS, trial.options.staleness())
    training = Training(trial, workload)
    engine = training.engine
    with mock.patch.object(engine, "synchronize", wraps=engine.synchronize) as synchronize:
        training.run(STEPS)
    training.synchronize()
    state = {name: value.clone() for name, value in workload.model.state_dict().items()}
    training.close()
    return state, wanted, synchronize.call_count


@pytest.mark.parametrize("algorithm", ["wfbp", "dear", "bytescheduler", "dadt"])
def test_a_scaler_steps_with_the_averages_of_gradients(world, algorithm):
    for state, wanted, _ in world(2).run(_trained, algorithm):
        torch.testing.assert_close(state, wanted)


@pytest.mark.parametrize("algorithm", ["neighbor", "win-put"])
def test_a_scaler_waits_for_no_parameters(world, algorithm):
    assert [calls for *_, calls in world(2).run(_trained, algorithm)] == [0, 0]
