"""`benchmarks.py` in a process of its own, on a small experiment, with its own folder of logs."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from common.harness.experiment_file import load
from common.harness.trial import Briefing
from tests.system.processes import ROOT, python, wait_for

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
    """Command line for one experiment, whose name is `tiny`."""

    def __init__(self, folder: Path, text: str = TINY) -> None:
        self.folder = folder
        self.experiment = folder / "tiny.yaml"
        self.experiment.write_text(text)
        self.logs = folder / "logs"
        self.sweep = self.logs / "tiny"

    def command(self, *flags: str) -> list[str]:
        logs = ["--logs", str(self.logs), "--no-plot"]
        return ["tests/system/undisturbed.py", "run", str(self.experiment), *logs, *flags]

    def run(self, *flags: str, **more: Any) -> subprocess.CompletedProcess:
        """Runs it to its end."""
        return python(*self.command(*flags), **more)

    def measured(self, *flags: str, **more: Any) -> list[dict]:
        """Runs it to its end, which must be a good one; returns the records."""
        done = self.run(*flags, **more)
        assert done.returncode == 0, done.stderr + done.stdout
        return self.records()

    def show(self, *flags: str) -> subprocess.CompletedProcess:
        return python("benchmarks.py", "show", *flags, "--logs", self.logs)

    def start(self, *flags: str, interrupts: signal.Handlers = signal.SIG_DFL) -> subprocess.Popen:
        """Starts it in the foreground; with `interrupts` ignored as scripts start things with `&`.

        A suite in the background would hand on otherwise that it ignores them.
        """
        return subprocess.Popen(
            [sys.executable, *self.command(*flags)],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, interrupts),
        )

    def records(self) -> list[dict]:
        """Returns the records as anybody may read them: a line of JSON each."""
        lines = (self.sweep / "records.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def evidence(self, record: dict) -> dict:
        """Returns the raw measurements of the trial's first repeat."""
        path = self.sweep / record["id"] / record["results"][0]["evidence"]
        return json.loads(gzip.decompress(path.read_bytes()))

    def worker(self, algorithm: str, rank: int, phase: str = "measuring") -> int:
        """The process id of a rank, once it is in `phase`; of virtual hosts, inside the sandbox."""

        def find() -> int | None:
            for path in self.sweep.glob(f"*-{algorithm}-*/phase-*-rank{rank}"):
                pid, _, name = path.read_text().partition(" ")
                if name == phase:
                    return int(pid)
            return None

        return wait_for(find)


def write_trial(folder: Path, algorithm: str, world_size: int) -> None:
    """Writes the files that the workers of a short trial read."""
    experiment = folder / "x.yaml"
    experiment.write_text(
        f"algorithms: [{algorithm}]\nworld_sizes: [{world_size}]\nbaseline: false\n"
        "models: [{name: mnist_cnn, batch_size: 2}]\n"
        "measure: {repeats: 1, warmup_steps: 1, steps_per_iter: 2}\n"
    )
    (trial,) = load(experiment).trials()
    trial.save(folder)
    Briefing(folder=folder).save()


def processes_of(folder: Path | str) -> list[int]:
    """Live processes whose environment or arguments name the folder, or hold this text."""
    pids = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            text = " ".join([*process.environ().values(), *process.cmdline()])
            if str(folder) in text and process.pid != os.getpid():
                pids.append(process.pid)
    return pids


def repeats(record: dict) -> list[list[float]]:
    """Returns the step times of a record in seconds, by repeat."""
    return [[step for block in result["iters"] for step in block] for result in record["results"]]
