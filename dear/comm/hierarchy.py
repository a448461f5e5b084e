"""All-reduce in three legs, for ranks in blocks that are nearer to each other than to the rest."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from dear.comm.communicator import (
    Communicator,
    Op,
    SubCommunicator,
    Work,
    flat_view,
    sub_communicators,
)
from dear.errors import UserError
from dear.lazy import torch

Ranks = list[range]


def blocks_of(size: int, local_size: int, what: str = "blocks") -> tuple[Ranks, Ranks]:
    """Blocks of `local_size` neighbours, and the ranks of each place in all blocks.

    Args:
        what: blocks are called in the error.

    Raises:
        UserError: `size` is no multiple of `local_size`.
    """
    if local_size < 1 or size % local_size:
        raise UserError(
            f"hierarchical averaging: {size} ranks are no whole number of {what} of "
            f"{local_size} ranks each"
        )
    blocks = [range(first, first + local_size) for first in range(0, size, local_size)]
    return blocks, [range(place, size, local_size) for place in range(local_size)]


def in_blocks(communicator: Communicator, local_size: int) -> Communicator:
    """What averages between blocks of neighbours: a `Hierarchy`, or `communicator` where there is
    one block, or each has one rank.

    A collective call.

    Args:
        local_size: ranks per block; ranks r and r + 1 are in one, but where a block is full.

    Raises:
        UserError: the world is no multiple of `local_size`.
    """
    blocks, places = blocks_of(communicator.size, local_size)
    return communicator if 1 in (len(blocks), len(places)) else Hierarchy(communicator, local_size)


class Hierarchy(SubCommunicator):
    """A communicator of all ranks of another; its all-reduces go in three legs.

    A reduce-scatter leaves each rank of a block its share of the block's sum; the ranks of one
    place in all B blocks all-reduce their shares; an all-gather in the block completes them (Mikami
    et al. 2018, arXiv 1811.05233). So 2 (B-1)/B of a buffer passes each way between a block and the
    others, where a ring of all P ranks takes 2 (P-1)/P there; and the start-ups of a far network
    are those of B ranks, not of P.

    Legs of one kind start in the order of the calls, each when the one before it of its own tensor
    has ended: the legs of several tensors go side by side. Made by `in_blocks`.
    """

    def __init__(self, parent: Communicator, local_size: int) -> None:
        super().__init__(parent, parent.groups[0])
        self.local_size = local_size
        blocks, places = blocks_of(self.size, local_size)
        # Each leg has groups of its own, since each is started by another thread.
        self._legs = [
            next(iter(sub_communicators(parent, ranks).values()))
            for ranks in (blocks, places, blocks)
        ]
        self._threads = [ThreadPoolExecutor(1, thread_name_prefix="dear leg") for _ in range(2)]
        self._aside: torch.cuda.Stream | None = None

    def all_reduce(
        self, tensor: torch.Tensor, *, op: Op, channel: int = 0, priority: int = 0
    ) -> ThreeLegs:
        """As any other's, in place; of as many elements as a multiple of `local_size`."""
        self._queue(channel, priority)
        if tensor.numel() % self.local_size:
            raise UserError(
                f"hierarchical averaging: {tensor.numel()} elements cannot be shared by the "
                f"{self.local_size} ranks of a block"
            )
        whole = self._summand(flat_view(tensor), op)
        share = whole.new_empty(whole.numel() // self.local_size)
        how: Op = "sum" if op == "mean" else op  # divided already, by the number of all ranks
        begin, between, end = self._legs

        def first() -> Work:
            return begin.reduce_scatter(share, whole, op=how)

        def second(before: Work) -> Work:
            before.join()
            return between.all_reduce(share, op=how)

        def third(before: Work) -> Work:
            before.join()
            return end.all_gather(whole, share)

        if tensor.is_cuda:
            return self._on_stream(whole, share, lambda: third(second(first())))
        started = first()
        across = self._threads[0].submit(second, started)
        last = self._threads[1].submit(lambda: third(across.result()))
        return ThreeLegs(self._parent, last, whole.nbytes)

    def _on_stream(
        self, whole: torch.Tensor, share: torch.Tensor, run: Callable[[], Work]
    ) -> ThreeLegs:
        """All legs are queued on a stream of their own at once, so that no other waits for them."""
        if self._aside is None:
            self._aside = torch.cuda.Stream(whole.device)
        self._aside.wait_stream(torch.cuda.current_stream(whole.device))
        last: Future[Work] = Future()
        with torch.cuda.stream(self._aside):
            last.set_result(run())
        for tensor in (whole, share):
            tensor.record_stream(self._aside)
        return ThreeLegs(self._parent, last, whole.nbytes)

    def close(self) -> None:
        """Waits for what is under way and lets go of the process groups of the blocks."""
        for thread in self._threads:
            thread.shutdown(wait=True)
        for leg in self._legs:
            leg.close()
        self.groups.clear()  # the parent's, which stays


class ThreeLegs:
    """An all-reduce of a `Hierarchy` under way; as `Work`."""

    def __init__(self, communicator: Communicator, last: Future[Work], nbytes: int) -> None:
        self._communicator = communicator
        self._last = last
        """Ends when the third leg starts."""
        self.nbytes = nbytes

    def wait(self) -> None:
        """Blocks until the result may be used (on CUDA: by the current stream).

        Raises RuntimeError if a peer died, disagreed, or did not answer in the time of the group.
        """
        began = self._communicator.clock()
        self._last.result().join()
        self._communicator.held_up(began)

    def done(self) -> bool:
        """True once the last leg has ended; never blocks."""
        return self._last.done() and self._last.result().done()
