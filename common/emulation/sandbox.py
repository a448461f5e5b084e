"""Sandbox: a process tree with its own processes, network, mounts and names.

    python -m common.emulation.sandbox -- COMMAND...

Nothing in a sandbox is visible outside, and nothing outlives the process that called `run`, even if
that process is killed by SIGKILL. The end of that process kills its child (this file, run as a
script). The end of this script kills process 1 of the sandbox, and then the kernel kills all other
processes inside. No other cleanup is needed. Virtual hosts are built in a sandbox.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

if __name__ == "__main__":
    # -S hides the installed packages, among which `dear` is beside `dear_bench`.
    sys.path[:0] = [str(Path(__file__).parents[up]) for up in (2, 3)]

from common.emulation.hosts import namespaces as ns
from dear.errors import UserError

MARK = "DEAR_SANDBOX"  # contains the PID namespace, so that a stale value is recognized
_FORWARDED = (signal.SIGINT, signal.SIGTERM)
_FAILED = 125  # exit status if the sandbox could not be created
_MAKE = [*ns.SCRIPT, __file__, "make"]
_ADMIN_FOLDERS = ("/usr/sbin", "/sbin")  # not on every user's PATH
_SETTINGS = {
    "kernel/unprivileged_userns_clone": ("0", "1"),
    "user/max_user_namespaces": ("0", "10000"),
    "kernel/apparmor_restrict_unprivileged_userns": ("1", "0"),
}
# Creates the kinds of links and queues that a cluster needs.
_PROBE = (
    "ip link add dev probe0 type veth peer name probe1",
    "ip link add dev probe2 type bridge",
    "tc qdisc add dev probe0 root tbf rate 1gbit burst 128kb limit 1mb",
)

_LACKING = ("not supported", "Unknown device type", "No such file or directory")
_LACKING += ("Unknown qdisc", "qdisc kind is unknown", "qdisc not found")
"""Answers of ip and tc if the kernel does not have a kind of link or queue."""


def inside() -> bool:
    """Returns True if this process is in a sandbox."""
    return os.environ.get(MARK) == str(Path("/proc/self/ns/pid").readlink())


@functools.cache
def unable() -> str | None:
    """Returns why this process cannot create a sandbox with virtual hosts, and a remedy, or None.
    Creates one to find out, which takes about a tenth of a second."""
    path = _environment(os.environ)["PATH"]
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool, path=path) is None]
    if missing:
        return f"{' and '.join(missing)} missing; install iproute2"
    command = [*_MAKE, str(os.getpid()), "probe", "--"]
    environment = _environment(os.environ)
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    if result.returncode == 0:
        return None
    lines = result.stderr.strip().splitlines() or [f"exit status {result.returncode}"]
    reason = lines[-1].removeprefix("error: cannot make a sandbox: ")
    if reason.startswith(_PROBE) and any(words in reason for words in _LACKING):
        return f"this kernel lacks what virtual hosts need ({reason}); use a kernel that has it"
    return f"namespaces are forbidden here ({reason}); {_remedy()}"


def run(command: Sequence[str], env: Mapping[str, str] | None = None) -> int:
    """Runs `command` in a new sandbox and returns its exit status, 128 + N after signal N.

    The command inherits stdout and stderr, and stdin unless that is a terminal. If the caller is
    the main thread, SIGINT and SIGTERM are passed on to the command. When the command ends, all
    processes that it has left behind are killed. `env` is the command's environment; None: that of
    this process. Raises `UserError` if a sandbox cannot be created here; see `unable`."""
    reason = unable()
    if reason:
        raise UserError(f"virtual hosts: {reason}")
    environment = _environment(os.environ if env is None else env)
    # The terminal belongs to this process group, so a reader in another group would be stopped.
    stdin = subprocess.DEVNULL if sys.stdin is None or sys.stdin.isatty() else None
    main_thread = threading.current_thread() is threading.main_thread()
    # Blocked until there is a process to pass them on to. The child unblocks them when it is ready.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    handlers = {}
    try:
        arguments = [*_MAKE, str(os.getpid()), "run", "--", *command]
        process = subprocess.Popen(arguments, env=environment, stdin=stdin)
        if main_thread:
            for number in _FORWARDED:
                handlers[number] = signal.signal(number, lambda n, _: process.send_signal(n))
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        try:
            status = process.wait()
        finally:
            process.kill()  # no effect after a normal end
            process.wait()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return status if status >= 0 else 128 - status


def _environment(base: Mapping[str, str]) -> dict[str, str]:
    folders = base.get("PATH", os.defpath).split(os.pathsep)
    folders += [folder for folder in _ADMIN_FOLDERS if folder not in folders]
    return {**base, "PATH": os.pathsep.join(folders)}


def _remedy() -> str:
    for setting, (bad, good) in _SETTINGS.items():
        path = Path("/proc/sys", setting)
        if path.exists() and path.read_text(encoding="utf-8").strip() == bad:
            return f"allow them: sudo sysctl {setting.replace('/', '.')}={good}, or run as root"
    return (
        "run as root, or start the container with --cap-add=SYS_ADMIN --cap-add=NET_ADMIN "
        "--security-opt seccomp=unconfined --security-opt apparmor=unconfined"
    )


def _make(parent: int, probe: bool, command: list[str]) -> int:
    os.setpgid(0, 0)  # the caller receives Ctrl-C and passes it on once
    _new_namespaces()
    ns.die_with_parent()
    if os.getppid() != parent:
        return _FAILED  # the parent died before die_with_parent
    alive, held = os.pipe()  # `held` closes when this process ends
    child = os.fork()
    if child == 0:
        os.close(held)
        # os._exit skips the exit handlers that were registered in the parent.
        os._exit(_reported(lambda: _first_process(alive, command, probe)))
    _forward(child)
    return _status(os.waitpid(child, 0)[1])


def _reported(body: Callable[[], int]) -> int:
    """Returns the status of `body`, or prints its error as one line on stderr."""
    try:
        return body()
    except subprocess.CalledProcessError as error:
        reason = f"{' '.join(error.cmd)}: {error.stderr.strip() or error.returncode}"
    except OSError as error:
        reason = f"{error.filename}: " if error.filename else ""
        reason += error.strerror or str(error)
    print(f"error: cannot make a sandbox: {reason}", file=sys.stderr, flush=True)
    return _FAILED


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
            pass  # root of a container without CAP_SYS_ADMIN: continue as an ordinary user
    uid, gid = os.geteuid(), os.getegid()
    ns.unshare(ns.NEWUSER | flags)
    ns.map_user(uid, gid)


def _first_process(alive: int, command: list[str], probe: bool) -> int:
    ns.die_with_parent()
    if select.select([alive], [], [], 0)[0]:
        return _FAILED  # end of file: the parent died before die_with_parent
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
    socket.sethostname(ns.SWITCH)
    if Path("/etc/hosts").exists():
        # A private file mounted over /etc/hosts; the mount keeps it alive without a name.
        hosts = Path("/dev/shm/hosts")
        hosts.write_text(f"{ns.LOCALHOST}127.0.0.1 {ns.SWITCH}\n", encoding="utf-8")
        ns.bind(str(hosts), "/etc/hosts")
        hosts.unlink()
    _quiet("ip link set dev lo up")


def _quiet(line: str) -> None:
    subprocess.run(line.split(), check=True, capture_output=True, text=True)


def _run(command: list[str]) -> int:
    environment = os.environ | {MARK: str(Path("/proc/self/ns/pid").readlink())}
    unset = [*_FORWARDED, signal.SIGPIPE]  # Python ignores SIGPIPE; the command must not inherit it
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
    """Passes SIGINT and SIGTERM, which the caller of this script has blocked, on to `child`."""

    def pass_on(number: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    for number in _FORWARDED:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)


def main(argv: list[str]) -> int:
    if argv[:1] == ["make"]:  # command line of `_MAKE`
        return _reported(lambda: _make(int(argv[1]), argv[2] == "probe", argv[4:]))
    if len(argv) < 2 or argv[0] != "--":
        print("usage: python -m common.emulation.sandbox -- COMMAND...", file=sys.stderr)
        return 2
    try:
        return run(argv[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return _FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
