"""Process groups of torch.distributed over MPI, through mpi4py, for `backend: mpi`.

torch's own backend "mpi" must be compiled into torch, and the wheels do not contain it. Its name
cannot be reused without patching torch, so this backend has another name.
"""

# ruff: noqa: N802, N815 - torch's names

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .engine import TYPES, Work, library, the_engine

NAME = "comm_core_mpi"

Tensors = Sequence[torch.Tensor]

_LIMIT = 2**31 - 1  # largest number of elements in one MPI call


def register() -> str:
    """Registers the backend with torch.distributed; returns its name for `init_process_group`.

    Raises:
        ImportError: mpi4py or an MPI library is missing; the message says what to install.
    """
    library()
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, MpiGroup, extended_api=True, devices=["cpu"])
    return NAME


def unavailable() -> str | None:
    """Returns the reason why the backend is unavailable, in one sentence; None if it works."""
    try:
        library()
    except ImportError as error:
        return str(error)
    return None


def library_version() -> str:
    """Returns the MPI library's description of itself, with its version. The build prints it."""
    return library().Get_library_version().split("\0")[0].strip()


class Row:
    """Elements of one or more CPU tensors in contiguous memory, with a count for each rank.

    A single contiguous tensor is used in place. Several tensors, a non-contiguous tensor, and one
    that shares memory with `other` are copied, because the arguments of an MPI call must not
    overlap: `fill` writes the copy, `spill` reads it back.

    Args:
        other: the other argument of the same operation, if any.
        output: True if this is the output and `other` the input. Used in messages only.

    Raises:
        ValueError, TypeError: MPI cannot carry the tensors, or `other` has another dtype.
    """

    def __init__(
        self, name: str, tensors: Tensors, other: Row | None = None, *, output: bool = False
    ) -> None:
        if not tensors:
            raise ValueError(f"{name}: at least one tensor is needed, got none")
        self.name, self.tensors, self.dtype = name, list(tensors), tensors[0].dtype
        for tensor in tensors:
            if tensor.device.type != "cpu":
                raise ValueError(
                    f"{name}: the tensor is on {tensor.device}, but the MPI backend takes CPU "
                    "tensors"
                )
            if tensor.layout != torch.strided:
                raise TypeError(
                    f"{name}: the tensor is {tensor.layout}, but the MPI backend takes dense ones"
                )
            if tensor.dtype != self.dtype:
                raise TypeError(
                    f"{name}: the tensors differ in dtype: {self.dtype} and {tensor.dtype}"
                )
        if self.dtype not in TYPES:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in TYPES)
            raise TypeError(
                f"{name}: the MPI backend does not support {self.dtype}; allowed: {names}"
            )
        if other is not None and other.dtype != self.dtype:
            target, source = (self, other) if output else (other, self)
            raise TypeError(f"{name}: output of {target.dtype}, but input of {source.dtype}")
        self.counts = [tensor.numel() for tensor in tensors]
        self.elements = sum(self.counts)
        if self.elements > _LIMIT:
            raise ValueError(
                f"{name}: {self.elements} elements exceed MPI's limit of {_LIMIT} elements per "
                "call; split the tensor"
            )
        self.nbytes = self.elements * self.dtype.itemsize
        # `.data`: autograd neither records the copies nor rejects a copy into a leaf tensor.
        self._memory, first = tensors[0].data, tensors[0]
        plain = len(tensors) == 1 and first.is_contiguous() and not first.is_conj()
        plain = plain and not first.is_neg()
        storages = [
            t.untyped_storage().data_ptr() for row in (self, other) if row for t in row.tensors
        ]
        # An empty tensor has a null address, which MPI would take for MPI_BOTTOM: copy it too.
        self._copied = not plain or not self.elements or len(set(storages)) < len(storages)
        if self._copied:
            self._memory = torch.empty(max(self.elements, 1), dtype=self.dtype)

    def fill(self) -> None:
        """Copies the tensors into the memory that MPI uses, unless that is the tensor itself."""
        for part, tensor in self._pairs():
            part.copy_(tensor)

    def spill(self) -> None:
        """Copies that memory back into the tensors."""
        for part, tensor in self._pairs():
            tensor.copy_(part)

    def _pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        if not self._copied:
            return []
        parts = self._memory[: self.elements].split([t.numel() for t in self.tensors])
        return [(part.view(t.shape), t.data) for part, t in zip(parts, self.tensors, strict=True)]

    def divide(self, by: int) -> None:
        """Divides every element in place."""
        self._memory.div_(by)

    def share(self, ranks: int, part: Row) -> None:
        """Sets every rank's count to that of `part`; ValueError unless the sum is all elements."""
        if self.elements != ranks * part.elements:
            raise ValueError(
                f"{self.name}: {self.elements} elements, but must be {ranks} ranks with "
                f"{part.elements} elements each"
            )
        self.counts = [part.elements] * ranks

    def split(self, splits: list[int], ranks: int) -> None:
        """Sets every rank's count from `splits`, in rows; equal parts if `splits` is empty."""
        tensor = self.tensors[0]
        if tensor.dim() == 0:
            raise ValueError(f"{self.name}: a tensor without dimensions cannot be split into rows")
        rows = tensor.shape[0]
        if not splits and rows % ranks:
            raise ValueError(f"{self.name}: {rows} rows do not divide evenly among {ranks} ranks")
        splits = splits or [rows // ranks] * ranks
        if len(splits) != ranks or min(splits) < 0 or sum(splits) != rows:
            raise ValueError(
                f"{self.name}: the splits must be {ranks} counts that sum to the tensor's {rows} "
                f"rows, got {splits}"
            )
        self.counts = [split * (tensor.numel() // max(rows, 1)) for split in splits]

    def message(self) -> list[Any]:
        """Returns the argument for mpi4py's calls."""
        engine = the_engine()
        memory = engine.mpi.buffer.fromaddress(self._memory.data_ptr(), self.nbytes)
        return [memory, engine.types[self.dtype]]

    def blocks(self) -> list[Any]:
        """Returns the argument for MPI's "v" calls, in which rank i has `counts[i]` elements."""
        memory, kind = self.message()
        return [memory, self.counts, kind]


class MpiGroup(dist.ProcessGroup):
    """torch.distributed's collectives and messages over MPI's non-blocking operations.

    Accepts CPU tensors with any strides and fewer than 2^31 elements; non-contiguous ones are
    copied. Do not touch tensors before the operation has ended. Before anything is sent, a call may
    raise TypeError (dtype or layout that the operation does not support), ValueError (device, rank,
    sizes) or DistBackendError (group destroyed or failed). Later errors are raised by the work's
    `wait`.

    Args:
        options: torch's `_DistributedBackendOptions`; torch.distributed creates it on every member.
        process_group_options: must be None; the backend has no options.

    Raises:
        ValueError: `process_group_options` is not None.
        torch.distributed.DistBackendError: torch's ranks differ from MPI's, MPI does not start, or
            a member does not join within the group's timeout.

    If ranks may have blocks of different lengths, the group always uses MPI's "v" operation: equal
    blocks on this rank do not imply equal blocks on all, and all ranks must make the same call.
    """

    def __init__(self, options: Any, process_group_options: Any = None) -> None:
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
        super().__init__(self._rank, self._size)
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
        row = Row("all_reduce", tensors)
        ends = (self._engine.mpi.IN_PLACE, row.message())
        op = self._engine.reduction(options.reduceOp, row.dtype)
        return self._submit(row.name, row, row, options, self._comm.Iallreduce, *ends, op)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, options: Any) -> Work:
        row = Row("reduce", tensors)
        root, is_root = self._root("reduce", options)
        ends = (self._engine.mpi.IN_PLACE, row.message()) if is_root else (row.message(), None)
        op = self._engine.reduction(options.reduceOp, row.dtype)
        out = row if is_root else None
        return self._submit("reduce", row, out, options, self._comm.Ireduce, *ends, op, root)

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, options: Any
    ) -> Work:
        row = Row("reduce_scatter_tensor", [input])
        # `out` comes second: if the two overlap, the second is copied, and it is the smaller one.
        out = Row("reduce_scatter_tensor", [output], row, output=True)
        row.share(self._size, out)
        return self._reduce_scatter(out, row, options)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], options: Any) -> Work:
        out = Row("reduce_scatter", outputs)
        return self._reduce_scatter(out, self._list("reduce_scatter", inputs, out), options)

    def _reduce_scatter(self, out: Row, row: Row, options: Any) -> Work:
        self._check_own(out.elements, "output", row)
        op = self._engine.reduction(options.reduceOp, row.dtype)
        arguments = (row.message(), out.message(), row.counts, op)
        return self._submit(row.name, row, out, options, self._comm.Ireduce_scatter, *arguments)

    def broadcast(self, tensors: Tensors, options: Any) -> Work:
        row = Row("broadcast", tensors)
        root, is_root = self._root("broadcast", options)
        ends = (row, None) if is_root else (None, row)
        return self._submit("broadcast", *ends, options, self._comm.Ibcast, row.message(), root)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, options: Any) -> Work:
        out = Row("all_gather_into_tensor", [output])
        row = Row("all_gather_into_tensor", [input], out)
        out.share(self._size, row)
        return self._all_gather(out, row, options)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, options: Any) -> Work:
        out = self._list("all_gather", outputs)
        return self._all_gather(out, Row(out.name, inputs, out), options)

    def _all_gather(self, out: Row, row: Row, options: Any) -> Work:
        self._check_own(row.elements, "input", out)
        ends = (row.message(), out.blocks())
        return self._submit(row.name, row, out, options, self._comm.Iallgatherv, *ends)

    def gather(self, outputs: list[Tensors], inputs: Tensors, options: Any) -> Work:
        root, is_root = self._root("gather", options)
        out = self._list("gather", outputs) if is_root else None
        row = Row("gather", inputs, out)
        if out is not None:
            self._check_own(row.elements, "input", out)
        arguments = (row.message(), out and out.blocks(), root)
        return self._submit("gather", row, out, options, self._comm.Igatherv, *arguments)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], options: Any) -> Work:
        root, is_root = self._root("scatter", options)
        out = Row("scatter", outputs)
        row = self._list("scatter", inputs, out) if is_root else None
        if row is not None:
            self._check_own(out.elements, "output", row)
        arguments = (row and row.blocks(), out.message(), root)
        return self._submit("scatter", row, out, options, self._comm.Iscatterv, *arguments)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        options: Any,
    ) -> Work:
        out = Row("all_to_all_single", [output])
        row = Row("all_to_all_single", [input], out)
        out.split(output_splits, self._size)
        row.split(input_splits, self._size)
        return self._all_to_all(out, row, options)

    def alltoall(self, outputs: Tensors, inputs: Tensors, options: Any) -> Work:
        out = self._list("all_to_all", [outputs])
        return self._all_to_all(out, self._list("all_to_all", [inputs], out), options)

    def _all_to_all(self, out: Row, row: Row, options: Any) -> Work:
        self._check_own(row.counts[self._rank], "input", out)
        ends = (row.blocks(), out.blocks())
        return self._submit(row.name, row, out, options, self._comm.Ialltoallv, *ends)

    def send(self, tensors: Tensors, to: int, tag: int) -> Work:
        row = Row("send", tensors)
        arguments = (row.message(), self._peer("send", to), self._tag("send", tag))
        return self._submit("send", row, None, None, self._comm.Isend, *arguments)

    def recv(self, tensors: Tensors, source: int, tag: int) -> Work:
        return self._receive("recv", tensors, self._peer("recv", source), tag)

    def recv_anysource(self, tensors: Tensors, tag: int) -> Work:
        return self._receive("recv_any_source", tensors, self._engine.mpi.ANY_SOURCE, tag)

    def _receive(self, name: str, tensors: Tensors, source: int, tag: int) -> Work:
        row = Row(name, tensors)
        arguments = (row.message(), source, self._tag(name, tag))
        return self._submit(name, None, row, None, self._comm.Irecv, *arguments)

    def barrier(self, opts: Any) -> Work:
        return self._submit("barrier", None, None, opts, self._comm.Ibarrier)

    # Names of these methods before torch 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    def _root(self, name: str, options: Any) -> tuple[int, bool]:
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
        options: Any,
        call: Callable[..., Any],
        *arguments: Any,
    ) -> Work:
        """Starts `call(*arguments)`; copies the result into `target`'s tensors at the end."""
        reason = self._failure and f"is unusable since {self._failure}"
        if reason := "was destroyed" if self._closed else reason:
            raise dist.DistBackendError(f"{name}: the MPI group '{self._label}' {reason}")
        if source is not None:
            source.fill()
        rows = [row for row in (target, source) if row is not None]
        nbytes = max((row.nbytes for row in rows), default=0)
        mean = getattr(options, "reduceOp", None) == dist.ReduceOp.AVG
        timeout = timedelta(0) if options is None else options.timeout

        def finish(status: Any) -> int | None:
            sender = None
            if name.startswith("recv"):
                sender, count = status.Get_source(), status.Get_count(arguments[0][1])
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
