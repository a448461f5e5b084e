"""Files of collectives' times as nccl-tests writes them."""

from __future__ import annotations

import datetime
import json

import pytest

from bench.collectives import Sample
from bench.rig import nccl_json
from dear.errors import UserError


def sample(op: str, nbytes: int, index: int, wrong: int = 0) -> Sample:
    """Of two ranks, of which now the one, now the other is slower; 2 and 4 ms."""
    times = [[0.002, 0.001], [0.001, 0.004]]
    return Sample(engine="gloo", op=op, nbytes=nbytes, round=index, times_s=times,
                  cpu_s=[0.1, 0.1], wrong=wrong)  # fmt: skip


def written(folder, samples):
    paths = nccl_json.write(
        folder,
        samples,
        world=2,
        began=datetime.datetime(2026, 1, 2, 3, 4, 5),
        args=["bench/collectives.py", "-n", "2"],
        ranks=[{"engine": "gloo", "pid": 7, "host": "h"}, {"engine": "mpi", "pid": 8, "host": "h"}],
        environment={"OMP_NUM_THREADS": "1"},
    )
    return {path.name: json.loads(path.read_text()) for path in paths}


def test_the_keys_and_units_are_theirs(tmp_path):
    samples = [sample("all_reduce", 4000, i) for i in range(3)]
    samples += [sample("all_gather", 8000, 0), sample("all_reduce", 8000, 0, wrong=5)]
    files = written(tmp_path, samples)
    assert list(files) == ["gloo-all_reduce.json", "gloo-all_gather.json"]
    told = files["gloo-all_reduce.json"]
    assert (told["version"], told["start_time"]) == (2, "2026-01-02 03:04:05")
    assert told["env"] == ["OMP_NUM_THREADS=1"] and told["nccl_version"] is None
    assert told["config"]["minimum_bytes"] == 4000 and told["config"]["maximum_bytes"] == 8000
    assert [one["pid"] for one in told["config"]["devices"]] == [7]
    first, second = told["results"]
    assert (first["size"], first["count"], first["type"]) == (4000, 1000, "float")
    assert (first["redop"], first["root"], first["actual_iterations"]) == ("sum", "-1", 6)
    assert first["out_of_place"] is None
    # 4000 bytes in 3 ms; over each link of two ranks as many leave in an all-reduce.
    assert first["in_place"] == pytest.approx(
        {"time": 3000.0, "alg_bw": 4000 / 3e-3 / 1e9, "bus_bw": 4000 / 3e-3 / 1e9, "nwrong": 0}
    )
    spread = first["in_place_per_iter"]
    assert (spread["min_us"], spread["p50_us"], spread["p99_us"]) == pytest.approx((2e3, 2e3, 4e3))
    assert spread["cv_pct"] == pytest.approx(100 / 3)
    assert len(spread["per_process_max_times_us"]) == 2 and len(spread["times_us"]) == 6
    assert second["in_place"]["nwrong"] == 5
    assert told["out_of_bounds"] == {"count": 5, "okay": "false"}


def test_a_gather_counts_what_each_rank_has(tmp_path):
    (told,) = written(tmp_path, [sample("all_gather", 8000, 0)]).values()
    (one,) = told["results"]
    assert (one["size"], one["count"], one["redop"], one["in_place"]) == (8000, 1000, "none", None)
    assert one["out_of_place"]["bus_bw"] == pytest.approx(one["out_of_place"]["alg_bw"] / 2)
    assert told["average_bus_bandwidth"]["bandwidth"] == one["out_of_place"]["bus_bw"]


def test_nothing_is_overwritten(tmp_path):
    written(tmp_path, [sample("all_gather", 8000, 0)])
    with pytest.raises(UserError, match="File exists"):
        written(tmp_path, [sample("all_gather", 8000, 0)])
