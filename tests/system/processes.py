"""Shared parts of tests of processes: waiting for something, and what is still there."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
LIMIT_S = 110.0
FOREVER = "import time; time.sleep(10000)"


def wait_for(condition: Callable[[], Any], limit_s: float = LIMIT_S) -> Any:
    """The first true value of `condition()`; the limit only ends what would never come."""
    deadline = time.monotonic() + limit_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not so within {limit_s:g} s"
        time.sleep(0.02)
    return value


def finished(
    command: Sequence[str | Path], *, cwd: Path | str = ROOT, timeout: float = 280.0, **options: Any
) -> subprocess.CompletedProcess[str]:
    """A program that has ended, and what it has printed."""
    fixed = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    return subprocess.run(command, cwd=cwd, timeout=timeout, **fixed, **options)


def python(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Python with these arguments, from the project's folder to its end."""
    return finished([sys.executable, *map(str, words)], **options)


def alive(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def number_in(path: Path) -> int | None:
    """Returns the number that a process wrote there, None before."""
    text = path.read_text() if path.exists() else ""
    return int(text) if text else None


def may_be_real_time() -> bool:
    """Returns True if this system gives real-time priority to a process."""
    tried = subprocess.run(["chrt", "--rr", "1", "true"], capture_output=True, check=False)
    return tried.returncode == 0
