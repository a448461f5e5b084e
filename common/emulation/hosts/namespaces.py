"""Namespaces of virtual hosts: system calls, holder processes, and a way to enter a host.

Uses the standard library only, since it is also run as a script, whose start must be fast:

    namespaces.py enter PID -- COMMAND...    runs the command on the host of that process
    namespaces.py hold PARENT_PID COUNT      creates and holds the namespaces of COUNT hosts
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
_LIBC = ctypes.CDLL(None, use_errno=True)  # loaded before any fork: a child only makes the call
# Namespaces of a virtual host, named as in /proc/PID/ns, in the order of entering them. The mount
# namespace comes last, because it changes the meaning of /proc/PID.
HOST = {"net": NEWNET, "uts": NEWUTS, "ipc": NEWIPC, "mnt": NEWNS}
SWITCH = "switch"  # host name of the sandbox
LOCALHOST = "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n"
# -S skips the site packages, which are not needed and take longest to look up.
SCRIPT = [sys.executable, "-I", "-S"]
ENTER = [*SCRIPT, __file__, "enter"]


def unshare(flags: int) -> None:
    """Moves this process (for NEWPID, its next children) to new namespaces, or raises OSError."""
    _check(_LIBC.unshare(flags), "unshare")


def setns(descriptor: int, kind: int) -> None:
    """Moves this process to the namespace of an open file, or raises OSError."""
    _check(_LIBC.setns(descriptor, kind), "setns")


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Makes the kernel signal this process when the thread that started it ends, for any reason. A
    change of the process's credentials undoes this: call it after entering a user namespace."""
    _check(_LIBC.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0), "prctl")


def map_user(uid: int, gid: int) -> None:
    """Maps the outside user `uid` and group `gid` to root of the user namespace just entered."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        Path("/proc/self", name).write_text(text, encoding="utf-8")


def own_mounts() -> None:
    """Hides mounts made from now on from all other mount namespaces."""
    _mount("none", "/", "", _MS_REC | _MS_PRIVATE, "")


def mount_proc() -> bool:
    """Mounts the /proc of this PID namespace; returns False if a container forbids it."""
    try:
        _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, "")
    except PermissionError:
        return False
    return True


def mount_tmpfs(target: str) -> None:
    """Mounts an empty private tmpfs, limited to half of the memory (the kernel's default)."""
    _mount("tmpfs", target, "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=1777")


def bind(source: str, target: str) -> None:
    """Bind-mounts one existing file over another."""
    _mount(source, target, "", _MS_BIND, "")


def proc_pid() -> int:
    """PID of this process as /proc shows it; under an outer /proc not equal to `getpid()`."""
    return int(Path("/proc/self").readlink().name)


def enter(pid: int, kinds: tuple[str, ...] = tuple(HOST)) -> None:
    """Moves this process to the host that process `pid` is on. `pid` is as /proc shows it. `kinds`
    are the namespaces of the host to enter, out of net, uts, ipc and mnt. Raises `OSError` if the
    process does not exist, or (for mnt) this process has several threads."""
    folder = Path.cwd()
    with contextlib.ExitStack() as stack:
        files = []
        for kind in kinds:
            descriptor = os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, descriptor)
            files.append((descriptor, kind))
        for descriptor, kind in files:
            setns(descriptor, HOST[kind])
    os.chdir(folder)  # entering a mount namespace moves the process to its root folder


class Holders:
    """Processes that hold the namespaces of `count` hosts, named h0, h1, ... `pids` are those of
    the holders, for system calls. `proc_pids` are the same, as /proc shows them. Raises
    `RuntimeError` if the kernel refused to create the namespaces."""

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
                raise RuntimeError(f"cannot create the namespaces of host h{len(self.pids)}")
            self.pids.append(int(line[0]))
            self.proc_pids.append(int(line[1]))

    def clear(self) -> None:
        """Kills all processes on the hosts except the holders."""
        for pid in inhabitants(self.proc_pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """Ends the processes that keep the network namespaces alive."""
        self._process.kill()
        self._process.communicate()


def inhabitants(holders: list[int]) -> list[int]:
    """Returns the PIDs (for system calls) of the processes on these hosts, without the holders.
    `holders` are PIDs of the holders, as /proc shows them."""
    own_status = Path("/proc/self/status").read_text(encoding="utf-8")
    level = len(_numbers(own_status)) - 1  # under an outer /proc a process has several PIDs
    host_networks, pids = set(), []
    for pid in holders:
        with contextlib.suppress(FileNotFoundError):
            host_networks.add(str(Path(f"/proc/{pid}/ns/net").readlink()))
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            network = str((folder / "ns/net").readlink())
            numbers = _numbers((folder / "status").read_text(encoding="utf-8"))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # the process has ended, or belongs to another user
        if network in host_networks and int(folder.name) not in holders and len(numbers) > level:
            pids.append(numbers[level])
    return pids


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
    """Writes a line `PID PID_IN_PROC` for each holder, then waits to be killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the calling program handles Ctrl-C
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
        with open(inlet, encoding="utf-8") as report:
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
    *names, options = (word.encode() or None for word in (source, target, kind, data))
    result = _LIBC.mount(*names, ctypes.c_ulong(flags), options)
    _check(result, f"mount {kind or source} on {target}")


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    if sys.argv[1] == "hold":
        sys.exit(_make_holders(int(sys.argv[2]), int(sys.argv[3])))
    sys.exit(_run_on_host(int(sys.argv[2]), sys.argv[4:]))
