"""Communicators of some of the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist

from dear.comm.communicator import Communicator, Work


class SubCommunicator(Communicator):
    """A communicator of some ranks of another, which counts their bytes and waits as its own."""

    def __init__(self, parent: Communicator, group: dist.ProcessGroup) -> None:
        super().__init__(
            group, record_times=parent.record_times, clock=parent.clock, pause=parent.pause
        )
        self._parent = parent

    def _work(self, handle: Any, channel: int, nbytes: int, sent: int) -> Work:
        self._parent.bytes_sent += sent
        return Work(self._parent, handle, channel, nbytes)

    def close(self) -> None:
        """Lets go of the process group, which is this communicator's own."""
        for group in self.groups:
            dist.destroy_process_group(group)
        super().close()


def sub_communicators(
    parent: Communicator, members: Iterable[Sequence[int]]
) -> dict[tuple[int, ...], SubCommunicator]:
    """A communicator for each list of ranks that this rank is in, by that list.

    A collective call of all ranks of `parent`, with the same lists in the same order.
    """
    ours = dist.get_process_group_ranks(parent.groups[0])
    made: dict[tuple[int, ...], SubCommunicator] = {}
    for ranks in dict.fromkeys(tuple(ranks) for ranks in members):
        group = dist.new_group([ours[rank] for rank in ranks], timeout=parent.timeout)
        if parent.rank in ranks:
            made[ranks] = SubCommunicator(parent, group)
    return made
