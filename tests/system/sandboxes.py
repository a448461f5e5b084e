"""Starts sandboxes from tests, as this user or as nobody, and looks for what they leave behind."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from common.emulation import sandbox
from tests.system.processes import ROOT, finished, wait_for
from tests.system.sweeps import processes_of

_NOBODY = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "--"]
_TOKEN = "TEST_TOKEN"

needs_sandbox = pytest.mark.skipif(
    sandbox.unable() is not None, reason=f"no sandbox here: {sandbox.unable()}"
)


class Outside:
    """Traces that a sandbox could leave behind, as seen from where the tests run.

    Attributes:
        environment: for the sandbox; by what it holds, its processes are found again.
    """

    def __init__(self) -> None:
        self._token = str(uuid.uuid4())
        self.environment = os.environ | {_TOKEN: self._token, "PYTHONPATH": str(ROOT)}
        self._before = self.network()

    def processes(self) -> list[int]:
        """The processes of the sandbox."""
        return processes_of(self._token)

    def check_clean(self) -> None:
        """Fails unless soon no process is left, and links and namespaces are as they were."""
        wait_for(lambda: not self.processes())
        assert self.network() == self._before

    @staticmethod
    def network() -> list[str]:
        """Links and named namespaces that anybody can see."""
        lines = []
        for command in (["ip", "netns", "list"], ["ip", "-brief", "link"]):
            done = finished(command, check=True)
            # Names only: that another program's link goes up is nothing of ours.
            lines += [line.split()[0] for line in done.stdout.splitlines() if line.strip()]
        return sorted(lines)


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
    done = finished(
        [*_NOBODY, "/usr/bin/python3", "-c", program],
        cwd="/tmp",
        env=os.environ | {"HOME": "/tmp", "PYTHONPATH": str(ROOT)},
    )
    if done.returncode:
        return f"nobody cannot run the code: {done.stderr.strip().splitlines()[-1]}"
    return f"nobody cannot make a sandbox: {done.stdout}" if done.stdout.strip() else None


def start(outside: Outside, user: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """Python with these arguments in a sandbox."""
    name = "/usr/bin/python3" if user == "nobody" else sys.executable
    return subprocess.Popen(
        in_sandbox(user, name, *arguments),
        cwd="/tmp",
        env=outside.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def in_sandbox(user: str, *command: str) -> list[str]:
    """The command line that runs `command` in a sandbox."""
    return [*python(user), "-m", "common.emulation.sandbox", "--", *command]
