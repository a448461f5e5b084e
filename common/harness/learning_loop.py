"""Training for a time: each rank at its own pace, or all in step until rank 0 says that it is over.

Ranks in step must all end at the same step and copy their parameters at the same ones. A word from
rank 0 in every step would be a collective in every step: instead it says after how many steps it
speaks next, from how long the last ones took, so that this is about when the next copy is due.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from common.harness.learning_clock import Schedule, TrainingClock
from dear.comm.communicator import Communicator
from dear.pace import Pace, run_for

Take = Callable[[range, float, int], None]
"""Copies the parameters for the marks of these numbers: at so many seconds, after so many steps."""


@dataclass(frozen=True, kw_only=True)
class Loop:
    """What both kinds of training for a time need.

    Attributes:
        budget_s: seconds of training, on `clock`.
        step: one step; returns its number of samples.
        settle: called before copies of ranks in step; nothing is in flight afterwards.
        take: makes copies, with the clock standing still.
        schedule: when copies are due; its last mark is `budget_s`.
    """

    budget_s: float
    step: Callable[[], int]
    settle: Callable[[], None]
    take: Take
    schedule: Schedule
    clock: TrainingClock
    communicator: Communicator

    def own_pace(self) -> Pace:
        """Ranks make different numbers of steps, and copy when it is time on their own clock."""
        steps = 0

        def step() -> int:
            nonlocal steps
            samples = self.step()
            steps += 1
            self._copy(self.clock.now(), steps)
            return samples

        self.communicator.barrier()
        self.clock.start()
        self._copy(0.0, 0)
        pace = run_for(self.budget_s, step, self.communicator, self.clock.now)
        # Where the time has run out between the look at the clock in `step` and the last one.
        self._copy(self.clock.now(), steps)
        return pace

    def in_step(self) -> Pace:
        """The clock is rank 0's. What is in flight when copies are made is waited for in time."""
        steps = samples = 0
        block, block_began_s = 1, 0.0
        self.communicator.barrier()
        self.clock.start()
        now_s = 0.0
        self._copy(now_s, steps)
        while now_s < self.budget_s:
            for _ in range(block):
                samples += self.step()
            steps += block
            self.settle()
            self.communicator.barrier()  # a rank that is behind takes its time on the clock
            self.clock.pause()
            step_s = (self.clock.now() - block_began_s) / block
            # Not much more at once than there were: the first steps tell little.
            said = self.clock.now(), self._next_block(step_s, most=2 * steps)
            now_s, block = self.communicator.broadcast_object(said)
            self._copy(now_s, steps)
            self.communicator.barrier()
            self.clock.resume()
            block_began_s = self.clock.now()
        return Pace(steps=steps, samples=samples, elapsed_s=now_s)

    def _copy(self, now_s: float, steps: int) -> None:
        passed = self.schedule.passed(now_s)
        if not passed:
            return
        paused = self.clock.paused
        if not paused:
            self.clock.pause()
        self.take(passed, now_s, steps)
        if not paused:
            self.clock.resume()

    def _next_block(self, step_s: float, most: int) -> int:
        now_s = self.clock.now()
        due_s = self.schedule.next_after(now_s)
        if due_s is None:
            return 0
        return max(1, min(most, math.ceil((due_s - now_s) / step_s)))
