"""One command per host, each ended when this process ends: directly, or through a remote shell."""

from __future__ import annotations

import contextlib
import os
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.launch.envs import ROOT
from common.launch.hosts import Block, Host, are_virtual
from common.launch.job import GRACE_S
from common.launch.orphans import die_with_parent
from dear.errors import UserError

# BatchMode: nobody is there to type a password. Alive: a dead network must end the job.
SSH = "ssh -o BatchMode=yes -o ConnectTimeout=8 -o ServerAliveInterval=15"
STACKS_S = 1.0
STOP_S = 20.0


@dataclass(frozen=True, kw_only=True)
class HostCommand:
    """What is started for one host; it must end when its standard input closes."""

    host: Host
    argv: Sequence[str]
    log: Path


class Fleet:
    """The commands of one job, from start to end; a context manager that leaves nothing running."""

    def __init__(self, commands: Sequence[HostCommand]) -> None:
        self.codes: dict[str, int] = {}
        """Exit status by host, of those that ended by themselves."""
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._commands = commands

    def __enter__(self) -> Fleet:
        try:
            for command in self._commands:
                with command.log.open("wb") as log:
                    self._processes[command.host.name] = subprocess.Popen(
                        command.argv,
                        cwd=ROOT,
                        stdin=subprocess.PIPE,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,  # a Ctrl-C at the terminal is the driver's
                        preexec_fn=lambda: die_with_parent(signal.SIGTERM),
                    )
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        deadline = time.monotonic() + STOP_S
        for process in self._processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def wait(self, timeout_s: float) -> bool:
        """Waits for all to end, or a little longer than the first failure; False if out of time."""
        deadline = time.monotonic() + timeout_s
        failed = False
        with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
            for name, process in self._processes.items():
                fd = os.pidfd_open(process.pid)
                stack.callback(os.close, fd)
                selector.register(fd, selectors.EVENT_READ, name)
            while len(self.codes) < len(self._processes):
                left = deadline - time.monotonic()
                if left <= 0:
                    return failed
                for key, _ in selector.select(left):
                    selector.unregister(key.fd)
                    self.codes[key.data] = self._processes[key.data].wait()
                if not failed and any(self.codes.values()):
                    failed = True
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return True

    def ask_for_stacks(self) -> None:
        """Has the workers print their stacks into their logs, if they still can."""
        for process in self._processes.values():
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(b"stacks\n")
                process.stdin.flush()
        self.wait(STACKS_S)

    @property
    def logs(self) -> list[Path]:
        """What the commands printed, a file per host."""
        return [command.log for command in self._commands]

    def failure(self) -> str | None:
        """What the host whose command failed said last, or None if none failed."""
        for command in self._commands:
            code = self.codes.get(command.host.name)
            if code:
                lines = command.log.read_text(errors="replace").strip().splitlines()
                said = f": {lines[-1].strip()}" if lines else ""
                return f"host {command.host.name} ended with status {code}{said}"
        return None


def agent_of(given: str | None, hosts: Sequence[Host] | None) -> list[str]:
    """The remote shell as words: what was given, or ssh, or for virtual hosts its stand-in."""
    if given is not None:
        words = shlex.split(given)
        if not words:
            raise UserError("option agent: must be a command such as ssh, got an empty text")
        return words
    if are_virtual(hosts):
        return [sys.executable, "-m", "common.emulation.rsh"]
    return shlex.split(SSH)


def on_host(
    host: Host, argv: Sequence[str], env: Mapping[str, str], agent: Sequence[str] | None
) -> list[str]:
    """`argv` as it must be started here to run on `host` in the repository's folder.

    Args:
        agent: the remote shell, or None to start it on this machine without one.
    """
    words = ["env", *(f"{key}={value}" for key, value in env.items()), *argv]
    if agent is None:
        return words
    return [*agent, host.reached_at, f"cd {shlex.quote(str(ROOT))} && exec {shlex.join(words)}"]


def meeting_point(blocks: Sequence[Block], port: int | None) -> dict[str, str]:
    """MASTER_ADDR and MASTER_PORT for ranks on these hosts; rank 0 opens the port.

    Raises:
        UserError: several hosts, of which the first has a name that the others cannot reach.
    """
    first = blocks[0].host
    if len(blocks) == 1:
        address = "127.0.0.1"
    elif first.loopback:
        raise UserError(
            f"the first of several hosts is {first.name!r}, which the others cannot reach: write "
            "its name in their network"
        )
    else:
        address = first.reached_at
    return {"MASTER_ADDR": address, "MASTER_PORT": str(port or _free_port())}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
