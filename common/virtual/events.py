"""Virtual clock that jumps from one event to the next; the same events give the same times."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from dear.errors import UserError


class Events:
    """Queue of events in order of time; events at the same time run in the order of scheduling."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def at(self, moment_s: float, action: Callable[[], None]) -> None:
        """Schedules `action` for the time `moment_s`, or for now if that time has passed."""
        heapq.heappush(self._queue, (max(moment_s, self.now_s), next(self._count), action))

    def run_for(self, seconds: float) -> None:
        """Advances the clock by `seconds`, and runs all events up to then."""
        end_s = self.now_s + seconds
        while self._queue and self._queue[0][0] <= end_s:
            self._run_next()
        self.now_s = end_s

    def run_until(self, over: Callable[[], bool]) -> None:
        """Runs events until `over()` returns True.

        Raises:
            UserError: no event is left before that.
        """
        while not over():
            if not self._queue:
                raise UserError("the event model waits for an event that never comes")
            self._run_next()

    def _run_next(self) -> None:
        self.now_s, _, action = heapq.heappop(self._queue)
        action()
