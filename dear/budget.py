"""Runs that end after a time instead of a number of steps, each rank at its own pace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dear.options import positive

if TYPE_CHECKING:
    from dear.communicator import Communicator


@dataclass(frozen=True, kw_only=True)
class Pace:
    """What one rank did in its time."""

    steps: int
    samples: int
    elapsed_s: float
    """To the end of the last step."""


def run_for(
    budget_s: float,
    step: Callable[[], int],
    communicator: Communicator,
    clock: Callable[[], float] | None = None,
) -> Pace:
    """Calls `step`, which returns its number of samples, until the time is over; at least once.

    Ranks start together (a barrier) and make different numbers of steps, so the steps must wait for
    no other rank: that is for asynchronous algorithms. Afterwards `optimizer.close()` waits for
    those that are still in their last step.

    Args:
        clock: what counts as time, in seconds; None: the communicator's.

    Raises:
        UserError: no time.
    """
    positive("budget_s", budget_s)
    clock = clock or communicator.clock
    communicator.barrier()
    began = clock()
    steps = samples = 0
    elapsed_s = 0.0
    while elapsed_s < budget_s:
        samples += step()
        steps += 1
        elapsed_s = clock() - began
    return Pace(steps=steps, samples=samples, elapsed_s=elapsed_s)


def paces(own: Pace, communicator: Communicator) -> list[Pace]:
    """What all ranks did, in the order of their numbers; a collective call."""
    return communicator.gather_objects(own)
