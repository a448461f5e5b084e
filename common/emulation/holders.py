"""Processes that do nothing but hold the namespaces of virtual hosts, one for each host.

A program starts them by `Holders`; this file run as a script is the process that makes them:

    holders.py PARENT_PID COUNT

It writes a line `PID PID_IN_PROC` for each, and waits to be killed. When it or the program dies,
by whatever cause, the kernel kills the holders.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2])]

from common.emulation import namespaces as ns

_LEVELS = "NSpid:"


class Holders:
    """Starts `count` holders, of hosts named h0, h1 and so on.

    Attributes:
        pids: of each holder, for system calls.
        proc_pids: of each holder, as /proc shows it.

    Raises:
        RuntimeError: the kernel has refused.
    """

    def __init__(self, count: int) -> None:
        command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(count)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
        )
        self.pids: list[int] = []
        self.proc_pids: list[int] = []
        assert self._process.stdout is not None
        for _ in range(count):
            line = self._process.stdout.readline().split()
            if len(line) != 2:
                self.close()
                raise RuntimeError(f"the namespaces of host h{len(self.pids)} cannot be made")
            self.pids.append(int(line[0]))
            self.proc_pids.append(int(line[1]))

    def clear(self) -> None:
        """Kills every other process that is left on the hosts."""
        for pid in inhabitants(self.proc_pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """Ends the holders."""
        self._process.kill()
        self._process.communicate()


def inhabitants(holders: list[int]) -> list[int]:
    """The processes on the hosts of these holders, for system calls; both in their own numbers.

    Args:
        holders: as /proc shows them.
    """
    own = Path("/proc/self/status").read_text()
    level = len(_numbers(own)) - 1  # under an outer /proc a process has several numbers
    wanted, found = set(), []
    for pid in holders:
        with contextlib.suppress(FileNotFoundError):
            wanted.add(str(Path(f"/proc/{pid}/ns/net").readlink()))
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            network = str((folder / "ns/net").readlink())
            numbers = _numbers((folder / "status").read_text())
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it has ended, or belongs to somebody else
        if network in wanted and int(folder.name) not in holders and len(numbers) > level:
            found.append(numbers[level])
    return found


def _numbers(status: str) -> list[int]:
    line = next(line for line in status.splitlines() if line.startswith(_LEVELS))
    return [int(number) for number in line.removeprefix(_LEVELS).split()]


def main(argv: list[str]) -> int:
    parent, count = int(argv[0]), int(argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the program's to handle
    ns.die_with_parent()
    if os.getppid() != parent:
        return 1
    children = []
    for index in range(count):
        me = os.getpid()
        inlet, outlet = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(inlet)
            os._exit(_hold(f"h{index}", me, outlet))
        os.close(outlet)
        children.append((child, inlet))
    for child, inlet in children:
        with open(inlet) as report:
            numbers = report.read()
        if not numbers:
            return 1
        print(child, numbers, flush=True)
    sys.stdout.close()
    while True:
        signal.pause()


def _hold(name: str, parent: int, outlet: int) -> int:
    try:
        ns.die_with_parent()
        if os.getppid() != parent:
            return 1
        ns.unshare(ns.NEWNET | ns.NEWUTS | ns.NEWIPC | ns.NEWNS)
        ns.own_mounts()
        ns.mount_tmpfs("/dev/shm")
        socket.sethostname(name)
        os.write(outlet, str(ns.proc_pid()).encode())
        os.close(outlet)
    except OSError as error:
        print(f"error: {name}: {error}", file=sys.stderr, flush=True)
        return 1
    os.closerange(0, 3)
    while True:
        signal.pause()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
