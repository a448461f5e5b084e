"""A process group over MPI."""

# ruff: noqa: N802, N815 - torch's names

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .engine import the_engine
from .operations import Row, Tensors, Work

NAME = "comm_core_mpi"


class MpiGroup(dist.ProcessGroup):
    """torch.distributed's collectives and messages over MPI's non-blocking operations.

    Takes CPU tensors of any strides and lengths below 2^31 elements; one that is not contiguous is
    copied. Tensors must not be touched before the operation has ended. Operations raise, before
    anything is sent, TypeError (element type or layout without meaning for the operation),
    ValueError (device, rank, sizes) or DistBackendError (group destroyed or failed); what goes
    wrong later is raised by the work's `wait`.
    """

    def __init__(self, options: Any) -> None:
        self._engine = the_engine()
        self._in_place = self._engine.mpi.IN_PLACE
        self._label = options.group_id
        self._rank, self._size = options.group_rank, options.group_size
        self._timeout = options.timeout
        self._failure: str | None = None
        self._closed = False
        self._sequence = 0
        ranks = list(options.global_ranks_in_group)
        self._check_ranks(ranks)
        super().__init__(self._rank, self._size)
        self._meet(options.store)
        self._comm = self._engine.call(lambda: self._communicator(ranks))

    def _check_ranks(self, ranks: list[int]) -> None:
        rank, size = self._engine.rank, self._engine.size
        same = ranks[self._rank] == rank if ranks else (self._rank, self._size) == (rank, size)
        if not same:
            said = ranks[self._rank] if ranks else f"{self._rank} of {self._size}"
            raise dist.DistBackendError(
                f"group '{self._label}': torch.distributed says rank {said}, MPI says rank {rank} "
                f"of {size}; started without mpirun?"
            )

    def _meet(self, store: dist.Store) -> None:
        # MPI has no timeout while it makes a communicator, and would hold up all other groups.
        keys = [f"mpi-member-{rank}" for rank in range(self._size)]
        try:
            store.set(keys[self._rank], "1")
            store.wait(keys, self._timeout)
        except Exception as error:
            raise dist.DistBackendError(
                f"group '{self._label}': not all of its {self._size} members came within "
                f"{self._timeout.total_seconds():g} s: {error}"
            ) from error

    def _communicator(self, ranks: list[int]) -> Any:
        mpi = self._engine.mpi
        world = mpi.COMM_WORLD
        self._largest_tag = world.Get_attr(mpi.TAG_UB)
        if ranks:
            tag = zlib.crc32(self._label.encode()) % (self._largest_tag + 1)
            comm = world.Create_group(world.Get_group().Incl(ranks), tag)
        else:
            comm = world.Dup()
        comm.Set_errhandler(mpi.ERRORS_RETURN)
        return comm

    def shutdown(self) -> None:
        """Ends the group for callers; what is under way goes on. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        # A failed group's operations may be under way for ever, and use the communicator.
        if self._failure is None:
            self._engine.post(self._comm.Free)

    abort = shutdown

    def name(self) -> str:
        return NAME

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    getBackendName = _get_backend_name = name

    def _get_backend(self, device: torch.device) -> MpiGroup:
        return self

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

    def allreduce(self, tensors: Tensors, options: Any) -> Work:
        return self._all_reduce("all_reduce", _only("all_reduce", tensors), options)

    def allreduce_coalesced(self, tensors: Tensors, options: Any) -> Work:
        return self._all_reduce("all_reduce_coalesced", tensors, options)

    def _all_reduce(self, name: str, tensors: Tensors, options: Any) -> Work:
        row = Row(name, tensors)
        arguments = (self._in_place, row.message(), self._op(options, row))
        return self._submit(name, self._comm.Iallreduce, arguments, row, row, options)

    def reduce(self, tensors: Tensors, options: Any) -> Work:
        row = Row("reduce", _only("reduce", tensors))
        root, mine = self._root("reduce", options)
        ends = (self._in_place, row.message()) if mine else (row.message(), None)
        arguments = (*ends, self._op(options, row), root)
        target = row if mine else None
        return self._submit("reduce", self._comm.Ireduce, arguments, row, target, options)

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, options: Any
    ) -> Work:
        name = "reduce_scatter_tensor"
        out = Row(name, [output])
        row = Row(name, [input], out)
        row.check_whole(self._size, out)
        arguments = (row.message(), out.message(), self._op(options, row))
        return self._submit(name, self._comm.Ireduce_scatter_block, arguments, row, out, options)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], options: Any) -> Work:
        name = "reduce_scatter"
        out = Row(name, _only(name, outputs))
        row = Row(name, self._list(name, inputs), out)
        out.check_part("output", row, "input", self._rank)
        arguments = (row.message(), out.message(), row.counts, self._op(options, row))
        return self._submit(name, self._comm.Ireduce_scatter, arguments, row, out, options)

    def broadcast(self, tensors: Tensors, options: Any) -> Work:
        row = Row("broadcast", _only("broadcast", tensors))
        root, mine = self._root("broadcast", options)
        ends = (row, None) if mine else (None, row)
        return self._submit("broadcast", self._comm.Ibcast, (row.message(), root), *ends, options)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, options: Any) -> Work:
        name = "all_gather_into_tensor"
        out, row = Row(name, [output]), Row(name, [input])
        out.check_whole(self._size, row)
        source = self._in_place
        if row.address != out.address + self._rank * row.nbytes:
            row = Row(name, [input], out)
            source = row.message()
        return self._submit(name, self._comm.Iallgather, (source, out.message()), row, out, options)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, options: Any) -> Work:
        name = "all_gather"
        out = Row(name, self._list(name, outputs))
        row = Row(name, _only(name, inputs), out)
        row.check_part("input", out, "output", self._rank)
        arguments = (row.message(), out.blocks())
        return self._submit(name, self._comm.Iallgatherv, arguments, row, out, options)

    def gather(self, outputs: list[Tensors], inputs: Tensors, options: Any) -> Work:
        root, mine = self._root("gather", options)
        out = Row("gather", self._list("gather", outputs)) if mine else None
        row = Row("gather", _only("gather", inputs), out)
        if out is not None:
            out.check_whole(self._size, row, equal="output")
        arguments = (row.message(), out and out.message(), root)
        return self._submit("gather", self._comm.Igather, arguments, row, out, options)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], options: Any) -> Work:
        root, mine = self._root("scatter", options)
        out = Row("scatter", _only("scatter", outputs))
        row = Row("scatter", self._list("scatter", inputs), out) if mine else None
        if row is not None:
            row.check_whole(self._size, out, equal="input")
        arguments = (row and row.message(), out.message(), root)
        return self._submit("scatter", self._comm.Iscatter, arguments, row, out, options)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        options: Any,
    ) -> Work:
        name = "all_to_all_single"
        out = Row(name, [output])
        row = Row(name, [input], out)
        out.counts = _row_blocks(name, output, output_splits, self._size)
        row.counts = _row_blocks(name, input, input_splits, self._size)
        return self._all_to_all(out, row, options)

    def alltoall(self, outputs: Tensors, inputs: Tensors, options: Any) -> Work:
        out = Row("all_to_all", self._list("all_to_all", [outputs]))
        row = Row("all_to_all", self._list("all_to_all", [inputs]), out)
        return self._all_to_all(out, row, options)

    def _all_to_all(self, out: Row, row: Row, options: Any) -> Work:
        sent, expected = row.counts[self._rank], out.counts[self._rank]
        if sent != expected:
            raise ValueError(
                f"{row.name}: this rank sends itself {sent} elements but expects {expected}"
            )
        # Always the "v" operation: equal blocks here do not mean equal blocks on every rank, and
        # all ranks must make the same call.
        arguments = (row.blocks(), out.blocks())
        return self._submit(row.name, self._comm.Ialltoallv, arguments, row, out, options)

    def send(self, tensors: Tensors, to: int, tag: int) -> Work:
        row = Row("send", _only("send", tensors))
        arguments = (row.message(), self._peer("send", to), self._tag("send", tag))
        return self._submit("send", self._comm.Isend, arguments, row, None)

    def recv(self, tensors: Tensors, source: int, tag: int) -> Work:
        return self._receive("recv", tensors, self._peer("recv", source), tag)

    def recv_anysource(self, tensors: Tensors, tag: int) -> Work:
        return self._receive("recv_any_source", tensors, self._engine.mpi.ANY_SOURCE, tag)

    def _receive(self, name: str, tensors: Tensors, source: int, tag: int) -> Work:
        row = Row(name, _only(name, tensors))
        arguments = (row.message(), source, self._tag(name, tag))
        return self._submit(name, self._comm.Irecv, arguments, None, row)

    def barrier(self, opts: Any) -> Work:
        return self._submit("barrier", self._comm.Ibarrier, (), None, None, opts)

    # Before torch 2.13 these had other names.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    def _op(self, options: Any, row: Row) -> Any:
        return self._engine.op(options.reduceOp, row.dtype)

    def _root(self, name: str, options: Any) -> tuple[int, bool]:
        root = self._peer(name, options.rootRank)
        return root, root == self._rank

    def _peer(self, name: str, rank: int) -> int:
        if not 0 <= rank < self._size:
            raise ValueError(f"{name}: there is no rank {rank} in a group of {self._size}")
        return rank

    def _tag(self, name: str, tag: int) -> int:
        if not 0 <= tag <= self._largest_tag:
            raise ValueError(f"{name}: tag {tag} is not in MPI's range 0 .. {self._largest_tag}")
        return tag

    def _list(self, name: str, lists: Sequence[Tensors]) -> Tensors:
        (tensors,) = _only(name, lists)
        if len(tensors) != self._size:
            raise ValueError(f"{name}: a list of {len(tensors)} tensors for {self._size} ranks")
        return tensors

    def _submit(
        self,
        name: str,
        call: Callable[..., Any],
        arguments: tuple[Any, ...],
        source: Row | None,
        target: Row | None,
        options: Any = None,
    ) -> Work:
        """Sends `call(*arguments)` off; then `target` is brought home."""
        reason = self._failure and f"is unusable since {self._failure}"
        if reason := "was destroyed" if self._closed else reason:
            raise dist.DistBackendError(f"{name}: the MPI group '{self._label}' {reason}")
        if source is not None:
            source.fill()
        rows = [row for row in (target, source) if row is not None]
        nbytes = max((row.nbytes for row in rows), default=0)
        mean = getattr(options, "reduceOp", None) == dist.ReduceOp.AVG
        given = timedelta(0) if options is None else options.timeout

        def start(keep: Any = rows) -> Any:
            return call(*arguments)  # which know addresses only: `keep` has the memory

        self._sequence += 1
        work = Work(
            name,
            f"MPI {name} #{self._sequence} of {nbytes} bytes on rank {self._rank} of {self._size} "
            f"of group '{self._label}'",
            (given if given > timedelta(0) else self._timeout).total_seconds(),
            start,
            target,
            self._size if mean else 1,
            rows[0].tensors if rows else [],
            self._fail,
        )
        self._engine.post(lambda: self._engine.begin(work))
        return work

    def _fail(self, reason: str) -> None:
        # No further operation is taken. The first reason is kept.
        self._failure = self._failure or reason


def _only(name: str, items: Sequence[Any]) -> Sequence[Any]:
    # torch passes one per device.
    if len(items) != 1:
        raise ValueError(f"{name}: the MPI backend takes one tensor, got {len(items)}")
    return items


def _row_blocks(name: str, tensor: torch.Tensor, splits: list[int], ranks: int) -> list[int]:
    # Elements per rank. Splits count rows; without any, every rank has the same number of rows.
    if tensor.dim() == 0:
        raise ValueError(f"{name}: a tensor without dimensions has no rows")
    rows = tensor.shape[0]
    if not splits and rows % ranks:
        raise ValueError(f"{name}: {rows} rows do not divide evenly among {ranks} ranks")
    splits = splits or [rows // ranks] * ranks
    if len(splits) != ranks or min(splits) < 0 or sum(splits) != rows:
        raise ValueError(
            f"{name}: the splits must be {ranks} counts that sum to the tensor's {rows} rows"
        )
    return [split * (tensor.numel() // max(rows, 1)) for split in splits]
