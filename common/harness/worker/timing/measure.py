"""Blocks of timed steps: a barrier, steps until all is in flow, and timed steps.

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
"""Most steps of a block, up to whole periods."""
LEAST_PERIODS = 2
FILLING_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Result of `measure_steps`; all ranks have the same, except for `bytes_sent`."""

    iters: list[list[float]]
    """Step times by block in seconds, from the end of a step on the last rank to the end of the
    next one."""
    untimed: list[list[float]]
    """Times of the steps before each block; the first one begins at the barrier."""
    marks: list[list[list[float]]]
    """Moments by rank and block, in seconds of the rank's clock: the barrier, the ends of untimed
    steps, the begin of the first timed step, and the ends of timed steps."""
    bytes_sent: int
    """Payload bytes per step that this rank handed to the communicator."""
    pressure: list[Pressure]
    """Pressure by rank."""
    canary_s: list[float]
    """Times of the canary right before the first block and right after the last."""


def untimed_in_block(staleness: int) -> int:
    """Returns the number of steps after a barrier that fill a pipeline of such staleness."""
    return FILLING_STEPS + staleness


def in_two(config: MeasureConfig) -> MeasureConfig:
    """Splits a single block into two of half its steps; several blocks stay as they are."""
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
    """Returns the number of timed steps of a block: whole periods of the algorithm, two at least.

    Args:
        step_s: duration of a step on this rank during warm-up.
    """
    wanted = config.steps_per_iter
    if wanted is None:
        wanted = max(config.min_steps, round(config.min_iter_s / max(step_s, 1e-6)))
        wanted = min(wanted, MAX_STEPS)
    # One rank decides, or the ranks would run different numbers of collectives.
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
    """Runs and times blocks of steps, in seconds of this machine.

    A barrier empties the pipeline. The first step after it is spared the transfers that an
    algorithm leaves to the next step (DeAR's all-gather, delayed gradients). So some untimed steps
    follow each barrier.

    Args:
        step: trains a step; need not wait for the device.
        untimed: number of steps after the barrier that are not part of the block.
        between: called with the block's number before the barrier of each block but the first.
        watch: stopwatch of the device; None: the host's clock.
        canary: waits until nothing is under way, and returns the canary's time.
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
    """Returns the times of a block's steps, of all ranks together, in seconds.

    Ranks that do not wait for each other take turns at being behind. The slowest time of each step
    would add up to more than any rank needs for the block.

    Args:
        moments: by rank, the begin of the block and the end of each step.
        one_clock: the ranks read the same clock. Otherwise each counts from its own begin, and the
            block of ranks that are not in phase is a little too long.
    """
    starts = [0.0 if one_clock else times[0] for times in moments]
    since = [[t - start for t in times] for times, start in zip(moments, starts, strict=True)]
    together = [max(times) for times in zip(*since, strict=True)]
    return [after - before for before, after in pairwise(together)]
