"""What the tests of the seeds' `Communicator` share: backends, worlds, values, running a body."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankPool

# comm_core lives in common/, which is not installed; last, so that it hides nothing.
sys.path.append(str(Path(__file__).parents[1] / "common"))

from comm_core.communicator import Communicator

module = sys.modules[Communicator.__module__]

BACKENDS = ["gloo"]  # add "comm_core" here once it is built
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
)
WORLDS = [1, 2, 3, 4]

backends = pytest.mark.parametrize("backend", BACKENDS)
worlds = pytest.mark.parametrize("world_size", WORLDS)
World = Callable[[int], RankPool]


def numels(size: int) -> list[int]:
    return sorted({0, 1, size - 1, size, size + 1, 2 * size, 2 * size + 1, 1003})


def values(rank: int, numel: int, salt: int = 0) -> torch.Tensor:
    """A rank's tensor: small whole numbers, unlike those of other ranks and places."""
    return (torch.arange(numel, dtype=torch.float64) * (rank + 2) + salt) % 5 + rank + 1


def total(size: int, numel: int, salt: int = 0) -> torch.Tensor:
    return sum((values(r, numel, salt) for r in range(size)), torch.zeros(numel).double())


def same(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got, wanted.to(got.dtype).view(got.shape), rtol=0, atol=0)


def over(backend: str) -> dist.ProcessGroup:
    """The group of all ranks with this backend, made once per pool."""
    if backend not in _groups:
        _groups[backend] = dist.new_group(backend=backend)
    return _groups[backend]


_groups: dict[str, dist.ProcessGroup] = {}


def run(pool: RankPool, body: Callable[..., Any], backend: str, nstreams: int, *args: Any) -> list:
    return pool.run(_with_communicator, body, backend, nstreams, args)


def _with_communicator(body: Callable[..., Any], backend: str, nstreams: int, args: tuple) -> Any:
    with Communicator(nstreams, over(backend), timeout_s=20) as comm:
        return body(comm, *args)


def error(kind: type[Exception], call: Callable[..., Any], *args: Any, **named: Any) -> str:
    with pytest.raises(kind) as caught:
        call(*args, **named)
    text = str(caught.value)
    assert "\n" not in text, f"not one sentence: {text}"
    return text


def comm_backend(comm: Communicator) -> str:
    return next(iter(comm._lanes[0].backends.values()))
