"""Blocks of timed steps: a barrier, some untimed steps, and the timed steps.

A step ends when the last rank has finished it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from common.harness.settings import MeasureConfig
from common.harness.worker.timing.stopwatch import Stopwatch
from common.harness.worker.timing.strain import Gauge, Pressure
from dear.comm.communicator import Communicator

MAX_STEPS = 1000
"""Largest number of steps of a block, rounded to whole periods of the algorithm."""
LEAST_PERIODS = 2
FILLING_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Result of `measure_steps`; it is equal on all ranks, except for `bytes_sent`."""

    iters: list[list[float]]
    """Step times by block in seconds, from the end of a step on the last rank to the end of the
    next one."""
    untimed: list[list[float]]
    """Times of the steps before each block; the first one begins at the barrier."""
    marks: list[list[list[float]]]
    """Times by rank and block, in seconds of the rank's clock: the barrier, the ends of untimed
    steps, the start of the first timed step, and the ends of timed steps."""
    bytes_sent: int
    """Payload bytes per step that this rank gave to the communicator."""
    pressure: list[Pressure]
    """Load on the machine, by rank."""
    canary_s: list[float]
    """Times of the canary right before the first block and right after the last."""


def untimed_in_block(staleness: int) -> int:
    """Returns the number of untimed steps after a barrier, for gradients of this age in steps."""
    return FILLING_STEPS + staleness


def in_two(config: MeasureConfig) -> MeasureConfig:
    """Splits a single block into two blocks with half of its steps; keeps several blocks."""
    if config.num_iters > 1:
        return config
    steps = config.steps_per_iter
    return dataclasses.replace(
        config,
        num_iters=2,
        steps_per_iter=None if steps is None else math.ceil(steps / 2),
        min_iter_s=config.min_iter_s / 2,
        min_steps=math.ceil(config.min_steps / 2),
    )


def block_steps(
    config: MeasureConfig, period: int, step_s: float, communicator: Communicator
) -> int:
    """Returns the number of timed steps of a block: at least two whole periods of the algorithm.

    Args:
        step_s: duration of a step on this rank during warm-up.
    """
    wanted = config.steps_per_iter
    if wanted is None:
        wanted = max(config.min_steps, round(config.min_iter_s / max(step_s, 1e-6)))
        wanted = min(wanted, MAX_STEPS)
    # One rank decides, so that all ranks run the same number of collectives.
    return communicator.broadcast_object(max(LEAST_PERIODS, math.ceil(wanted / period)) * period)


def measure_steps(
    step: Callable[[], None],
    communicator: Communicator,
    *,
    blocks: int,
    steps: int,
    untimed: int,
    between: Callable[[int], None] = lambda block: None,
    watch: Stopwatch | None = None,
    gauge: Gauge | None = None,
    canary: Callable[[], float] = lambda: 0.0,
) -> Measured:
    """Runs and times blocks of steps, in real seconds.

    At a barrier, nothing is in flight. So the first step after it does not contain the transfers
    that an algorithm leaves to the next step (DeAR's all-gather, delayed gradients). Therefore some
    untimed steps follow each barrier.

    Args:
        step: trains a step; it need not wait for the device.
        untimed: number of steps after the barrier that are not part of the block.
        between: called with the block's number, before the barrier of each block except the first.
        watch: stopwatch of the device; None: the host's clock.
        canary: waits until nothing is in flight, and returns the canary's time.
    """
    watch, gauge = watch or Stopwatch(), gauge or Gauge()
    marks: list[list[float]] = []
    sent = 0
    before_s = canary()
    for block in range(blocks):
        if block:
            between(block)
        communicator.barrier()
        watch.start()
        watch.mark()
        for _ in range(untimed):
            step()
            watch.mark()
        sent_before = communicator.bytes_sent
        with gauge.block():
            watch.mark()
            for _ in range(steps):
                step()
                watch.mark()
            marks.append(watch.read())
        sent += communicator.bytes_sent - sent_before
    after_s = canary()  # first of all: the machine must be as it was in the blocks
    ranks = communicator.gather_objects((marks, gauge.pressure))
    one_clock = len({pressure.machine for _, pressure in ranks}) == 1
    all_blocks = list(zip(*(rank_marks for rank_marks, _ in ranks), strict=True))
    cut = untimed + 1
    return Measured(
        iters=[steps_of_all([rank[cut:] for rank in block], one_clock) for block in all_blocks],
        untimed=[steps_of_all([rank[:cut] for rank in block], one_clock) for block in all_blocks],
        marks=[rank_marks for rank_marks, _ in ranks],
        bytes_sent=sent // (steps * blocks),
        pressure=[pressure for _, pressure in ranks],
        canary_s=[before_s, after_s],
    )


def steps_of_all(moments: Sequence[Sequence[float]], one_clock: bool) -> list[float]:
    """Returns the times of a block's steps in seconds, of all ranks together.

    A step ends when the last rank ends it. (The sum of each step's slowest time could be longer
    than the block, because another rank may be the slowest in each step.)

    Args:
        moments: start of the block and end of each step, by rank.
        one_clock: True if all ranks read the same clock. Otherwise, times count from each rank's
            own start; if ranks do not start together, the block is a little too long.
    """
    starts = [0.0 if one_clock else times[0] for times in moments]
    since = [[t - start for t in times] for times, start in zip(moments, starts, strict=True)]
    together = [max(times) for times in zip(*since, strict=True)]
    return [after - before for before, after in pairwise(together)]
