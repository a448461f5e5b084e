"""Worlds of ranks for the tests of CUDA tensors; the same bodies run on CPU tensors, too.

In a test's id `on_cpu` stands where no GPU takes part, so `-k "not on_cpu"` is what a GPU adds.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import dear
from tests.ranks import RankPool

TIMEOUT_S = 50.0
# About 10 ms of a GPU's time: long enough for the host to run far ahead.
DELAY_CYCLES = 15_000_000


@dataclass(frozen=True)
class World:
    """Ranks, the backend between them, and where their tensors are."""

    backend: str
    size: int
    place: str
    """`cpu`; `shared`: all ranks on the first GPU; `own`: each on one of its own."""

    @property
    def name(self) -> str:
        return f"{self.backend}-{self.size}-on_{self.place}"

    def run(self, pool: RankPool, body: Callable[..., Any], *args: Any) -> list[Any]:
        """Calls `body(device, *args)` on every rank."""
        return pool.run(_call, body, self.place, args)


ON_CPU = [World("comm_core", 2, "cpu"), World("gloo", 2, "cpu"), World("comm_core", 1, "cpu")]
ON_GPU = [
    World("comm_core", 2, "shared"),
    World("gloo", 2, "shared"),
    World("nccl", max(torch.cuda.device_count(), 1), "own"),
]
EVERYWHERE = [*ON_CPU, *ON_GPU]


def named(world: World) -> str:
    return world.name


def skip_without_cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip(f"torch {torch.__version__} sees no CUDA device here")


def skip_without_comm_core() -> None:
    try:
        importlib.import_module("comm_core")
    except ImportError as error:
        pytest.skip(str(error))


class Pools:
    """Pools of ranks made when first needed; a new one after a failure."""

    def __init__(self) -> None:
        self._pools: dict[World, RankPool] = {}

    def run(self, world: World, body: Callable[..., Any], *args: Any) -> list[Any]:
        if world.place != "cpu":
            skip_without_cuda()
        if world.backend == "comm_core":
            skip_without_comm_core()
        if world not in self._pools or self._pools[world].broken:
            self._pools[world] = RankPool(world.size, TIMEOUT_S, world.backend)
        return world.run(self._pools[world], body, *args)

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


def _call(body: Callable[..., Any], place: str, args: tuple[Any, ...]) -> Any:
    if place == "cpu":
        return body(torch.device("cpu"), *args)
    device = torch.device("cuda", dear.local_rank() if place == "own" else 0)
    torch.cuda.set_device(device)
    return body(device, *args)


def side_stream(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A new stream for the block; nothing on CPUs."""
    if device.type == "cpu":
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))


def keep_busy(device: torch.device) -> None:
    """Makes what is queued next on the current stream late; nothing on CPUs."""
    if device.type == "cuda":
        torch.cuda._sleep(DELAY_CYCLES)


def settle(device: torch.device) -> None:
    """Waits for the whole device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
