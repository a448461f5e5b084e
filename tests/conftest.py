"""Fixtures: worlds of rank processes, one for each size, kept for the whole run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from dear.errors import UserError
from dear.training.algorithm import load_plugin
from tests.contract import pairs
from tests.ranks import RankPool

# An example that a busy machine holds up is not wrong.
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")
# Torch's threads spin while they wait for each other. That would slow other runs of tests.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "a Python file with an algorithm: tests of every algorithm are run on it, too"
    parser.addoption("--plugin", action="append", default=[], metavar="FILE", help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Loads plugins, whose algorithms must be known when tests are collected."""
    for path in config.getoption("--plugin"):
        try:
            load_plugin(Path(path))
        except UserError as error:
            raise pytest.UsageError(str(error)) from None
    pairs.QUICK = config.getoption("markexpr") == "not full"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Horovod's last, so that its ranks are started once; see `world`."""
    items.sort(key=lambda item: "horovod" in item.name)


KINDS = ("gloo", "bluefog", "horovod")


@pytest.fixture(scope="session")
def _pools() -> Iterator[dict[tuple[int, str], RankPool]]:
    pools: dict[tuple[int, str], RankPool] = {}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture
def world(_pools: dict[tuple[int, str], RankPool]) -> Iterator[Callable[..., RankPool]]:
    """`world(n)` is the pool of n ranks of this run; one that a failed test broke is replaced.

    `world(n, "gloo")` has torch's own backend; `world(4, "bluefog")` two machines of two ranks,
    after `bf.init`. `world(n, "horovod")` is one for Horovod, whose background threads never rest
    and would slow what follows: it is closed as soon as another one is asked for.
    """
    used: list[RankPool] = []

    def get(world_size: int, kind: str = "") -> RankPool:
        key = world_size, kind if kind in KINDS else ""
        for other, pool in _pools.items():
            if other[1] == "horovod" and other != key:
                pool.close()
        if key not in _pools or _pools[key].broken:
            _pools[key] = _made(*key)
        used.append(_pools[key])
        return _pools[key]

    yield get
    for pool in used:
        if not pool.broken:
            pool.reset()


def _made(world_size: int, kind: str) -> RankPool:
    machines = [{"BLUEFOG_NODES_PER_MACHINE": "2"}] * world_size if kind == "bluefog" else None
    backend = "gloo" if kind == "gloo" else "comm_core"
    pool = RankPool(world_size, backend=backend, environments=machines)
    pool.run(_begin, kind)
    return pool


def _begin(kind: str) -> None:
    """Leaves out what takes long to measure, and changes no result.

    `mgs` times how it selects elements, for seconds: here the smallest sizes are enough, and so
    are messages of up to 1 MiB where collectives are timed. Dynamo empties the processor's caches
    to time each guard, only to tell it in its log.
    """
    from torch._dynamo import guards

    from dear import bluefog
    from dear.algorithms.synchronous import bytescheduler, mgs
    from dear.training import tuning

    guards.profile_guard_manager = lambda *_: 0.0
    mgs.measured_call = partial(mgs.measured_call, sizes=(2**12, 2**13, 2**14))
    whole, most = tuning.measured_costs, 1 << 20

    def of_small(
        ranks: object, operation: str, device: object, largest: int = most, *more: object
    ) -> object:
        return whole(ranks, operation, device, min(largest, most), *more)

    tuning.measured_costs = bytescheduler.measured_costs = of_small
    if kind == "bluefog":
        bluefog.init()


@pytest.fixture
def own_pool() -> Iterator[Callable[..., RankPool]]:
    """`own_pool(n)` is a pool for one test that leaves it broken."""
    pools: list[RankPool] = []

    def get(world_size: int, timeout_s: float = 30.0) -> RankPool:
        pools.append(RankPool(world_size, timeout_s, backend="comm_core"))
        return pools[-1]

    yield get
    for pool in pools:
        pool.close()
