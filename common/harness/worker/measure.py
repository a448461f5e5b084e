"""Times training steps.

Steps: a barrier, steps, and for each step when the last rank has done it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from common.emulation.flow import cpu_s
from common.harness.trial import MeasureConfig
from dear.comm.communicator import Communicator

MAX_STEPS = 1000


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Result of `measure_steps`, the same on all ranks."""

    iters: list[list[float]]
    """Step times in seconds, a list per block: from when all ranks had done the step before to when
    all have done this one."""
    bytes_sent: int
    """Payload bytes that this rank handed to the communicator per step."""
    cpu_s: float
    """CPU seconds of all ranks per second of measurement."""
    foreign_cpu_s: float
    """CPU seconds of all other processes of this host per second of measurement."""


def measure_steps(
    step: Callable[[], None], config: MeasureConfig, communicator: Communicator, estimate_s: float
) -> Measured:
    """Runs and times blocks of steps.

    Args:
        step: one training step, which returns when the device has finished it.
        estimate_s: this rank's guess of a step's duration, from the warm-up.

    Seconds are those of this machine's clock, whatever they stand for.
    """
    steps = config.steps_per_iter
    if steps is None:
        # One rank decides, or the ranks would run different numbers of collectives.
        wanted = max(config.min_steps, round(config.min_iter_s / max(estimate_s, 1e-6)))
        steps = communicator.broadcast_object(min(wanted, MAX_STEPS))
    iters = []
    sent = 0
    spent = [0.0, 0.0, 0.0]
    for _ in range(config.num_iters):
        communicator.barrier()
        # Not timed: behind a barrier nothing is under way, so that the step would be spared what
        # an algorithm leaves of one step to the next (DeAR's all-gather).
        step()
        before = communicator.bytes_sent
        usage = Usage()
        marks = [time.perf_counter()]
        for _ in range(steps):
            step()
            marks.append(time.perf_counter())
        spent = [sum(pair) for pair in zip(spent, usage.since(), strict=True)]
        sent += communicator.bytes_sent - before
        iters.append([mark - marks[0] for mark in marks])
    own, busy, elapsed = spent
    ranks = communicator.gather_objects((iters, own))
    used = sum(cpu for _, cpu in ranks)
    return Measured(
        iters=[steps_of_all(blocks) for blocks in zip(*(b for b, _ in ranks), strict=True)],
        bytes_sent=sent // (steps * config.num_iters),
        cpu_s=used / elapsed,
        foreign_cpu_s=max(0.0, busy - used) / elapsed,
    )


def steps_of_all(ends: Sequence[Sequence[float]]) -> list[float]:
    """The steps of a block, of all ranks together.

    Where no step waits for all ranks, now this one is behind, now that one, and is ahead in the
    next step. The slowest of each step would add up to more than any rank needs for the block.

    Args:
        ends: by rank, when its steps ended in seconds since the block began, its begin first.
    """
    together = [max(times) for times in zip(*ends, strict=True)]
    return [after - before for before, after in pairwise(together)]


class Usage:
    """CPU time of this process and of the whole host since construction."""

    def __init__(self) -> None:
        self._began = (*cpu_s()[:2], time.perf_counter())

    def since(self) -> tuple[float, float, float]:
        """CPU seconds of this process, of the host, and elapsed seconds."""
        own, busy, clock = self._began
        now = cpu_s()
        return now[0] - own, now[1] - busy, time.perf_counter() - clock
