"""A real job trains across virtual hosts: with mpirun, two-node torchrun, ssh, and local."""

from __future__ import annotations

import json

import pytest

from common.emulation import sandbox
from common.harness.experiment_file import load
from tests.test_launch_virtual import launch

# Every rank imports torch, which takes a minute on a busy machine.
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module", autouse=True)
def _sandbox():
    reason = sandbox.unable()
    if reason:
        pytest.skip(reason)


@pytest.mark.parametrize("launcher", ["local", "ssh", "torchrun", "mpirun"])
def test_a_real_job_trains_across_virtual_hosts(tmp_path, launcher):
    experiment = tmp_path / "x.yaml"
    experiment.write_text(
        "algorithms: [dear]\nmodels: [{name: mnist_cnn, batch_size: 2}]\nbaseline: false\n"
        "measure: {repeats: 1, warmup_steps: 1, steps_per_iter: 2}\n"
    )
    (trial,) = load(experiment).trials()
    (tmp_path / "trial.json").write_text(json.dumps(trial.to_json()))
    outcome = launch(tmp_path, launcher)
    assert outcome["status"] == "ok", outcome["error"]
    result = outcome["result"]
    assert result["check"]["matches_reference"] and result["check"]["replicas_agree"]
    assert result["started_by"] == ("Open MPI" if launcher == "mpirun" else "torchrun")
