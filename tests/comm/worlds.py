"""Worlds of ranks by the way in which their bytes go, and what happens to them when one is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common.launch.ranks import gather
from tests.ranks import RankPool


def environments(name: str) -> list[dict[str, str]]:
    """What places each rank of a world.

    "shm4": four ranks that share memory; "tcp4" talk over loopback; "hosts0011" are on pretended
    hosts, one digit for each rank.
    """
    transport = "tcp" if name.startswith("tcp") else "auto"
    common = {"COMM_CORE_TRANSPORT": transport, "COMM_CORE_ALLOW_LOOPBACK": "1"}
    if name.startswith("hosts"):
        return [{**common, "COMM_CORE_HOST_ID": f"host{host}"} for host in name[5:]]
    return [common] * int(name[3:])


@contextmanager
def pool(name: str, timeout_s: float = 30.0) -> Iterator[RankPool]:
    places = environments(name)
    ranks = RankPool(len(places), timeout_s, "comm_core", places)
    try:
        yield ranks
    finally:
        ranks.close()


def run_without(ranks: RankPool, lost: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """`function(*args)` on every rank, of which `lost` does not answer; what the others return."""
    for pipe in ranks.pipes.values():
        pipe.send((function, args))
    others = {rank: pipe for rank, pipe in ranks.pipes.items() if rank != lost}
    answers = dict(gather(others, 60.0))
    for rank, (ok, value) in answers.items():
        assert ok, f"rank {rank}:\n{value}"
    return [answers[rank][1] for rank in sorted(answers)]


def shared_files() -> set[str]:
    return {str(path) for path in Path("/dev/shm").glob("comm_core-*")}
