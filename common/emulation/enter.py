"""Runs commands on a virtual host: `python common/emulation/enter.py PID -- COMMAND...`.

PID is that of any process on the host, as /proc shows it. Also works as `python -m`.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2])]

from common.emulation.namespaces import HOST, setns


def enter(pid: int, kinds: tuple[str, ...] = tuple(HOST)) -> None:
    """Moves this process to the host that process `pid` is on.

    Args:
        pid: as /proc shows it.
        kinds: which of the host's namespaces, out of net, uts, ipc and mnt.

    Raises:
        OSError: there is no such process, or (for mnt) this process has several threads.
    """
    folder = Path.cwd()
    with ExitStack() as stack:
        files = []
        for kind in kinds:
            descriptor = os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, descriptor)
            files.append((descriptor, kind))
        for descriptor, kind in files:
            setns(descriptor, HOST[kind])
    os.chdir(folder)  # a new mount namespace begins at its root


def main(argv: list[str]) -> int:
    if len(argv) < 3 or not argv[0].isdecimal() or argv[1] != "--":
        print("usage: enter.py PID -- COMMAND...", file=sys.stderr)
        return 2
    command = argv[2:]
    try:
        enter(int(argv[0]))
    except OSError as error:
        print(f"error: cannot enter the host of process {argv[0]}: {error}", file=sys.stderr)
        return 126
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"error: cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
