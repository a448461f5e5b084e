"""A real job trains across virtual hosts: with mpirun, two-node torchrun, ssh, and local."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.emulation import sandbox
from common.harness.experiment import load
from dear.training.algorithm import algorithm_class
from tests.system.test_launch_virtual import launch

# Every rank imports torch, which takes a minute on a busy machine.
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module", autouse=True)
def _sandbox():
    reason = sandbox.unable()
    if reason:
        pytest.skip(reason)


def train(folder: Path, launcher: str, algorithm: str, world_size: int, slots: int) -> None:
    """Runs a job of the real worker on two virtual hosts and checks its result."""
    experiment = folder / "x.yaml"
    experiment.write_text(
        f"algorithms: [{algorithm}]\nworld_sizes: [{world_size}]\n"
        "models: [{name: mnist_cnn, batch_size: 2}]\nbaseline: false\n"
        "measure: {repeats: 1, warmup_steps: 1, steps_per_iter: 2}\n"
    )
    (trial,) = load(experiment).trials()
    (folder / "trial.json").write_text(json.dumps(trial.to_json()))
    outcome = launch(folder, launcher, world_size=world_size, slots=slots)
    assert outcome["status"] == "ok", outcome["error"]
    result = outcome["result"]
    assert result["check"]["matches_reference"] and result["check"]["replicas_agree"]
    assert result["started_by"] == ("Open MPI" if launcher == "mpirun" else "torchrun")


@pytest.mark.parametrize("launcher", ["ssh", "torchrun", "mpirun"])
def test_a_real_job_trains_across_virtual_hosts(tmp_path, launcher):
    train(tmp_path, launcher, "dear", world_size=2, slots=1)


def test_horovods_own_gloo_trains_across_hosts_of_unlike_size(tmp_path):
    reason = algorithm_class("horovod").unavailable()
    if reason:
        pytest.skip(reason)
    train(tmp_path, "local", "horovod", world_size=3, slots=2)
