"""Decentralized algorithms through the harness: trained, compared, recorded."""

from __future__ import annotations

import pytest

from tests.system.sweeps import Driver

_SWEEP = """
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
    driver = Driver(tmp_path, _SWEEP)
    done = driver.run()
    records = driver.records()
    assert [record["status"] for record in records] == ["ok"] * 10, done.stderr
    for record in records:
        found = record["check"]
        assert found["matches_reference"], (record["trial"]["algorithm"], found)
        assert found["replicas_agree"] and found["replica_spread"] > 0
        assert 0 < found["consensus_distance"] < 0.5
        # On a busy machine two steps may send nothing, where puts that are under way go on.
        free = record["bound"]["kind"] == "asynchronous"
        assert record["repeats"][0] and (free or record["bytes"]["sent_per_step"] > 0)
        assert record["costs"]["exchange"]["beta_s_per_byte"] > 0
        assert record["bound"]["kind"] and record["bound"]["reached"] > 0
    assert "NO" not in done.stdout and "of bound" in done.stdout
    counted = {record["trial"]["algorithm"]: record["statistics"] for record in records}
    assert counted["decentralized"] is None
    assert [set(rank["staleness"]) for rank in counted["asyncddp"]] == [
        {"1", "2"},
        {"0", "2"},
        {"0", "1"},
    ]
