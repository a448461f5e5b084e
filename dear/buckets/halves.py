"""An all-reduce in two halves: reduce to owners, later gather from them; and who has a gradient."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from dear.buckets.carriers import payload_carrier
from dear.buckets.compressors import CompressedOptions, make_compressor
from dear.buckets.flat import Bucket
from dear.comm.communicator import Communicator, Work, buffer
from dear.lazy import torch


class Decoupled(ABC):
    """The two halves for one bucket.

    Args:
        wire: the type in which gradients travel; None means their own. Half precision with a small
            range (fp16) is scaled before the sum, which needs a copy; so does another `wire` type.
        skip: leave the first half out and take this rank's own gradients: wrong on purpose.
    """

    def __init__(
        self,
        bucket: Bucket,
        communicator: Communicator,
        *,
        wire: torch.dtype | None = None,
        skip: bool = False,
    ) -> None:
        self.bucket = bucket
        self._communicator = communicator
        self._skip = skip
        self._skipped = False
        self._reducing: Work | None = None
        self._sum: torch.Tensor | None = None
        self._gathering: tuple[Work, torch.Tensor, torch.Tensor] | None = None
        whole = bucket.gradients
        self._empty = not whole.numel()
        self._staged: torch.Tensor | None = None
        narrow = wire or (torch.float16 if whole.dtype == torch.float16 else None)
        if narrow is not None and not whole.is_complex():
            self._staged = buffer(whole.new_empty(0, dtype=narrow), whole.numel(), communicator)
        self.owned = self.owned_by(communicator.rank)
        """The part of the bucket whose mean this rank gets."""
        self.shard = whole.new_zeros(self.owned.stop - self.owned.start)
        """The mean gradient of that part, after `finish_reduce`."""

    @abstractmethod
    def owned_by(self, rank: int) -> slice:
        """The part of the bucket that belongs to `rank`."""

    @abstractmethod
    def _reduce(self, whole: torch.Tensor) -> Work:
        """Starts the sum of everybody's `whole`; what this rank owns of it begins `self._sum`.

        `whole` is left as it is, unless it is the staged copy.
        """

    @abstractmethod
    def _gather(self, whole: torch.Tensor) -> Work:
        """Starts to complete `whole`, of which every rank has its own part, in place."""

    def start_reduce(self) -> None:
        """Starts with the gradients as they are; a further call supersedes the one before."""
        self._skipped = self._skip
        if self._empty or self._skip:
            return
        self.await_reduce()
        source = self.bucket.gradients
        if self._staged is not None:
            source = torch.mul(source, 1 / self._communicator.size, out=self._staged)
        self._reducing = self._reduce(source)

    def reduced(self) -> bool:
        """True if `finish_reduce` would not block."""
        return self._reducing is None or self._reducing.done()

    def await_reduce(self) -> None:
        """Waits until nothing that `start_reduce` has started is under way."""
        if self._reducing is not None:
            self._reducing.wait()

    def finish_reduce(self) -> None:
        """Waits until `shard` holds the mean over ranks."""
        if self._skipped:  # once, like a sum: the caller may have scaled `shard` since
            self._skipped = False
            self.shard.copy_(self.bucket.gradients[self.owned])
        if self._reducing is None:
            return
        self._reducing.wait()
        self._reducing = None
        self._take()

    def _take(self) -> None:
        total = self._sum[: self.shard.numel()]
        if self._staged is not None:
            self.shard.copy_(total)
        else:
            torch.div(total, self._communicator.size, out=self.shard)

    def start_gather(self, whole: torch.Tensor) -> None:
        """Starts to bring every owner's part of `whole` to all ranks, in place."""
        if not self._empty:
            self._gathering = (self._gather(whole), whole, whole)

    def start_gather_mean(self, whole: torch.Tensor) -> None:
        """Starts to bring the whole mean gradient to all ranks, in `whole`."""
        if not self._empty:
            source = whole if self._staged is None else self._staged
            source[self.owned].copy_(self.shard)
            self._gathering = (self._gather(source), source, whole)

    def finish_gather(self) -> None:
        """Waits until what the last `start_gather...` was given is complete."""
        if self._gathering is None:
            return
        work, source, whole = self._gathering
        self._gathering = None
        work.wait()
        if source is not whole:
            whole.copy_(source)


class ScatterGather(Decoupled):
    """Reduce-scatter and all-gather: rank r owns part r of the world's equal parts."""

    def owned_by(self, rank: int) -> slice:
        count = self.bucket.gradients.numel() // self._communicator.size
        return slice(rank * count, (rank + 1) * count)

    def _reduce(self, whole: torch.Tensor) -> Work:
        if self._staged is None:
            self._sum = self.shard
        elif self._sum is None:
            self._sum = whole.new_empty(self.shard.numel())
        return self._communicator.reduce_scatter(self._sum, whole, op="sum")

    def _gather(self, whole: torch.Tensor) -> Work:
        return self._communicator.all_gather(whole, whole[self.owned])


class ReduceBroadcast(Decoupled):
    """Reduce to one rank and broadcast from it; buckets take turns in who that is.

    The sum is made in a copy, since a reduction may use every rank's buffer as scratch.
    """

    def __init__(self, bucket: Bucket, *args: Any, owner: int, **options: Any) -> None:
        self._owner = owner
        super().__init__(bucket, *args, **options)

    def owned_by(self, rank: int) -> slice:
        return slice(0, self.bucket.gradients.numel() if rank == self._owner else 0)

    def _reduce(self, whole: torch.Tensor) -> Work:
        if self._staged is not None:
            self._sum = self._staged
        elif self._sum is None:
            self._sum = whole.clone()
        else:
            self._sum.copy_(whole)
        return self._communicator.reduce(self._sum, root=self._owner, op="sum")

    def _gather(self, whole: torch.Tensor) -> Work:
        return self._communicator.broadcast(whole, root=self._owner)


class _AtOnce(Decoupled):
    """The first half brings the whole mean to all ranks, so each owns, and updates, all of it.

    The second half moves nothing.
    """

    def owned_by(self, rank: int) -> slice:
        return slice(0, self.bucket.gradients.numel())

    def _gather(self, whole: torch.Tensor) -> Work:
        raise RuntimeError("every rank has the whole bucket after the first half")

    def start_gather(self, whole: torch.Tensor) -> None:
        return

    def start_gather_mean(self, whole: torch.Tensor) -> None:
        whole.copy_(self.shard)


class AllReduced(_AtOnce):
    """For a few bytes: one message, an all-reduce, instead of two.

    Args:
        marks: numbers of the caller's own that are added up with the gradients.
    """

    def __init__(
        self, bucket: Bucket, communicator: Communicator, *, marks: int = 0, **options: Any
    ) -> None:
        super().__init__(bucket, communicator, **options)
        like = bucket.gradients if self._staged is None else self._staged
        count = bucket.gradients.numel()
        self._message = buffer(like, count + marks, communicator)
        self._sum = self._message[:count]
        if self._staged is not None:
            self._staged = self._sum
        self.marks = self._message[count:]
        """Written before `start_reduce`, their sums are here after `await_reduce`."""

    def _reduce(self, whole: torch.Tensor) -> Work:
        if self._staged is None:
            self._sum.copy_(whole)
        return self._communicator.all_reduce(self._message, op="sum")


class Gathered(_AtOnce):
    """Payloads of a compressor, which no reduction can add up, are all-gathered.

    A payload counts as sent when the second half starts, so one of a pass that another supersedes
    leaves no trace.
    """

    def __init__(
        self, bucket: Bucket, communicator: Communicator, options: CompressedOptions
    ) -> None:
        super().__init__(bucket, communicator)
        self._staged = None
        # Without the padding, which has no place in a mean magnitude.
        whole = bucket.gradients[: bucket.numel]
        self.compressor = make_compressor(options, bucket.numel, whole.dtype, whole.device)
        sizes = [param.numel() for param in bucket.params]
        self._carrier = payload_carrier(communicator, self.compressor, options, sizes)
        self._open = False

    def _reduce(self, whole: torch.Tensor) -> Work:
        self._open = False
        present = [param.grad is not None for param in self.bucket.params]
        return self._carrier.send(whole[: self.bucket.numel], present)

    def _take(self) -> None:
        self._carrier.take(self.shard[: self.bucket.numel])
        self._open = True

    def start_gather_mean(self, whole: torch.Tensor) -> None:
        if self._open:
            self._carrier.commit()
            self._open = False
        super().start_gather_mean(whole)

    def kept(self) -> dict[torch.nn.Parameter, tuple[int, torch.Tensor | None]]:
        """Per parameter: communicated passes so far, and what has not travelled yet, if kept."""
        bucket, residual = self.bucket, self.compressor.residual
        rests = [None] * len(bucket.params) if residual is None else bucket.views(residual)
        steps = self.compressor.steps
        return {param: (steps, rest) for param, rest in zip(bucket.params, rests, strict=True)}

    def keep(self, kept: dict[torch.nn.Parameter, tuple[int, torch.Tensor | None]]) -> None:
        """Goes on from what other buckets of the same parameters have kept."""
        found = [kept.get(param, (0, None)) for param in self.bucket.params]
        self.compressor.steps = max(steps for steps, _ in found)
        if self.compressor.residual is not None:
            views = self.bucket.views(self.compressor.residual)
            for view, (_, rest) in zip(views, found, strict=True):
                if rest is not None:
                    view.copy_(rest)


class Usage:
    """Which parameters have a gradient on any rank: the others must be left as they are.

    One all-reduce of a byte per parameter, started when the last gradient is there. Where the last
    message is a small all-reduce the marks travel in that one.
    """

    def __init__(self, params: Sequence[torch.nn.Parameter], communicator: Communicator) -> None:
        self._params = list(params)
        self._communicator = communicator
        self._marks = torch.zeros(len(params), dtype=torch.uint8, device=params[0].device)
        # A queue of its own, ahead of the large transfers; other backends have one only.
        self._queue = {"channel": 1, "priority": 1} if communicator.native else {}
        communicator.ensure_channels(2 if communicator.native else 1)
        self._work: Work | None = None
        self._carrier: AllReduced | None = None
        self._unused: set[torch.nn.Parameter] = set()
        self._all_present = False

    def start(self, carrier: AllReduced | None = None) -> None:
        """Asks; a further call supersedes the one before.

        Args:
            carrier: with room for all marks, if it has room; started by the caller right after.
        """
        if self._work is not None:
            self._work.wait()
            self._work = None
        has = [param.grad is not None for param in self._params]
        self._all_present = all(has)
        self._carrier = carrier
        if carrier is not None:
            carrier.await_reduce()
        marks = self._marks if carrier is None else carrier.marks
        if self._all_present:
            marks.fill_(1)
        else:
            marks.copy_(torch.tensor(has, dtype=torch.uint8))
        if carrier is None:
            self._work = self._communicator.all_reduce(marks, op="max", **self._queue)

    def unused(self) -> set[torch.nn.Parameter]:
        """The parameters that no rank had a gradient for when `start` was called."""
        if self._work is not None:
            self._work.wait()
            self._work = None
            self._read(self._marks)
        elif self._carrier is not None:
            self._carrier.await_reduce()
            self._read(self._carrier.marks)
            self._carrier = None
        return self._unused

    def _read(self, marks: torch.Tensor) -> None:
        if self._all_present:  # then no mark can be 0, and the device need not be asked
            self._unused = set()
        else:
            pairs = zip(self._params, marks.tolist(), strict=True)
            self._unused = {param for param, mark in pairs if not mark}
