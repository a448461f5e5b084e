"""Costs that `calibrate` measures: in ranks that it starts, and as a rank of a launcher's job."""

from __future__ import annotations

import pytest

from common.emulation.links.profile import network_file
from dear.cost.measurement import MEASURABLE
from tests.system.processes import python

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.parametrize("job", [[], TORCHRUN], ids=["alone", "torchrun"])
def test_all_collectives_are_measured_and_written(job, tmp_path):
    path = tmp_path / "here.yaml"
    few = ["--largest", "65536", "--seconds", "5", "-o", str(path)]
    done = python(*job, "benchmarks.py", "calibrate", *([] if job else ["--ranks", "3"]), *few)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("wrote") == 1, "only rank 0 writes"
    costs = network_file(path).costs
    world = 2 if job else 3
    assert (costs.engine, costs.world_size, costs.ranks_per_host) == ("comm_core", world, world)
    assert set(costs.by_operation()) == set(MEASURABLE)
    for cost in costs.by_operation().values():
        assert 4096 <= cost.smallest_bytes < 4096 + 4 * world
        assert 65536 <= cost.largest_bytes < 65536 + 4 * world
        assert cost.cost()(4096) > 0


def test_only_rank_0_says_what_is_wrong():
    done = python(*TORCHRUN, "benchmarks.py", "calibrate", "--ranks", "3")
    assert done.returncode != 0
    assert done.stderr.count("error: torchrun started 2 rank(s), not --ranks 3") == 1
