"""Times training steps.

Steps: a barrier, steps until all is in flow, timed ones, and for each when the last rank has done
it.
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
"""Of a block, up to whole periods."""
LEAST_PERIODS = 2
FILLING_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Result of `measure_steps`, the same on all ranks but for `bytes_sent`."""

    iters: list[list[float]]
    """Step times in seconds, a list per block: from when all ranks had done the step before to when
    all have done this one."""
    untimed: list[list[float]]
    """The same of the steps before each block, the first from the barrier."""
    marks: list[list[list[float]]]
    """By rank and block, in seconds of that rank's clock: the barrier, the ends of the untimed
    steps, the begin of the first timed step, and the ends of the timed ones."""
    bytes_sent: int
    """Payload bytes that this rank handed to the communicator per step."""
    pressure: list[Pressure]
    """By rank."""
    canary_s: list[float]
    """What a fixed piece of work took right before the first block and right behind the last."""


def untimed_in_block(staleness: int) -> int:
    """Steps after a barrier until a pipeline is full again that reaches over so many steps."""
    return FILLING_STEPS + staleness


def in_two(config: MeasureConfig) -> MeasureConfig:
    """Splits a single block into two of half its steps; a configuration of more blocks stays."""
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
    """Timed steps of a block: whole periods of the algorithm's schedule, two at least.

    Args:
        step_s: this rank's guess of a step's duration, from the warm-up.
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
    absorbed_s: Callable[[], float | None] = lambda: None,
    canary: Callable[[], float] = lambda: 0.0,
    links_pid: int | None = None,
) -> Measured:
    """Runs and times blocks of steps. Seconds are those of this machine, whatever they stand for.

    Behind a barrier nothing is under way, so that the first step is spared what an algorithm leaves
    of one step to the next: DeAR's all-gather, or with delayed gradients the waiting for several
    steps. A few untimed steps fill the pipeline again.

    Args:
        step: one training step, which need not wait for the device.
        untimed: steps after the barrier that are no part of the block.
        between: called before the barrier of each block but the first with the block's number; what
            it does is not timed.
        watch: for the device; None: the host's clock.
        absorbed_s: of the rank so far, as `Training.absorbed_s`.
        canary: lets all that is under way end, does the fixed work, and returns its seconds.
        links_pid: as of `Gauge`.
    """
    watch, gauge = watch or Stopwatch(), Gauge(links_pid)
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
        before, absorbed_before_s = communicator.bytes_sent, absorbed_s()
        with gauge.block():
            watch.mark()
            for _ in range(steps):
                step()
                watch.mark()
            marks.append(watch.read())
        sent += communicator.bytes_sent - before
        if absorbed_before_s is not None:
            gained_s = absorbed_s() - absorbed_before_s
            gauge.found.absorbed_s = (gauge.found.absorbed_s or 0.0) + gained_s
    after_s = canary()  # before anything else: the machine is to be what it was in the blocks
    ranks = communicator.gather_objects((marks, gauge.found))
    one_clock = len({pressure.machine for _, pressure in ranks}) == 1

    def of_all(chosen: slice) -> list[list[float]]:
        blocks = zip(*(found for found, _ in ranks), strict=True)
        return [steps_of_all([rank[chosen] for rank in block], one_clock) for block in blocks]

    timed = slice(untimed + 1, None)
    return Measured(
        iters=of_all(timed),
        untimed=of_all(slice(untimed + 1)),
        marks=[found for found, _ in ranks],
        bytes_sent=sent // (steps * blocks),
        pressure=[pressure for _, pressure in ranks],
        canary_s=[before_s, after_s],
    )


def steps_of_all(moments: Sequence[Sequence[float]], one_clock: bool) -> list[float]:
    """The steps of a block in seconds, of all ranks together.

    Where no step waits for all ranks, now this one is behind, now that one, and is ahead in the
    next step. The slowest of each step would add up to more than any rank needs for the block.

    Args:
        moments: by rank, when the block began and when each of its steps ended.
        one_clock: the ranks read the same clock. Otherwise each counts from its own begin, and the
            block of ranks that are not in phase is a little too long.
    """
    starts = [0.0 if one_clock else times[0] for times in moments]
    since = [[t - start for t in times] for times, start in zip(moments, starts, strict=True)]
    together = [max(times) for times in zip(*since, strict=True)]
    return [after - before for before, after in pairwise(together)]
