"""A sandbox: a process tree that keeps its processes, network, mounts and names to itself.

    python -m common.emulation.sandbox -- COMMAND...

Nothing of it is ever visible outside, and nothing of it outlives the process that called `run`,
not even when that one is killed by SIGKILL (see init.py). Virtual hosts are built inside.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from common.emulation.init import FAILED, FORWARDED, MARK
from dear.errors import UserError

# -S: the site's packages are not needed, and looking for them takes longer than all the rest.
_INIT = [sys.executable, "-I", "-S", str(Path(__file__).with_name("init.py"))]
_ADMIN_FOLDERS = ("/usr/sbin", "/sbin")  # not on every user's PATH
_SETTINGS = {
    "kernel/unprivileged_userns_clone": ("0", "1"),
    "user/max_user_namespaces": ("0", "10000"),
    "kernel/apparmor_restrict_unprivileged_userns": ("1", "0"),
}


def inside() -> bool:
    """Whether this process is in a sandbox."""
    return os.environ.get(MARK) == str(Path("/proc/self/ns/pid").readlink())


@functools.cache
def unable() -> str | None:
    """Why this process cannot make a sandbox with virtual hosts, and how to mend that, or None.

    It is found out by making one, in about a tenth of a second.
    """
    path = _environment(os.environ)["PATH"]
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool, path=path) is None]
    if missing:
        return f"{' and '.join(missing)} missing; install iproute2"
    command = [*_INIT, str(os.getpid()), "probe", "--"]
    environment = _environment(os.environ)
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    reason = lines[-1].removeprefix("error: cannot make a sandbox: ")
    return f"namespaces are forbidden here ({reason}); {_remedy()}"


def run(command: Sequence[str], env: Mapping[str, str] | None = None) -> int:
    """Runs `command` in a new sandbox and returns its exit status, 128 + N after signal N.

    It inherits stdout and stderr, and stdin unless that is a terminal. SIGINT and SIGTERM that
    this process gets meanwhile are passed on to it, when the caller is the main thread. When it
    ends, what it has left behind is killed.

    Args:
        env: the command's environment; None: this process's.

    Raises:
        UserError: a sandbox cannot be made here, see `unable`.
    """
    reason = unable()
    if reason:
        raise UserError(f"virtual hosts: {reason}")
    environment = _environment(os.environ if env is None else env)
    # The terminal belongs to this process's group; a reader in another group would be stopped.
    stdin = subprocess.DEVNULL if sys.stdin is None or sys.stdin.isatty() else None
    main_thread = threading.current_thread() is threading.main_thread()
    # Blocked until there is somebody to pass them to; the child unblocks when it is ready, too.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    handlers = {}
    try:
        arguments = [*_INIT, str(os.getpid()), "run", "--", *command]
        process = subprocess.Popen(arguments, env=environment, stdin=stdin)
        if main_thread:
            for number in FORWARDED:
                handlers[number] = signal.signal(number, lambda n, _: process.send_signal(n))
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        try:
            status = process.wait()
        finally:
            process.kill()  # without effect after a normal end
            process.wait()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return status if status >= 0 else 128 - status


def _environment(given: Mapping[str, str]) -> dict[str, str]:
    folders = given.get("PATH", os.defpath).split(os.pathsep)
    folders += [folder for folder in _ADMIN_FOLDERS if folder not in folders]
    return {**given, "PATH": os.pathsep.join(folders)}


def _remedy() -> str:
    for setting, (bad, good) in _SETTINGS.items():
        path = Path("/proc/sys", setting)
        if path.exists() and path.read_text().strip() == bad:
            return f"allow them: sudo sysctl {setting.replace('/', '.')}={good}, or run as root"
    return (
        "run as root, or start the container with --cap-add=SYS_ADMIN --cap-add=NET_ADMIN "
        "--security-opt seccomp=unconfined --security-opt apparmor=unconfined"
    )


def main(argv: list[str]) -> int:
    if len(argv) < 2 or argv[0] != "--":
        print("usage: python -m common.emulation.sandbox -- COMMAND...", file=sys.stderr)
        return 2
    try:
        return run(argv[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
