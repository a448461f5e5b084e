"""Brake for real compute: slows it down to the speed of a host of the emulated cluster."""

from __future__ import annotations

import time

from common.models.replay.pace import SHORTEST_SLEEP_S, Pace
from common.models.replay.threads import SCHEDSTAT, waited_s
from dear.errors import UserError


class Brake:
    """Context manager around a piece of real compute; the exit waits until it took long enough.

    The piece shall take F x the time for which this thread ran. F is the slowdown of `pace` x the
    time scale (at time scale 1 on a slowed host: the slowdown x `crowd`). The time for which the
    thread waited for a core since the previous piece is part of the result. So a rank computes as
    if it had a core of its own that is F times slower, whether or not other ranks compute at the
    same time. Time in which the thread is blocked, for example by communication, does not count.

    Args:
        pace: supplies the slowdown and the time scale; None: never wait.
        crowd: threads of all ranks per core of this machine, at least 1. Without a brake, compute
            takes longer than it runs by this factor, because ranks share cores.

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
        """Seconds for which this thread waited for a core without making a piece take too long."""

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
        """Waits in the middle of a piece, until the part computed so far took long enough."""
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
        """Waits; returns for how many seconds the thread ran before, and waited for a core."""
        ran_s, now_s = ran_and_waited_s()
        ran_s, piece_waited_s = ran_s - self._ran_s, now_s - self._waited_s
        rest_s = self._factor * ran_s - (ran_s + piece_waited_s + self._slept_s)
        if rest_s >= SHORTEST_SLEEP_S:
            time.sleep(rest_s)
            self._slept_s += rest_s
        return ran_s, piece_waited_s


def ran_and_waited_s() -> tuple[float, float]:
    """Returns the seconds for which this thread has run, and has waited for a core."""
    waiting_s = waited_s()
    if waiting_s is None:
        raise UserError(
            f"this kernel has no {SCHEDSTAT}, which time_scale and slow_host need for models that "
            "compute; use a replayed model, MODEL@DEVICE"
        )
    # The kernel updates the run time in its file only at each tick.
    return time.thread_time(), waiting_s
