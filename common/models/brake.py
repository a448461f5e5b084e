"""Makes compute on this host slower than it is: after it has computed, a rank waits."""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType

from common.models.pace import Pace
from dear.errors import UserError

_SCHEDSTAT = Path("/proc/thread-self/schedstat")


class Brake:
    """`with brake:` around a piece of compute; on leaving, it waits (factor - 1) times as long.

    What counts is the time that this thread ran or wanted to run, which another rank that shares
    the core lengthens. Time blocked, as in waiting for communication, is not the host's compute and
    does not.

    Args:
        pace: knows the present factor; None: no wait ever.

    Raises:
        UserError: on entering, if this kernel does not tell threads' times.
    """

    def __init__(self, pace: Pace | None) -> None:
        self._pace = pace
        self._factor = 1.0
        self._began_s = 0.0

    def __enter__(self) -> None:
        if self._pace is None:
            return
        self._factor = self._pace.slowdown(time.perf_counter())
        if self._factor > 1:
            self._began_s = _wanted_s()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._factor > 1:
            time.sleep((self._factor - 1) * (_wanted_s() - self._began_s))


def _wanted_s() -> float:
    """Seconds that this thread has run or waited for a core."""
    try:
        ran_ns, waited_ns, _ = _SCHEDSTAT.read_text().split()
    except FileNotFoundError:
        raise UserError(
            f"faults: slow_host: this kernel has no {_SCHEDSTAT}, by which models that compute for "
            "real are slowed; use a model MODEL@DEVICE"
        ) from None
    return (int(ran_ns) + int(waited_ns)) / 1e9
