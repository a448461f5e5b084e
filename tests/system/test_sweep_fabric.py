"""What a sweep does with what its fabric says: failures, and costs that one trial has measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from common.harness.experiment import load
from common.harness.fabric import Fabric
from common.harness.record import Result
from common.harness.sweep import Sweep, cost_place
from common.harness.trial import Briefing, Trial
from common.launch.job import Job, Outcome
from common.results import records
from common.results.comparison import Comparison
from common.results.records import Check, Record
from dear.cost.collectives import AlphaBeta
from tests.made_trials import make_trial

TWO_CELLS = """
name: tiny
algorithms: [ddp, dear]
models: [{name: mnist_cnn, batch_size: 2}, {name: mnist_cnn, batch_size: 4}]
world_sizes: [2]
baseline: false
measure: {repeats: 2}
"""


class Made(Fabric):
    """Every job ends as `outcome` says; the network of the first `broken` cells carries nothing."""

    def __init__(self, outcome: Outcome, broken: int = 0) -> None:
        self._outcome, self._broken = outcome, broken
        self.started: list[str] = []
        self.told: list[Briefing] = []

    def enter_cell(self, trials: Sequence[Trial]) -> None:
        self._broken -= 1
        if self._broken >= 0:
            raise RuntimeError("the link of h1 carries no data: timed out")

    def run(self, trial: Trial, job: Job) -> Outcome:
        self.started.append(trial.title)
        self.told.append(Briefing.load(job.folder))
        return self._outcome


TOO_SLOW = Outcome(
    status="timeout",
    error={"kind": "timeout", "message": "too slow", "rank": None, "where": None},
)
COSTS = {"all_reduce": AlphaBeta(alpha_s=0.01, beta_s_per_byte=1e-9)}
GOOD = Result(
    iters=[[0.5, 0.5]],
    cpu_s_per_s=1.0,
    foreign_cpu_s_per_s=0.0,
    loss=1.0,
    check=Check(replicas_agree=True, matches_reference=True),
    costs=COSTS,
)


def _sweep(folder: Path, fabric: Made, fail_fast: bool = False) -> list[Record]:
    path = folder / "tiny.yaml"
    path.write_text(TWO_CELLS)
    experiment = load(path)
    trials = experiment.trials()
    comparison = Comparison(compare_to="ddp", trials=tuple(trial.hash for trial in trials))
    logs = folder / "logs"
    Sweep(experiment, trials, comparison, logs, fabric, {"cores": 1}, lambda _: None).run(
        fail_fast=fail_fast
    )
    return records.load(logs / "records.jsonl")


def test_a_cell_whose_network_fails_is_recorded_and_the_sweep_goes_on(tmp_path):
    fabric = Made(TOO_SLOW, broken=1)
    found = _sweep(tmp_path, fabric)
    failed = [record for record in found if record.status == "failed"]
    assert [record.trial["batch_size"] for record in failed] == [2, 2]
    for record in failed:
        assert "h1 carries no data" in record.error.message
    assert len(fabric.started) == 2
    assert all("bs=4" in title for title in fabric.started)


def test_fail_fast_ends_the_sweep_there(tmp_path):
    fabric = Made(TOO_SLOW, broken=1)
    found = _sweep(tmp_path, fabric, fail_fast=True)
    assert [record.status for record in found] == ["failed", "failed"]
    assert fabric.started == []


def test_what_one_trial_has_measured_of_collectives_the_others_of_its_model_are_told(tmp_path):
    fabric = Made(Outcome(status="ok", result=GOOD.to_json()))
    found = _sweep(tmp_path, fabric)
    assert [record.costs for record in found] == [COSTS] * 4
    # Two models, which differ in batch size only; of each, trials and repeats take turns.
    assert [briefing.costs for briefing in fabric.told] == [None, *[COSTS] * 7]


def test_costs_of_another_fabric_are_no_word_on_this_one():
    trial = make_trial("wfbp")
    others = ({"world_size": 2}, {"network": "1gbe"}, {"model": "alexnet"})
    places = [cost_place(dataclasses.replace(trial, **other), 1.0) for other in others]
    places += [cost_place(trial, 2.0), cost_place(trial, 1.0)]
    assert len(set(places)) == len(places)
    assert cost_place(make_trial("dear"), 1.0) == places[-1]
