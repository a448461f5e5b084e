"""Sums of sparse COO tensors over ranks: every rank gets the entries of all."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from dear.buckets.compressors import joined, split
from dear.comm.communicator import Communicator, Work
from dear.lazy import torch

ABSENT = -1
"""The number of entries of a rank that has no tensor at all."""


def gather_entries(
    mine: Sequence[torch.Tensor | None],
    device: torch.device,
    communicator: Communicator,
    channel: int = 0,
) -> list[tuple[list[int], int]]:
    """How many entries each rank has of each tensor; blocking.

    Args:
        mine: coalesced tensors of this rank, as many on all ranks.

    Returns:
        Per tensor: the numbers in rank order (`ABSENT` where there is none), and of how many
        dimensions the places are (0 if no rank has one).
    """
    own = [(ABSENT, 0) if t is None else (t._nnz(), t.sparse_dim()) for t in mine]
    row = torch.tensor(own, dtype=torch.int64).to(device).view(-1)
    rows = row.new_empty(communicator.size * row.numel())
    communicator.all_gather(rows, row, channel=channel).wait()
    found = rows.view(communicator.size, len(mine), 2).tolist()
    return [
        ([rank[i][0] for rank in found], max(rank[i][1] for rank in found))
        for i in range(len(mine))
    ]


class SparseSum:
    """The sum of one tensor, under way: one all-gather of places and values.

    Args:
        mine: this rank's tensor, coalesced, or None.
        like: a tensor of the same shape, type and device; dense ones do.
        entries: of this tensor, from `gather_entries`.
        divisor: of the values, before they are sent.
    """

    def __init__(
        self,
        mine: torch.Tensor | None,
        like: torch.Tensor,
        entries: tuple[list[int], int],
        communicator: Communicator,
        *,
        divisor: int = 1,
        channel: int = 0,
    ) -> None:
        self._like = like.detach()
        self._counts, self._places = entries
        self._size = communicator.size
        self.work: Work | None = None
        """None if there is nothing to send."""
        most = max(self._counts)
        if most <= 0:
            return
        indices = torch.zeros(self._places, most, dtype=torch.int64, device=like.device)
        values = torch.zeros(most, *self._dense_shape(), dtype=like.dtype, device=like.device)
        if mine is not None:
            indices[:, : mine._nnz()] = mine.indices()
            own = mine.values()
            values[: mine._nnz()] = own if divisor == 1 else own / divisor
        row = joined(indices.view(-1), values.view(-1))
        self._rows = row.new_empty(self._size * row.numel())
        self.work = communicator.all_gather(self._rows, row, channel=channel)

    def result(self) -> torch.Tensor | None:
        """The sum, coalesced; None if no rank has a tensor. The work must have ended."""
        if max(self._counts) == ABSENT:
            return None
        like, places = self._like, max(self._places, 1)
        dense = self._dense_shape()
        indices = [torch.zeros(places, 0, dtype=torch.int64, device=like.device)]
        values = [torch.zeros(0, *dense, dtype=like.dtype, device=like.device)]
        if self.work is not None:
            most = max(self._counts)
            for count, row in zip(self._counts, self._rows.view(self._size, -1), strict=True):
                kinds = (places * most, torch.int64), (most * prod(dense), like.dtype)
                found_indices, found_values = split(row, *kinds)
                count = max(count, 0)
                indices.append(found_indices.view(places, most)[:, :count])
                values.append(found_values.view(most, *dense)[:count])
        return torch.sparse_coo_tensor(
            torch.cat(indices, 1), torch.cat(values), like.shape, check_invariants=False
        ).coalesce()

    def _dense_shape(self) -> tuple[int, ...]:
        return tuple(self._like.shape[max(self._places, 1) :])
