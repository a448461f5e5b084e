"""Fixtures: worlds of rank processes, kept while one test module runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings

from tests.ranks import RankPool

# An example that a busy machine holds up is not wrong.
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")


# Not longer than a module: Horovod's background threads never rest, and would slow what follows.
@pytest.fixture(scope="module")
def _pools() -> Iterator[dict[int, RankPool]]:
    pools: dict[int, RankPool] = {}
    yield pools
    for pool in pools.values():
        if not pool.broken:
            pool.close()


@pytest.fixture
def world(_pools: dict[int, RankPool]) -> Callable[[int], RankPool]:
    """`world(n)` is a pool of n ranks; a pool that a failed test broke is replaced."""

    def get(world_size: int) -> RankPool:
        if world_size not in _pools or _pools[world_size].broken:
            _pools[world_size] = RankPool(world_size, backend="comm_core")
        return _pools[world_size]

    return get


@pytest.fixture
def own_pool() -> Iterator[Callable[[int], RankPool]]:
    """`own_pool(n)` is a pool for one test that leaves it broken."""
    made: list[RankPool] = []

    def get(world_size: int, timeout_s: float = 30.0) -> RankPool:
        made.append(RankPool(world_size, timeout_s, backend="comm_core"))
        return made[-1]

    yield get
    for pool in made:
        pool.close()


@pytest.fixture(scope="module")
def bluefog_pool() -> Iterator[RankPool]:
    """Four ranks on two machines of two, after `bf.init`."""
    import dear.bluefog as bf

    pool = RankPool(4, backend="comm_core", environments=[{"BLUEFOG_NODES_PER_MACHINE": "2"}] * 4)
    pool.run(bf.init)
    yield pool
    pool.close()
