"""`python -m tests.comm.soak.sweep`: a sweep of a thousand short trials; nothing grows or is left.

The trials differ in algorithm, label, batch size and world size. While `benchmarks.py` runs them,
the memory and the descriptors of the driver are sampled. The status is 3 if a trial lacks a valid
record, if the driver grew, or if a process, a port or a file is left.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from tests.faults.traces import TOKEN, Traces
from tests.system.sweeps import Driver

GROWTH = 0.02
"""Largest growth of the driver's memory beyond what its records take."""
RECORD_BYTES = 8 << 10
"""Memory that a record may take in the driver."""
EVERY_S = 1.0

_SWEEP = """
name: tiny
algorithms: {algorithms}
models: {models}
world_sizes: {worlds}
baseline: false
measure: {{repeats: 1, warmup_steps: 1, steps_per_iter: 2, check_steps: 2}}
timeout_s: 60
"""
_ALGORITHMS = ["allreduce", "wfbp", "ddp", "dear", "dadt"]
_LABELS = 10
"""Trials of each algorithm that differ only in their label."""
_WORLDS = [1, 2]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.comm.soak.sweep", description=__doc__)
    parser.add_argument("--trials", type=int, default=1000, help="a multiple of 100")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    os.environ[TOKEN] = f"soak {os.getpid()}"
    with tempfile.TemporaryDirectory() as folder:
        # torch keeps a cache for later processes. Other programs' temporary files come and go.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/cache"
        tempfile.tempdir = os.environ["TMPDIR"] = f"{folder}/temporary"
        Path(tempfile.tempdir).mkdir()
        traces = Traces()
        facts = _swept(Path(folder), options.trials)
        facts["left"] = traces.left()
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(facts, indent=1))
    misses = _misses(facts, options.trials)
    print(_summary(facts), *misses, sep="\n")
    return 3 if misses else 0


def _swept(folder: Path, trials: int) -> dict[str, Any]:
    """Runs the sweep; returns what it took, and what its records say."""
    algorithms = [
        {"name": name, "label": f"{name} {number}"}
        for name in _ALGORITHMS
        for number in range(_LABELS)
    ]
    batches = range(1, trials // (len(algorithms) * len(_WORLDS)) + 1)
    models = [{"name": "mnist_cnn", "batch_size": batch} for batch in batches]
    lists = {"algorithms": algorithms, "worlds": _WORLDS, "models": models}
    texts = {key: json.dumps(value) for key, value in lists.items()}
    driver = Driver(folder, _SWEEP.format(**texts))
    began = time.monotonic()
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, *driver.command()], stdout=output, stderr=subprocess.STDOUT
        )
        samples = []
        while process.poll() is None:
            with contextlib.suppress(psutil.Error):
                samples.append({"at_s": time.monotonic() - began, **_used(process.pid, driver)})
            time.sleep(EVERY_S)
    seconds = time.monotonic() - began
    statuses = Counter(record["status"] for record in driver.records())
    tail = (folder / "output").read_text()[-2000:]
    return {
        "seconds": round(seconds, 1),
        "status": process.returncode,
        "records": dict(statuses),
        "samples": samples,
        "output": tail,
    }


def _used(pid: int, driver: Driver) -> dict[str, int]:
    """Returns what the driver holds; its ranks come and go."""
    process = psutil.Process(pid)
    records = driver.sweep / "records.jsonl"
    return {
        "rss_bytes": process.memory_info().rss,
        "descriptors": process.num_fds(),
        "threads": process.num_threads(),
        "descendants": len(process.children(recursive=True)),
        "records": len(records.read_bytes().splitlines()) if records.exists() else 0,
    }


def _misses(facts: dict[str, Any], trials: int) -> list[str]:
    """Returns a sentence for each bar that was missed."""
    misses = [f"left: {trace}" for trace in facts["left"]]
    if facts["status"] != 0 or facts["records"] != {"ok": trials}:
        misses.append(f"status {facts['status']}, records {facts['records']}: {facts['output']}")
    before, after = _early(facts), _late(facts)
    new = (after["records"] - before["records"]) * RECORD_BYTES
    if after["rss_bytes"] - new > before["rss_bytes"] * (1 + GROWTH):
        misses.append(
            f"the driver's memory grew from {before['rss_bytes'] >> 20} to "
            f"{after['rss_bytes'] >> 20} MB"
        )
    for what in ("descriptors", "threads", "descendants"):
        half = [sample[what] for sample in facts["samples"]]
        if max(half[len(half) // 2 :]) > max(half[: len(half) // 2]):
            misses.append(f"more {what} in the second half than in the first")
    return misses


def _early(facts: dict[str, Any]) -> dict[str, Any]:
    """Sample after a tenth of the records."""
    samples = facts["samples"]
    return next(s for s in samples if s["records"] >= samples[-1]["records"] / 10)


def _late(facts: dict[str, Any]) -> dict[str, Any]:
    """Last sample before the last record: afterwards come tables and the report."""
    samples = facts["samples"]
    earlier = (s for s in reversed(samples) if s["records"] < samples[-1]["records"])
    return next(earlier, samples[-1])


def _summary(facts: dict[str, Any]) -> str:
    before, after = _early(facts), _late(facts)
    return (
        f"{sum(facts['records'].values())} trials in {facts['seconds']:.0f} s; the driver: "
        f"{before['rss_bytes'] >> 20} MB after {before['records']} records, "
        f"{after['rss_bytes'] >> 20} MB after {after['records']}; {before['descriptors']} and "
        f"{after['descriptors']} descriptors"
    )


if __name__ == "__main__":
    sys.exit(main())
