"""A thread that finds out, once per cycle, which collectives all ranks have asked for."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from dear.dadt.named_requests import Key, Request
from dear.errors import UserError

if TYPE_CHECKING:
    from dear.comm.communicator import Communicator
    from dear.dadt.named_execution import Execution

LEAST_PAUSE_S = 0.001


class Cycles:
    """Lets ranks ask for collectives in any order.

    In each cycle the ranks tell each other what they have asked for; what all have asked for runs,
    by type and number, highest first. A rank that has asked for nothing takes no part, and the
    others wait for it: where nobody asks, nothing is sent.

    Args:
        control: for the ranks' lists; used by nobody else.
        cycle_s: least time between two cycles, in which requests gather.
    """

    def __init__(self, control: Communicator, execution: Execution, cycle_s: float) -> None:
        self._control = control
        self._execution = execution
        self._cycle_s = cycle_s
        self._changed = threading.Condition()
        self._arriving: deque[Request] = deque()
        self._closing = False
        self._dead: Exception | None = None
        self.error: Exception | None = None
        """What has ended the thread, other than `close`."""
        self._waiting: dict[Key, deque[Request]] = {}
        self._thread = threading.Thread(target=self._run, name="dadt-cycles", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Takes a request; its answer comes when all ranks have given one of the same key.

        Raises:
            UserError: `close` has been called.
            Exception: what has ended the thread.
        """
        with self._changed:
            if self._dead is not None:
                raise self._dead
            if self._closing:
                raise UserError(f"{request.name}: after shutdown()")
            self._arriving.append(request)
            self._changed.notify()

    def close(self) -> None:
        """Ends when every rank has called it. What some rank has not asked for fails."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._cycle():
                pass
            self._end(UserError("not all ranks asked for it before shutdown()"))
        except Exception as error:  # whoever waits raises it, and `close`
            self.error = error
            self._end(error)

    def _end(self, reason: Exception) -> None:
        with self._changed:
            self._dead = reason
            self._collect()
        for requests in self._waiting.values():
            for request in requests:
                request.fail(reason)

    def _cycle(self) -> bool:
        """One exchange of lists, and what follows from it; False after the last."""
        with self._changed:
            while not (self._arriving or self._waiting or self._closing):
                self._changed.wait()
            self._collect()
            closing = self._closing
        began = self._control.clock()
        mine = {key: requests[0].signature for key, requests in self._waiting.items()}
        everybody = self._control.gather_objects((mine, closing))
        lists = [found for found, _ in everybody]
        ready = sorted(set.intersection(*(set(found) for found in lists)), reverse=True)
        batch = [request for key in ready for request in self._accepted(key, lists)]
        self._execution.run(batch)
        self._fail_lost(everybody)
        if not ready and all(left for _, left in everybody):
            return False
        self._pause(began, idle=not ready)
        return True

    def _collect(self) -> None:
        while self._arriving:
            request = self._arriving.popleft()
            request.enter("StayInWaitingRequestPool")
            self._waiting.setdefault(request.key, deque()).append(request)

    def _take(self, key: Key) -> Request:
        requests = self._waiting[key]
        request = requests.popleft()
        if not requests:
            del self._waiting[key]
        return request

    def _accepted(self, key: Key, lists: list[dict[Key, Any]]) -> list[Request]:
        request = self._take(key)
        signatures = [found[key] for found in lists]
        for rank, signature in enumerate(signatures):
            if signature != signatures[0]:
                request.fail(
                    UserError(
                        f"{request.name}: rank 0 gave {_shown(signatures[0])}, rank {rank} gave "
                        f"{_shown(signature)}; they must be alike"
                    )
                )
                return []
        return [request]

    def _fail_lost(self, everybody: list[tuple[dict[Key, Any], bool]]) -> None:
        """Requests that a rank which is leaving has not made cannot be answered any more."""
        for key in list(self._waiting):
            request = self._waiting[key][0]
            request.missing = [r for r, (found, _) in enumerate(everybody) if key not in found]
            left = [r for r in request.missing if everybody[r][1]]
            if left:
                self._take(key).fail(
                    UserError(f"{request.name}: ranks {left} shut down without asking for it")
                )

    def _pause(self, began: float, *, idle: bool) -> None:
        """The rest of the cycle; less, if nothing can happen before a new request is there."""
        rest = self._cycle_s - (self._control.clock() - began)
        if idle:
            with self._changed:
                if not (self._arriving or self._closing):
                    self._changed.wait(max(rest, LEAST_PAUSE_S))
            rest = self._cycle_s - (self._control.clock() - began)
        if rest > 0:
            with self._changed:
                self._changed.wait_for(lambda: self._closing, timeout=rest)


def _shown(signature: tuple[str, tuple[int, ...], str, int]) -> str:
    dtype, shape, device, _ = signature
    return f"{dtype} {shape} on {device}"
