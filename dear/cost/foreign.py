"""Measures all-reduces of an engine that sends gradients in place of the communicator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from dear.comm.communicator import Communicator
from dear.cost.collectives import budget_of, timed_by_size
from dear.cost.measurement import Measurement, carried


class Sender(Protocol):
    """The engine: a library's own, or all-reduces that consist of several collectives."""

    name: str
    fusion_bytes: float
    """Tensors that are ready together travel in one buffer up to this size; 0: each by itself."""

    def timed(self, nbytes: int, tensors: int) -> Callable[[], float]:
        """Returns a function that all-reduces `nbytes` in `tensors` equal tensors; on all ranks.

        The tensors are ready together. The function returns the seconds until all of them are
        reduced. Copies into a fused buffer and out of it count; waiting for the first all-reduce to
        begin does not.
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
    """Times all-reduces of such an engine; every rank calls it, and nothing else runs meanwhile.

    Args:
        communicator: of the same ranks.
        sizes: bytes, all tensors together.
        tensors: so many at once.
        budget_s: as of `dear.cost.collectives.measure_collective`.
    """
    unit = 4 * tensors * communicator.size
    free = communicator.burst_bytes / carried("all_reduce", communicator.size)

    def timed_of(nbytes: int) -> Callable[[], float]:
        send = sender.timed(nbytes, tensors)

        def timed() -> float:
            communicator.barrier()
            return send()

        return timed

    done = timed_by_size(
        communicator,
        sorted({-(-size // unit) * unit for size in sizes}),
        timed_of,
        left_s=budget_of(communicator, budget_s),
        free_bytes=free,
    )
    return Measurement(
        operation="all_reduce",
        nbytes=list(done),
        seconds=list(done.values()),
        free_bytes=free,
    )
