"""All-reduces of a bucket in two halves, and detection of gradients that no rank has.

The first half reduces each part of the bucket to the rank that owns the part. The second half
gathers the parts later. A message may end in marks: one number per parameter, 1 if the sending rank
has its gradient, else 0. A mark whose sum is 0 says that no rank has the gradient. If gradients
must be scaled or change their dtype on the way, they travel in a second, staged buffer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from dear.buckets.carriers import payload_carrier
from dear.buckets.compressors import CompressedOptions, make_compressor
from dear.buckets.flat import Bucket
from dear.comm.communicator import Communicator, mark
from dear.comm.flight.recorder import note_bucket
from dear.comm.work import Work
from dear.lazy import torch

Kept: TypeAlias = "tuple[int, torch.Tensor | None, torch.Tensor | None]"
"""Number of committed passes, residual and velocity of a parameter."""

COPIED_BYTES = 512 * 2**10
"""Largest message in bytes that is copied to save one start-up; the copy takes about 10 us."""


@dataclass(frozen=True)
class Marks:
    """Marks at the end of a message; the reduction sums them together with the gradients."""

    values: torch.Tensor
    """`[marks]`, or `[ranks, marks]` with equal rows; written before `start_reduce`."""
    sums: torch.Tensor
    """Sums on every rank after `await_reduce`, in the dtype of the message. A sum of zeros and ones
    may be rounded there, but never to 0."""


class Decoupled(ABC):
    """Two halves of an all-reduce for one bucket.

    Args:
        wire: dtype in which gradients are sent; None: the dtype that they have. Another dtype
            needs a staged copy. So does fp16, which is scaled before the sum (its range is small).
        skip: leave out the first half and use this rank's gradients. This is wrong on purpose: it
            measures what the first half costs.
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
        self._gathering: tuple[Work, torch.Tensor, torch.Tensor] | None = None
        self.marks: Marks | None = None
        """None: the message has no room for marks."""
        whole = bucket.gradients
        self._empty = not whole.numel()
        self._staged: torch.Tensor | None = None
        narrow = wire or (torch.float16 if whole.dtype == torch.float16 else None)
        if narrow is not None and not whole.is_complex():
            self._staged = communicator.allocate(whole.new_empty(0, dtype=narrow), whole.numel())
        note_bucket(bucket.params, self._staged)
        self.owned = self.owned_by(communicator.rank)
        """The part of the bucket whose mean this rank receives."""
        self.shard = whole.new_zeros(self.owned.stop - self.owned.start)
        """Mean gradient of the owned part, after `finish_reduce`."""
        self._sum = self.shard
        """Sum over the ranks after the reduction; starts with the part that this rank owns."""

    @abstractmethod
    def owned_by(self, rank: int) -> slice:
        """Returns the part of the bucket that `rank` owns."""

    @abstractmethod
    def _reduce(self, whole: torch.Tensor) -> Work:
        """Starts the sum of `whole` over the ranks; `whole` changes only if it is a staged copy."""

    @abstractmethod
    def _gather(self, whole: torch.Tensor) -> Work:
        """Starts to gather `whole` in place; each rank supplies the part that it owns."""

    def start_reduce(self) -> None:
        """Starts the first half with the current gradients; replaces a first half not yet used."""
        self._skipped = self._skip
        if self._empty or self._skip:
            return
        self.await_message()
        whole = self.bucket.gradients
        self._reducing = self._reduce(whole if self._staged is None else self._stage(self._staged))

    def _stage(self, staged: torch.Tensor) -> torch.Tensor:
        return torch.mul(self.bucket.gradients, 1 / self._communicator.size, out=staged)

    def reduced(self) -> bool:
        """Returns True if `finish_reduce` would not block."""
        return self._reducing is None or self._reducing.done()

    def await_reduce(self) -> None:
        """Waits for the reduction that `start_reduce` started, if any."""
        if self._reducing is not None:
            self._reducing.wait()

    def await_message(self) -> None:
        """Waits until the message and its marks may be overwritten.

        If a layer has not run since the previous step, the staged buffer may still hold that step's
        mean gradient.
        """
        self.await_reduce()
        if self._staged is not None:
            self.finish_gather()

    def finish_reduce(self) -> None:
        """Waits until `shard` holds the mean over the ranks."""
        if self._skipped:  # copy only once, as a sum would: the caller may have scaled `shard`
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
        """Starts to gather `whole` in place: each owner's part goes to all ranks."""
        if not self._empty:
            self._gathering = (self._gather(whole), whole, whole)

    def start_gather_mean(self, whole: torch.Tensor) -> None:
        """Starts to gather the mean gradient of the whole bucket into `whole` on all ranks."""
        if not self._empty:
            source = whole if self._staged is None else self._staged
            source[self.owned].copy_(self.shard)
            self._gathering = (self._gather(source), source, whole)

    def finish_gather(self) -> None:
        """Waits until the tensor of the last `start_gather...` call is complete."""
        if self._gathering is None:
            return
        work, source, whole = self._gathering
        self._gathering = None
        work.wait()
        if source is not whole:
            whole.copy_(source)


class ScatterGather(Decoupled):
    """Reduce-scatter and all-gather: rank r owns part r of `world_size` equal parts.

    Args:
        marks: number of marks that follow each rank's part. Marks change the layout of the message,
            so a bucket without a staged copy is copied if it has at most `COPIED_BYTES`. The
            message of a larger bucket has no room for marks.
    """

    def __init__(
        self,
        bucket: Bucket,
        communicator: Communicator,
        *,
        marks: int = 0,
        wire: torch.dtype | None = None,
        skip: bool = False,
    ) -> None:
        super().__init__(bucket, communicator, wire=wire, skip=skip)
        like = bucket.gradients if self._staged is None else self._staged
        size, count = communicator.size, self.shard.numel()
        numel = size * (count + marks)
        large = self._staged is None and numel * like.element_size() > COPIED_BYTES
        if not marks or self._empty or self._skip or large:
            if self._staged is not None:
                self._sum = like.new_empty(count)
            return
        self._message = communicator.allocate(like, numel)
        note_bucket(bucket.params, self._message)
        rows = self._message.view(size, count + marks)
        self._blocks = rows[:, :count]
        self._sum = like.new_empty(count + marks)
        self.marks = Marks(rows[:, count:], self._sum[count:])
        if self._staged is not None:  # second halves use it, with the bucket's layout
            self._staged = self._message[: size * count]

    def owned_by(self, rank: int) -> slice:
        count = self.bucket.gradients.numel() // self._communicator.size
        return slice(rank * count, (rank + 1) * count)

    def _stage(self, staged: torch.Tensor) -> torch.Tensor:
        if self.marks is None:
            return super()._stage(staged)
        rows = self.bucket.gradients.view_as(self._blocks)
        torch.mul(rows, 1 / self._communicator.size, out=self._blocks)
        return self._message

    def _reduce(self, whole: torch.Tensor) -> Work:
        if self.marks is not None:
            if self._staged is None:
                self._blocks.copy_(whole.view_as(self._blocks))
            whole = self._message
        return self._communicator.reduce_scatter(self._sum, whole, op="sum")

    def _gather(self, whole: torch.Tensor) -> Work:
        return self._communicator.all_gather(whole, whole[self.owned])


class ReduceBroadcast(Decoupled):
    """Reduction to one rank and broadcast from it; buckets have different owners.

    The sum is made in a copy, since a reduction may use the buffer of any rank as scratch memory.
    """

    def __init__(
        self,
        bucket: Bucket,
        communicator: Communicator,
        *,
        owner: int,
        wire: torch.dtype | None = None,
        skip: bool = False,
    ) -> None:
        self._owner = owner
        super().__init__(bucket, communicator, wire=wire, skip=skip)
        if self._staged is not None:
            self._sum = self._staged
        elif not skip:
            self._sum = torch.empty_like(bucket.gradients)

    def owned_by(self, rank: int) -> slice:
        return slice(0, self.bucket.gradients.numel() if rank == self._owner else 0)

    def _reduce(self, whole: torch.Tensor) -> Work:
        if self._staged is None:
            self._sum.copy_(whole)
        return self._communicator.reduce(self._sum, root=self._owner, op="sum")

    def _gather(self, whole: torch.Tensor) -> Work:
        return self._communicator.broadcast(whole, root=self._owner)


class _AtOnce(Decoupled):
    """First half that brings the whole mean to all ranks, so that each owns the whole bucket.

    The second half moves no bytes.
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
    """One all-reduce in place of two messages, for a bucket of few bytes.

    Args:
        marks: number of extra values that travel behind the gradients.
    """

    def __init__(
        self,
        bucket: Bucket,
        communicator: Communicator,
        *,
        marks: int = 0,
        wire: torch.dtype | None = None,
        skip: bool = False,
    ) -> None:
        super().__init__(bucket, communicator, wire=wire, skip=skip)
        like = bucket.gradients if self._staged is None else self._staged
        count = bucket.gradients.numel()
        self._message = communicator.allocate(like, count + marks)
        note_bucket(bucket.params, self._message)
        self._sum = self._message[:count]
        if self._staged is not None:
            self._staged = self._sum
        if marks:
            self.marks = Marks(self._message[count:], self._message[count:])

    def _reduce(self, whole: torch.Tensor) -> Work:
        if self._staged is None:
            self._sum.copy_(whole)
        return self._communicator.all_reduce(self._message, op="sum")


class Gathered(_AtOnce):
    """All-gather of compressed payloads, which no reduction can sum.

    A payload counts as sent when the second half starts. So if another backward pass replaces this
    one before that, the first pass changes no residual.
    """

    def __init__(
        self, bucket: Bucket, communicator: Communicator, options: CompressedOptions
    ) -> None:
        super().__init__(bucket, communicator)
        self._staged = None
        # The padding is left out, since it would change the mean magnitude.
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
        """Returns the parameters that no rank has a gradient for; call it after `finish_reduce`.

        The payloads carry the marks. An empty bucket sends no payload, so there the answer depends
        on this rank's gradients alone; an update of no elements changes nothing.
        """
        if self._empty:
            return {param for param in self.bucket.params if param.grad is None}
        pairs = zip(self.bucket.params, self._carrier.used, strict=True)
        return {param for param, used in pairs if not used}

    def kept(self) -> dict[torch.nn.Parameter, Kept]:
        """Returns, per parameter, the number of committed passes, its residual, its velocity."""
        bucket, compressor = self.bucket, self.compressor
        flat = [compressor.residual, compressor.velocity]
        none: Sequence[torch.Tensor | None] = [None] * len(bucket.params)
        residuals, velocities = (none if state is None else bucket.views(state) for state in flat)
        kept = zip(bucket.params, residuals, velocities, strict=True)
        return {param: (compressor.steps, rest, velocity) for param, rest, velocity in kept}

    def keep(self, kept: dict[torch.nn.Parameter, Kept]) -> None:
        """Takes over the state that `kept` returned for other buckets of the same parameters."""
        entries = [kept.get(param, (0, None, None)) for param in self.bucket.params]
        self.compressor.steps = max(steps for steps, *_ in entries)
        for place, state in (1, self.compressor.residual), (2, self.compressor.velocity):
            views = [] if state is None else self.bucket.views(state)
            for view, entry in zip(views, entries, strict=False):
                former = entry[place]
                if isinstance(former, torch.Tensor):
                    view.copy_(former)


class Usage:
    """Detects the parameters that have no gradient on any rank; an update must not change these.

    After the last gradient of a pass, each rank sets one mark per parameter. The marks travel in
    the last message of the pass if it has room. Otherwise they travel in their own all-reduce of
    one byte per parameter, with a higher priority than the large messages.
    """

    def __init__(self, params: Sequence[torch.nn.Parameter], communicator: Communicator) -> None:
        self._params = list(params)
        self._communicator = communicator
        self._marks = torch.zeros(len(params), dtype=torch.uint8, device=params[0].device)
        # A separate queue, ahead of the large transfers; other backends have only one.
        native = self._marks.device.type in communicator.native
        self._queue = {"channel": 1, "priority": 1} if native else {}
        communicator.ensure_channels(2 if native else 1)
        self._work: Work | None = None
        self._carrier: Decoupled | None = None
        self._missing: set[torch.nn.Parameter] = set()
        """Parameters without a gradient on this rank."""
        self._unused: set[torch.nn.Parameter] | None = None
        """None: the marks are not read yet."""

    def start(self, carrier: Decoupled | None = None) -> None:
        """Starts the exchange of marks; a further call replaces this one.

        Args:
            carrier: the last message of the pass, which the caller starts right afterwards.
        """
        if self._work is not None:
            self._work.wait()
            self._work = None
        has = [param.grad is not None for param in self._params]
        pairs = zip(self._params, has, strict=True)
        self._missing = {param for param, present in pairs if not present}
        self._unused = None
        marks, self._carrier = self._marks, None
        if carrier is not None and carrier.marks is not None:
            carrier.await_message()
            marks, self._carrier = carrier.marks.values, carrier
        mark(marks, has)
        if self._carrier is None:
            self._work = self._communicator.all_reduce(marks, op="max", **self._queue)

    def unused(self, params: Iterable[torch.nn.Parameter] | None = None) -> set[torch.nn.Parameter]:
        """Returns the parameters that no rank had a gradient for when `start` was called.

        Args:
            params: the only parameters of interest. If this rank has gradients for all of them,
                the call neither waits for the last message nor reads from the device.
        """
        if self._work is not None:
            self._work.wait()
            self._work = None
        if not self._missing or (params is not None and self._missing.isdisjoint(params)):
            return set()
        if self._unused is None:
            sums = self._marks
            if self._carrier is not None and self._carrier.marks is not None:
                self._carrier.await_reduce()
                sums = self._carrier.marks.sums
            pairs = zip(self._params, sums.tolist(), strict=True)
            self._unused = {param for param, mark in pairs if not mark}
        return self._unused
