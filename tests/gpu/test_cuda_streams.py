"""Collectives of CUDA tensors keep the order of the CUDA streams; CPU tensors prove the bodies."""

from __future__ import annotations

import pytest
import torch

from tests.gpu import cuda_stream_bodies as bodies
from tests.gpu.cuda_worlds import worlds

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int64]
every_type = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])


@worlds()
@every_type
@pytest.mark.parametrize("wait_elsewhere", [False, True], ids=["same_stream", "other_stream"])
def test_a_late_input_is_waited_for_and_the_result_is_there_after_wait(
    run_in, world, dtype, wait_elsewhere
):
    for collective in bodies.COLLECTIVES:
        name = collective.__name__
        run_in(world, bodies.written_late_and_read_at_once, name, dtype, wait_elsewhere)


@worlds()
@every_type
def test_many_collectives_under_way(run_in, world, dtype):
    run_in(world, bodies.many_under_way, dtype)


@worlds()
@pytest.mark.parametrize(
    "body", [bodies.two_channels, bodies.memory_reused, bodies.chain], ids=lambda b: b.__name__
)
def test_streams(run_in, world, body):
    run_in(world, body)


@worlds("comm_core")
def test_the_other_operations_of_comm_core(run_in, world):
    run_in(world, bodies.other_operations)


@worlds("comm_core", "nccl")
def test_the_multi_stream_communicator(run_in, world):
    run_in(world, bodies.seed_communicator)
