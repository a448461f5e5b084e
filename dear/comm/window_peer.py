"""One neighbour reached through one-sided windows: slots that it writes, and slots to write to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dear.comm.staleness import Staleness

if TYPE_CHECKING:
    from dear.buckets.flat_parameters import FlatParameters

TAG_BYTES = 8
LINE_BYTES = 64


class Packet:
    """A bucket's values and the number of steps in them, as bytes in host memory: one put.

    Args:
        pinned: memory that a GPU copies to directly.
    """

    def __init__(self, bucket: FlatParameters, *, pinned: bool = False) -> None:
        memory = torch.zeros(row_bytes(bucket), dtype=torch.uint8, pin_memory=pinned)
        self.memory = memory
        self._values, self._tag = unpack(memory, bucket)
        self.works: list[Any] = []
        """Puts that read it."""

    def busy(self) -> bool:
        """True while a put may still read it."""
        self.works = [work for work in self.works if not work.is_completed()]
        return bool(self.works)

    def fill(self, values: torch.Tensor, steps: int) -> None:
        """Takes a copy of `values`; returns when it is there."""
        self._values.copy_(values)
        self._tag.fill_(steps)


def row_bytes(bucket: FlatParameters) -> int:
    """Length of a packet: values, then the tag, padded to whole cache lines."""
    return -(-(bucket.values.nbytes + 2 * TAG_BYTES) // LINE_BYTES) * LINE_BYTES


def tag_offset(bucket: FlatParameters) -> int:
    """Where the tag is in a packet, in bytes."""
    return -(-bucket.values.nbytes // TAG_BYTES) * TAG_BYTES


def unpack(row: torch.Tensor, bucket: FlatParameters) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and tag of a packet, as views."""
    values = row[: bucket.values.nbytes].view(bucket.values.dtype)
    at = tag_offset(bucket)
    return values, row[at : at + TAG_BYTES].view(torch.int64)


class Peer:
    """A neighbour, in a process group of the two: if it dies, nobody else's windows fail.

    Args:
        weight: of its values; None: it sends nothing to this rank.
        sends: this rank sends to it.
        group: of the two, with the backend `comm_core`.
    """

    def __init__(
        self, rank: int, group: dist.ProcessGroup, *, weight: float | None, sends: bool
    ) -> None:
        self.rank = rank
        self.weight = weight
        self.sends = sends
        self.lost = False
        self.reported = False
        """Others have been told that it is lost."""
        self.staleness = Staleness()
        self.puts = 0
        self.skipped = 0
        """Puts left out because the one before was still under way."""
        self._group = group
        self._me = dist.get_rank(group)
        self._windows: list[Any] = []
        self._under_way: dict[int, Any] = {}

    @property
    def receives(self) -> bool:
        """True if it sends to this rank."""
        return self.weight is not None

    def open(self, buckets: Sequence[FlatParameters]) -> None:
        """Makes the slots; the other one does so, too."""
        from comm_core.windows import Window  # other algorithms do without it

        for bucket in buckets:
            slots = 1 if self.receives else 0
            window = Window(slots, row_bytes(bucket), torch.uint8, self._group)
            self._windows.append(window)

    def meet(self) -> None:
        """Returns when the other one has come here."""
        dist.barrier(self._group)

    def write_own_slot(self, index: int, packet: Packet) -> None:
        """Puts something of this rank's own where the neighbour's values would be."""
        self._windows[index].put(packet.memory, self._me).wait()

    def read(self, index: int) -> torch.Tensor | None:
        """A copy of the packet that came last; None if the neighbour has died."""
        return self._guarded(lambda: self._windows[index].read(0, 1)[0])

    def steps_in(self, index: int, bucket: FlatParameters) -> int | None:
        """Steps in the packet that came last; None if the neighbour has died."""
        tag = torch.zeros(1, dtype=torch.int64)

        def read() -> int:
            at = tag_offset(bucket)
            self._windows[index].get(tag.view(torch.uint8), self._me, 0, at).wait()
            return int(tag.item())

        return self._guarded(read)

    def ready(self, index: int, *, wait: bool) -> bool:
        """True if a put may start; False if the one before is under way, or the peer has died."""
        work = self._under_way.get(index)
        if work is None:
            return not self.lost
        if not (wait or work.is_completed()):
            return False
        del self._under_way[index]
        self._guarded(work.wait)
        return not self.lost

    def put(self, index: int, packet: Packet) -> None:
        """Starts to write a packet into the neighbour's slot."""
        work = self._guarded(lambda: self._windows[index].put(packet.memory, 1 - self._me))
        if work is not None:
            self._under_way[index] = work
            packet.works.append(work)
            self.puts += 1

    def wait(self) -> None:
        """Returns when all puts have been applied, or the neighbour has died."""
        for index in list(self._under_way):
            self.ready(index, wait=True)

    def look(self) -> None:
        """Notices if the neighbour has died."""
        for window in self._windows[:1]:
            self._guarded(window.versions)

    def close(self) -> None:
        """Gives the slots back; the other one does so, too, unless it has died."""
        for window in self._windows:
            self._guarded(window.free)
        self._windows = []
        dist.destroy_process_group(self._group)

    def _guarded(self, call: Any) -> Any:
        # A failed operation leaves the group of the two, and only that, useless.
        if self.lost:
            return None
        try:
            return call()
        except RuntimeError:
            self.lost = True
            return None
