"""Runs a command that must not outlive whoever started it.

    python -m common.launch.tether [--undo JSON] -- COMMAND...

The tether is standard input, a pipe whose other end the launcher holds. When it closes (the
launcher ends it, dies, or the network to it breaks), or on SIGTERM, SIGINT or SIGHUP, everything
below this process is ended. The line `stacks` on it asks the workers for their stacks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from common.launch.orphans import adopt_orphans, ask_for_stacks, die_with_parent, kill_all_below

STOP_S = 5.0
UNDO_S = 12.0
CUT = 128 + signal.SIGTERM
"""Exit status of a tether that was cut."""
_END = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Tether:
    """Starts children, and watches them and standard input; single-threaded.

    Args:
        tied: False if standard input is no tether (a person typed the command).
        undo: a command to run when the tether is cut, before the children are ended.
    """

    def __init__(self, *, tied: bool = True, undo: Sequence[str] = ()) -> None:
        adopt_orphans()
        self._undo = list(undo)
        self._children: list[subprocess.Popen[bytes]] = []
        self._selector = selectors.DefaultSelector()
        # A signal must wake the selector: a handler alone may run just before it falls asleep.
        woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake)
        self._selector.register(woken, selectors.EVENT_READ, "signal")
        for number in _END:
            signal.signal(number, _only_wake)
        if tied:
            self._selector.register(0, selectors.EVENT_READ, "tether")

    def start(self, argv: Sequence[str], env: Mapping[str, str], log: Path | None = None) -> None:
        """Starts a child in a session of its own; what it prints goes to `log` if given."""
        with contextlib.ExitStack() as stack:
            file = None if log is None else stack.enter_context(log.open("wb"))
            child = subprocess.Popen(
                argv,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(signal.SIGTERM),
            )
        self._children.append(child)
        self._selector.register(os.pidfd_open(child.pid), selectors.EVENT_READ, child)

    def wait(
        self, grace_s: float = 0.0, ended: Callable[[int, int], None] = lambda place, code: None
    ) -> int:
        """Waits for all children, but only `grace_s` longer than for the first that fails.

        When it returns, nothing is left below this process.

        Args:
            ended: called with place and exit status of each child that ended by itself.

        Returns:
            The exit status of the child that failed first, else 0; `CUT` if the tether was cut.
        """
        status, deadline, running = 0, None, len(self._children)
        while running:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            events = self._selector.select(left)
            for key, _ in events:
                if key.data == "signal" or (key.data == "tether" and not _hear()):
                    self._cut()
                    return CUT
                if isinstance(key.data, subprocess.Popen):
                    self._selector.unregister(key.fd)
                    os.close(key.fd)
                    running -= 1
                    code = key.data.wait()
                    ended(self._children.index(key.data), code)
                    if code and not status:
                        status, deadline = code, time.monotonic() + grace_s
            if left == 0.0 and not events:
                break
        self._stop()
        return status

    def _cut(self) -> None:
        if self._undo:
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(self._undo, stdin=subprocess.DEVNULL, timeout=UNDO_S)
        self._stop()

    def _stop(self) -> None:
        for child in self._children:
            if child.poll() is None:
                child.terminate()
        self._await(STOP_S)
        kill_all_below()

    def _await(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for child in self._children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, deadline - time.monotonic()))


def _hear() -> bool:
    """Reads from the tether; False if it is cut."""
    text = os.read(0, 4096)
    if b"stacks" in text:
        ask_for_stacks()
    return text != b""


def _only_wake(*_: object) -> None:
    pass


def main(argv: Sequence[str]) -> int:
    """Runs the command after `--`; its exit status, 128 + n if signal n ended it."""
    parser = argparse.ArgumentParser(prog="python -m common.launch.tether")
    parser.add_argument("--undo", type=json.loads, default=[], help="run this if the tether is cut")
    parser.add_argument("command", nargs="+")
    given = parser.parse_args(argv)
    tether = Tether(undo=given.undo)
    tether.start(given.command, os.environ)
    status = tether.wait()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
