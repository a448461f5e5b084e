"""Worlds of ranks for the tests of CUDA tensors; the same bodies run on CPU tensors, too.

In a test's id `on_cpu` stands where no GPU takes part, so `-k "not on_cpu"` is what a GPU adds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import dear

# Over 1 ms on any GPU. The host queues an operation in about 10 us, and so gets far ahead.
DELAY_CYCLES = 5_000_000


@dataclass(frozen=True)
class World:
    """Ranks, the backend between them, and where their tensors are."""

    backend: str
    size: int
    place: str
    """`cpu`; `shared`: all ranks on the first GPU; `own`: each on one of its own."""

    def call(self, body: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Calls `body(device, *args)` on this rank."""
        if self.place == "cpu":
            return body(torch.device("cpu"), *args)
        device = torch.device("cuda", dear.local_rank() if self.place == "own" else 0)
        torch.cuda.set_device(device)
        return body(device, *args)


def worlds(*backends: str, cpu_is_quick: bool = True) -> Any:
    """Parametrises a test by its `world`: two ranks on CPUs, if that tells more than tests without
    GPUs do, and GPUs; by other ranks on CPUs, if not quick."""
    cases = [World("comm_core", 2, "cpu"), World("gloo", 2, "cpu"), World("comm_core", 1, "cpu")]
    if torch.cuda.is_available():
        cases += [
            World("comm_core", 2, "shared"),
            World("gloo", 2, "shared"),
            World("nccl", torch.cuda.device_count(), "own"),
        ]
    else:
        cases.append(World("comm_core", 2, "shared"))  # skipped, with the reason
    params = [
        pytest.param(
            world,
            id=f"{world.backend}-{world.size}-on_{world.place}",
            marks=[pytest.mark.full] if world in cases[cpu_is_quick:3] else [],
        )
        for world in cases
        if world.backend in backends or not backends
    ]
    return pytest.mark.parametrize("world", params)


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
