"""Loops that train for some seconds or epochs, with ranks in lockstep or at their own pace.

Ranks in lockstep must end at the same step and copy their parameters at the same steps; rank 0
decides which. To avoid a collective in every step, rank 0 announces after how many steps it will
decide again: about when the next copy is due. A mark is a time or an epoch at which a copy is due.
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
    """Waits until nothing is in flight; called before copies of ranks in lockstep."""
    take: Callable[[range, float, int], None]
    """Copies the parameters, with the clock stopped. Arguments: indices of marks, time, steps."""
    schedule: Schedule
    """Marks, in seconds of `clock` or in epochs; the last mark is the end."""
    clock: TrainingClock
    communicator: Communicator

    def own_pace(self) -> Pace:
        """Trains for `budget_s`; each rank makes its own number of steps, by its own clock."""
        steps = 0

        def step() -> int:
            nonlocal steps
            samples = self.step()
            steps += 1
            self._copy(self.clock.now(), steps)
            return samples

        self._start()
        pace = run_for(self.schedule.end, step, self.communicator, self.clock.now)
        # The time may have ended after `step` has last read the clock.
        self._copy(self.clock.now(), steps)
        return pace

    def in_step(self) -> Pace:
        """Trains for `budget_s` by rank 0's clock, including waits for transfers before a copy."""
        steps = samples = 0
        block, block_began_s, now_s = 1, 0.0, 0.0
        self._start()
        while now_s < self.schedule.end:
            for _ in range(block):
                samples += self.step()
            steps += block
            self.settle()
            self.communicator.barrier()  # the clock includes this wait for slower ranks
            with self.clock.stopped():
                step_s = (self.clock.now() - block_began_s) / block
                # The first steps are not typical, so the number of steps at most triples.
                decision = self.clock.now(), self._next_block(step_s, most=2 * steps)
                now_s, block = self.communicator.broadcast_object(decision)
                self._copy(now_s, steps)
                self.communicator.barrier()
            block_began_s = self.clock.now()
        return Pace(steps=steps, samples=samples, elapsed_s=now_s)

    def for_epochs(self, steps_per_epoch: int, *, own_pace: bool) -> Pace:
        """Trains for epochs: all ranks copy after the same steps; times are by their own clock."""
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
        clock: returns real seconds.
        time_scale: real seconds per second of training.
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
    """Marks that the training passes one after the other.

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
