#!/usr/bin/env python3
"""Is a throughput the elapsed time of training, also where steps differ by a schedule?

  python bench/elapsed.py        neighbor averaging in each fourth step, by the harness, and by one
                                 look at the clock before and after 40 steps; bar 1 %

The harness's figure is that of a short block, in whole periods of the schedule; the stopwatch is
that of rank 0 alone, around all steps of a long block in processes of its own.

Exit status: 0 within the bar, 1 not or something failed.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
BAR_PERCENT = 1.0
EVERY = 4


def experiment(args: argparse.Namespace, steps: int, name: str) -> dict[str, Any]:
    """The keys of an experiment file: blocks of so many steps."""
    return {
        "name": name,
        "algorithms": [{"name": "neighbor", "options": {"every": EVERY}}],
        "models": [{"name": "resnet50@rtx2080ti-modelled", "batch_size": 64}],
        "cluster": {"hosts": 4, "network": "2.5gbit", "time_scale": args.time_scale},
        "baseline": False,
        "optimizer": {"name": "sgd", "lr": 0.01},
        "measure": {
            "repeats": 1,
            "warmup_steps": 2,
            "check_steps": 1,
            "steps_per_iter": steps,
        },
    }


def run(args: argparse.Namespace, steps: int, folder: Path) -> tuple[dict[str, Any], float]:
    """The record of a block of so many steps, and the stopwatch's seconds per step."""
    name = f"elapsed-{steps}"
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(experiment(args, steps, name)))
    command = [sys.executable, str(ROOT / "benchmarks.py"), "run", str(path), "--logs", str(folder)]
    subprocess.run([*command, "--no-plot", "-q"], check=True, stdout=subprocess.DEVNULL)
    lines = (folder / name / "records.jsonl").read_text().splitlines()
    record = json.loads(lines[-1])
    if record["status"] != "ok":
        raise SystemExit(f"{name}: {record['error']['message']}")
    with gzip.open(folder / name / record["evidence"], "rt") as file:
        block = json.load(file)["marks_s"][0][0]
    begin, end = block[-steps - 1], block[-1]
    return record, (end - begin) / steps / record["time_scale"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--time-scale", type=float, default=3.0)
    parser.add_argument("--steps", type=int, default=40, help="around which the stopwatch runs")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="elapsed-") as folder:
        short, _ = run(args, 2 * EVERY, Path(folder))
        long, stopwatch_s = run(args, args.steps, Path(folder))
    steps = [step for repeat in short["iters"] for block in repeat for step in block]
    harness_s = sum(steps) / len(steps)
    median_s = sorted(steps)[len(steps) // 2]
    off = 100 * (harness_s / stopwatch_s - 1)
    print(f"harness    {1e3 * harness_s:7.1f} ms a step, block of {len(steps)}")
    print(f"stopwatch  {1e3 * stopwatch_s:7.1f} ms a step, around {args.steps}")
    print(f"off        {off:+7.2f} %, bar {BAR_PERCENT:g} %")
    print(f"by median  {100 * (median_s / stopwatch_s - 1):+7.2f} %")
    for note in dict.fromkeys([*short["notes"], *long["notes"]]):
        print(f"# {note}")
    return 0 if abs(off) <= BAR_PERCENT else 1


if __name__ == "__main__":
    sys.exit(main())
