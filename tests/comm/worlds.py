"""Worlds of ranks by the way in which their bytes go, and what happens to them when one is lost."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

from common.launch.ranks import gather
from tests.ranks import RankPool


def environments(name: str) -> list[dict[str, str]]:
    """Environments that place each rank of a world.

    "shm4": four ranks that share memory; "tcp4" talk over loopback; "hosts0011" are on pretended
    hosts, one digit for each rank.
    """
    transport = "tcp" if name.startswith("tcp") else "auto"
    common = {"COMM_CORE_TRANSPORT": transport, "COMM_CORE_ALLOW_LOOPBACK": "1"}
    if name.startswith("hosts"):
        return [{**common, "COMM_CORE_HOST_ID": f"host{host}"} for host in name[5:]]
    return [common] * int(name[3:])


def _made(name: str, timeout_s: float = 30.0) -> RankPool:
    places = environments(name)
    return RankPool(len(places), timeout_s, "comm_core", places)


@contextmanager
def pool(name: str, timeout_s: float = 30.0) -> Iterator[RankPool]:
    """A world for one test, which may leave it in any state."""
    ranks = _made(name, timeout_s)
    try:
        yield ranks
    finally:
        ranks.close()


_kept: dict[str, RankPool] = {}
"""Worlds of `lent` by name."""


@contextmanager
def lent(name: str) -> Iterator[RankPool]:
    """A world that the tests of a module share. Each test must leave it usable."""
    if name not in _kept or _kept[name].broken:
        _kept[name] = _made(name)
    ranks = _kept[name]
    yield ranks
    if not ranks.broken:
        ranks.reset()


def close_lent() -> None:
    """Ends the worlds that `lent` has begun."""
    while _kept:
        _kept.popitem()[1].close()


def run_without(ranks: RankPool, lost: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """`function(*args)` on every rank, of which `lost` does not answer; what the others return."""
    for pipe in ranks.pipes.values():
        pipe.send((function, args))
    others = {rank: pipe for rank, pipe in ranks.pipes.items() if rank != lost}
    answers = dict(gather(others, 60.0))
    for rank, (ok, value) in answers.items():
        assert ok, f"rank {rank}:\n{value}"
    return [answers[rank][1] for rank in sorted(answers)]


def on_ranks(
    given: Callable[..., AbstractContextManager[Any]], *sizes: int, of: Sequence[Any] = ()
) -> Callable[..., Any]:
    """Makes of `body(communicator)` a test that runs it on all ranks of 1 to 4, or of `sizes`.

    Args:
        given: makes the communicator on each rank,
        of: of each of these in turn; none: `given` takes nothing.
    """

    def make(body: Callable[[Any], Any]) -> Callable[..., None]:
        @pytest.mark.parametrize("world_size", sizes or (1, 2, 3, 4))
        @pytest.mark.parametrize("made_of", [(argument,) for argument in of] or [()], ids=str)
        def test(
            world: Callable[[int], RankPool], world_size: int, made_of: tuple[Any, ...]
        ) -> None:
            world(world_size).run(_with, given, made_of, body.__module__, body.__name__)

        test.__name__, test.body = body.__name__, body
        return test

    return make


def _with(given: Callable[..., Any], made_of: tuple[Any, ...], module: str, name: str) -> None:
    with given(*made_of) as communicator:
        getattr(importlib.import_module(module), name).body(communicator)
