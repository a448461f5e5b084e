"""Loops that train for a time or for epochs, with ranks in step or at their own pace.

Ranks in step must all end at the same step and copy their parameters at the same steps. Rank 0
decides. A decision in every step would be a collective in every step, so rank 0 announces the
number of steps until its next decision, which is about when the next copy is due.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from dear.comm.communicator import Communicator
from dear.training.pace import Pace, run_for


@dataclass(frozen=True, kw_only=True)
class Loop:
    """Functions and clock that all loops need."""

    step: Callable[[], int]
    """Trains a step; returns its number of samples."""
    settle: Callable[[], None]
    """Called before copies of ranks in step; nothing is in flight afterwards."""
    take: Callable[[range, float, int], None]
    """Copies the parameters, with the clock stopped: for marks by index, at a time, after steps."""
    schedule: Schedule
    """Marks at which copies are due, in seconds of `clock` or in epochs; the last is the end."""
    clock: TrainingClock
    communicator: Communicator

    def own_pace(self) -> Pace:
        """Trains for a time; each rank makes its own number of steps, by its own clock."""
        steps = 0

        def step() -> int:
            nonlocal steps
            samples = self.step()
            steps += 1
            self._copy(self.clock.now(), steps)
            return samples

        self._start()
        pace = run_for(self.schedule.end, step, self.communicator, self.clock.now)
        # The time may end after the last look at the clock in `step`.
        self._copy(self.clock.now(), steps)
        return pace

    def in_step(self) -> Pace:
        """Trains for a time by rank 0's clock. Waits for transfers before a copy count as time."""
        steps = samples = 0
        block, block_began_s, now_s = 1, 0.0, 0.0
        self._start()
        while now_s < self.schedule.end:
            for _ in range(block):
                samples += self.step()
            steps += block
            self.settle()
            self.communicator.barrier()  # ranks that are behind take their time on the clock
            with self.clock.stopped():
                step_s = (self.clock.now() - block_began_s) / block
                # The first steps are not typical, so a block at most triples their number.
                decision = self.clock.now(), self._next_block(step_s, most=2 * steps)
                now_s, block = self.communicator.broadcast_object(decision)
                self._copy(now_s, steps)
                self.communicator.barrier()
            block_began_s = self.clock.now()
        return Pace(steps=steps, samples=samples, elapsed_s=now_s)

    def for_epochs(self, steps_per_epoch: int, *, own_pace: bool) -> Pace:
        """Trains for epochs: all ranks copy after the same steps, each by its own clock."""
        samples, epochs = 0, int(self.schedule.end)
        self._start()
        for epoch in range(1, epochs + 1):
            for _ in range(steps_per_epoch):
                samples += self.step()
            if not own_pace:
                self.settle()
                self.communicator.barrier()
            self._copy(self.clock.now(), epoch * steps_per_epoch, at=epoch)
        return Pace(steps=epochs * steps_per_epoch, samples=samples, elapsed_s=self.clock.now())

    def _start(self) -> None:
        self.communicator.barrier()
        self.clock.start()
        self._copy(0.0, 0)

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
    """Seconds of training since `start`, without those in which the clock is stopped.

    Args:
        clock: seconds of this machine.
        time_scale: seconds of this machine per second of training.
    """

    def __init__(self, clock: Callable[[], float], time_scale: float) -> None:
        self._clock, self._time_scale = clock, time_scale
        self._began = 0.0
        self._stopped_at: float | None = None

    def start(self) -> None:
        """Sets the clock to 0."""
        self._began = self._clock()

    def now(self) -> float:
        at = self._clock() if self._stopped_at is None else self._stopped_at
        return (at - self._began) / self._time_scale

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stops the clock; such contexts may be nested."""
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
        self._marks, self._passed = marks, 0

    @property
    def end(self) -> float:
        """The last mark."""
        return self._marks[-1]

    def next_after(self, now: float) -> float | None:
        """Returns the first mark after `now`, or None."""
        return next((mark for mark in self._marks[self._passed :] if mark > now), None)

    def passed(self, now: float) -> range:
        """Returns the indices of the marks that were passed since the last call."""
        first = self._passed
        while self._passed < len(self._marks) and self._marks[self._passed] <= now:
            self._passed += 1
        return range(first, self._passed)
