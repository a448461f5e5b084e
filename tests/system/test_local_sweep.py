"""A whole sweep of processes on this machine, and what becomes of them when things go wrong."""

from __future__ import annotations

import json
import os
import signal

import pytest

from tests.system.processes import alive, wait_for
from tests.system.sweeps import ENDLESS, Driver, processes_of

ONE = ("--set", "measure.repeats=1", "-k", "n=2")


@pytest.fixture
def driver(tmp_path):
    return Driver(tmp_path)


def test_a_sweep_records_every_trial(driver):
    done = driver.run("--set", "algorithms=[allreduce, wfbp, dear]")
    assert done.returncode == 0, done.stderr
    records = driver.records()
    assert {r["trial"]["algorithm"] for r in records} == {"none", "allreduce", "wfbp", "dear"}
    for record in records:
        assert record["status"] == "ok"
        assert record["check"]["replicas_agree"] and record["check"]["matches_reference"]
        assert [len(steps) for steps in record["repeats"]] == [2, 2]
        assert record["throughput"]["n"] == 4
        assert record["throughput"]["ci_low"] <= record["throughput"]["value"]
        assert min(record["compute"].values()) > 0
        parts = dict(record["breakdown"])
        step_s = parts.pop("step_s")
        assert sum(part or 0.0 for part in parts.values()) == pytest.approx(step_s)
    by_name = {record["trial"]["algorithm"]: record for record in records}
    assert by_name["none"]["costs"] is None
    costs = [record["costs"] for name, record in by_name.items() if name != "none"]
    assert costs == [costs[0]] * 3  # one trial has measured for all
    assert costs[0].keys() == {"all_reduce", "reduce_scatter", "all_gather", "exchange"}
    for name, kind in (("none", "compute"), ("wfbp", "wfbp"), ("dear", "dear")):
        bound = by_name[name]["bound"]
        assert bound["kind"] == kind and bound["wire_limit_s"] is None
        assert 0 < bound["compute_limit_s"] <= bound["step_s"]
        assert bound["reached"] > 0
    table = (driver.sweep / "table.md").read_text()
    assert "| of bound |" in table
    assert table.count("\n") == 2 + len(records)
    reports = json.loads((driver.sweep / "reports.json").read_text())
    assert reports["0"]["mnist_cnn_2"].keys() == {"allreduce", "wfbp", "dear"}
    log = next(driver.sweep.glob("*-dear-*/log-0-rank0.txt")).read_text()
    assert "Iter #0: " in log and "Total img/sec on 2 CPU(s): " in log

    shown = driver.show("--breakdown").stdout
    assert "exposed comm" in shown and "compute limit" in shown and "dear" in shown


@pytest.mark.full
def test_a_killed_worker_fails_its_trial_alone(driver):
    flags = ["--set", "measure.steps_per_iter=40", "--set", "algorithms=[wfbp, dear]"]
    sweep = driver.start(*ONE, *flags)
    victim = driver.worker("wfbp", rank=1)
    other = driver.worker("wfbp", rank=0)
    os.kill(victim, signal.SIGKILL)
    _, stderr = sweep.communicate(timeout=100)
    assert sweep.returncode == 1, stderr
    by_name = {record["trial"]["algorithm"]: record for record in driver.records()}
    assert by_name["wfbp"]["status"] == "failed"
    assert by_name["wfbp"]["error"]["rank"] == 1
    assert "killed by signal 9" in by_name["wfbp"]["error"]["message"]
    assert by_name["dear"]["status"] == "ok"
    assert not alive(victim) and not alive(other)
    assert processes_of(driver.logs) == []


@pytest.mark.parametrize(
    "background",
    [False, pytest.param(True, marks=pytest.mark.full)],
    ids=["terminal", "background_of_a_script"],
)
def test_ctrl_c_keeps_finished_records_and_leaves_no_process(driver, background):
    sweep = driver.start(
        *(*ONE, "--set", ENDLESS, "--set", "algorithms=[allreduce]"),
        interrupts=signal.SIG_IGN if background else signal.SIG_DFL,
    )
    pids = [driver.worker("allreduce", rank) for rank in (0, 1)]
    sweep.send_signal(signal.SIGINT)
    _, stderr = sweep.communicate(timeout=60)
    assert sweep.returncode == 130, stderr
    assert "Traceback" not in stderr
    assert [record["status"] for record in driver.records()] == ["interrupted"]
    assert not any(map(alive, pids))
    assert processes_of(driver.logs) == []


@pytest.mark.full
def test_workers_die_with_a_killed_driver(driver):
    sweep = driver.start("--set", ENDLESS, *ONE, "-k", "allreduce")
    pids = [driver.worker("allreduce", rank) for rank in (0, 1)]
    sweep.kill()
    sweep.communicate(timeout=30)
    wait_for(lambda: not any(map(alive, pids)))


@pytest.mark.full
def test_a_trial_out_of_time_is_stopped_and_says_where_its_ranks_were(driver):
    done = driver.run("--set", "timeout_s=8", "--set", ENDLESS, *ONE, "-k", "dear")
    assert done.returncode == 1
    (record,) = driver.records()
    assert record["status"] == "timeout"
    assert "rank 0: " in record["error"]["message"]
    assert "Current thread" in next(driver.sweep.glob("*/log-0-rank1.txt")).read_text()
