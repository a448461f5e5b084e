"""Neighbour collectives and windows of the comm core, on a virtual network.

All ranks do the same. So what this rank sends to a neighbour, a neighbour sends to this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from common.virtual.world.network import Network, Transfer


class Neighbors:
    """Stands for `comm_core.Communicator`: collectives along the edges of a graph of ranks."""

    def __init__(self, network: Network) -> None:
        self._network = network

    def neighbor_all_gather(
        self,
        values: torch.Tensor,
        received: Sequence[torch.Tensor],
        sources: Sequence[int],
        targets: Sequence[int],
        check: bool,
    ) -> Transfer:
        """Sends `values` to each target; rows of `received` become what the sources send."""

        def effect() -> None:
            for row in received:
                row.copy_(values)

        return self._start(values, targets, effect)

    def neighbor_all_reduce(
        self,
        values: torch.Tensor,
        sources: Mapping[int, float],
        targets: Mapping[int, float],
        *,
        self_weight: float,
        out: torch.Tensor | None = None,
        check: bool,
    ) -> Transfer:
        """Sends `values` times a weight to each target; adds up what the sources send."""
        weight = self_weight + sum(sources.values()) * next(iter(targets.values()), 0.0)
        target = values if out is None else out
        return self._start(values, targets, lambda: torch.mul(values, weight, out=target))

    def _start(
        self, values: torch.Tensor, targets: Iterable[int], effect: Callable[[], Any]
    ) -> Transfer:
        legs = [self._network.pair(target) for target in targets]
        return self._network.start(
            "exchange", values.nbytes, effect, legs=legs, channel="neighbors"
        )

    def sync_stream(self, transfer: Transfer) -> None:
        """Waits for a transfer."""
        transfer.wait()

    def done(self, transfer: Transfer) -> bool:
        """Returns True once the transfer has ended."""
        return transfer.is_completed()

    def destroy(self) -> None:
        """Does nothing."""


class Window:
    """Stands for `comm_core.Window`: rows of memory that other ranks write and read."""

    def __init__(
        self, network: Network, slots: int, room: int, dtype: torch.dtype, group: dist.ProcessGroup
    ) -> None:
        self._network = network
        self._ranks = dist.get_process_group_ranks(group)
        self._rows = torch.zeros(slots, room, dtype=dtype)
        self._versions = [0] * slots
        network.windows.append(self)

    def put(self, memory: torch.Tensor, place: int, slot: int, offset: int = 0) -> Transfer:
        """Writes to a slot at rank `place`; what a neighbour writes here arrives with it."""
        return self._write(memory, place, slot, offset, torch.Tensor.copy_)

    def accumulate(self, memory: torch.Tensor, place: int, slot: int, offset: int = 0) -> Transfer:
        """Adds to a slot at rank `place`."""
        return self._write(memory, place, slot, offset, torch.Tensor.add_)

    def get(self, row: torch.Tensor, place: int, slot: int, offset: int = 0) -> Transfer:
        """Reads a slot of rank `place` into `row`."""
        shown = self._rows[slot][offset : offset + row.numel()]
        return self._start(row.nbytes, place, lambda: row.copy_(shown))

    def _write(
        self, memory: torch.Tensor, place: int, slot: int, offset: int, how: Any
    ) -> Transfer:
        # A window of two ranks has no slot here if this rank only sends. Then the windows of the
        # ranks that send to this one get what they would send.
        alike = [self] if len(self._rows) else self._siblings()

        def effect() -> None:
            for window in alike:
                at = min(slot, len(window._rows) - 1)
                how(window._rows[at][offset : offset + memory.numel()], memory)
                window._versions[at] += 1

        return self._start(memory.nbytes, place, effect)

    def _siblings(self) -> list[Window]:
        room = self._rows.shape[1:]
        windows = self._network.windows
        return [w for w in windows if len(w._rows) and w._rows.shape[1:] == room]

    def _start(self, nbytes: int, place: int, effect: Callable[[], Any]) -> Transfer:
        legs = (self._network.pair(self._ranks[place]),)
        return self._network.start("exchange", nbytes, effect, legs=legs, channel="windows")

    def read(
        self, first: int, count: int, reset_versions: bool = False, clear: bool = False
    ) -> list[torch.Tensor]:
        """Returns copies of slots of this rank."""
        rows = [row.clone() for row in self._rows[first : first + count]]
        if clear:
            self._rows[first : first + count].zero_()
        if reset_versions:
            self._versions[first : first + count] = [0] * count
        return rows

    def versions(self) -> list[int]:
        """Returns the writes to each slot since its versions were reset."""
        return list(self._versions)

    def free(self) -> None:
        """Does nothing."""
