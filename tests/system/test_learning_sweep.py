"""Whole sweeps that learn: every kind of consistency, a slow host, and a rank that is killed."""

from __future__ import annotations

import pytest

from common.emulation import sandbox
from tests.system.sweeps import Driver

BUDGET_S = 1.5

SWEEP = f"""
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
    driver = Driver(tmp_path, SWEEP)
    done = driver.run()
    records = driver.records()
    assert [record["status"] for record in records] == ["ok"] * 3, done.stderr
    found = {record["trial"]["algorithm"]: record for record in records}
    for name, record in found.items():
        (repeat,) = record["learning"]
        evaluations, ranks = repeat["evaluations"], repeat["ranks"]
        assert [e["at_s"] for e in evaluations] == [0.0, 0.5, 1.0, 1.5]
        assert all(e["seconds"] >= e["at_s"] for e in evaluations)
        assert evaluations[-1]["loss"] < evaluations[0]["loss"], name
        assert all(0 <= e["accuracy_min"] <= e["accuracy_max"] <= 1 for e in evaluations)
        assert repeat["to_target"] is None
        assert all(rank["elapsed_s"] >= BUDGET_S for rank in ranks)
        assert [rank["samples"] for rank in ranks] == [
            size * rank["steps"] for size, rank in zip((4, 2), ranks, strict=True)
        ]
        assert record["repeats"] == [[]] and record["throughput"]["value"] > 0
        if name != "asyncddp":
            assert ranks[0]["steps"] == ranks[1]["steps"]
        if name == "dadt":
            assert record["check"]["replica_spread"] == 0.0 and record["check"]["replicas_agree"]
            assert all(e["consensus_distance"] == 0.0 for e in evaluations)
        else:
            assert 0 < record["check"]["consensus_distance"] < 0.5
    # The same start and the same judges for all.
    assert len({r["learning"][0]["evaluations"][0]["loss"] for r in records}) == 1
    ages = [rank["staleness"] for rank in found["asyncddp"]["statistics"]]
    assert [set(age) for age in ages] == [{"1"}, {"0"}]
    curve = [e.get("staleness") for e in found["asyncddp"]["learning"][0]["evaluations"]]
    assert curve[0] is None and any(age is not None for age in curve)
    assert not list(driver.sweep.glob("*/learned-*"))
    shown = driver.show().stdout
    assert "to target" in shown and "consensus" in shown and "staleness" in shown
    assert "mnist_cnn, 2 workers: none reaches 100% in 1.5 s" in shown
    refused = driver.show("--breakdown")
    assert refused.returncode == 2 and "has timed no single steps" in refused.stderr


EMULATED = """
name: tiny
algorithms: [asyncddp]
models: [{name: mnist_cnn, batch_size: 4}]
cluster: {hosts: 3, network: 10gbe}
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
    done = driver.run()
    assert done.returncode == 0, done.stderr + done.stdout
    calm, slow, killed = driver.records()
    assert [r["status"] for r in (calm, slow, killed)] == ["ok"] * 3

    steps = [rank["steps"] for rank in slow["learning"][0]["ranks"]]
    # Five times slower compute; what else a step takes, and a shared machine, are not slower.
    assert steps[2] < min(steps[:2]), steps
    assert slow["fault_events"][0]["ok"]
    losses = [e["loss"] for e in slow["learning"][0]["evaluations"]]
    assert losses[-1] < losses[0]
    behind = [slow["statistics"][rank]["staleness"]["2"]["max"] for rank in (0, 1)]
    assert max(behind) > 0

    (repeat,) = killed["learning"]
    assert repeat["ranks"][1] is None and all(repeat["ranks"][rank] for rank in (0, 2))
    assert killed["statistics"][1] is None
    assert [killed["statistics"][rank]["lost"] for rank in (0, 2)] == [[1], [1]]
    assert any("rank 1 was killed" in note for note in killed["notes"])
    assert [e["steps"][1] for e in repeat["evaluations"]] == [None] * 3
    assert "rank 1 was killed" in done.stdout


@virtual
@pytest.mark.full
def test_a_killed_rank_of_a_synchronous_algorithm_fails_the_trial(tmp_path):
    driver = Driver(tmp_path, EMULATED)
    done = driver.run("--set", "algorithms=[ddp]", "-k", "kill_rank")
    assert done.returncode == 1, done.stderr + done.stdout
    (record,) = driver.records()
    assert record["status"] == "failed" and record["error"]["rank"] == 1
    assert "rank 1 was killed by signal 9" in record["error"]["message"]
    assert record["learning"] == []


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
    (repeat,) = record["learning"]
    # 64 samples at 253.1 per second are 0.253 s.
    assert all(1 <= rank["steps"] <= 9 for rank in repeat["ranks"])
    known = [{key for key, value in e.items() if value is not None} for e in repeat["evaluations"]]
    assert known[0] == {"at_s", "seconds", "steps"}
    assert all(keys - {"staleness"} == known[0] for keys in known[1:])
    assert (
        record["check"]["replicas_agree"] is None and record["check"]["consensus_distance"] is None
    )
    assert "steps/s" in done.stdout and "accuracy" not in done.stdout
