"""How long a step computes: forward, backward and update without communication between them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from common.models.workload import Workload
from dear.comm.communicator import Communicator
from dear.cost.bounds import StepTimes, compute_limit_s

LEAST, ENOUGH, ENOUGH_S = 2, 3, 1.0
"""Timed steps beyond the first, at least; and enough of them, in number or in seconds of this
machine."""
SHORT, SHORT_S = 20, 0.3
"""More where they are short, and the first few tell little of the rest: up to so many, within so
many seconds."""


def timed_step(
    workload: Workload,
    optimizer: torch.optim.Optimizer,
    average: Callable[[], None] = lambda: None,
) -> StepTimes:
    """One plain training step; what it takes on this rank, in seconds of this machine.

    Args:
        average: run between the backward pass and the update; its time is left out.
    """
    began = time.perf_counter()
    optimizer.zero_grad()
    loss = workload.loss()
    forward = _done(loss.device)
    loss.backward()
    backward = _done(loss.device)
    average()
    resumed = _done(loss.device)
    optimizer.step()
    return StepTimes(
        forward_s=forward - began,
        backward_s=backward - forward,
        update_s=_done(loss.device) - resumed,
    )


def slowest_rank(
    workload: Workload,
    optimizer: torch.optim.Optimizer,
    communicator: Communicator,
    steps: Sequence[StepTimes],
) -> StepTimes:
    """The medians of the rank that computes longest, with all ranks at work at once.

    Trains on without averaging until there are enough steps: parameters, optimizer state, gradients
    and random state are the caller's to restore.

    Args:
        steps: those that this rank has timed before; the first, which touches much memory for the
            first time, does not count.
    """
    counted = list(steps[1:])
    # One rank decides, or some would compute while others rest.
    while communicator.broadcast_object(_too_few(counted)):
        communicator.barrier()
        counted.append(timed_step(workload, optimizer))
    own = StepTimes(
        **{
            # Of two the lower: what disturbs only adds.
            name: statistics.median_low(getattr(step, name) for step in counted)
            for name in ("forward_s", "backward_s", "update_s")
        }
    )
    return max(communicator.gather_objects(own), key=compute_limit_s)


def _too_few(counted: Sequence[StepTimes]) -> bool:
    spent = sum(compute_limit_s(step) for step in counted)
    if len(counted) < ENOUGH:
        return len(counted) < LEAST or spent < ENOUGH_S
    return len(counted) < SHORT and spent < SHORT_S


def _done(device: torch.device) -> float:
    """The time when the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
