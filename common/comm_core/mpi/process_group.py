"""Collectives and messages of torch.distributed over MPI."""

# mypy: disable-error-code="override, assignment"
# torch's stub types the calls of a user, with several overloads. Its C++ code calls these methods
# with the options of each operation.

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .engine import Work
from .group import Group
from .rows import Row, Tensors

if TYPE_CHECKING:
    from torch._C._distributed_c10d import (
        AllgatherOptions,
        AllreduceOptions,
        AllToAllOptions,
        BarrierOptions,
        BroadcastOptions,
        GatherOptions,
        ReduceOptions,
        ReduceScatterOptions,
        ScatterOptions,
    )


class MpiGroup(Group):
    """torch.distributed's collectives and messages over MPI's non-blocking operations.

    Accepts CPU tensors with any strides and fewer than 2^31 elements; non-contiguous ones are
    copied. Do not touch tensors before the operation has ended. Before anything is sent, a call may
    raise TypeError (dtype or layout that the operation does not support), ValueError (device, rank,
    sizes) or DistBackendError (group destroyed or failed). Later errors are raised by the work's
    `wait`.

    If ranks may have blocks of different lengths, the group always uses MPI's "v" operation: equal
    blocks on this rank do not imply equal blocks on all, and all ranks must make the same call.
    """

    def allreduce(self, tensors: Tensors, options: AllreduceOptions) -> Work:
        row = Row("all_reduce", tensors)
        ends = (self._engine.mpi.IN_PLACE, row.message())
        op = self._engine.reduction(options.reduceOp, row.dtype)
        return self._submit(row.name, row, row, options, self._comm.Iallreduce, *ends, op)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, options: ReduceOptions) -> Work:
        row = Row("reduce", tensors)
        root, is_root = self._root("reduce", options)
        ends = (self._engine.mpi.IN_PLACE, row.message()) if is_root else (row.message(), None)
        op = self._engine.reduction(options.reduceOp, row.dtype)
        out = row if is_root else None
        return self._submit("reduce", row, out, options, self._comm.Ireduce, *ends, op, root)

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, options: ReduceScatterOptions
    ) -> Work:
        row = Row("reduce_scatter_tensor", [input])
        # `out` comes second: if the two overlap, the second is copied, and it is the smaller one.
        out = Row("reduce_scatter_tensor", [output], row, output=True)
        row.share(self._size, out)
        return self._reduce_scatter(out, row, options)

    def reduce_scatter(
        self, outputs: Tensors, inputs: list[Tensors], options: ReduceScatterOptions
    ) -> Work:
        out = Row("reduce_scatter", outputs)
        return self._reduce_scatter(out, self._list("reduce_scatter", inputs, out), options)

    def _reduce_scatter(self, out: Row, row: Row, options: ReduceScatterOptions) -> Work:
        self._check_own(out.elements, "output", row)
        op = self._engine.reduction(options.reduceOp, row.dtype)
        arguments = (row.message(), out.message(), row.counts, op)
        return self._submit(row.name, row, out, options, self._comm.Ireduce_scatter, *arguments)

    def broadcast(self, tensors: Tensors, options: BroadcastOptions) -> Work:
        row = Row("broadcast", tensors)
        root, is_root = self._root("broadcast", options)
        ends = (row, None) if is_root else (None, row)
        return self._submit("broadcast", *ends, options, self._comm.Ibcast, row.message(), root)

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, options: AllgatherOptions
    ) -> Work:
        out = Row("all_gather_into_tensor", [output])
        row = Row("all_gather_into_tensor", [input], out)
        out.share(self._size, row)
        return self._all_gather(out, row, options)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, options: AllgatherOptions) -> Work:
        out = self._list("all_gather", outputs)
        return self._all_gather(out, Row(out.name, inputs, out), options)

    def _all_gather(self, out: Row, row: Row, options: AllgatherOptions) -> Work:
        self._check_own(row.elements, "input", out)
        ends = (row.message(), out.blocks())
        return self._submit(row.name, row, out, options, self._comm.Iallgatherv, *ends)

    def gather(self, outputs: list[Tensors], inputs: Tensors, options: GatherOptions) -> Work:
        root, is_root = self._root("gather", options)
        out = self._list("gather", outputs) if is_root else None
        row = Row("gather", inputs, out)
        if out is not None:
            self._check_own(row.elements, "input", out)
        arguments = (row.message(), out and out.blocks(), root)
        return self._submit("gather", row, out, options, self._comm.Igatherv, *arguments)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], options: ScatterOptions) -> Work:
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
        options: AllToAllOptions,
    ) -> Work:
        out = Row("all_to_all_single", [output])
        row = Row("all_to_all_single", [input], out)
        out.split(output_splits, self._size)
        row.split(input_splits, self._size)
        return self._all_to_all(out, row, options)

    def alltoall(self, outputs: Tensors, inputs: Tensors, options: AllToAllOptions) -> Work:
        out = self._list("all_to_all", [outputs])
        return self._all_to_all(out, self._list("all_to_all", [inputs], out), options)

    def _all_to_all(self, out: Row, row: Row, options: AllToAllOptions) -> Work:
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

    def barrier(self, opts: BarrierOptions) -> Work:
        return self._submit("barrier", None, None, opts, self._comm.Ibarrier)

    # Names of these methods before torch 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
