"""Neighbour collectives and windows of the comm core, on a virtual network."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from common.virtual.world.group import group_of
from common.virtual.world.marks import carried, zeros
from common.virtual.world.network import Network, Transfer, apply

Received = Mapping[int, torch.Tensor]
"""Carried values by the rank that sent them."""


class Neighbors:
    """Stands for `comm_core.Communicator`: collectives along the edges of a graph of ranks."""

    def __init__(self, network: Network, group: dist.ProcessGroup) -> None:
        self._network = network
        self._queue = "neighbors", group_of(group)

    def neighbor_all_gather(
        self,
        values: torch.Tensor,
        received: Sequence[torch.Tensor],
        sources: Sequence[int],
        targets: Sequence[int],
        check: bool,
    ) -> Transfer:
        """Sends `values` to each target; rows of `received` become what the sources send."""
        rows = {source: carried(row, values) for source, row in zip(sources, received, strict=True)}

        def effect(parts: Received) -> None:
            for source, part in parts.items():
                rows[source].copy_(part)

        given = dict.fromkeys(targets, carried(values, values))
        return self._network.swap(self._queue, values.nbytes, given, sources, effect)

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
        given = carried(values, values)
        target = carried(values if out is None else out, values)

        def effect(parts: Received) -> None:
            terms = [part * sources[source] for source, part in parts.items()]
            torch.sum(torch.stack([given * self_weight, *terms]), 0, out=target)

        weighted = {rank: given * weight for rank, weight in targets.items()}
        return self._network.swap(self._queue, values.nbytes, weighted, sources, effect)

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
        self.slots, self.room = slots, room
        self._network, self._group = network, group_of(group)
        self._rows = [zeros([room], dtype) for _ in range(slots)]
        self._ends = [carried(row, row) for row in self._rows]
        self._versions = [0] * slots
        self._there = network.windows(self._group, self)

    def put(self, memory: torch.Tensor, place: int, slot: int, offset: int = 0) -> Transfer:
        """Writes to a slot at rank `place`."""
        return self._write(memory, place, slot, offset, torch.Tensor.copy_)

    def accumulate(self, memory: torch.Tensor, place: int, slot: int, offset: int = 0) -> Transfer:
        """Adds to a slot at rank `place`."""
        return self._write(memory, place, slot, offset, torch.Tensor.add_)

    def get(self, row: torch.Tensor, place: int, slot: int, offset: int = 0) -> Transfer:
        """Reads a slot of rank `place` into `row`."""
        peer, here, to = self._group.ranks[place], self._network.rank, carried(row, row)
        return self._network.reach(
            peer, here, row.nbytes, lambda: self._there[place][0]._part(slot, offset, row), to.copy_
        )

    def _write(
        self,
        memory: torch.Tensor,
        place: int,
        slot: int,
        offset: int,
        how: Callable[[torch.Tensor, torch.Tensor], Any],
    ) -> Transfer:
        def effect(values: torch.Tensor) -> None:
            for window in self._there[place]:
                if window.slots and window.room == self.room:
                    at = min(slot, window.slots - 1)
                    how(window._part(at, offset, memory), values)
                    window._versions[at] += 1

        here, peer = self._network.rank, self._group.ranks[place]
        return self._network.reach(
            here, peer, memory.nbytes, lambda: carried(memory, memory), effect
        )

    def _part(self, slot: int, offset: int, like: torch.Tensor) -> torch.Tensor:
        """Returns the carried values of a part of a slot, as long as `like`."""
        if like.numel() == self.room:
            return self._ends[slot]
        return carried(self._rows[slot].narrow(0, offset, like.numel()), like)

    def read(
        self, first: int, count: int, reset_versions: bool = False, clear: bool = False
    ) -> list[torch.Tensor]:
        """Returns copies of slots of this rank."""
        self._network.catch_up()
        copies = []
        for end in self._ends[first : first + count]:
            row = zeros([self.room], end.dtype)
            apply(partial(carried(row, row).copy_, end))
            copies.append(row)
            if clear:
                end.zero_()
        if reset_versions:
            self._versions[first : first + count] = [0] * count
        return copies

    def versions(self) -> list[int]:
        """Returns the writes to each slot since its versions were reset."""
        self._network.catch_up()
        return list(self._versions)

    def free(self) -> None:
        """Does nothing."""
