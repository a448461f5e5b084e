"""Carriers: averaging of one flat tensor over the ranks, dense or compressed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate
from math import prod

from dear.buckets.compressors import (
    CompressedOptions,
    Compressor,
    HalfOptions,
    Signum,
    TopK,
    joined,
    make_compressor,
    split,
)
from dear.comm.communicator import Communicator, flat_view, mark
from dear.comm.work import Work
from dear.errors import UserError
from dear.lazy import torch


class Carrier(ABC):
    """Averages the gradients of one buffer over the ranks in every step.

    A step may be dropped: a `send` without a matching `receive` changes nothing.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    @abstractmethod
    def send(self, tensor: torch.Tensor, present: Sequence[bool] = (True,), **queue: int) -> Work:
        """Starts to average `tensor`; every rank must call it.

        Args:
            tensor: dense; the caller must not read or write it until the returned work has ended.
            present: one flag per piece of the tensor: True if this rank has a gradient for it, and
                False if the piece holds zeros in its place. Only carriers of payloads need them.
            queue: `channel` and `priority`, as for the communicator's collectives.
        """

    @abstractmethod
    def receive(self, tensor: torch.Tensor) -> None:
        """Writes the mean into `tensor`, which `send` was given; the work must have ended."""


class Dense(Carrier):
    """All-reduces the tensor in place."""

    def send(self, tensor: torch.Tensor, present: Sequence[bool] = (True,), **queue: int) -> Work:
        return self._communicator.all_reduce(tensor, op="mean", **queue)

    def receive(self, tensor: torch.Tensor) -> None:
        return


class Half(Carrier):
    """All-reduces a copy in another dtype; divides before the sum, since fp16 has a small range."""

    def __init__(self, communicator: Communicator, wire: torch.dtype) -> None:
        super().__init__(communicator)
        self._wire = wire
        self._staged: torch.Tensor | None = None

    def send(self, tensor: torch.Tensor, present: Sequence[bool] = (True,), **queue: int) -> Work:
        flat = flat_view(tensor)
        if self._staged is None:
            self._staged = torch.empty_like(flat, dtype=self._wire)
        torch.mul(flat, 1 / self._communicator.size, out=self._staged)
        return self._communicator.all_reduce(self._staged, op="sum", **queue)

    def receive(self, tensor: torch.Tensor) -> None:
        assert self._staged is not None
        flat_view(tensor).copy_(self._staged)


class Payloads(Carrier):
    """All-gathers the ranks' compressed payloads, each followed by one flag per piece.

    A flag is 1 if the rank has a gradient for the piece. If no rank has one, the piece counts as
    not sent: its payload holds only residuals of earlier steps, which the compressor keeps.

    Args:
        sizes: numbers of elements of the pieces, e.g. one piece per parameter.
    """

    def __init__(
        self, communicator: Communicator, compressor: Compressor, sizes: Sequence[int]
    ) -> None:
        super().__init__(communicator)
        self.compressor = compressor
        ends = list(accumulate(sizes))
        self.pieces = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        self.used: list[bool] = [False] * len(sizes)
        """Flag of each piece: True if some rank has a gradient for it; set by `receive`."""
        self._gathered: torch.Tensor | None = None
        self._all_present = False

    def send(self, tensor: torch.Tensor, present: Sequence[bool] = (True,), **queue: int) -> Work:
        row = self._row_of(tensor, present)
        self._gathered = row.new_empty(self._communicator.size * row.numel())
        return self._communicator.all_gather(self._gathered, row, **queue)

    def _row_of(self, tensor: torch.Tensor, present: Sequence[bool]) -> torch.Tensor:
        self._all_present = all(present)
        payload = self.compressor.compress(flat_view(tensor))
        marks = mark(payload.new_empty(len(present)), present)
        # Each row of the all-gather must start at a multiple of 8 bytes.
        marks = torch.nn.functional.pad(marks, (0, -marks.numel() % 8))
        self._start = payload.numel()
        return torch.cat([payload, marks])

    def receive(self, tensor: torch.Tensor) -> None:
        self.take(tensor)
        self.commit()

    def take(self, tensor: torch.Tensor) -> None:
        """Does the first part of `receive`: writes the mean into `tensor`."""
        assert self._gathered is not None
        rows = self._gathered.view(self._communicator.size, -1)
        marks = rows[:, self._start : self._start + len(self.pieces)]
        self._decompress(rows[:, : self._start], marks, flat_view(tensor))
        self._read(marks)
        self._gathered = None

    def _decompress(
        self, payloads: torch.Tensor, marks: torch.Tensor, output: torch.Tensor
    ) -> None:
        """Writes the mean into `output`; `marks` are the flags, `[ranks, pieces]`."""
        self.compressor.decompress(payloads, output)

    def _read(self, marks: torch.Tensor) -> None:
        if self._all_present:  # all pieces are used, so no copy from the device is needed
            self.used = [True] * len(self.pieces)
        else:
            self.used = marks.any(dim=0).tolist()

    def commit(self) -> None:
        """Does the second part of `receive`: counts the payload as sent."""
        unused = [piece for piece, used in zip(self.pieces, self.used, strict=True) if not used]
        self.compressor.commit(unused)


class Vote(Payloads):
    """Lets the ranks vote on the signs of each piece for which they have a gradient."""

    def __init__(
        self, communicator: Communicator, compressor: Signum, sizes: Sequence[int]
    ) -> None:
        super().__init__(communicator, compressor, sizes)
        self._signum = compressor
        self._sizes = torch.tensor(sizes, device=compressor.device)

    def _decompress(
        self, payloads: torch.Tensor, marks: torch.Tensor, output: torch.Tensor
    ) -> None:
        absent = len(marks) - marks.sum(0, dtype=torch.int32)
        # Without `output_size`, the host would wait for the sum of the sizes.
        absent = absent.repeat_interleave(self._sizes, output_size=output.numel())
        self._signum.decompress(payloads, output, absent)


class GlobalTopK(Payloads):
    """Averages only the elements that are largest in the sum over the ranks.

    gTopK (Shi et al., ICDCS 2019, arXiv 1901.04359) has log2(number of ranks) rounds. In each round
    a rank exchanges its entries with one other rank, adds the received entries to its own, and
    keeps as many of the largest as it had before. After the last round all ranks have the same
    entries. An entry that was dropped on the way goes back to the residual of the rank that sent
    it. `send` starts the first round, and `take` does the others.

    Raises:
        UserError: the number of ranks is not a power of 2.
    """

    def __init__(self, communicator: Communicator, compressor: TopK, sizes: Sequence[int]) -> None:
        super().__init__(communicator, compressor, sizes)
        self._topk = compressor
        if communicator.size & (communicator.size - 1):
            raise UserError(
                "compression='gtopk': the number of ranks must be a power of 2, got "
                f"{communicator.size}"
            )

    def send(self, tensor: torch.Tensor, present: Sequence[bool] = (True,), **queue: int) -> Work:
        if self._communicator.size == 1:
            return super().send(tensor, present, **queue)
        self._row, self._channel = self._row_of(tensor, present), queue.get("channel", 0)
        return self._exchange(1)

    def _exchange(self, distance: int) -> Work:
        peer = self._communicator.rank ^ distance
        self._theirs = torch.empty_like(self._row)
        return self._communicator.exchange(
            self._theirs, self._row, peer=peer, channel=self._channel
        )

    def take(self, tensor: torch.Tensor) -> None:
        size = self._communicator.size
        if size == 1:
            super().take(tensor)
            return
        values, places = self._topk.entries(self._row[: self._start])
        stays = values != 0
        distance = 1
        while True:
            self._row = self._merged(self._row, self._theirs)
            kept_values, kept_places = self._topk.entries(self._row[: self._start])
            stays &= torch.isin(places, kept_places[kept_values != 0])
            distance *= 2
            if distance == size:
                break
            self._exchange(distance).wait()
        dropped = ~stays & (values != 0)
        self._topk.give_back(places[dropped], values[dropped])
        output = flat_view(tensor).zero_()
        output.index_add_(0, kept_places, kept_values, alpha=1 / size)
        self._read(self._row[self._start :][: len(self.pieces)].unsqueeze(0))

    def _merged(self, mine: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
        """Returns the merged row; it is the same on both ranks, since addition is commutative."""
        entries = [self._topk.entries(row[: self._start]) for row in (mine, theirs)]
        values, repeated = (torch.cat(parts) for parts in zip(*entries, strict=True))
        places, index = torch.unique(repeated, sorted=True, return_inverse=True)
        sums = values.new_zeros(places.numel()).index_add_(0, index, values)
        marks = torch.maximum(mine[self._start :], theirs[self._start :])
        return torch.cat([self._topk.payload(sums, places), marks])


def payload_carrier(
    communicator: Communicator,
    compressor: Compressor,
    options: CompressedOptions,
    sizes: Sequence[int],
) -> Payloads:
    """Returns the carrier that the options choose for payloads of `compressor`."""
    if options.compression == "gtopk" and isinstance(compressor, TopK):
        return GlobalTopK(communicator, compressor, sizes)
    if isinstance(compressor, Signum):
        return Vote(communicator, compressor, sizes)
    return Payloads(communicator, compressor, sizes)


def make_carrier(
    options: HalfOptions,
    communicator: Communicator,
    like: torch.Tensor,
    sizes: Sequence[int] | None = None,
) -> Carrier:
    """Returns the carrier that the options choose, for dense tensors like `like`.

    Args:
        sizes: numbers of elements of the tensor's pieces; None means a single piece.
    """
    if isinstance(options, CompressedOptions) and options.gathers:
        compressor = make_compressor(options, like.numel(), like.dtype, like.device)
        return payload_carrier(communicator, compressor, options, sizes or [like.numel()])
    if options.wire is None or options.wire == like.dtype:
        return Dense(communicator)
    return Half(communicator, options.wire)


ABSENT = -1
"""Number of entries reported by a rank that has no tensor."""


def gather_entries(
    mine: Sequence[torch.Tensor | None],
    device: torch.device,
    communicator: Communicator,
    channel: int = 0,
) -> list[tuple[list[int], int]]:
    """Gathers the number of entries that each rank has of each sparse tensor; blocks.

    Args:
        mine: this rank's tensors, coalesced; the same number of tensors on all ranks.

    Returns:
        Per tensor: the numbers of entries in rank order (`ABSENT` for a missing tensor), and the
        number of sparse dimensions (0 if no rank has the tensor).
    """
    sizes = [(ABSENT, 0) if t is None else (t._nnz(), t.sparse_dim()) for t in mine]
    row = torch.tensor(sizes, dtype=torch.int64).to(device).view(-1)
    rows = row.new_empty(communicator.size * row.numel())
    communicator.all_gather(rows, row, channel=channel).wait()
    sizes_by_rank = rows.view(communicator.size, len(mine), 2).tolist()
    return [
        ([rank[i][0] for rank in sizes_by_rank], max(rank[i][1] for rank in sizes_by_rank))
        for i in range(len(mine))
    ]


class SparseSum:
    """Sum of one sparse tensor over the ranks, started by the constructor as one all-gather.

    Args:
        mine: this rank's tensor, coalesced, or None.
        like: a tensor of the same shape, dtype and device; may be dense.
        entries: result of `gather_entries` for this tensor.
        divisor: divides the values before they are sent.
    """

    def __init__(
        self,
        mine: torch.Tensor | None,
        like: torch.Tensor,
        entries: tuple[list[int], int],
        communicator: Communicator,
        *,
        divisor: int = 1,
    ) -> None:
        self._like = like.detach()
        self._counts, self._places = entries
        self._size = communicator.size
        self.work: Work | None = None
        """None if no rank has entries to send."""
        largest = max(self._counts)
        if largest <= 0:
            return
        indices = torch.zeros(self._places, largest, dtype=torch.int64, device=like.device)
        values = torch.zeros(largest, *self._dense_shape(), dtype=like.dtype, device=like.device)
        if mine is not None:
            indices[:, : mine._nnz()] = mine.indices()
            mine_values = mine.values()
            values[: mine._nnz()] = mine_values if divisor == 1 else mine_values / divisor
        row = joined(indices.view(-1), values.view(-1))
        self._rows = row.new_empty(self._size * row.numel())
        self.work = communicator.all_gather(self._rows, row)

    def result(self) -> torch.Tensor | None:
        """Returns the sum, coalesced, or None if no rank has a tensor; the work must have ended."""
        if max(self._counts) == ABSENT:
            return None
        like, places = self._like, max(self._places, 1)
        dense = self._dense_shape()
        indices = [torch.zeros(places, 0, dtype=torch.int64, device=like.device)]
        values = [torch.zeros(0, *dense, dtype=like.dtype, device=like.device)]
        if self.work is not None:
            largest = max(self._counts)
            for count, row in zip(self._counts, self._rows.view(self._size, -1), strict=True):
                kinds = (places * largest, torch.int64), (largest * prod(dense), like.dtype)
                rank_indices, rank_values = split(row, *kinds)
                count = max(count, 0)
                indices.append(rank_indices.view(places, largest)[:, :count])
                values.append(rank_values.view(largest, *dense)[:count])
        return torch.sparse_coo_tensor(
            torch.cat(indices, 1), torch.cat(values), like.shape, check_invariants=False
        ).coalesce()

    def _dense_shape(self) -> tuple[int, ...]:
        return tuple(self._like.shape[max(self._places, 1) :])
