"""The system calls behind virtual hosts: unshare, setns, mount, prctl. Standard library only."""

from __future__ import annotations

import ctypes
import os
import signal
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


def unshare(flags: int) -> None:
    """Moves this process (its next children, for NEWPID) to new namespaces; OSError if refused."""
    _check(_LIBC.unshare(flags), "unshare")


def setns(descriptor: int, kind: int) -> None:
    """Moves this process to the namespace of this open file; OSError if refused."""
    _check(_LIBC.setns(descriptor, kind), "setns")


def die_with_parent() -> None:
    """Has the kernel kill this process when the thread that started it ends, by whatever cause.

    A change of the process's credentials undoes it: call this after entering a user namespace.
    """
    _check(_LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")


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


def _mount(source: str, target: str, kind: str, flags: int, data: str) -> None:
    words = [word.encode() or None for word in (source, target, kind, data)]
    result = _LIBC.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3])
    _check(result, f"mount {kind or source} on {target}")


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
