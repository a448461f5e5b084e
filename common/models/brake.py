"""Makes compute on this host slower than it is: after it has computed, a rank waits."""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType

from common.models.pace import Pace
from dear.errors import UserError

_SCHEDSTAT = Path("/proc/thread-self/schedstat")


class Brake:
    """`with brake:` around a piece of compute; on leaving, waits until that took long enough.

    Long enough is `factor * crowd` times what this thread ran. What it has waited for a core counts
    towards it, and is no reason to wait longer: whether the other ranks compute at the same time is
    the algorithm's doing, and their cores are not this host's. Time blocked, as in waiting for
    communication, is not the host's compute and counts nowhere.

    Args:
        pace: knows the present factor; None: no wait ever.
        crowd: how much longer than it runs a rank's compute takes where no host is slowed: the
            threads of all ranks per core of this machine, at least 1.

    Raises:
        UserError: on entering, if this kernel does not tell threads' times.
    """

    def __init__(self, pace: Pace | None, crowd: float = 1.0) -> None:
        self._pace = pace
        self._crowd = max(1.0, crowd)
        self._factor = 1.0
        self._ran_s = self._waited_s = 0.0

    def __enter__(self) -> None:
        if self._pace is None:
            return
        self._factor = self._pace.slowdown(time.perf_counter())
        if self._factor > 1:
            self._ran_s, self._waited_s = _ran_and_waited_s()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._factor > 1:
            ran_s, waited_s = _ran_and_waited_s()
            ran_s, waited_s = ran_s - self._ran_s, waited_s - self._waited_s
            time.sleep(max(0.0, self._factor * self._crowd * ran_s - (ran_s + waited_s)))


def _ran_and_waited_s() -> tuple[float, float]:
    """Seconds that this thread has run, and has waited for a core.

    The kernel's file tells what it has run up to the last tick only; its clock tells all.
    """
    try:
        _, waited_ns, _ = _SCHEDSTAT.read_text().split()
    except FileNotFoundError:
        raise UserError(
            f"faults: slow_host: this kernel has no {_SCHEDSTAT}, by which models that compute for "
            "real are slowed; use a model MODEL@DEVICE"
        ) from None
    return time.thread_time(), int(waited_ns) / 1e9
