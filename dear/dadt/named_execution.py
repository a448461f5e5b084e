"""Runs collectives that every rank has asked for: several small ones in one buffer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from dear.buckets.grouping import by_buffer
from dear.buckets.sparse import SparseSum, gather_entries
from dear.dadt.named_requests import ALL_REDUCE, BROADCAST, COO_ALL_REDUCE, Request

if TYPE_CHECKING:
    from dear.comm.communicator import Communicator, Work

Finish = Callable[[], None]

ROOT = 0


class Execution:
    """Runs batches of requests on one thread; all ranks give the same batches.

    Args:
        communicator: used by nobody else.
        buffer_bytes: all-reduces of one type share buffers of at most so many bytes; one that is as
            large runs alone.
    """

    def __init__(self, communicator: Communicator, buffer_bytes: float) -> None:
        self._communicator = communicator
        self._buffer_bytes = buffer_bytes
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def run(self, batch: Sequence[Request]) -> None:
        """Ends each request of `batch`, with its result or the error that its group met."""
        running: list[tuple[list[Request], Work | None, Finish]] = []
        for group in self._groups(batch):
            with self._failing(group), self._on_stream(group):
                running.append((group, *self._start(group)))
        for group, work, finish in running:
            with self._failing(group), self._on_stream(group):
                if work is not None:
                    work.wait()
                finish()

    def _groups(self, batch: Sequence[Request]) -> list[list[Request]]:
        groups: list[list[Request]] = []
        fusible: dict[tuple, list[Request]] = {}
        for request in batch:
            if request.key[0] == ALL_REDUCE:
                kind = (request.tensor.dtype, request.tensor.device)
                fusible.setdefault(kind, []).append(request)
            else:
                groups.append([request])
        for alike in fusible.values():
            sizes = [request.tensor.nbytes for request in alike]
            groups += [[alike[i] for i in g] for g in by_buffer(sizes, self._buffer_bytes)]
        return sorted(groups, key=lambda group: group[0].key, reverse=True)

    def _start(self, group: list[Request]) -> tuple[Work | None, Finish]:
        kind, first = group[0].key[0], group[0]
        if kind == COO_ALL_REDUCE:
            return self._start_sparse(first)
        if kind == BROADCAST:
            first.enter("DoBroadCast")
            work = self._communicator.broadcast(first.tensor, root=ROOT)
            return work, lambda: first.finish(first.tensor)
        for request in group:
            request.enter("CopyToMidWay")
        if len(group) == 1:
            flat = first.tensor
        else:
            flat = torch.cat([request.tensor.view(-1) for request in group])
        for request in group:
            request.enter("DoAllReduce")
        work = self._communicator.all_reduce(flat, op="sum")
        return work, lambda: _hand_out(flat, group)

    def _start_sparse(self, request: Request) -> tuple[Work | None, Finish]:
        request.enter("DoAllReduce")
        tensor = request.tensor
        (entries,) = gather_entries([tensor], tensor.device, self._communicator)
        total = SparseSum(tensor, tensor, entries, self._communicator)
        return total.work, lambda: request.finish(total.result())

    @contextlib.contextmanager
    def _failing(self, group: list[Request]) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the callers raise it, each from its own wait
            for request in group:
                request.fail(error)

    @contextlib.contextmanager
    def _on_stream(self, group: list[Request]) -> Iterator[None]:
        """On CUDA: a stream of this thread's own, after what has written the tensors."""
        device = group[0].tensor.device
        if device.type != "cuda":
            yield
            return
        stream = self._streams.setdefault(device, torch.cuda.Stream(device))
        with torch.cuda.device(device), torch.cuda.stream(stream):
            for request in group:
                stream.wait_event(request.written)
                if not request.tensor.is_sparse:
                    request.tensor.record_stream(stream)
            yield


def _hand_out(flat: torch.Tensor, group: list[Request]) -> None:
    if len(group) > 1:
        sizes = [request.tensor.numel() for request in group]
        for request, piece in zip(group, flat.split(sizes), strict=True):
            request.tensor.view(-1).copy_(piece)
    for request in group:
        request.finish(request.tensor)
