"""Leaving a job whose ranks make different numbers of steps: who is done waits for the others."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed import distributed_c10d

if TYPE_CHECKING:
    from dear.comm.communicator import Communicator

log = logging.getLogger("dear")

LOOK_S = 0.5
_numbers = itertools.count()


class Farewell:
    """Notes in the job's store who is done and who is lost.

    Made in the same order on all ranks. A barrier would do the same, but within the time limit of
    a collective, which a rank several times slower than the others does not keep.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._rank, self._size = communicator.rank, communicator.size
        self._clock = communicator.clock
        name = f"farewell.{communicator.groups[0].group_name}.{next(_numbers)}"
        # A private function of torch; the group's own store would be one, too.
        self._store = dist.PrefixStore(name, distributed_c10d._get_default_store())

    def done(self) -> None:
        """This rank makes no further steps."""
        self._store.set(f"done{self._rank}", "")

    def lost(self, rank: int) -> None:
        """Rank `rank` has died: nobody needs to wait for it."""
        self._store.set(f"lost{rank}", "")

    def gone(self, rank: int) -> bool:
        """True if rank `rank` is done or lost."""
        return self._store.check([f"done{rank}"]) or self._store.check([f"lost{rank}"])

    def wait(self, timeout_s: float, look: Callable[[], None]) -> None:
        """Returns when all ranks are done or lost.

        Args:
            look: called now and then; may say that somebody is lost.

        Raises:
            RuntimeError: some are neither after `timeout_s`; it names them.
        """
        deadline = self._clock() + timeout_s
        waiting: Sequence[int] = range(self._size)
        while waiting := [rank for rank in waiting if not self.gone(rank)]:
            if self._clock() > deadline:
                names = ", ".join(map(str, waiting))
                raise RuntimeError(
                    f"rank {self._rank} is done, but after {timeout_s:g} s rank {names} is not"
                )
            try:
                self._store.wait([f"done{waiting[0]}"], timedelta(seconds=LOOK_S))
            except RuntimeError as error:  # a FileStore has no kind of error of its own for it
                if "timeout" not in str(error).lower():
                    raise
                look()
