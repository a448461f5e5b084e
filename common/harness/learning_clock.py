"""Time that counts as training, and when copies of the parameters are due."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class TrainingClock:
    """Seconds of training since `start`, without what lies between `pause` and `resume`.

    Args:
        clock: seconds of this machine.
        time_scale: of them per second of training.
    """

    def __init__(self, clock: Callable[[], float], time_scale: float) -> None:
        self._clock = clock
        self._time_scale = time_scale
        self._began = 0.0
        self._paused_at: float | None = None

    def start(self) -> None:
        """Training begins now, at 0."""
        self._began = self._clock()

    def now(self) -> float:
        """Stands still while paused."""
        at = self._clock() if self._paused_at is None else self._paused_at
        return (at - self._began) / self._time_scale

    @property
    def paused(self) -> bool:
        return self._paused_at is not None

    def pause(self) -> None:
        self._paused_at = self._clock()

    def resume(self) -> None:
        """Goes on from where it was paused."""
        assert self._paused_at is not None
        self._began += self._clock() - self._paused_at
        self._paused_at = None


class Schedule:
    """Marks in time, each of which is passed once.

    Args:
        marks: seconds of training, ascending.
    """

    def __init__(self, marks: Sequence[float]) -> None:
        self._marks = marks
        self._passed = 0

    def next_after(self, now_s: float) -> float | None:
        """The first mark after `now_s`, None if there is none."""
        return next((mark for mark in self._marks[self._passed :] if mark > now_s), None)

    def passed(self, now_s: float) -> range:
        """The numbers of the marks that are passed by `now_s` and were not before."""
        first = self._passed
        while self._passed < len(self._marks) and self._marks[self._passed] <= now_s:
            self._passed += 1
        return range(first, self._passed)
