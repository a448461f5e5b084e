"""Costs that `calibrate` measures: in ranks that it starts, and as a rank of a launcher's job."""

from __future__ import annotations

import pytest

from common.emulation.links.profile import network_file
from dear.cost.measurement import MEASURABLE
from tests.system.processes import python
from tests.system.sandboxes import needs_sandbox

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.parametrize(
    ("job", "flags", "world", "per_host"),
    [
        ([], ["--ranks", "3"], 3, 3),
        pytest.param(TORCHRUN, [], 2, 2, marks=pytest.mark.full),
        pytest.param(
            *([], ["--hosts", "2", "--network", "1gbe", "--time-scale", "2"], 2, 1),
            marks=needs_sandbox,
        ),
    ],
    ids=["alone", "torchrun", "virtual hosts"],
)
def test_all_collectives_are_measured_and_written(job, flags, world, per_host, tmp_path):
    path = tmp_path / "here.yaml"
    few = ["--largest", "65536", "--seconds", "20", "-o", str(path)]
    done = python(*job, "benchmarks.py", "calibrate", *flags, *few)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("wrote") == 1, "only rank 0 writes"
    costs = network_file(path).costs
    assert (costs.engine, costs.world_size) == ("comm_core", world)
    assert costs.ranks_per_host == per_host
    assert set(costs.by_operation()) == set(MEASURABLE)
    for cost in costs.by_operation().values():
        assert 4096 <= cost.smallest_bytes < 4096 + 4 * world
        assert 65536 <= cost.largest_bytes < 65536 + 4 * world
        assert cost.cost()(4096) > 0
    if per_host == 1:  # in the network's time, at 1 Gb/s
        assert costs.collective_costs()["exchange"](65536) > 65536 / 125e6


@pytest.mark.full
def test_only_rank_0_says_what_is_wrong():
    done = python(*TORCHRUN, "benchmarks.py", "calibrate", "--ranks", "3")
    assert done.returncode != 0
    assert done.stderr.count("error: torchrun started 2 rank(s), not --ranks 3") == 1
