"""Membership and life of a process group over MPI, and the start of its operations."""

# ruff: noqa: N802, N815 - torch's names

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from .engine import Work, the_engine
from .rows import Row, Tensors

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch._C._distributed_c10d import _DistributedBackendOptions

NAME = "comm_core_mpi"


class Options(Protocol):
    """Options that torch passes to every collective."""

    timeout: timedelta


class RootedOptions(Options, Protocol):
    """Options of a collective with a root."""

    rootRank: int


class Group(dist.ProcessGroup):
    """Process group over MPI without operations; `MpiGroup` adds them.

    Args:
        options: torch's `_DistributedBackendOptions`; torch.distributed creates it on every member.
        process_group_options: must be None; the backend has no options.

    Raises:
        ValueError: `process_group_options` is not None.
        torch.distributed.DistBackendError: torch's ranks differ from MPI's, MPI does not start, or
            a member does not join within the group's timeout.
    """

    def __init__(
        self, options: _DistributedBackendOptions, process_group_options: object = None
    ) -> None:
        if process_group_options is not None:
            raise ValueError(f"{NAME} has no process group options, got {process_group_options!r}")
        self._engine = the_engine()
        self._label = options.group_id
        self._rank, self._size = options.group_rank, options.group_size
        self._timeout = options.timeout
        self._failure: str | None = None
        self._closed = False
        self._sequence = 0
        ranks = list(options.global_ranks_in_group)
        rank, size = self._engine.rank, self._engine.size
        expected = (ranks[self._rank], size) if ranks else (self._rank, self._size)
        if expected != (rank, size):
            raise dist.DistBackendError(
                f"group '{self._label}': torch.distributed says rank {expected[0]} of "
                f"{expected[1]}, MPI says rank {rank} of {size}; started without mpirun?"
            )
        super().__init__(self._rank, self._size)  # type: ignore[call-arg]  # not in torch's stub
        # Creating an MPI communicator has no timeout and blocks all other groups, so the members
        # first wait for each other here.
        keys = [f"mpi-member-{rank}" for rank in range(self._size)]
        try:
            options.store.set(keys[self._rank], "1")
            options.store.wait(keys, self._timeout)
        except Exception as error:
            raise dist.DistBackendError(
                f"group '{self._label}': not all of its {self._size} members joined within "
                f"{self._timeout.total_seconds():g} s: {error}"
            ) from error
        self._comm = self._engine.call(self._communicator, ranks)

    def _communicator(self, ranks: list[int]) -> MPI.Intracomm:
        mpi = self._engine.mpi
        world: MPI.Intracomm = mpi.COMM_WORLD
        largest_tag = world.Get_attr(mpi.TAG_UB)
        assert isinstance(largest_tag, int)
        self._largest_tag = largest_tag
        if ranks:
            tag = zlib.crc32(self._label.encode()) % (self._largest_tag + 1)
            comm = world.Create_group(world.Get_group().Incl(ranks), tag)
        else:
            comm = world.Dup()
        comm.Set_errhandler(mpi.ERRORS_RETURN)
        return comm

    def shutdown(self) -> None:
        """Closes the group for new calls; operations in flight continue. Idempotent."""
        # The operations of a failed group may never end, and they use the communicator.
        if not self._closed and self._failure is None:
            self._engine.call(self._comm.Free)
        self._closed = True

    abort = shutdown

    def name(self) -> str:
        return NAME

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    getBackendName = _get_backend_name = name

    def _get_backend(self, device: torch.device) -> Group:  # type: ignore[override]
        return self  # a group in Python is its own backend

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    supports_coalescing = False

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def _set_sequence_number_for_group(self) -> None:
        return

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def _root(self, name: str, options: RootedOptions) -> tuple[int, bool]:
        root = self._peer(name, options.rootRank)
        return root, root == self._rank

    def _peer(self, name: str, rank: int) -> int:
        if not 0 <= rank < self._size:
            raise ValueError(f"{name}: no rank {rank} in a group of {self._size} ranks")
        return rank

    def _tag(self, name: str, tag: int) -> int:
        if not 0 <= tag <= self._largest_tag:
            raise ValueError(f"{name}: tag {tag} is outside MPI's range 0 .. {self._largest_tag}")
        return tag

    def _list(self, name: str, lists: Sequence[Tensors], other: Row | None = None) -> Row:
        (tensors,) = lists  # torch passes one list per device
        if len(tensors) != self._size:
            raise ValueError(
                f"{name}: a list of {len(tensors)} tensors, but must be one for each of the "
                f"{self._size} ranks"
            )
        return Row(name, tensors, other)

    def _check_own(self, elements: int, kind: str, blocks: Row) -> None:
        if elements != blocks.counts[self._rank]:
            raise ValueError(
                f"{blocks.name}: {kind} of {elements} elements, but the block of rank "
                f"{self._rank} has {blocks.counts[self._rank]}"
            )

    def _submit(
        self,
        name: str,
        source: Row | None,
        target: Row | None,
        options: Options | None,
        call: Callable[..., MPI.Request],
        *arguments: object,
    ) -> Work:
        """Starts `call(*arguments)`; copies the result into `target`'s tensors at the end.

        Sends and receives have no `options`.
        """
        reason = self._failure and f"is unusable since {self._failure}"
        if reason := "was destroyed" if self._closed else reason:
            raise dist.DistBackendError(f"{name}: the MPI group '{self._label}' {reason}")
        if source is not None:
            source.fill()
        rows = [row for row in (target, source) if row is not None]
        nbytes = max((row.nbytes for row in rows), default=0)
        mean = getattr(options, "reduceOp", None) == dist.ReduceOp.AVG
        timeout = timedelta(0) if options is None else options.timeout

        def finish(status: MPI.Status) -> int | None:
            sender = None
            if target is not None and options is None:
                sender = status.Get_source()
                count = status.Get_count(self._engine.types[target.dtype])
                if count != target.elements:
                    raise ValueError(
                        f"rank {sender} sent {count} elements, but the tensor has {target.elements}"
                    )
            if target is not None:
                if mean:
                    target.divide(self._size)
                target.spill()
            return sender

        self._sequence += 1
        work = Work(
            f"MPI {name} #{self._sequence} of {nbytes} bytes on rank {self._rank} of {self._size} "
            f"of group '{self._label}'",
            timeout if timeout > timedelta(0) else self._timeout,
            rows[0].tensors if rows else [],
            finish,
            self._fail if options is not None else lambda reason: None,
        )
        self._engine.begin(work, rows, call, *arguments)
        return work

    def _fail(self, reason: str) -> None:
        # Refuses further operations, because the ranks may disagree on the next one. Keeps the
        # first reason.
        self._failure = self._failure or reason
