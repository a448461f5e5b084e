"""`benchmarks.py` in a process of its own, on a small experiment, with its own folder of logs."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from common.harness import cli
from common.harness.experiment_file import load
from common.harness.trial import Briefing
from tests.system.processes import ROOT, may_be_real_time, python, wait_for

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
        """Shows a sweep, in this process: another one would import everything again."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = cli.main(["show", *flags, "--logs", str(self.logs)])
        return subprocess.CompletedProcess((), status, out.getvalue(), err.getvalue())

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


def check_fabric(
    driver: Driver, records: list[dict], gbps: float, time_scale: float, blocks: list[int]
) -> None:
    """Checks what the records of two trials say of links, costs of collectives, and load.

    The trials ran once, on two virtual hosts. `gbps`: speed of the links. `blocks`: number of timed
    steps of each block.
    """
    # The trial whose turn came first has measured what collectives cost, at its begin and its end.
    first, second = sorted(records, key=lambda record: record["order"]["positions"])
    check = first["results"][0]["cost_check"]
    assert check["residual"] >= 0 and second["results"][0]["cost_check"] == check
    assert second["results"][0]["costs"] == first["results"][0]["costs"]
    for record in records:
        fabric, (result,) = record["fabric"], record["results"]
        assert fabric["kind"] == "emulated" and fabric["time_scale"] == time_scale
        network = fabric["network"]
        assert network["requested"]["gbps"] == gbps
        assert [link["host"] for link in network["measured"]] == ["h0", "h1"]
        assert all(0 < link["up_gbps"] <= 1.2 * gbps for link in network["measured"])
        assert [link["host"] for link in network["together"]] == ["h0", "h1"]
        assert all(0 < link["gbps"] <= 1.2 * gbps for link in network["together"])
        flagged = any(note["kind"] == "unfaithful" for note in record["notes"])
        assert record["unfaithful"] is flagged
        strain = result["strain"]
        assert strain["core_wait"] >= 0 and min(strain["canary_s"]) > 0
        assert [len(block) for block in result["iters"]] == blocks and result["period"] == 1
        assert [len(block) for block in result["untimed"]] == [2] * len(blocks)
        assert strain["helpers_hurried"] is may_be_real_time()
        evidence = driver.evidence(record)
        # A barrier, two steps that do not count, the start of those that do, and their ends.
        assert [len(rank[0]) for rank in evidence["marks_s"]] == [1 + 2 + 1 + blocks[0]] * 2
        assert all(rank["gradients"] for rank in evidence["traces"]) and evidence["plan"]["groups"]
        # Through this link went what the algorithm sent, and more: headers.
        for rank in evidence["network"]["ranks"]:
            sent = rank["eth0"]["tx_bytes"] / evidence["network"]["steps"]
            assert sent > result["gradient_bytes"]
        assert ("collectives" in evidence) == (record is first)


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
