"""What a sweep does when the fabric fails before a trial can start."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.harness.experiment_file import load
from common.harness.fabric import Fabric
from common.harness.recording import REAL
from common.harness.sweep import Sweep
from common.harness.trial import Trial
from common.launch.job import Job, Outcome
from common.results import records
from common.results.comparison import Comparison

TWO_CELLS = """
name: tiny
algorithms: [ddp, dear]
models: [{name: mnist_cnn, batch_size: 2}, {name: mnist_cnn, batch_size: 4}]
world_sizes: [2]
baseline: false
measure: {repeats: 2}
"""


class Broken(Fabric):
    """The network of the first cell carries nothing; no trial gets a result."""

    def __init__(self) -> None:
        self.entered = 0
        self.started: list[str] = []

    def __enter__(self) -> Broken:
        return self

    def command(self, job: Job) -> str:
        return ""

    def enter_cell(self, trials: Sequence[Trial]) -> None:
        self.entered += 1
        if self.entered == 1:
            raise RuntimeError("the link of h1 carries no data: timed out")

    def run(self, trial: Trial, job: Job) -> Outcome:
        self.started.append(trial.title)
        error = {"kind": "timeout", "message": "too slow", "rank": None, "where": None}
        return Outcome(status="timeout", error=error)

    def describe(self, trial: Trial) -> dict[str, Any]:
        return dict(REAL)


def _sweep(folder: Path, fail_fast: bool) -> tuple[Broken, list[dict[str, Any]]]:
    path = folder / "tiny.yaml"
    path.write_text(TWO_CELLS)
    experiment = load(path)
    trials = experiment.trials()
    comparison = Comparison(compare_to="ddp", trials=tuple(trial.hash for trial in trials))
    fabric = Broken()
    logs = folder / "logs"
    Sweep(experiment, trials, comparison, logs, fabric, {"cores": 1}, lambda _: None).run(
        fail_fast=fail_fast
    )
    return fabric, list(records.load(logs / "records.jsonl"))


def test_a_cell_whose_network_fails_is_recorded_and_the_sweep_goes_on(tmp_path):
    fabric, found = _sweep(tmp_path, fail_fast=False)
    failed = [record for record in found if record["status"] == "failed"]
    assert [record["trial"]["batch_size"] for record in failed] == [2, 2]
    for record in failed:
        assert "h1 carries no data" in record["error"]["message"]
    assert len(fabric.started) == 2
    assert all("bs=4" in title for title in fabric.started)


def test_fail_fast_ends_the_sweep_there(tmp_path):
    fabric, found = _sweep(tmp_path, fail_fast=True)
    assert [record["status"] for record in found] == ["failed", "failed"]
    assert fabric.started == []
