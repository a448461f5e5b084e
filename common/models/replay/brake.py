"""Slows real compute down to the speed that a host of the emulated cluster has."""

from __future__ import annotations

import time

from common.models.replay.pace import SHORTEST_SLEEP_S, Pace
from common.models.replay.threads import SCHEDSTAT, waited_s
from dear.errors import UserError


class Brake:
    """Context manager around a piece of real compute; on exit it waits until the piece took long
    enough.

    The piece takes the time that this thread ran, times the current slowdown of `pace`, times its
    time scale (or times `crowd`, at time scale 1 on a slowed host). Waits for a core since the
    previous piece count as part of that time. So a rank computes as if it had a core of its own,
    slower by this factor: whether other ranks compute at the same time depends on the algorithm,
    and their cores belong to other hosts. Time in which the thread is blocked, for example by
    communication, does not count.

    Args:
        pace: supplies the current slowdown; None: never wait.
        crowd: threads of all ranks per core of this machine, at least 1; the factor by which the
            compute of a rank on a host that is not slowed takes longer than it runs.

    Raises:
        UserError: on entry, if this kernel does not report the times of threads.
    """

    def __init__(self, pace: Pace | None, crowd: float = 1.0) -> None:
        self._pace = pace
        self._crowd = max(1.0, crowd)
        self._factor = 1.0
        self._inside = False
        self._ran_s = self._slept_s = 0.0
        self._waited_s: float | None = None
        self.absorbed_s = 0.0
        """Seconds that this thread waited for a core without making a piece too long."""

    @property
    def scaled(self) -> bool:
        """True if a time scale slows all compute."""
        return self._pace is not None and self._pace.time_scale > 1

    def __enter__(self) -> None:
        if self._pace is None:
            return
        self._factor = self._pace.slowdown(time.perf_counter())
        if self._pace.time_scale > 1:
            self._factor *= self._pace.time_scale
        elif self._factor > 1:
            self._factor *= self._crowd
        if self._factor <= 1:
            self._waited_s = None
            return
        self._inside = True
        self._ran_s, now_s = ran_and_waited_s()
        self._waited_s = now_s if self._waited_s is None else self._waited_s
        self._slept_s = 0.0

    def catch_up(self, *_: object) -> None:
        """Waits, inside a piece, until the part computed so far took long enough."""
        if self._inside:
            self._wait()

    def __exit__(self, *_: object) -> None:
        if not self._inside:
            return
        ran_s, piece_waited_s = self._wait()
        self.absorbed_s += min(piece_waited_s, (self._factor - 1) * ran_s)
        # A wait for a core after the sleep belongs to the next piece.
        self._waited_s += piece_waited_s
        self._inside = False

    def _wait(self) -> tuple[float, float]:
        """Returns the seconds that the thread ran, and waited for a core, in this stretch."""
        ran_s, now_s = ran_and_waited_s()
        ran_s, piece_waited_s = ran_s - self._ran_s, now_s - self._waited_s
        rest_s = self._factor * ran_s - (ran_s + piece_waited_s + self._slept_s)
        if rest_s >= SHORTEST_SLEEP_S:
            time.sleep(rest_s)
            self._slept_s += rest_s
        return ran_s, piece_waited_s


def ran_and_waited_s() -> tuple[float, float]:
    """Seconds that this thread has run, and has waited for a core."""
    waiting_s = waited_s()
    if waiting_s is None:
        raise UserError(
            f"this kernel has no {SCHEDSTAT}, by which models that compute for real are slowed "
            "(time_scale, or a slow_host); use a model MODEL@DEVICE"
        )
    # The kernel's file has the run time up to the last tick only.
    return time.thread_time(), waiting_s
