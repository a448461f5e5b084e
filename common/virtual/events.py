"""A clock that jumps from one event to the next. The same events give the same times."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from dear.errors import UserError


class Events:
    """What is to happen, in the order of time; at the same moment, as it was asked for."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._coming: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def at(self, moment_s: float, action: Callable[[], None]) -> None:
        """Lets `action` happen then, or now if that is over."""
        heapq.heappush(self._coming, (max(moment_s, self.now_s), next(self._count), action))

    def run_for(self, seconds: float) -> None:
        """Lets so much time pass, and all happen that falls into it."""
        end_s = self.now_s + seconds
        while self._coming and self._coming[0][0] <= end_s:
            self._happen()
        self.now_s = end_s

    def run_until(self, over: Callable[[], bool]) -> None:
        """Lets time pass until `over()`.

        Raises:
            UserError: nothing is left that could bring that about.
        """
        while not over():
            if not self._coming:
                raise UserError("the event model waits for what never ends")
            self._happen()

    def _happen(self) -> None:
        self.now_s, _, action = heapq.heappop(self._coming)
        action()
