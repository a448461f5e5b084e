"""An all-reduce in two halves: reduce to owners, later gather from them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from dear.buckets.flat import Bucket
from dear.comm.communicator import buffer
from dear.lazy import torch

if TYPE_CHECKING:
    from dear.comm.communicator import Communicator, Work


class Decoupled(ABC):
    """The two halves for one group (`dear.buckets.gathered` has those that no sum can add up).

    Args:
        wire: the type in which gradients travel; None means their own. Half precision with a small
            range (fp16) is scaled before the sum, which needs a copy; so does another `wire` type.
        skip: leave the first half out and take this rank's own gradients: wrong on purpose.
    """

    def __init__(
        self,
        group: Bucket,
        communicator: Communicator,
        *,
        wire: torch.dtype | None = None,
        skip: bool = False,
    ) -> None:
        self.group = group
        self._communicator = communicator
        self._skip = skip
        self._reducing: Work | None = None
        self._sum: torch.Tensor | None = None
        self._gathering: tuple[Work, torch.Tensor, torch.Tensor] | None = None
        whole = group.gradients
        narrow = wire or (torch.float16 if whole.dtype == torch.float16 else None)
        if narrow is None or whole.is_complex() or communicator.size == 1:
            self._staged = None
        else:
            like = whole.new_empty(0, dtype=narrow)
            self._staged = buffer(like, whole.numel(), communicator)
        self._alone = communicator.size == 1 or not whole.numel()
        self.owned = self.owned_by(communicator.rank)
        """The part of the group whose mean this rank gets."""
        self.shard = whole if self._alone else whole.new_zeros(self.owned.stop - self.owned.start)
        """The mean gradient of that part, after `finish_reduce`."""

    @abstractmethod
    def owned_by(self, rank: int) -> slice:
        """The part of the group that belongs to `rank`."""

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
        if self._alone or self._skip:
            return
        self.await_reduce()
        source = self.group.gradients
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
        if self._skip and not self._alone:
            self.shard.copy_(self.group.gradients[self.owned])
        if self._reducing is None:
            return
        self._reducing.wait()
        self._reducing = None
        total = self._sum[: self.shard.numel()]
        if self._staged is not None:
            self.shard.copy_(total)
        else:
            torch.div(total, self._communicator.size, out=self.shard)

    def start_gather(self, whole: torch.Tensor) -> None:
        """Starts to bring every owner's part of `whole` to all ranks, in place."""
        if not self._alone:
            self._gathering = (self._gather(whole), whole, whole)

    def start_gather_mean(self, whole: torch.Tensor) -> None:
        """Starts to bring the whole mean gradient to all ranks, in `whole`."""
        if not self._alone:
            source = whole if self._staged is None else self._staged
            source[self.owned].copy_(self.shard)
            self._gathering = (self._gather(source), source, whole)
        elif whole is not self.shard:
            whole.copy_(self.shard)

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
        count = self.group.gradients.numel() // self._communicator.size
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
    """Reduce to one rank and broadcast from it; groups take turns in who that is.

    The sum is made in a copy, since a reduction may use every rank's buffer as scratch.
    """

    def __init__(self, group: Bucket, *args: Any, owner: int, **options: Any) -> None:
        self._owner = owner
        super().__init__(group, *args, **options)

    def owned_by(self, rank: int) -> slice:
        return slice(0, self.group.gradients.numel() if rank == self._owner else 0)

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


class AllReduced(Decoupled):
    """For a few bytes: one message instead of two.

    The first half is the whole all-reduce, so every rank owns the whole group and makes the same
    update; the second half moves nothing.

    Args:
        marks: numbers of the caller's own that are added up with the gradients.
    """

    def __init__(
        self, group: Bucket, communicator: Communicator, *, marks: int = 0, **options: Any
    ) -> None:
        super().__init__(group, communicator, **options)
        like = group.gradients if self._staged is None else self._staged
        count = group.gradients.numel()
        self._message = buffer(like, count + marks, communicator)
        self._sum = self._message[:count]
        if self._staged is not None:
            self._staged = self._sum
        self.marks = self._message[count:]
        """Written before `start_reduce`, their sums are here after `await_reduce`."""

    def owned_by(self, rank: int) -> slice:
        return slice(0, self.group.gradients.numel())

    def _reduce(self, whole: torch.Tensor) -> Work:
        if self._staged is None:
            self._sum.copy_(whole)
        return self._communicator.all_reduce(self._message, op="sum")

    def _gather(self, whole: torch.Tensor) -> Work:
        raise RuntimeError("every rank has the whole group after the first half")

    def start_gather(self, whole: torch.Tensor) -> None:
        return

    def start_gather_mean(self, whole: torch.Tensor) -> None:
        if whole is not self.shard:
            whole.copy_(self.shard)
