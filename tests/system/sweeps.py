"""`benchmarks.py` in a process of its own, on a small experiment, with its own folder of logs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ENDLESS = "measure.steps_per_iter=1000000"

TINY = """
name: tiny
algorithms: [allreduce, wfbp, ddp, dear]
models: [{name: mnist_cnn, batch_size: 2}]
world_sizes: [2]
measure: {repeats: 2, warmup_steps: 1, steps_per_iter: 2, check_steps: 2}
timeout_s: 60
"""


class Driver:
    """Of one experiment, whose name is `tiny`."""

    def __init__(self, folder: Path, text: str = TINY) -> None:
        self.folder = folder
        self.experiment = folder / "tiny.yaml"
        self.experiment.write_text(text)
        self.logs = folder / "logs"
        self.sweep = self.logs / "tiny"

    def command(self, *flags: str) -> list[str]:
        run = [sys.executable, str(ROOT / "benchmarks.py"), "run", str(self.experiment)]
        return [*run, "--logs", str(self.logs), "--no-plot", *flags]

    def run(self, *flags: str, **more: Any) -> subprocess.CompletedProcess:
        """To its end."""
        return _finished(self.command(*flags), timeout=280, **more)

    def show(self, *flags: str) -> subprocess.CompletedProcess:
        command = [sys.executable, str(ROOT / "benchmarks.py"), "show", *flags]
        return _finished([*command, "--logs", str(self.logs)], timeout=60)

    def start(self, *flags: str, interrupts: signal.Handlers = signal.SIG_DFL) -> subprocess.Popen:
        """In the foreground; with `interrupts` ignored as a script starts things with `&`.

        Otherwise a suite in the background would hand on that it ignores them.
        """
        return subprocess.Popen(
            self.command(*flags),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, interrupts),
        )

    def records(self) -> list[dict]:
        """As anybody may read them: a line of JSON each."""
        lines = (self.sweep / "records.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def worker(self, algorithm: str, rank: int, phase: str = "measuring") -> int:
        """The process id of a rank, once it is in `phase`; of virtual hosts, inside the sandbox."""

        def find() -> int | None:
            for path in self.sweep.glob(f"*-{algorithm}-*/phase-*-rank{rank}"):
                pid, _, name = path.read_text().partition(" ")
                if name == phase:
                    return int(pid)
            return None

        return wait_for(find, timeout_s=120)


def _finished(command: list[str], timeout: float, **more: Any) -> subprocess.CompletedProcess:
    return subprocess.run(
        command,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        **more,
    )


def wait_for(condition: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    """The first true value of `condition()`."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"not so within {timeout_s} s")


def alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def processes_of(folder: Path) -> list[int]:
    """Live processes whose environment or arguments name the folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            text = (path / "environ").read_bytes() + (path / "cmdline").read_bytes()
        except OSError:
            continue
        if str(folder).encode() in text and int(path.name) != os.getpid():
            found.append(int(path.name))
    return found
