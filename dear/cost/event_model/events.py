"""Virtual clock that jumps from one event to the next; the same events give the same times.

Several threads may share the clock. Exactly one of them runs at a time, and the clock moves only
while all of them wait. So a program that is written to block stays as it is.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from dear.errors import UserError


@dataclass(eq=False)
class _Waiter:
    over: Callable[[], bool]
    """Returns True once the thread may continue."""
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))


class Events:
    """Queue of events in order of time; events at the same time run in the order of scheduling."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._waiters: list[_Waiter] = []
        """Threads that wait, in the order in which they began to."""
        self._error: BaseException | None = None
        self._acting = False
        """True while an event runs, which must not wait itself."""

    def at(self, moment_s: float, action: Callable[[], None]) -> None:
        """Schedules `action` for the time `moment_s`, or for now if that time has passed."""
        heapq.heappush(self._queue, (max(moment_s, self.now_s), next(self._count), action))

    def run_for(self, seconds: float) -> None:
        """Advances the clock by `seconds`, and runs all events and other threads up to then."""
        self._refuse_event()
        end_s = self.now_s + seconds
        if self._waiters:
            # Events of the same time that were scheduled before still come first.
            ended: list[bool] = []
            self.at(end_s, lambda: ended.append(True))
            self.run_until(lambda: bool(ended))
            return
        while self._queue and self._queue[0][0] <= end_s:
            self._run_next()
        self.now_s = end_s

    def run_until(self, over: Callable[[], bool], what: str = "an event") -> None:
        """Blocks the calling thread until `over()`; events and other threads run meanwhile.

        Args:
            what: what the thread waits for, for the error message.

        Raises:
            UserError: no event is left before that; or another thread has failed, with its error.
        """
        if over():
            return
        self._refuse_event()
        me = _Waiter(over)
        self._waiters.append(me)
        while True:
            following = next((waiter for waiter in self._waiters if waiter.over()), None)
            if following is me or self._error is not None:
                self._waiters.remove(me)
                break
            if following is not None:
                self._waiters.remove(following)
                following.turn.release()
                me.turn.acquire()
                break
            if not self._queue:
                self._waiters.remove(me)
                raise UserError(f"the virtual cluster waits for {what} that never comes")
            self._run_next()
        if self._error is not None:
            raise self._error

    def start(self, call: Callable[[], None]) -> None:
        """Runs `call` in a thread of its own, which gets its turn when the calling thread waits."""
        waiter = _Waiter(lambda: True)
        self._waiters.append(waiter)

        def run() -> None:
            waiter.turn.acquire()
            try:
                call()
            except BaseException as error:
                self._error = self._error or error
            self._leave()

        threading.Thread(target=run, daemon=True, name="virtual rank").start()

    def _leave(self) -> None:
        """Gives the turn of a thread that ends to the next one, after events if necessary."""
        while self._waiters:
            waiters = self._waiters
            following = next((waiter for waiter in waiters if waiter.over()), None)
            if self._error is not None or not (following or self._queue):
                following = waiters[0]  # it raises the error
            if following is not None:
                waiters.remove(following)
                if not following.over() and self._error is None:
                    self._error = UserError("the virtual cluster waits for ranks that have ended")
                following.turn.release()
                return
            self._run_next()

    def _run_next(self) -> None:
        self.now_s, _, action = heapq.heappop(self._queue)
        self._acting = True
        try:
            action()
        finally:
            self._acting = False

    def _refuse_event(self) -> None:
        if self._acting:
            raise RuntimeError("an event of the virtual clock must not take time, nor wait")
