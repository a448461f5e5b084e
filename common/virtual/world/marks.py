"""Values of a virtual cluster: those of small tensors, and the last ones of large messages.

Nobody reads the parameters and gradients of a replayed model, but algorithms put marks behind them:
the number of steps in a message, the weight of push-sum. So messages carry the last values.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from dear.comm.communicator import flat_view

SMALL = 4096
"""Largest number of elements of tensors whose values are computed."""
LAST = 32
"""Number of values at the end of a large tensor that messages carry."""


def large(tensor: torch.Tensor) -> bool:
    """Returns True if the values of a tensor are not computed."""
    # Integers are indices or counts, whose values decide what a program does.
    return tensor.numel() > SMALL and tensor.is_floating_point()


def zeros(size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Returns zeros whose memory is not touched."""
    nbytes = math.prod(size) * dtype.itemsize
    # Pages straight from the kernel are zero; the C library would clear memory that it kept.
    memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(*size)


def carried(tensor: torch.Tensor, whole: torch.Tensor, rows: int = 1) -> torch.Tensor:
    """Returns the values that a message carries: a view of `tensor`, 2-D and maybe without columns.

    Of a large buffer that ranks have parts of, nothing is carried: its pages would fill the memory.

    Args:
        whole: full buffer of the operation.
        rows: number of rows of `tensor`, such as one for each rank.
    """
    with torch._C._DisableTorchDispatch():
        flat = flat_view(tensor.detach()).view(rows, tensor.numel() // rows)
        if not large(whole):
            return flat
        return flat[:, -LAST:] if rows == 1 and tensor.numel() == whole.numel() else flat[:, :0]


@dataclass(frozen=True)
class Parts:
    """Carried values that the ranks of a group have given, in the order of the ranks."""

    given: Sequence[torch.Tensor]
    times: int = 1
    """Number of ranks that have given the same, for each of `given`."""

    def of(self, place: int) -> torch.Tensor:
        """Returns what the rank at `place` has given."""
        return self.given[place // self.times]

    @cached_property
    def joined(self) -> torch.Tensor:
        """Rows of all ranks."""
        return torch.cat([part.expand(self.times, -1) for part in self.given])

    @cached_property
    def _stacked(self) -> torch.Tensor:
        return torch.stack(list(self.given))

    def reduced(self, op: Any) -> torch.Tensor:
        """Returns the reduction by `op` over all ranks."""
        if op == dist.ReduceOp.MIN:
            return self._stacked.amin(0)
        if op == dist.ReduceOp.MAX:
            return self._stacked.amax(0)
        return self._sum

    @cached_property
    def _sum(self) -> torch.Tensor:
        if len(self.given) == 1:
            return self.given[0] * self.times
        return self._stacked.sum(0, dtype=self._stacked.dtype) * self.times
