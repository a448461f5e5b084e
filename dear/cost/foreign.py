"""Measures the all-reduces of an engine that sends gradients in place of the communicator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from dear.comm.communicator import Communicator
from dear.cost.collectives import budget_of, leading, timed_by_size
from dear.cost.measurement import Measurement, carried


class Sender(Protocol):
    """Engine with its own all-reduce, e.g. of another library."""

    name: str
    fusion_bytes: float
    """Largest buffer in bytes for tensors that are ready together; 0: each tensor travels alone."""

    def timed(self, nbytes: int, tensors: int) -> Callable[[], float]:
        """Returns a function that all-reduces `nbytes` in `tensors` equal tensors, on all ranks.

        The tensors are ready together. The function returns the seconds until all of them are
        reduced. This includes copies into a fused buffer and out of it, but not the wait for the
        first all-reduce to begin.
        """
        ...


def measure_sender(
    communicator: Communicator,
    sender: Sender,
    *,
    sizes: Sequence[int],
    tensors: int,
    budget_s: float,
) -> Measurement:
    """Times all-reduces of a `Sender`; every rank calls it, and nothing else runs meanwhile.

    Args:
        communicator: group of the same ranks.
        sizes: bytes of all tensors together.
        tensors: number of tensors that are ready at once.
        budget_s: as for `dear.cost.collectives.measure_collective`.
    """
    unit = 4 * tensors * communicator.size
    free = communicator.burst_bytes / carried("all_reduce", communicator.size)
    lead = leading(communicator)

    def timed_of(nbytes: int) -> Callable[[], float]:
        send = sender.timed(nbytes, tensors)

        def timed() -> float:
            lead.before(send)
            return send()

        return timed

    seconds = timed_by_size(
        communicator,
        sorted({-(-size // unit) * unit for size in sizes}),
        timed_of,
        left_s=budget_of(communicator, budget_s),
        of_ranks=lead.of_ranks,
        free_bytes=free,
    )
    return Measurement(
        operation="all_reduce",
        nbytes=list(seconds),
        seconds=list(seconds.values()),
        free_bytes=free,
    )
