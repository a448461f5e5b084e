"""Collectives of CUDA tensors keep the order of the CUDA streams; CPU tensors prove the bodies."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.gpu import cuda_stream_bodies as bodies
from tests.gpu.cuda_worlds import EVERYWHERE, Pools, World, named, skip_without_comm_core

worlds = pytest.mark.parametrize("world", EVERYWHERE, ids=named)
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int64]


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    pools = Pools()
    yield pools
    pools.close()


@worlds
@pytest.mark.parametrize("wait_elsewhere", [False, True], ids=["same_stream", "other_stream"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).partition(".")[2])
@pytest.mark.parametrize("collective", [c.__name__ for c in bodies.COLLECTIVES])
def test_a_late_input_is_waited_for_and_the_result_is_there_after_wait(
    pools, world: World, collective, dtype, wait_elsewhere
):
    pools.run(world, bodies.written_late_and_read_at_once, collective, dtype, wait_elsewhere)


@worlds
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).partition(".")[2])
def test_many_collectives_under_way(pools, world: World, dtype):
    pools.run(world, bodies.many_under_way, dtype)


@worlds
@pytest.mark.parametrize(
    "body", [bodies.two_channels, bodies.memory_reused, bodies.chain], ids=lambda b: b.__name__
)
def test_streams(pools, world: World, body):
    pools.run(world, body)


@pytest.mark.parametrize("world", [w for w in EVERYWHERE if w.backend == "comm_core"], ids=named)
def test_the_other_operations_of_comm_core(pools, world: World):
    pools.run(world, bodies.other_operations)


@pytest.mark.parametrize("world", [w for w in EVERYWHERE if w.backend != "gloo"], ids=named)
def test_the_multi_stream_communicator(pools, world: World):
    skip_without_comm_core()
    pools.run(world, bodies.seed_communicator)
