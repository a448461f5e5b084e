"""Process 1 of a sandbox and the one that makes it; started by `sandbox.py` as a script.

    init.py PARENT_PID run|probe -- COMMAND...

The caller's end, even by SIGKILL, kills the process that this script runs in, whose end kills
process 1, with which the kernel kills whatever is in the sandbox. Nothing else needs to clean up.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2])]

from common.emulation import namespaces as ns

FORWARDED = (signal.SIGINT, signal.SIGTERM)
FAILED = 125  # the sandbox could not be made
MARK = "DEAR_SANDBOX"  # holds the PID namespace, so that a stale value is recognized
SWITCH = "switch"
LOCALHOST = "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n"
# Creates the kinds of link and of queue that a cluster needs.
_PROBE = (
    "ip link add dev probe0 type veth peer name probe1",
    "ip link add dev probe2 type bridge",
    "tc qdisc add dev probe0 root tbf rate 1gbit burst 128kb limit 1mb",
)


def main(argv: list[str]) -> int:
    parent, probe, command = int(argv[0]), argv[1] == "probe", argv[3:]
    os.setpgid(0, 0)  # Ctrl-C is the caller's to handle, which passes it on once
    _new_namespaces()
    ns.die_with_parent()
    if os.getppid() != parent:
        return FAILED  # it died before die_with_parent
    alive, held = os.pipe()  # `held` closes when this process ends
    child = os.fork()
    if child == 0:
        os.close(held)
        # os._exit: nothing of what the parent prepared for its own exit is to run here.
        os._exit(_reported(lambda: _first_process(alive, command, probe)))
    _forward(child)
    return _status(os.waitpid(child, 0)[1])


def _reported(body: Callable[[], int]) -> int:
    """The status that `body` returns; what went wrong is one line on stderr."""
    try:
        return body()
    except subprocess.CalledProcessError as error:
        reason = f"{' '.join(error.cmd)}: {error.stderr.strip() or error.returncode}"
    except OSError as error:
        reason = f"{error.filename}: " if error.filename else ""
        reason += error.strerror or str(error)
    print(f"error: cannot make a sandbox: {reason}", file=sys.stderr, flush=True)
    return FAILED


def _status(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _new_namespaces() -> None:
    flags = ns.NEWNS | ns.NEWPID | ns.NEWNET | ns.NEWUTS | ns.NEWIPC
    if os.geteuid() == 0:
        try:
            ns.unshare(flags)
            return
        except PermissionError:
            pass  # root of a container without CAP_SYS_ADMIN: as an ordinary user does it
    uid, gid = os.geteuid(), os.getegid()
    ns.unshare(ns.NEWUSER | flags)
    ns.map_user(uid, gid)


def _first_process(alive: int, command: list[str], probe: bool) -> int:
    """Sets the sandbox up, runs the command, reaps what is orphaned, returns its status."""
    ns.die_with_parent()
    if select.select([alive], [], [], 0)[0]:
        return FAILED  # end of file: the parent died before die_with_parent
    _set_up()
    if probe:
        for line in _PROBE:
            _quiet(line)
        return 0
    return _run(command)


def _set_up() -> None:
    ns.own_mounts()
    ns.mount_proc()
    ns.mount_tmpfs("/dev/shm")
    socket.sethostname(SWITCH)
    if Path("/etc/hosts").exists():
        # A file of its own in place of /etc/hosts; without a name it is still there.
        hosts = Path("/dev/shm/hosts")
        hosts.write_text(f"{LOCALHOST}127.0.0.1 {SWITCH}\n")
        ns.bind(str(hosts), "/etc/hosts")
        hosts.unlink()
    _quiet("ip link set dev lo up")


def _quiet(line: str) -> None:
    subprocess.run(line.split(), check=True, capture_output=True, text=True)


def _run(command: list[str]) -> int:
    environment = os.environ | {MARK: str(Path("/proc/self/ns/pid").readlink())}
    unset = [*FORWARDED, signal.SIGPIPE]  # Python ignores SIGPIPE, and so would the command
    try:
        child = os.posix_spawnp(command[0], command, environment, setsigmask=[], setsigdef=unset)
    except OSError as error:
        print(f"error: cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        return 127 if isinstance(error, FileNotFoundError) else 126
    _forward(child)
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            return _status(status)


def _forward(child: int) -> None:
    """Passes SIGINT and SIGTERM, which the caller of this script has blocked, to `child`."""

    def pass_on(number: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    for number in FORWARDED:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)


if __name__ == "__main__":
    sys.exit(_reported(lambda: main(sys.argv[1:])))
