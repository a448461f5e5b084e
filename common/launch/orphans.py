"""No process is left behind: the kernel ends a child whose parent has died, even by SIGKILL."""

from __future__ import annotations

import ctypes

_LIBC = ctypes.CDLL(None)  # loaded before any fork, so that the child only makes the call
_PR_SET_PDEATHSIG = 1


def die_with_parent(signal_number: int) -> None:
    """Asks the kernel to send this process `signal_number` when its parent ends (Linux)."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal_number)
