"""An all-reduce in two halves: reduce to owners, later gather from them; and who has a gradient."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from dear.buckets.carriers import payload_carrier
from dear.buckets.compressors import CompressedOptions, make_compressor
from dear.buckets.flat import Bucket
from dear.comm.communicator import Communicator, Work, buffer
from dear.lazy import torch

COPIED_BYTES = 512 * 2**10
"""What may be copied to save a message's start-up: it takes about 10 us in a CPU's cache."""


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
        self.marks: torch.Tensor | None = None
        """Room for numbers of the caller's own that are added up with the gradients: `[marks]`, or
        `[ranks, marks]` of which all rows are to be the same. Written before `start_reduce`. None:
        the message has no room for them."""
        self.mark_sums: torch.Tensor | None = None
        """Their sums after `await_reduce`, on every rank; in the type in which gradients travel, in
        which a sum of zeros and ones may be rounded, but never to 0."""
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
        self.await_message()
        source = self.bucket.gradients
        self._reducing = self._reduce(source if self._staged is None else self._stage(source))

    def _stage(self, whole: torch.Tensor) -> torch.Tensor:
        """The staged copy of `whole`, which is scaled so that a sum is the mean."""
        return torch.mul(whole, 1 / self._communicator.size, out=self._staged)

    def reduced(self) -> bool:
        """True if `finish_reduce` would not block."""
        return self._reducing is None or self._reducing.done()

    def await_reduce(self) -> None:
        """Waits until nothing that `start_reduce` has started is under way."""
        if self._reducing is not None:
            self._reducing.wait()

    def await_message(self) -> None:
        """Waits until the next message, and its marks, may be written.

        Where a layer has not run since, the last mean may still be in the staged copy.
        """
        self.await_reduce()
        if self._staged is not None:
            self.finish_gather()

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
    """Reduce-scatter and all-gather: rank r owns part r of the world's equal parts.

    Args:
        marks: so many numbers of the caller's own travel behind each rank's part. Parts then do not
            lie as in the bucket: what is not staged anyway is copied, up to `COPIED_BYTES`; a
            larger message has no room for marks.
    """

    def __init__(
        self, bucket: Bucket, communicator: Communicator, *, marks: int = 0, **options: Any
    ) -> None:
        super().__init__(bucket, communicator, **options)
        like = bucket.gradients if self._staged is None else self._staged
        size, count = communicator.size, self.shard.numel()
        numel = size * (count + marks)
        large = self._staged is None and numel * like.element_size() > COPIED_BYTES
        if not marks or self._empty or self._skip or large:
            return
        self._message = buffer(like, numel, communicator)
        rows = self._message.view(size, count + marks)
        self._blocks, self.marks = rows[:, :count], rows[:, count:]
        self._sum = like.new_empty(count + marks)
        self.mark_sums = self._sum[count:]
        if self._staged is not None:  # then for second halves only, which lie as in the bucket
            self._staged = self._message[: size * count]

    def owned_by(self, rank: int) -> slice:
        count = self.bucket.gradients.numel() // self._communicator.size
        return slice(rank * count, (rank + 1) * count)

    def _stage(self, whole: torch.Tensor) -> torch.Tensor:
        if self.marks is None:
            return super()._stage(whole)
        torch.mul(whole.view_as(self._blocks), 1 / self._communicator.size, out=self._blocks)
        return self._message

    def _reduce(self, whole: torch.Tensor) -> Work:
        if self.marks is not None:
            if self._staged is None:
                self._blocks.copy_(whole.view_as(self._blocks))
            whole = self._message
        elif self._staged is None:
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
        marks: so many numbers of the caller's own travel behind the gradients.
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
        if marks:
            self.marks = self.mark_sums = self._message[count:]

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

    def unused(self) -> set[torch.nn.Parameter]:
        """The parameters that no rank had a gradient for, after `finish_reduce`.

        Payloads carry their marks. Of an empty bucket, which sends none, this rank's gradients say
        it: an update changes nothing there.
        """
        if self._empty:
            return {param for param in self.bucket.params if param.grad is None}
        pairs = zip(self.bucket.params, self._carrier.used, strict=True)
        return {param for param, used in pairs if not used}

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

    When the last gradient is there each rank marks those that it has. The marks travel in the last
    message of the pass, where that has room for them. Else they are an all-reduce of a byte per
    parameter, which goes ahead of the large message beside it.
    """

    def __init__(self, params: Sequence[torch.nn.Parameter], communicator: Communicator) -> None:
        self._params = list(params)
        self._communicator = communicator
        self._marks = torch.zeros(len(params), dtype=torch.uint8, device=params[0].device)
        # A queue of its own, ahead of the large transfers; other backends have one only.
        self._queue = {"channel": 1, "priority": 1} if communicator.native else {}
        communicator.ensure_channels(2 if communicator.native else 1)
        self._work: Work | None = None
        self._carrier: Decoupled | None = None
        self._missing: set[torch.nn.Parameter] = set()
        """Those that this rank has no gradient for."""
        self._unused: set[torch.nn.Parameter] | None = None
        """None: not read yet."""

    def start(self, carrier: Decoupled | None = None) -> None:
        """Asks; a further call supersedes the one before.

        Args:
            carrier: the last message of the pass, started by the caller right after.
        """
        if self._work is not None:
            self._work.wait()
            self._work = None
        has = [param.grad is not None for param in self._params]
        pairs = zip(self._params, has, strict=True)
        self._missing = {param for param, present in pairs if not present}
        self._unused = None
        self._carrier = None if carrier is None or carrier.marks is None else carrier
        if self._carrier is not None:
            self._carrier.await_message()
        marks = self._marks if self._carrier is None else self._carrier.marks
        if self._missing:
            marks.copy_(torch.tensor(has, dtype=torch.uint8))
        else:
            marks.fill_(1)
        if self._carrier is None:
            self._work = self._communicator.all_reduce(marks, op="max", **self._queue)

    def unused(self, params: Iterable[torch.nn.Parameter] | None = None) -> set[torch.nn.Parameter]:
        """The parameters that no rank had a gradient for when `start` was called.

        Args:
            params: nothing but these matters. Where this rank had gradients for all of them nobody
                has to wait for the last message, nor to ask the device.
        """
        if self._work is not None:
            self._work.wait()
            self._work = None
        if not self._missing or (params is not None and self._missing.isdisjoint(params)):
            return set()
        if self._unused is None:
            sums = self._marks
            if self._carrier is not None:
                self._carrier.await_reduce()
                sums = self._carrier.mark_sums
            pairs = zip(self._params, sums.tolist(), strict=True)
            self._unused = {param for param, mark in pairs if not mark}
        return self._unused
