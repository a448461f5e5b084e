"""Tests of what stands in the file beside a record: the steps traced, the groups, the counters."""

from __future__ import annotations

import gzip
import json
from types import SimpleNamespace

import pytest
import torch

from common.harness.settings import OptimizerConfig
from common.harness.trial import BASELINE
from common.harness.worker.timing import evidence
from common.harness.worker.timing.measure import Measured, measure_steps
from common.harness.worker.timing.strain import Pressure
from common.harness.worker.training import Training
from common.models.workload import Workload
from common.results.records import Breakdown
from dear.comm import runtime
from dear.training.trace import Timeline
from tests.system.made import make_trial


def _workload():
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    return Workload(model=model, inputs=(torch.ones(2, 8),), targets=(), criterion=torch.sum)


def _traced(algorithm, options):
    workload, communicator = _workload(), runtime.communicator()
    communicator.record_times = False  # other tests' trainings may have turned it on
    training = Training(make_trial(algorithm, world=2, options=options), workload)
    training.run(3)
    trace = evidence.Trace(training, workload.model, communicator)
    training.synchronize()
    result = trace.to_json(), evidence.plan(training, workload.model), communicator.record_times
    started = communicator._log
    training.close()
    return *result, started


NAMES = {"0.weight", "0.bias", "2.weight", "2.bias"}
GRADIENT_BYTES = 4 * (8 * 8 + 8 + 8 * 4 + 4)


@pytest.mark.parametrize(
    ("algorithm", "options", "per_step"),
    [
        ("wfbp", {}, {"all_reduce": 4}),
        ("dear", {"fusion": "none", "small_kb": 0}, {"reduce_scatter": 4, "all_gather": 4}),
        ("neighbor", {"topology": "ring"}, {"neighbors": 1}),
        ("ddp", {}, {}),  # in code of its own
        (BASELINE, {}, {}),
    ],
)
@pytest.mark.parametrize("backend", ["", "gloo"])
def test_a_trace_has_all_gradients_and_all_that_is_sent(
    world, backend, algorithm, options, per_step
):
    for lines, _, recording, started in world(2, backend).run(_traced, algorithm, options):
        assert not recording and started is None, "nothing is recorded afterwards"
        began, *ends = lines["marks_s"]
        assert len(ends) == evidence.TRACED_STEPS == len(lines["gradients"])
        for step, begin, end in zip(lines["gradients"], [began, *ends], ends, strict=False):
            assert {item["name"] for item in step} == NAMES
            assert sum(item["bytes"] for item in step) == GRADIENT_BYTES
            assert all(begin <= item["at_s"] <= end for item in step)
        names = [item["name"] for item in lines["collectives"]]
        for name, count in per_step.items():
            # One that says which gradients there are may be sent besides.
            assert sum(item.startswith(name) for item in names) >= count * evidence.TRACED_STEPS
        assert bool(names) == bool(per_step)
        known = sum("enqueued_s" in item for item in lines["collectives"])
        assert known == len(names) or backend == "gloo"
        for item in lines["collectives"]:
            if "enqueued_s" in item:  # Gloo tells nothing of a reduce-scatter
                assert began <= item["enqueued_s"] <= item["started_s"] <= item["finished_s"]
        json.dumps(lines)


@pytest.mark.parametrize(
    ("algorithm", "options", "groups"),
    [
        ("wfbp", {}, 4),
        ("dear", {}, 1),
        ("dear", {"fusion": "none"}, 4),
        ("neighbor", {}, 1),
        ("fsdp", {"min_mb": 1e-6}, 2),
        ("fsdp", {}, 1),
    ],
)
def test_the_plan_says_what_travels_together(world, algorithm, options, groups):
    for _, plan, *_ in world(2).run(_traced, algorithm, options):
        assert len(plan["groups"]) == groups
        assert {name for item in plan["groups"] for name in item["parameters"]} == NAMES
        assert sum(item["bytes"] for item in plan["groups"]) == GRADIENT_BYTES
        some = {item["some"] for item in plan["groups"]}
        assert some == ({bool(options)} if algorithm == "fsdp" else {None})


def test_the_plan_of_ddp_has_its_buckets_in_bytes(world):
    for _, plan, *_ in world(2).run(_traced, "ddp", {}):
        assert sum(item["bytes"] for item in plan["groups"]) == GRADIENT_BYTES
        assert all(item["parameters"] == [] for item in plan["groups"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_copies_and_updates_are_timed_by_size_where_the_trial_trains(dtype, monkeypatch):
    updated = []
    right = evidence.make_optimizer
    noted = lambda config, module: updated.append(module.param) or right(config, module)  # noqa: E731
    monkeypatch.setattr(evidence, "make_optimizer", noted)
    result = evidence.host_costs(OptimizerConfig(momentum=0.9), torch.device("cpu"), dtype)
    assert {param.dtype for param in updated} == {dtype}
    assert [param.nbytes for param in updated] == [item["bytes"] for item in result]
    assert [item["bytes"] for item in result] == sorted({item["bytes"] for item in result})
    assert all(item["copy_s"] > 0 and item["update_s"] > 0 for item in result) and len(result) > 2


@pytest.fixture
def counters(tmp_path, monkeypatch):
    """Makes `tmp_path` what the kernel tells of the network, as this one does."""
    result = evidence.network_counters()
    assert "lo" in result and "RetransSegs" in result["tcp"]
    monkeypatch.setattr(evidence, "_NETWORK", tmp_path)
    monkeypatch.setattr(evidence.shutil, "which", lambda name: None)
    head = "Inter-| Receive | Transmit\n face |bytes packets | bytes\n"

    def tell(received, sent, lost):
        row = f" eth0: {received} 20 0 1 0 0 0 0 {sent} 30 0 2 0 0 0 0\n"
        (tmp_path / "dev").write_text(head + row)
        (tmp_path / "snmp").write_text(
            f"Ip: Forwarding\nIp: 1\nTcp: A RetransSegs\nTcp: -1 {lost}\n"
        )
        (tmp_path / "netstat").write_text("TcpExt: TCPTimeouts Other\nTcpExt: 4 9\n")
        return evidence.network_counters()

    return tell


def test_counters_of_the_network_are_told_as_what_they_have_gained(counters):
    before, after = counters(1000, 500, 3), counters(1700, 900, 5)
    result = evidence.gained(before, after)
    assert (result["eth0"]["rx_bytes"], result["eth0"]["tx_bytes"]) == (700, 400)
    assert after["eth0"]["rx_drop"] == 1 and after["eth0"]["tx_drop"] == 2
    assert result["tcp"] == {"RetransSegs": 2, "TCPTimeouts": 0} and result["queues"] == {}
    del before["eth0"]  # a device that has come since
    assert "eth0" not in evidence.gained(before, after)


def test_the_file_has_every_moment_of_every_rank(tmp_path):
    marks = [[[0.0, 1.0, 1.1, 2.1, 3.1]], [[0.0, 1.0, 1.2, 2.2, 3.0]]]
    measured = Measured(
        iters=[[1.0, 1.0]],
        untimed=[[1.0]],
        marks=marks,
        bytes_sent=0,
        pressure=[Pressure(machine="one")] * 2,
        canary_s=[0.1, 0.1],
    )
    step = Breakdown(forward_s=0.1, backward_s=0.2, update_s=0.3, exposed_comm_s=0.4, step_s=1.0)
    counted = [{"eth0": {"rx_bytes": 9}}] * 2
    # Of five steps, two were traced; one more was not timed.
    facts = evidence.timing(measured, [[step] * 5] * 2, counted, watched=1)
    path = tmp_path / evidence.file_name(0)
    evidence.write(path, {"trial": "one", **facts})
    result = json.loads(gzip.decompress(path.read_bytes()))
    assert result["schema"] == evidence.SCHEMA and result["marks_s"] == marks
    assert result["parts"]["columns"] == [
        *("forward_s", "backward_s", "update_s", "exposed_comm_s", "step_s")
    ]
    assert result["parts"]["ranks"] == [[[0.1, 0.2, 0.3, 0.4, 1.0]] * 3] * 2
    assert result["network"] == {"steps": 4, "ranks": counted} and len(result["pressure"]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["evidence.json.gz"]
    assert evidence.file_name(2) == "evidence-2.json.gz"


def _sent_in(blocks, steps):
    workload, communicator = _workload(), runtime.communicator()
    training = Training(make_trial("wfbp", world=2), workload)
    result = measure_steps(training.step, communicator, blocks=blocks, steps=steps, untimed=2)
    log = communicator._log
    training.close()
    return result.bytes_sent, log, len(result.pressure), result.iters


def test_nothing_is_traced_while_steps_are_timed(world):
    results = world(2).run(_sent_in, 2, 3)
    assert all(sent >= GRADIENT_BYTES and log is None for sent, log, *_ in results)
    assert results[0][3] == results[1][3] and results[0][2] == 2


def test_a_timeline_makes_its_folder_and_is_written_anew(tmp_path):
    timeline = Timeline(str(tmp_path / "new" / "trace.json"), rank=2)
    timeline.add("step", "second", 2.0, 2.5, number=2)
    timeline.add("transfer", "first", 1.0, 0.5)
    for path in (None, tmp_path / "other" / "deep" / "trace.json"):
        timeline.write(path)
        written = json.loads((path or tmp_path / "new" / "trace-rank2.json").read_text())
        *names, process, first, second = written["traceEvents"]
        assert [item["args"]["name"] for item in names] == ["step", "transfer"]
        assert process["args"]["name"] == "rank 2"
        assert (first["name"], first["ts"], first["dur"]) == ("first", 1e6, 0.0)
        assert (second["dur"], second["args"], second["tid"]) == (5e5, {"number": 2}, 0)


def test_a_trace_of_a_gpu_has_the_moments_of_the_gpu():
    clock = SimpleNamespace(mark=lambda: lambda: 7.5, at_s=lambda event: event / 1e3)
    communicator = SimpleNamespace(device_clock=lambda device: clock)
    assert evidence.moments(communicator, torch.device("cuda"))()() == 7.5
    training = object.__new__(Training)
    training.device, training._communicator = torch.device("cuda"), communicator
    training._marks = [(1, 2, 3, 4)]
    assert training.phases() == [[0.001, 0.002, 0.003, 0.004]]
