"""No process is left behind: ways to reach children and what they started, dead parents or not."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path

_LIBC = ctypes.CDLL(None)  # loaded before any fork, so that the child only makes the call
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(signal_number: int) -> None:
    """Asks the kernel to send this process `signal_number` when its parent ends (Linux)."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal_number)


def adopt_orphans() -> None:
    """Makes this process the parent of descendants that lose theirs (Linux)."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def ask_for_stacks() -> None:
    """Sends SIGUSR1 to every process below this one that catches it; workers then print stacks."""
    for pid in _below():
        with contextlib.suppress(OSError):
            status = Path("/proc", pid, "status").read_text()
            caught = int(status.partition("\nSigCgt:")[2].split()[0], 16)
            if caught >> (signal.SIGUSR1 - 1) & 1:
                _send(pid, signal.SIGUSR1)


def kill_all_below() -> None:
    """Ends every process below this one, also what has left its session; needs `adopt_orphans`."""
    while pids := _below():
        for pid in pids:
            with contextlib.suppress(OSError):
                _send(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)


def _below() -> list[str]:
    """Processes below this one, by their names in /proc, which may be another PID namespace's."""
    me = str(Path("/proc/self").readlink())
    parents: dict[str, str] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The command's name stands in parentheses and may hold some itself.
            parents[path.parent.name] = path.read_text().rpartition(")")[2].split()[1]
    found = {me}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found - {me})


def _send(pid: str, number: signal.Signals) -> None:
    folder = os.open(f"/proc/{pid}", os.O_RDONLY | os.O_DIRECTORY)
    try:
        signal.pidfd_send_signal(folder, number)
    finally:
        os.close(folder)
