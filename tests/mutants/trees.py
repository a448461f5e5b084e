"""A copy of the checkout in which a mutant can live, and the tests that try to catch it there."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
import pytest

from tests.mutants import chosen

Outcome = Literal["failed", "hang", "unstartable", "survived"]
"""`unstartable`: no test could begin; all but `survived` are caught."""
START_S = 60.0
"""Limit for pytest and the fork server, and for tests that a pool's ranks keep waiting once."""
SLOWER = 4.0
"""A mutant may take so many times longer than the tests took when they were looked at."""
_HANGS = ("Failed: Timeout", "no answer from rank")
_PR_SET_CHILD_SUBREAPER = 36
_BUILT = (
    "common/comm_core/*.so",
    "common/comm_core/_built_for.json",
    "common/emulation/links/link_switch/link_switch",
)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Outcome of one mutant."""

    outcome: Outcome
    by: str | None = None
    """The test that has caught it."""
    message: str | None = None
    """A line of what the test said."""
    asked: int = 0
    """Tests that were to be run."""
    seconds: float = 0.0


class Tree:
    """A copy of what git knows of `root`, and of the built comm core."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.folder = folder
        shutil.rmtree(folder, ignore_errors=True)
        for path in tracked(root):
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / path, target)
        for pattern in _BUILT:
            for path in root.glob(pattern):
                shutil.copy2(path, folder / path.relative_to(root))
        if (root / ".venv").exists():
            (folder / ".venv").symlink_to((root / ".venv").resolve())
        self._written = 0

    def try_out(self, path: str, text: str, tests: Sequence[tuple[str, float]]) -> Trial:
        """Runs tests, given with their seconds, with `text` in place of a file's own.

        A test that fails or hangs counts if it does so again by itself; else it is left out. Where
        something hangs, the tests must also pass just then if nothing is changed, and where none
        can begin, begin.
        """
        began = time.monotonic()
        original = (self.folder / path).read_text()
        try:
            trial = self._tried(path, text, original, list(tests))
        finally:
            self._write(path, original)
        facts = {"asked": len(tests), "seconds": round(time.monotonic() - began, 1)}
        return Trial(**{**trial, **facts})

    def _tried(
        self, path: str, changed: str, original: str, left: list[tuple[str, float]]
    ) -> dict[str, str | None]:
        while left:
            self._write(path, changed)
            first = self.pytest(left)
            if first["outcome"] == "survived":
                return first
            asked, named = left, first["by"] is not None
            if named:
                place = [name for name, _ in left].index(first["by"])
                asked, left = left[place : place + 1], left[place + 1 :]
            counts = not named or self.pytest(asked)["outcome"] != "survived"
            if counts and first["outcome"] != "failed":
                self._write(path, original)
                now = self.pytest(asked)["outcome"]
                begun = first["outcome"] == "unstartable" and now == "failed"
                counts = now == "survived" or begun
            if counts:
                return first
            if not named:
                message = f"nor did tests pass with nothing changed: {first['message']}"
                return {"outcome": "survived", "message": message}
        return {"outcome": "survived"}

    def pytest(self, tests: Sequence[tuple[str, float]]) -> dict[str, str | None]:
        """Runs tests until one fails; nothing that it started is left when this returns."""
        limit_s = START_S + SLOWER * sum(seconds for _, seconds in tests)
        files = sorted({name.partition("::")[0] for name, _ in tests})
        with tempfile.TemporaryDirectory(prefix="mutant") as place:
            env = {name: value for name, value in os.environ.items() if "COVERAGE" not in name}
            env |= chosen.environment([name for name, _ in tests], Path(place))
            paths = (self.folder, self.folder / "common")
            env |= {"PYTHONPATH": os.pathsep.join(map(str, paths)), "TMPDIR": place}
            command = [sys.executable, "-m", "pytest", "-x", "-q", "--timeout=60", *files]
            command += ["-p", "no:cacheprovider", "-p", "tests.mutants.chosen"]
            with Path(place, "output").open("w") as output:
                process = subprocess.Popen(
                    command,
                    cwd=self.folder,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
                try:
                    code = process.wait(limit_s)
                except subprocess.TimeoutExpired:
                    message = f"not done after {limit_s:.0f} s"
                    return {"outcome": "hang", "by": None, "message": message}
                finally:
                    end_descendants()
            if code == 0:
                return {"outcome": "survived"}
            if code == pytest.ExitCode.NO_TESTS_COLLECTED:  # it has changed their names
                return {"outcome": "survived", "message": "the tests that see it were not found"}
            failure = chosen.failed(Path(place))
            if failure is None:
                words = Path(place, "output").read_text().strip().splitlines()
                message = words[-1] if words else f"exit status {code}"
                return {"outcome": "unstartable", "by": None, "message": message}
            hung = any(sign in failure["message"] for sign in _HANGS)
            message = _last_error(failure["message"])
            outcome = "hang" if hung else "failed"
            return {"outcome": outcome, "by": failure["test"], "message": message}

    def _write(self, path: str, text: str) -> None:
        """Each time with another date, by which Python knows whether compiled code is of today."""
        self._written += 1
        file = self.folder / path
        file.write_text(text)
        date = int(time.time()) + self._written
        os.utime(file, (date, date))


def tracked(root: Path) -> list[str]:
    """Files of the checkout, relative to `root`; also what is new and not ignored."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others"]
    command.append("--exclude-standard")
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [name for name in names.split("\0") if name and (root / name).is_file()]


def adopt() -> None:
    """Adopts processes whose parents have died, so that this process can end them."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants() -> None:
    """Kills all that this process has started and adopted, and what those have started."""
    while left := psutil.Process().children(recursive=True):
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.02)


def _last_error(text: str) -> str:
    """The line of a report that says what was wrong."""
    lines = [line for line in text.splitlines() if line.startswith("E ")]
    return (lines[0][2:] if lines else text.strip().rpartition("\n")[2]).strip()[:200]
