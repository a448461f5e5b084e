"""All-reduce in three phases, for blocks of ranks that are close to each other."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from dear.comm.communicator import (
    Communicator,
    Op,
    SubCommunicator,
    flat_view,
    sub_communicators,
)
from dear.comm.work import Work
from dear.errors import UserError
from dear.lazy import torch

Ranks = list[range]


def blocks_of(size: int, local_size: int, what: str = "blocks") -> tuple[Ranks, Ranks]:
    """Returns the blocks of `local_size` neighbours, and the ranks with each local rank.

    Args:
        what: name of the blocks for the error message.

    Raises:
        UserError: `size` is not a multiple of `local_size`.
    """
    if local_size < 1 or size % local_size:
        raise UserError(
            f"hierarchical averaging: {size} ranks cannot be split into {what} of {local_size} "
            "ranks each"
        )
    blocks = [range(first, first + local_size) for first in range(0, size, local_size)]
    return blocks, [range(place, size, local_size) for place in range(local_size)]


def in_blocks(communicator: Communicator, local_size: int) -> Communicator:
    """Returns a `Hierarchy` over blocks of neighbours, or `communicator` itself if there is a
    single block or each block has one rank. Collective.

    Args:
        local_size: ranks per block; block b holds ranks b * local_size to (b+1) * local_size - 1.

    Raises:
        UserError: the world size is not a multiple of `local_size`.
    """
    blocks, places = blocks_of(communicator.size, local_size)
    return communicator if 1 in (len(blocks), len(places)) else Hierarchy(communicator, local_size)


class Hierarchy(SubCommunicator):
    """Communicator of all ranks of a parent, with all-reduces in three phases; see `in_blocks`.

    First, a reduce-scatter leaves each rank of a block with its share of the block's sum. Second,
    the ranks with the same local rank in all B blocks all-reduce their shares. Third, an all-gather
    in the block completes the result (Mikami et al. 2018, arXiv 1811.05233). So 2 (B-1)/B of a
    buffer passes each way between a block and the others; with a ring of all P ranks it is 2
    (P-1)/P. A start-up on the network between blocks involves B ranks, not P.

    Phases of the same number start in the order of the calls. Each phase starts when the previous
    phase of its tensor has ended, so the phases of different tensors overlap.
    """

    def __init__(self, parent: Communicator, local_size: int) -> None:
        super().__init__(parent, parent.groups[0])
        self.local_size = local_size
        blocks, places = blocks_of(self.size, local_size)
        # Each phase has its own groups, since another thread starts it.
        self._legs = [
            next(iter(sub_communicators(parent, ranks).values()))
            for ranks in (blocks, places, blocks)
        ]
        self._threads = [parent.worker("dear leg") for _ in range(2)]
        self._aside: torch.cuda.Stream | None = None

    def all_reduce(  # type: ignore[override]  # has all of a `Work` that callers use
        self, tensor: torch.Tensor, *, op: Op, channel: int = 0, priority: int = 0
    ) -> ThreeLegs:
        """Reduces `tensor` in place; its number of elements must be a multiple of `local_size`."""
        self._queue(channel, priority, tensor)
        if tensor.numel() % self.local_size:
            raise UserError(
                f"hierarchical averaging: the {self.local_size} ranks of a block cannot share "
                f"{tensor.numel()} elements equally"
            )
        whole = self._summand(flat_view(tensor), op)
        share = whole.new_empty(whole.numel() // self.local_size)
        part_op: Op = "sum" if op == "mean" else op  # `_summand` has divided by the number of ranks
        begin, between, end = self._legs

        def first() -> Work:
            return begin.reduce_scatter(share, whole, op=part_op)

        def second(before: Work) -> Work:
            before.join()
            return between.all_reduce(share, op=part_op)

        def third(before: Work) -> Work:
            before.join()
            return end.all_gather(whole, share)

        if tensor.is_cuda:
            return self._on_stream(whole, share, lambda: third(second(first())))
        started = first()
        second_work = self._threads[0].submit(second, started)
        last = self._threads[1].submit(lambda: third(second_work.result()))
        return ThreeLegs(self._parent, last, whole.nbytes)

    def _on_stream(
        self, whole: torch.Tensor, share: torch.Tensor, run: Callable[[], Work]
    ) -> ThreeLegs:
        """Queues all phases on a separate stream, so that other streams need not wait for them."""
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
        """Waits for all pending transfers, and destroys the process groups of the blocks."""
        for thread in self._threads:
            thread.shutdown(wait=True)
        for leg in self._legs:
            leg.close()
        self.groups.clear()  # the parent's groups remain


class ThreeLegs:
    """All-reduce of a `Hierarchy` that has started; it has the methods of `Work`."""

    def __init__(self, communicator: Communicator, last: Future[Work], nbytes: int) -> None:
        self._communicator = communicator
        self._last = last
        """Completes when the third phase starts."""
        self.nbytes = nbytes

    def wait(self) -> None:
        """Blocks until the result may be used (on CUDA: by the current stream).

        Raises RuntimeError if a peer died, made another call, or exceeded the group's timeout.
        """
        began_s = self._communicator.clock()
        self._last.result().join()
        self._communicator.held_up(began_s)

    def done(self) -> bool:
        """Returns True once the last phase has ended; never blocks."""
        return self._last.done() and self._last.result().done()
