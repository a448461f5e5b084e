"""The ranks of the tests of CUDA tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.gpu.cuda_worlds import World
from tests.ranks import RankPool

TIMEOUT_S = 50.0


@pytest.fixture(scope="session")
def run_in() -> Iterator[Callable[..., list[Any]]]:
    """`run_in(world, body, *args)` calls `body(device, *args)` on every rank of the world.

    Pools of ranks are made when first needed, and anew after a failure.
    """
    pools: dict[World, RankPool] = {}

    def run(world: World, body: Callable[..., Any], *args: Any) -> list[Any]:
        if world.place != "cpu" and not torch.cuda.is_available():
            pytest.skip(f"torch {torch.__version__} sees no CUDA device here")
        if world not in pools or pools[world].broken:
            pools[world] = RankPool(world.size, TIMEOUT_S, world.backend)
        return pools[world].run(world.call, body, args)

    yield run
    for pool in pools.values():
        pool.close()
