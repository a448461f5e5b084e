"""Training that diverges is recorded and marked, and the sweep goes on."""

from __future__ import annotations

import math

import torch

from common.harness.check import replica_spread
from common.harness.recording import make_record
from common.launch.job import Outcome
from common.results.records import append, load
from dear.comm import runtime
from tests.test_sweep import Driver


def _spread_of(values: list[float]) -> float:
    model = torch.nn.Linear(3, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([values]))
        model.weight[0, 0] += runtime.rank() * 0.5
    return replica_spread(model, runtime.communicator())


def test_the_spread_is_the_largest_difference_and_infinite_for_nan(world):
    assert world(2).run(_spread_of, [1.0, 2.0, 3.0]) == [0.5, 0.5]
    assert world(2).run(_spread_of, [1.0, math.nan, 3.0]) == [math.inf, math.inf]


def test_a_diverged_trial_can_be_recorded(tmp_path):
    from common.harness.experiment_file import load as load_experiment

    (tmp_path / "x.yaml").write_text("algorithms: [dear]\nmodels: [mnist_cnn]\n")
    trial = load_experiment(tmp_path / "x.yaml").trials()[-1]
    check = {"reference_error": math.inf, "matches_reference": False}
    result = {
        "iters": [[0.1, 0.1]],
        "loss": math.nan,
        "check": check | {"replica_spread": math.inf, "replicas_agree": False},
        "cpu_s_per_s": 1.0,
        "foreign_cpu_s_per_s": 0.0,
    }
    outcome = Outcome(status="ok", result=result)
    record = make_record(trial, [result], outcome, {"cores": 2}, "2026-01-01T00:00:00+00:00", 1.0)
    append(tmp_path / "records.jsonl", record)
    (read,) = load(tmp_path / "records.jsonl")
    assert read["loss"] is None and read["check"]["replica_spread"] is None
    assert read["check"]["replicas_agree"] is False
    assert "diverged" in read["notes"][0]


def test_a_sweep_survives_divergence(tmp_path):
    driver = Driver(tmp_path)
    flags = ["--set", "optimizer.lr=1e30", "--set", "measure.repeats=1", "-k", "allreduce"]
    done = driver.run(*flags)
    (record,) = driver.records()
    assert record["status"] == "ok" and record["loss"] is None, done.stderr
    assert "diverged" in done.stdout and "NO" in done.stdout
