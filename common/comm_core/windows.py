"""One-sided communication: memory of a rank that the others write, read and add to at any time.

The engine of the target serves every operation; its Python takes no part, and need not call
anything. Each operation is applied as a whole. Operations of one rank on one target are applied in
the order of the calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

_made: dict[str, int] = {}


class Window:
    """A piece of memory on every rank, in equal slots (for example one for each neighbour).

    Making and freeing one is collective over `group`.

    Args:
        slots: number of slots on this rank; the ranks' may differ.
        numel: elements of a slot.
        dtype: as torch's; the same on all ranks.
        group: a process group with the backend `comm_core`; the default one if None.

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
        group = group or dist.group.WORLD
        if dist.get_backend(group) != "comm_core":
            raise ValueError(
                f"windows need the backend comm_core, this group has {dist.get_backend(group)}"
            )
        if slots < 0 or numel < 0:
            raise ValueError(f"a window of {slots} slots of {numel} elements")
        self.slots, self.numel, self.dtype = slots, numel, dtype
        self._group = group
        self._backend = group._get_backend(torch.device("cpu"))
        # Windows are made in the same order on all ranks of a group, so a count is a common name.
        key = group.group_name
        self._number = _made[key] = _made.get(key, 0) + 1
        self._backend.add_window(self._number, torch.zeros(slots, numel, dtype=dtype))
        self._freed = False
        dist.barrier(group)

    def put(self, tensor: torch.Tensor, target: int, slot: int = 0, offset: int = 0) -> dist.Work:
        """Writes `tensor` (any shape) into a slot of rank `target`, from element `offset` on.

        The work ends when the target has applied it; until then `tensor` must stay as it is.

        Raises:
            ValueError: there is no such rank. `wait()` raises ValueError if the target refuses: no
                such slot, too long, or another type.
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
        """Folds `tensor` into a slot of rank `target`; otherwise as `put`."""
        return self._operation("accumulate", target, slot, offset, tensor, op)

    def get(self, tensor: torch.Tensor, target: int, slot: int = 0, offset: int = 0) -> dist.Work:
        """Reads from a slot of rank `target` into `tensor`; otherwise as `put`."""
        return self._operation("get", target, slot, offset, tensor)

    def read(
        self, slot: int = 0, count: int = 1, reset_versions: bool = False, clear: bool = False
    ) -> torch.Tensor:
        """This rank's slots `slot` .. `slot + count - 1` at one moment, as a new `[count, numel]`.

        Args:
            reset_versions: count their writes from 0 again, in the same moment.
            clear: leave zeros behind, in the same moment.
        """
        return self._backend.read_window(self._number, slot, count, reset_versions, clear)

    def versions(self) -> list[int]:
        """How often each of this rank's slots was put or accumulated to since the last reset."""
        return self._backend.window_versions(self._number)

    def update(
        self, value: torch.Tensor, self_weight: float, weights: dict[int, float]
    ) -> torch.Tensor:
        """`self_weight * value + sum of weight * slot`, of this rank's slots as they are now.

        Args:
            value: `[numel]`.
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
        """Holds the lock of rank `target`'s window; ranks get it in the order in which they ask.

        It keeps away only those who ask for it. A rank that dies loses it.
        """
        self._operation("lock", target, 0, 0, None).wait()
        try:
            yield
        finally:
            self._operation("unlock", target, 0, 0, None).wait()

    def free(self) -> None:
        """Gives the memory back when all ranks have called it. A second call does nothing."""
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
