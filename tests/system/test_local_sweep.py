"""Whole sweeps of processes on this machine: what they record, learn, and leave when they end."""

from __future__ import annotations

import json
import os
import re
import signal

import pytest

from common.emulation import sandbox
from common.results.records import Record
from common.results.validity import flag_text
from tests.system.processes import alive, wait_for
from tests.system.sweeps import ENDLESS, Driver, processes_of, repeats

ONE = ("--set", "measure.repeats=1", "-k", "n=2")


@pytest.fixture
def driver(tmp_path):
    return Driver(tmp_path)


def test_a_sweep_records_every_trial(driver):
    records = driver.measured("--set", "algorithms=[wfbp, dear]")
    assert {r["trial"]["algorithm"] for r in records} == {"none", "wfbp", "dear"}
    for record in records:
        assert record["status"] == "ok"
        assert record["check"]["replicas_agree"] and record["check"]["matches_reference"]
        # The check splits the first repeat into two blocks; a block has at least two steps.
        assert [len(steps) for steps in repeats(record)] == [4, 2]
        assert record["throughput"]["n"] == 6
        assert record["throughput"]["ci_low"] <= record["throughput"]["value"]
        assert min(record["results"][0]["compute"].values()) > 0
        # Torch alone takes 100 MiB. The first repeat has copies for the check.
        first, second = (result["use"]["memory_bytes"] for result in record["results"])
        assert first is None and len(second) == record["trial"]["world_size"]
        assert all(100 << 20 < peak < 2 << 30 for peak in second)
        parts = dict(record["breakdown"])
        step_s = parts.pop("step_s")
        assert 0 <= parts.pop("rank") < record["trial"]["world_size"]
        assert sum(part or 0.0 for part in parts.values()) == pytest.approx(step_s)
    by_name = {record["trial"]["algorithm"]: record for record in records}
    assert by_name["none"]["results"][0]["costs"] is None
    costs = [record["results"][0]["costs"] for name, record in by_name.items() if name != "none"]
    assert costs == [costs[0]] * 2  # one trial has measured for all
    assert costs[0].keys() == {"all_reduce", "reduce_scatter", "all_gather", "exchange"}
    for name, kind in (("none", "compute"), ("wfbp", "wfbp"), ("dear", "dear")):
        bound = by_name[name]["bound"]
        assert bound["kind"] == kind and bound["wire_limit_s"] is None
        assert 0 < bound["compute_limit_s"] <= bound["step_s"]
    plan = by_name["dear"]["results"][0]["plan"]
    assert sum(group["tensors"] for group in plan["groups"]) == 8
    assert plan["found"]["first_mb"] > 0, "by what collectives cost here"
    assert all(group["first"] and group["last"] for group in plan["groups"])
    table = (driver.sweep / "table.md").read_text()
    assert "| of bound |" in table
    assert table.count("\n") == 2 + len(records)
    reports = json.loads((driver.sweep / "reports.json").read_text())
    flagged = {r["trial"]["label"]: bool(flag_text(Record.from_json(r))) for r in records}
    del flagged["single worker"]
    shown = {name: rates == ["nan"] for name, rates in reports["0"]["mnist_cnn_2"].items()}
    assert shown == flagged
    log = next(driver.sweep.glob("*-dear-*/log-0-rank0.txt")).read_text()
    sizes = [f"{group['bytes'] / 2**20:.2f}" for group in plan["groups"]]
    assert f"#Tensor fusion groups: {len(sizes)}" in log
    assert f"Buffer sizes (MB): {', '.join(sizes)}" in log
    assert f"{len(sizes)} groups of 8 tensors" in driver.show("--plan").stdout
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
    message = by_name["wfbp"]["error"]["message"]
    assert re.match("rank 1 was killed by signal 9; ranks? .* #", message), message
    (hang,) = driver.sweep.glob("*/hang.json")
    assert json.loads(hang.read_bytes())["divergence"] in message
    assert not list(driver.sweep.glob("*/flight-*"))
    assert by_name["dear"]["status"] == "ok"
    assert not alive(victim) and not alive(other)
    assert processes_of(driver.logs) == []


@pytest.mark.full
def test_a_trial_that_outlives_its_time_limit_says_which_rank_holds_it_up(driver):
    flags = ["--set", ENDLESS, "--set", "algorithms=[dear]", "--set", "timeout_s=25"]
    sweep = driver.start(*ONE, *flags)
    os.kill(driver.worker("dear", rank=1), signal.SIGSTOP)
    _, stderr = sweep.communicate(timeout=100)
    assert sweep.returncode == 1, stderr
    (record,) = driver.records()
    message = record["error"]["message"]
    assert record["status"] == "timeout" and message.startswith("not finished after 25 s")
    assert re.search("; rank 1 has not come to #.*, rank 0 is at ", message), message
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
    done = driver.run("--set", "timeout_s=20", "--set", ENDLESS, *ONE, "-k", "dear")
    assert done.returncode == 1
    (record,) = driver.records()
    assert record["status"] == "timeout"
    assert "rank 0: " in record["error"]["message"]
    assert "Current thread" in next(driver.sweep.glob("*/log-0-rank1.txt")).read_text()


DECENTRALIZED = """
name: tiny
algorithms:
  - neighbor
  - {name: neighbor, label: atc, options: {combine: atc, dynamic: one-peer-exp}}
  - gradient-tracking
  - exact-diffusion
  - push-diging
  - win-put
  - pull-get
  - push-sum
  - decentralized
  - asyncddp
models: [{name: mnist_cnn, batch_size: 2}]
world_sizes: [3]
baseline: false
measure: {repeats: 1, warmup_steps: 1, steps_per_iter: 2, check_steps: 3}
timeout_s: 60
"""


@pytest.mark.full
def test_every_decentralized_algorithm_runs_in_a_sweep_and_is_checked(tmp_path):
    driver = Driver(tmp_path, DECENTRALIZED)
    done = driver.run()
    records = driver.records()
    assert [record["status"] for record in records] == ["ok"] * 10, done.stderr
    for record in records:
        check = record["check"]
        assert check["matches_reference"], (record["trial"]["algorithm"], check)
        assert check["replicas_agree"] and check["replica_spread"] > 0
        assert 0 < check["consensus_distance"] < 0.5
        # On a busy machine two steps may send nothing, where puts that are under way go on.
        free = record["bound"]["kind"] == "asynchronous"
        assert repeats(record)[0] and (free or record["results"][0]["bytes_per_step"] > 0)
        assert record["results"][0]["costs"]["exchange"]["beta_s_per_byte"] > 0
        assert record["bound"]["kind"] and record["bound"]["step_s"] > 0
    assert "NO" not in done.stdout and "of bound" in done.stdout
    counted = {
        record["trial"]["algorithm"]: record["results"][0]["statistics"] for record in records
    }
    assert counted["decentralized"] is None
    assert [set(rank["staleness"]) for rank in counted["asyncddp"]] == [
        {"1", "2"},
        {"0", "2"},
        {"0", "1"},
    ]


BUDGET_S = 1.5

LEARNING = f"""
name: tiny
algorithms:
  - dadt
  - decentralized
  - asyncddp
models: [{{name: mnist_cnn, batch_size: 4}}]
world_sizes: [2]
baseline: false
optimizer: {{name: sgd, lr: 0.05}}
learn:
  budget_s: {BUDGET_S}
  eval_every_s: 0.5
  data: digits
  batch_sizes: [4, 2]
  target_accuracy: 0.999
measure: {{repeats: 1}}
timeout_s: 90
"""


@pytest.mark.full
@pytest.mark.timeout(280)
def test_every_kind_of_consistency_learns_for_the_same_time(tmp_path):
    driver = Driver(tmp_path, LEARNING)
    done = driver.run()
    records = driver.records()
    assert [record["status"] for record in records] == ["ok"] * 3, done.stderr
    by_name = {record["trial"]["algorithm"]: record for record in records}
    for name, record in by_name.items():
        (repeat,) = [result["learning"] for result in record["results"]]
        evaluations, ranks = repeat["evaluations"], repeat["ranks"]
        assert [e["at_s"] for e in evaluations] == [0.0, 0.5, 1.0, 1.5]
        assert all(e["seconds"] >= e["at_s"] for e in evaluations)
        assert evaluations[-1]["loss"] < evaluations[0]["loss"], name
        assert 0 <= evaluations[-1]["accuracy_min"] <= evaluations[-1]["accuracy_max"] <= 1
        assert repeat["seed"] == 1
        assert min(record["results"][0]["strain"]["canary_s"]) > 0
        raw = driver.evidence(record)
        assert [[step for _, step in rank] for rank in raw["copies"]] == [
            [e["steps"][rank] for e in evaluations] for rank in (0, 1)
        ]
        assert record["results"][0]["data"] == {
            "name": "digits",
            "train": 1618,
            "test": 179,
            "split": "scikit-learn's 1,797 digits",
        }
        assert all(rank["elapsed_s"] >= BUDGET_S for rank in ranks)
        assert [rank["samples"] for rank in ranks] == [
            size * rank["steps"] for size, rank in zip((4, 2), ranks, strict=True)
        ]
        assert repeats(record) == [[]] and record["throughput"]["value"] > 0
        if name != "asyncddp":
            assert ranks[0]["steps"] == ranks[1]["steps"]
        if name == "dadt":
            assert record["check"]["replica_spread"] == 0.0 and record["check"]["replicas_agree"]
            assert all(e["consensus_distance"] == 0.0 for e in evaluations)
        else:
            assert 0 < record["check"]["consensus_distance"] < 0.5
    # The same start and the same judges for all.
    assert len({r["results"][0]["learning"]["evaluations"][0]["loss"] for r in records}) == 1
    ages = [rank["staleness"] for rank in by_name["asyncddp"]["results"][0]["statistics"]]
    assert [set(age) for age in ages] == [{"1"}, {"0"}]
    curve = [
        e.get("staleness") for e in by_name["asyncddp"]["results"][0]["learning"]["evaluations"]
    ]
    assert curve[0] is None and any(age is not None for age in curve)
    assert not list(driver.sweep.glob("*/learned-*"))
    shown = driver.show().stdout
    assert "to target" in shown and "consensus" in shown and "staleness" in shown
    assert "mnist_cnn, 2 workers: none reaches 100% in 1.5 s" in shown
    refused = driver.show("--breakdown")
    assert refused.returncode == 2 and "do not time steps" in refused.stderr


EMULATED = """
name: tiny
algorithms: [asyncddp]
models: [{name: mnist_cnn, batch_size: 4}]
cluster: {hosts: 3, network: 1gbe}  # which this machine carries at full speed
faults:
  - {kind: slow_host, host: 2, factor: 5}
  - {kind: kill_rank, rank: 1, at_s: 0.7}
baseline: false
optimizer: {name: sgd, lr: 0.05}
learn: {budget_s: 2, eval_every_s: 1, data: digits}
measure: {repeats: 1}
timeout_s: 90
"""
virtual = pytest.mark.skipif(bool(sandbox.unable()), reason=f"no virtual hosts: {sandbox.unable()}")


@virtual
@pytest.mark.full
def test_a_slow_host_is_left_behind_and_a_killed_rank_is_survived_and_named(tmp_path):
    driver = Driver(tmp_path, EMULATED)
    calm, slow, killed = driver.measured()
    assert [r["status"] for r in (calm, slow, killed)] == ["ok"] * 3

    steps = [rank["steps"] for rank in slow["results"][0]["learning"]["ranks"]]
    # Five times slower compute; what else a step takes, and a shared machine, are not slower.
    assert steps[2] < min(steps[:2]), steps
    assert slow["fabric"]["fault_events"][0]["ok"]
    losses = [e["loss"] for e in slow["results"][0]["learning"]["evaluations"]]
    assert losses[-1] < losses[0]
    behind = [slow["results"][0]["statistics"][rank]["staleness"]["2"]["max"] for rank in (0, 1)]
    assert max(behind) > 0

    (repeat,) = [result["learning"] for result in killed["results"]]
    assert repeat["ranks"][1] is None and all(repeat["ranks"][rank] for rank in (0, 2))
    assert killed["results"][0]["statistics"][1] is None
    assert [killed["results"][0]["statistics"][rank]["lost"] for rank in (0, 2)] == [[1], [1]]
    assert any("rank 1 was killed" in note["text"] for note in killed["notes"])
    assert [e["steps"][1] for e in repeat["evaluations"]] == [None] * 3
    # A terminal may break the line anywhere.
    assert "rank 1 was killed" in (driver.sweep / "table.md").read_text()


RATES = """
name: tiny
algorithms: [asyncddp]
models: [{name: resnet50@rtx2080ti-modelled, batch_size: 64}]
world_sizes: [2]
baseline: false
learn: {budget_s: 2, eval_every_s: 1}
measure: {repeats: 1, warmup_steps: 1}
timeout_s: 120
"""


@pytest.mark.full
def test_without_data_ranks_count_their_own_steps(tmp_path):
    driver = Driver(tmp_path, RATES)
    done = driver.run()
    assert done.returncode == 0, done.stderr + done.stdout
    (record,) = driver.records()
    (repeat,) = [result["learning"] for result in record["results"]]
    # 64 samples at 253.1 per second are 0.253 s.
    assert all(1 <= rank["steps"] <= 9 for rank in repeat["ranks"])
    known = [{key for key, value in e.items() if value is not None} for e in repeat["evaluations"]]
    assert known[0] == {"at_s", "seconds", "steps"}
    assert all(keys - {"staleness"} == known[0] for keys in known[1:])
    assert record["check"]["replicas_agree"] and record["check"]["matches_reference"]
    assert "steps/s" in done.stdout and "accuracy" not in done.stdout
