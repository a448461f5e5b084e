"""Time for which this thread has run or waited for a core, as the kernel reports it."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

SCHEDSTAT = Path("/proc/thread-self/schedstat")

_local = threading.local()


def host_s() -> float:
    """Returns the seconds for which this thread has run or waited for a core.

    If the kernel does not report waits, they are missing.
    """
    return time.thread_time() + (waited_s() or 0.0)


def waited_s() -> float | None:
    """Returns the seconds for which this thread has waited for a core; None if not reported."""
    if getattr(_local, "process", None) != os.getpid():  # after a fork it is the parent's file
        _local.process = os.getpid()
        try:
            _local.file = os.open(SCHEDSTAT, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            _local.file = None
    return None if _local.file is None else int(os.pread(_local.file, 64, 0).split()[1]) / 1e9
