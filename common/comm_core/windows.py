"""One-sided communication: memory of a rank that other ranks write, read and add to at any time.

The engine of the target serves every operation; the target's Python code takes no part. Each
operation is atomic. Operations of one rank on one target are applied in the order of the calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from ._core import CoreBackend

_num_windows: dict[str, int] = {}


class Window:
    """Memory on every rank, divided into equal slots (for example one for each neighbour).

    Creating and freeing a window are collective calls over `group`.

    Args:
        slots: number of slots on this rank; may differ between ranks.
        numel: number of elements in a slot.
        dtype: element type; the same on all ranks.
        group: process group with the backend `comm_core`; the default group if None.

    Raises:
        ValueError: the group has another backend, or a size is negative.
    """

    def __init__(
        self,
        slots: int,
        numel: int,
        dtype: torch.dtype = torch.float32,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        group = group or dist.distributed_c10d._get_default_group()
        if dist.get_backend(group) != "comm_core":
            raise ValueError(
                f"windows need the backend comm_core, but this group has {dist.get_backend(group)}"
            )
        if slots < 0 or numel < 0:
            raise ValueError(f"negative window size: {slots} slots of {numel} elements")
        self.slots, self.numel, self.dtype = slots, numel, dtype
        self._group = group
        backend = group._get_backend(torch.device("cpu"))
        assert isinstance(backend, CoreBackend)
        self._backend = backend
        # All ranks of a group create windows in the same order, so a count identifies a window.
        key = group.group_name
        self._number = _num_windows[key] = _num_windows.get(key, 0) + 1
        self._backend.add_window(self._number, torch.zeros(slots, numel, dtype=dtype))
        self._freed = False
        dist.barrier(group)

    def put(self, tensor: torch.Tensor, target: int, slot: int = 0, offset: int = 0) -> dist.Work:
        """Writes `tensor` (any shape) into a slot of rank `target`, from element `offset` on.

        The work ends when the target has applied the operation. Do not change `tensor` before.

        Raises:
            ValueError: rank `target` does not exist. `wait()` raises ValueError if the slot does
                not exist, the tensor does not fit into it, or the dtype differs.
        """
        return self._operation("put", target, slot, offset, tensor)

    def accumulate(
        self,
        tensor: torch.Tensor,
        target: int,
        slot: int = 0,
        offset: int = 0,
        op: ReduceOp.RedOpType = ReduceOp.SUM,
    ) -> dist.Work:
        """Reduces `tensor` into a slot of rank `target` with `op`; otherwise like `put`."""
        return self._operation("accumulate", target, slot, offset, tensor, op)

    def get(self, tensor: torch.Tensor, target: int, slot: int = 0, offset: int = 0) -> dist.Work:
        """Reads from a slot of rank `target` into `tensor`; otherwise like `put`."""
        return self._operation("get", target, slot, offset, tensor)

    def read(
        self, slot: int = 0, count: int = 1, reset_versions: bool = False, clear: bool = False
    ) -> torch.Tensor:
        """Returns a copy `[count, numel]` of this rank's slots `slot` .. `slot + count - 1`.

        No write of another rank is applied during the copy.

        Args:
            reset_versions: also set their version counters to 0, atomically with the copy.
            clear: also set the slots to zero, atomically with the copy.
        """
        return self._backend.read_window(self._number, slot, count, reset_versions, clear)

    def versions(self) -> list[int]:
        """Returns the number of puts and accumulates to each local slot since the last reset."""
        return self._backend.window_versions(self._number)

    def update(
        self, value: torch.Tensor, self_weight: float, weights: dict[int, float]
    ) -> torch.Tensor:
        """Returns `self_weight * value + sum of weight * slot` over this rank's slots.

        Resets the versions of all slots if `weights` is not empty.

        Args:
            value: tensor with `numel` elements; the result has its shape.
            weights: slot -> weight.
        """
        mixed = value.reshape(-1) * self_weight
        if weights:
            slots = self.read(0, self.slots, reset_versions=True)
            for slot in sorted(weights):
                mixed += slots[slot] * weights[slot]
        return mixed.view_as(value)

    @contextlib.contextmanager
    def mutex(self, target: int) -> Iterator[None]:
        """Context that holds the lock of rank `target`'s window.

        Ranks get the lock in the order of their requests. It is advisory: operations without the
        lock are not blocked. A rank that dies loses the lock.
        """
        self._operation("lock", target, 0, 0, None).wait()
        try:
            yield
        finally:
            self._operation("unlock", target, 0, 0, None).wait()

    def free(self) -> None:
        """Frees the memory once all ranks have called this. A second call does nothing."""
        if self._freed:
            return
        self._freed = True
        dist.barrier(self._group)
        self._backend.remove_window(self._number)

    def _operation(
        self,
        kind: str,
        target: int,
        slot: int,
        offset: int,
        tensor: torch.Tensor | None,
        op: ReduceOp.RedOpType = ReduceOp.SUM,
    ) -> dist.Work:
        return self._backend.window_operation(
            kind, self._number, target, slot, offset, tensor, ReduceOp(op)
        )
