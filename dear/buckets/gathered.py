"""A compressed all-reduce in which the first half brings everything to everybody."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from dear.buckets.carriers import Payloads
from dear.buckets.compressors import make_compressor
from dear.buckets.flat import shaped
from dear.buckets.halves import Decoupled
from dear.lazy import torch

if TYPE_CHECKING:
    from torch.nn import Parameter

    from dear.buckets.compression import CompressedOptions
    from dear.buckets.flat import Bucket
    from dear.comm.communicator import Communicator, Work

Kept = Mapping["Parameter", "tuple[int, torch.Tensor | None]"]


class Gathered(Decoupled):
    """Payloads, which no reduction can add up, are all-gathered in the first half.

    Every rank then owns the whole group, and the second half moves nothing. A payload counts as
    sent when the second half starts, so one of a pass that another supersedes leaves no trace.
    """

    def __init__(
        self, group: Bucket, communicator: Communicator, options: CompressedOptions
    ) -> None:
        super().__init__(group, communicator)
        self._staged = None
        sizes = [param.numel() for param in group.params]
        self._count = sum(sizes)  # without the padding, which has no place in a mean magnitude
        whole = group.gradients
        self.compressor = make_compressor(options, self._count, whole.dtype, whole.device)
        self._carrier = Payloads(communicator, self.compressor, sizes)
        self._open = False

    def owned_by(self, rank: int) -> slice:
        return slice(0, self.group.gradients.numel())

    def _reduce(self, whole: torch.Tensor) -> Work:
        self._open = False
        present = [param.grad is not None for param in self.group.params]
        return self._carrier.send(whole[: self._count], present)

    def _gather(self, whole: torch.Tensor) -> Work:
        raise RuntimeError("every rank has the whole group after the first half")

    def finish_reduce(self) -> None:
        if self._reducing is None:
            return
        self._reducing.wait()
        self._reducing = None
        self._carrier.take(self.shard[: self._count])
        self._open = True

    def start_gather(self, whole: torch.Tensor) -> None:
        return

    def start_gather_mean(self, whole: torch.Tensor) -> None:
        if self._open:
            self._carrier.commit()
            self._open = False
        if whole is not self.shard:
            whole.copy_(self.shard)

    def kept(self) -> Kept:
        """Per parameter: communicated passes so far, and what has not travelled yet, if kept."""
        residual = self.compressor.residual
        return {
            param: (
                self.compressor.steps,
                None if residual is None else shaped(residual, offset, view),
            )
            for param, view, offset in self._places()
        }

    def keep(self, kept: Kept) -> None:
        """Goes on from what other groups of the same parameters have kept."""
        for param, view, offset in self._places():
            steps, rest = kept.get(param, (0, None))
            self.compressor.steps = max(self.compressor.steps, steps)
            if rest is not None:
                shaped(self.compressor.residual, offset, view).copy_(rest)

    def _places(self) -> list[tuple[Parameter, torch.Tensor, int]]:
        group = self.group
        return list(zip(group.params, group.gradient_views, group.offsets, strict=True))
