"""What the tests of the seeds' `Communicator` share: values, and bodies that all ranks run."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankPool

# comm_core lives in common/, which is not installed; last, so that it hides nothing.
sys.path.append(str(Path(__file__).parents[2] / "common"))

from comm_core.communicator import Communicator

module = sys.modules[Communicator.__module__]

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


def over_gloo() -> dist.ProcessGroup:
    """A group of all ranks, made once per pool."""
    if not _groups:
        _groups.append(dist.new_group(backend="gloo"))
    return _groups[0]


_groups: list[dist.ProcessGroup] = []


def run(pool: RankPool, body: Callable[..., Any], nstreams: int = 2) -> list[Any]:
    """`body(communicator)` on every rank, with a communicator over Gloo."""
    return pool.run(_with_communicator, body.__module__, body.__name__, nstreams)


def _with_communicator(module: str, name: str, nstreams: int) -> Any:
    body = getattr(importlib.import_module(module), name)
    with Communicator(nstreams, over_gloo(), timeout_s=20) as comm:
        return getattr(body, "body", body)(comm)


def on_ranks(*worlds: int, nstreams: Sequence[int] = (2,)) -> Callable[..., Any]:
    """Makes of `body(communicator)` a test that runs it on all ranks of 1 to 4, or of `worlds`."""

    def make(body: Callable[[Communicator], Any]) -> Callable[..., None]:
        @pytest.mark.parametrize("world_size", worlds or (1, 2, 3, 4))
        @pytest.mark.parametrize("nstreams", nstreams)
        def test(world: World, world_size: int, nstreams: int) -> None:
            run(world(world_size), body, nstreams)

        test.__name__, test.body = body.__name__, body
        return test

    return make


def error(kind: type[Exception], call: Callable[..., Any], *args: Any, **named: Any) -> str:
    with pytest.raises(kind) as caught:
        call(*args, **named)
    text = str(caught.value)
    assert "\n" not in text, f"not one sentence: {text}"
    return text
