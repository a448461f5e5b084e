"""Starts sandboxes from tests, as this user or as nobody, and looks for what they leave behind."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from common.emulation import sandbox

ROOT = Path(__file__).parents[2]
LIMIT_S = 110.0
_NOBODY = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "--"]
_TOKEN = "TEST_TOKEN"

needs_sandbox = pytest.mark.skipif(
    sandbox.unable() is not None, reason=f"no sandbox here: {sandbox.unable()}"
)


class Outside:
    """What a sandbox could leave behind, as seen from where the tests run.

    Attributes:
        environment: for the sandbox; by what it holds, its processes are found again.
    """

    def __init__(self) -> None:
        self._token = f"{_TOKEN}={uuid.uuid4()}"
        name, _, value = self._token.partition("=")
        self.environment = os.environ | {name: value, "PYTHONPATH": str(ROOT)}
        self._before = self._network()

    def processes(self) -> list[int]:
        """The processes of the sandbox."""
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdecimal() and int(folder.name) != os.getpid():
                try:
                    environment = (folder / "environ").read_bytes()
                except (FileNotFoundError, ProcessLookupError, PermissionError):
                    continue
                if self._token.encode() in environment.split(b"\0"):
                    found.append(int(folder.name))
        return found

    def check_clean(self) -> None:
        """Fails unless soon no process is left, and links and namespaces are as they were."""
        wait_until(lambda: not self.processes(), "the end of the sandbox's processes")
        assert self._network() == self._before

    @staticmethod
    def _network() -> list[str]:
        lines = []
        for command in (["ip", "netns", "list"], ["ip", "-brief", "link"]):
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            # Names only: that another program's link goes up is nothing of ours.
            lines += [line.split()[0] for line in done.stdout.splitlines() if line.strip()]
        return sorted(lines)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come in {LIMIT_S:.0f} s"
        time.sleep(0.05)


def python(user: str) -> list[str]:
    """The interpreter to run as `me` or as `nobody`; skips where nobody cannot."""
    if user == "me":
        return [sys.executable]
    reason = _nobody_cannot()
    if reason:
        pytest.skip(reason)
    return [*_NOBODY, "/usr/bin/python3"]


@functools.cache
def _nobody_cannot() -> str | None:
    if os.geteuid() != 0:
        return "only root can become another user"
    if shutil.which("setpriv") is None or not Path("/usr/bin/python3").exists():
        return "needs setpriv and /usr/bin/python3"
    program = "from common.emulation import cluster, sandbox; print(sandbox.unable() or '')"
    done = subprocess.run(
        [*_NOBODY, "/usr/bin/python3", "-c", program],
        cwd="/tmp",
        env=os.environ | {"HOME": "/tmp", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        return f"nobody cannot run the code: {done.stderr.strip().splitlines()[-1]}"
    return f"nobody cannot make a sandbox: {done.stdout}" if done.stdout.strip() else None


def in_sandbox(user: str, *command: str) -> list[str]:
    """The command line that runs `command` in a sandbox."""
    return [*python(user), "-m", "common.emulation.sandbox", "--", *command]
