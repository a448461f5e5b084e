"""Tests of an algorithm's own decisions: in records, in `show --plan`, and in a trial's log."""

from __future__ import annotations

import dataclasses

from common.harness.running.record import make_record
from common.harness.running.ui import log_plan
from common.harness.worker.throughput import _rescaled
from common.launch.job import Outcome
from common.results.records import REAL, Group, Plan, Record, Result
from common.results.records.trust import Check, Modelled
from common.results.timed.plans import lines
from tests.system.made import make_trial
from tests.unit.made_record import with_iters

GROUPS = [
    Group(bytes=1 << 20, tensors=3, first="fc.bias", last="conv2.weight"),
    Group(bytes=1 << 19, tensors=1, first="conv1.weight", last="conv1.weight"),
]
TRIED = [{"threshold_mb": 25.0, "step_s": 0.2}, {"threshold_mb": 8.0, "step_s": 0.1}]
TUNED = {"tuner": {"tried": TRIED, "threshold_mb": 8.0, "wall_s": 0.5}}


def record(plan):
    failed = Outcome(status="failed", error={"message": "it was"})
    built = make_record(make_trial("dear"), [], failed, {"cores": 2}, "now", 1.0, REAL)
    built = dataclasses.replace(built, results=[Result(cpu_s_per_s=1.0, check=Check(), plan=plan)])
    return Record.from_json(built.to_json())


def test_a_log_tells_groups_as_the_references_do():
    assert log_plan(Plan(groups=GROUPS)) == [
        "#Tensor fusion groups: 2",
        "Buffer sizes (MB): 1.00, 0.50",
        "Merged sizes:  [262144, 131072]",
        "Total number of tensors: 4",
        "Merged Number of groups: 2",
    ]
    assert log_plan(None) == log_plan(Plan()) == []


def test_a_log_tells_what_a_tuner_has_tried():
    assert log_plan(Plan(found=TUNED)) == [
        "BO Tuning step [0], param: 25.0000, iteration time: 0.2000",
        "BO Tuning step [1], param: 8.0000, iteration time: 0.1000",
        "BO Tuning optimal param: 8.0000, optimal iteration time 0.1000",
        "BO Tuning cost: 0.5000",
    ]
    unfinished = {"tuner": {**TUNED["tuner"], "threshold_mb": None}}
    assert len(log_plan(Plan(found=unfinished))) == 2


def test_a_plan_in_lines():
    predicted = {"backward_s": 0.2, "ends_s": [0.15, 0.25]}
    result = {"first_mb": 1 / 32, "predicted": predicted, **TUNED}
    title, *report = lines(record(Plan(groups=GROUPS, found=result)))
    assert title == "dear: mnist_cnn, batch 8, 4 workers"
    assert [line.strip() for line in report] == [
        "2 groups of 4 tensors, MB: 1.00, 0.50",
        "groups grow from 0.0312 MB at both ends, by costs",
        "predicted: all gradients are ready after 200.0 ms of the backward pass; their averages "
        "are complete 50.0 ms later",
        "tuner: 25.00 MB 200.0 ms; 8.00 MB 100.0 ms",
        "tuner: 8.00 MB stayed",
    ]
    many = lines(record(Plan(groups=GROUPS * 50)))
    assert many[1].strip() == "100 groups of 200 tensors, 0.50 to 1.00 MB"
    queues = {"partitions": 5, "queues": 1, "credit_mb": 2.0, "order": [1, 1, 0]}
    (_, line) = lines(record(Plan(found=queues)))
    assert line.strip() == (
        "5 partitions in 1 queues, 2.00 MB under way at most; groups in the order of their first "
        "start: 1 0"
    )
    assert lines(record(None))[1].strip() == "no plan on record"


def test_seconds_of_this_machine_become_those_that_they_stand_for():
    result = {"ends_s": [8.0, 16.0], "wall_s": 4.0, "tuner": {"tried": TRIED}, "queues": 2}
    assert _rescaled(result, 8) == {
        "ends_s": [1.0, 2.0],
        "wall_s": 4.0,
        "tuner": {"tried": [{**item, "step_s": item["step_s"] / 8} for item in TRIED]},
        "queues": 2,
    }


def test_the_second_method_is_told_beside_the_first():
    built = with_iters(record(None), [[[0.26, 0.28]]])
    built = dataclasses.replace(built, modelled=Modelled(step_s=0.25, exposed_s=0.01))
    assert lines(built)[2:] == [
        "    event model: 250.0 ms a step, of which 10.0 ms wait for communication; measured "
        "270.0 ms (+8.0%)"
    ]
    unknown = dataclasses.replace(built, modelled=Modelled(reason="its plan is not on record"))
    assert lines(unknown)[2:] == ["    event model: not computed: its plan is not on record"]
    assert lines(dataclasses.replace(built, modelled=None))[2:] == []
