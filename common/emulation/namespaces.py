"""The namespaces that make virtual hosts: the system calls, who holds them, and who enters them.

Standard library only, since this is also run as a script, where every millisecond counts:

    namespaces.py enter PID -- COMMAND...    runs the command on the host of that process
    namespaces.py hold PARENT_PID COUNT      makes and holds the namespaces of that many hosts
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

NEWNS, NEWUTS, NEWIPC = 0x00020000, 0x04000000, 0x08000000
NEWUSER, NEWPID, NEWNET = 0x10000000, 0x20000000, 0x40000000
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 0x2, 0x4, 0x8
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)  # loaded before any fork: the child only makes the call
# What a virtual host has of its own, as names in /proc/PID/ns, in the order to enter them: what
# /proc/PID means changes with the mount namespace, which therefore comes last.
HOST = {"net": NEWNET, "uts": NEWUTS, "ipc": NEWIPC, "mnt": NEWNS}
# -S: the site's packages are not needed, and looking for them takes longer than all the rest.
SCRIPT = [sys.executable, "-I", "-S"]
ENTER = [*SCRIPT, __file__, "enter"]


def unshare(flags: int) -> None:
    """Moves this process (its next children, for NEWPID) to new namespaces; OSError if refused."""
    _check(_LIBC.unshare(flags), "unshare")


def setns(descriptor: int, kind: int) -> None:
    """Moves this process to the namespace of this open file; OSError if refused."""
    _check(_LIBC.setns(descriptor, kind), "setns")


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Has the kernel signal this process when the thread that started it ends, by whatever cause.

    A change of the process's credentials undoes it: call this after entering a user namespace.
    """
    _check(_LIBC.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0), "prctl")


def map_user(uid: int, gid: int) -> None:
    """Makes the user with these numbers outside root of the user namespace just entered."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        Path("/proc/self", name).write_text(text)


def own_mounts() -> None:
    """What is mounted from now on is not seen outside of this mount namespace."""
    _mount("none", "/", "", _MS_REC | _MS_PRIVATE, "")


def mount_proc() -> bool:
    """Mounts the /proc of this PID namespace; False where a container forbids it."""
    try:
        _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, "")
    except PermissionError:
        return False
    return True


def mount_tmpfs(target: str) -> None:
    """An empty, private tmpfs that may grow to half of the memory (the kernel's default)."""
    _mount("tmpfs", target, "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=1777")


def bind(source: str, target: str) -> None:
    """Puts one existing file in place of another."""
    _mount(source, target, "", _MS_BIND, "")


def proc_pid() -> int:
    """This process's number as /proc shows it: another than `getpid()` under an outer /proc."""
    return int(Path("/proc/self").readlink().name)


def enter(pid: int, kinds: tuple[str, ...] = tuple(HOST)) -> None:
    """Moves this process to the host that process `pid` is on.

    Args:
        pid: as /proc shows it.
        kinds: which of the host's namespaces, out of net, uts, ipc and mnt.

    Raises:
        OSError: there is no such process, or (for mnt) this process has several threads.
    """
    folder = Path.cwd()
    with contextlib.ExitStack() as stack:
        files = []
        for kind in kinds:
            descriptor = os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, descriptor)
            files.append((descriptor, kind))
        for descriptor, kind in files:
            setns(descriptor, HOST[kind])
    os.chdir(folder)  # a new mount namespace begins at its root


class Holders:
    """Starts `count` holders, of hosts named h0, h1 and so on.

    Attributes:
        pids: of each holder, for system calls.
        proc_pids: of each holder, as /proc shows it.

    Raises:
        RuntimeError: the kernel has refused.
    """

    def __init__(self, count: int) -> None:
        command = [*SCRIPT, __file__, "hold", str(os.getpid()), str(count)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
        )
        self.pids: list[int] = []
        self.proc_pids: list[int] = []
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
    line = next(line for line in status.splitlines() if line.startswith("NSpid:"))
    return [int(number) for number in line.removeprefix("NSpid:").split()]


def _run_on_host(pid: int, command: list[str]) -> int:
    try:
        enter(pid)
    except OSError as error:
        print(f"error: cannot enter the host of process {pid}: {error}", file=sys.stderr)
        return 126
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"error: cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        return 127


def _make_holders(parent: int, count: int) -> int:
    """Writes a line `PID PID_IN_PROC` for each holder, and waits to be killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the program's to handle
    die_with_parent()
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
        die_with_parent()
        if os.getppid() != parent:
            return 1
        unshare(NEWNET | NEWUTS | NEWIPC | NEWNS)
        own_mounts()
        mount_tmpfs("/dev/shm")
        socket.sethostname(name)
        os.write(outlet, str(proc_pid()).encode())
        os.close(outlet)
    except OSError as error:
        print(f"error: {name}: {error}", file=sys.stderr, flush=True)
        return 1
    os.closerange(0, 3)
    while True:
        signal.pause()


def _mount(source: str, target: str, kind: str, flags: int, data: str) -> None:
    words = [word.encode() or None for word in (source, target, kind, data)]
    result = _LIBC.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3])
    _check(result, f"mount {kind or source} on {target}")


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    if sys.argv[1] == "hold":
        sys.exit(_make_holders(int(sys.argv[2]), int(sys.argv[3])))
    sys.exit(_run_on_host(int(sys.argv[2]), sys.argv[4:]))
