"""Virtual clock that jumps from one event to the next; the same events give the same times.

Several threads may share the clock. Exactly one of them runs at a time, and the clock moves only
while all of them wait. So a program that is written to block stays as it is.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from dear.errors import UserError

Seat = Callable[[], None]
"""Function that makes the state of the process that of one virtual rank."""


@dataclass(eq=False)
class _Waiter:
    over: Callable[[], bool] | None
    """Returns True once the thread may continue; None: an event says so."""
    turn: threading.Lock = field(default_factory=threading.Lock)
    """Held until it is the thread's turn."""

    def __post_init__(self) -> None:
        self.turn.acquire()


class Events:
    """Queue of events in order of time; events at the same time run in the order of scheduling."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._waiters: dict[_Waiter, None] = {}
        """Threads that wait, in the order in which they began to."""
        self._asked: dict[_Waiter, None] = {}
        """Waiting threads that must be asked whether they may continue."""
        self._ready: deque[_Waiter] = deque()
        """Waiting threads that may continue."""
        self._error: BaseException | None = None
        self._acting = False
        """True while an event runs, which must not wait itself."""
        self._seat: Seat | None = None

    def sit(self, seat: Seat | None) -> None:
        """Makes `seat` the rank whose code runs now."""
        if seat is not self._seat and seat is not None:
            seat()
        self._seat = seat

    def at(self, moment_s: float, action: Callable[[], None]) -> None:
        """Schedules `action` for the time `moment_s`, or for now if that time has passed."""
        heapq.heappush(self._queue, (max(moment_s, self.now_s), next(self._count), action))

    def run_for(self, seconds: float) -> None:
        """Advances the clock by `seconds`, and runs all events and other threads up to then."""
        self.run_to(self.now_s + seconds)

    def run_to(self, end_s: float) -> None:
        """Advances the clock to `end_s`, and runs all events and other threads up to then."""
        self._refuse_event()
        if self._waiters:
            # Events of the same time that were scheduled before still come first.
            me = _Waiter(None)
            self.at(end_s, lambda: self._ready.append(me))
            self._wait(me, "an event")
            return
        seat = self._seat
        while self._queue and self._queue[0][0] <= end_s:
            self._run_next()
        self.now_s = end_s
        self.sit(seat)

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
        self._wait(_Waiter(over), what)

    def start(self, call: Callable[[], None], seat: Seat | None = None) -> None:
        """Runs `call` in a thread of its own, which gets its turn when the calling thread waits.

        Args:
            seat: rank whose code the thread runs; None: that of the calling thread.
        """
        waiter, seat = _Waiter(None), seat or self._seat
        self._waiters[waiter] = None
        self._ready.append(waiter)

        def run() -> None:
            waiter.turn.acquire()
            try:
                if self._error is None:
                    self.sit(seat)
                    call()
            except BaseException as error:
                self._error = self._error or error
            self._leave()

        threading.Thread(target=run, daemon=True, name="virtual rank").start()

    def _wait(self, me: _Waiter, what: str) -> None:
        seat = self._seat
        self._waiters[me] = None
        if me.over is not None:
            self._asked[me] = None
        following = self._following()
        if following is None:
            self._forget(me)
            raise UserError(f"the virtual cluster waits for {what} that never comes")
        self._forget(following)
        if following is not me:
            following.turn.release()
            me.turn.acquire()
        self.sit(seat)
        if self._error is not None:
            raise self._error

    def _following(self) -> _Waiter | None:
        """Returns the next thread to run, after events if necessary; None: all wait in vain.

        After an error, each thread gets it; who runs the others waits for longest, and is last.
        """
        while self._error is None:
            if self._ready:
                return self._ready.popleft()
            for waiter in self._asked:
                if waiter.over is not None and waiter.over():
                    return waiter
            if not self._queue:
                return None
            try:
                self._run_next()
            except BaseException as error:
                self._error = error
        timed = (waiter for waiter in self._waiters if waiter.over is None)
        return next(timed, next(reversed(self._asked), None))

    def _forget(self, waiter: _Waiter) -> None:
        del self._waiters[waiter]
        self._asked.pop(waiter, None)

    def _leave(self) -> None:
        """Gives the turn of a thread that ends to the next one."""
        following = self._following()
        if following is None and self._waiters:
            self._error = UserError("the virtual cluster waits for ranks that have ended")
            following = self._following()
        if following is not None:
            self._forget(following)
            following.turn.release()

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
