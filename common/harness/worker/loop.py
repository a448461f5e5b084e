"""Who ends when: training for a time or for epochs, in step or at each rank's own pace.

Each rank trains at its own pace, or all in step until rank 0 says that it is over. Ranks in step
must all end at the same step and copy their parameters at the same ones. A word from rank 0 in
every step would be a collective in every step: instead it says after how many steps it speaks
next, from how long the last ones took, so that this is about when the next copy is due.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from dear.comm.communicator import Communicator
from dear.training.pace import Pace, run_for

Take = Callable[[range, float, int], None]
"""Copies the parameters for the marks of these numbers: at so many seconds, after so many steps."""


@dataclass(frozen=True, kw_only=True)
class Loop:
    """What all kinds of training need.

    Attributes:
        step: one step; returns its number of samples.
        settle: called before copies of ranks in step; nothing is in flight afterwards.
        take: makes copies, with the clock standing still.
        schedule: when copies are due, in seconds of `clock` or in epochs; the last mark is the end.
    """

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
        pace = run_for(self.schedule.end, step, self.communicator, self.clock.now)
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
        while now_s < self.schedule.end:
            for _ in range(block):
                samples += self.step()
            steps += block
            self.settle()
            self.communicator.barrier()  # a rank that is behind takes its time on the clock
            with self.clock.stopped():
                step_s = (self.clock.now() - block_began_s) / block
                # Not much more at once than there were: the first steps tell little.
                said = self.clock.now(), self._next_block(step_s, most=2 * steps)
                now_s, block = self.communicator.broadcast_object(said)
                self._copy(now_s, steps)
                self.communicator.barrier()
            block_began_s = self.clock.now()
        return Pace(steps=steps, samples=samples, elapsed_s=now_s)

    def for_epochs(self, steps_per_epoch: int, *, own_pace: bool) -> Pace:
        """All ranks make the same steps, and copy after the same ones, each on its own clock."""
        samples = 0
        self.communicator.barrier()
        self.clock.start()
        self._copy(0.0, 0, at=0)
        for epoch in range(1, int(self.schedule.end) + 1):
            for _ in range(steps_per_epoch):
                samples += self.step()
            if not own_pace:
                self.settle()
                self.communicator.barrier()
            self._copy(self.clock.now(), epoch * steps_per_epoch, at=epoch)
        steps = int(self.schedule.end) * steps_per_epoch
        return Pace(steps=steps, samples=samples, elapsed_s=self.clock.now())

    def _copy(self, now_s: float, steps: int, at: float | None = None) -> None:
        passed = self.schedule.passed(now_s if at is None else at)
        if passed:
            with self.clock.stopped():
                self.take(passed, now_s, steps)

    def _next_block(self, step_s: float, most: int) -> int:
        now_s = self.clock.now()
        due_s = self.schedule.next_after(now_s)
        if due_s is None:
            return 0
        return max(1, min(most, math.ceil((due_s - now_s) / step_s)))


class TrainingClock:
    """Seconds of training since `start`, without those in which it is `stopped`.

    Args:
        clock: seconds of this machine.
        time_scale: of them per second of training.
    """

    def __init__(self, clock: Callable[[], float], time_scale: float) -> None:
        self._clock = clock
        self._time_scale = time_scale
        self._began = 0.0
        self._stopped_at: float | None = None

    def start(self) -> None:
        """Training begins now, at 0."""
        self._began = self._clock()

    def now(self) -> float:
        at = self._clock() if self._stopped_at is None else self._stopped_at
        return (at - self._began) / self._time_scale

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """It stands still meanwhile; within another such block it does so already."""
        if self._stopped_at is not None:
            yield
            return
        self._stopped_at = self._clock()
        yield
        self._began += self._clock() - self._stopped_at
        self._stopped_at = None


class Schedule:
    """Marks on the way, each of which is passed once.

    Args:
        marks: seconds of training, or epochs; ascending.
    """

    def __init__(self, marks: Sequence[float]) -> None:
        self._marks = marks
        self._passed = 0

    @property
    def end(self) -> float:
        """The last mark."""
        return self._marks[-1]

    def next_after(self, now: float) -> float | None:
        """The first mark after `now`, None if there is none."""
        return next((mark for mark in self._marks[self._passed :] if mark > now), None)

    def passed(self, now: float) -> range:
        """The numbers of the marks that are passed by `now` and were not before."""
        first = self._passed
        while self._passed < len(self._marks) and self._marks[self._passed] <= now:
            self._passed += 1
        return range(first, self._passed)
