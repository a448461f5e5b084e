#!/usr/bin/env python3
"""Is a throughput the elapsed time of training, also where steps differ by a schedule?

  python bench/elapsed.py        neighbor averaging in each fourth step: what the harness makes of a
                                 block of two periods, and of all, against one look at the clock
                                 before and after 40 steps; bar 1 %

The stopwatch is that of rank 0 alone, of the same launch: launches differ by more than that.

Exit status: 0 within the bar, 1 not or something failed.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
BAR_PERCENT = 1.0
EVERY = 4
BLOCK = 2 * EVERY


def experiment(args: argparse.Namespace) -> dict[str, Any]:
    """The keys of the experiment file: one block of so many steps."""
    measure = {"repeats": 1, "warmup_steps": 2, "check_steps": 1, "steps_per_iter": args.steps}
    return {
        "name": "elapsed",
        "algorithms": [{"name": "neighbor", "options": {"every": EVERY}}],
        "models": [{"name": "resnet50@rtx2080ti-modelled", "batch_size": 64}],
        "cluster": {"hosts": 4, "network": "2.5gbit", "time_scale": args.time_scale},
        "baseline": False,
        "optimizer": {"name": "sgd", "lr": 0.01},
        "measure": measure,
    }


def run(args: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], float]:
    """The record, and the stopwatch's seconds per step."""
    path = folder / "elapsed.yaml"
    path.write_text(yaml.safe_dump(experiment(args)))
    command = [sys.executable, str(ROOT / "benchmarks.py"), "run", str(path), "--logs", str(folder)]
    subprocess.run([*command, "--no-plot", "-q"], check=True, stdout=subprocess.DEVNULL)
    lines = (folder / "elapsed" / "records.jsonl").read_text().splitlines()
    record = json.loads(lines[-1])
    if record["status"] != "ok":
        raise SystemExit(f"failed: {record['error']['message']}")
    with gzip.open(folder / "elapsed" / record["evidence"], "rt") as file:
        marks = json.load(file)["marks_s"][0][0]
    begin, end = marks[-args.steps - 1], marks[-1]
    return record, (end - begin) / args.steps / record["time_scale"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--time-scale", type=float, default=3.0)
    parser.add_argument("--steps", type=int, default=40, help="around which the stopwatch runs")
    args = parser.parse_args()
    if args.steps % BLOCK:
        parser.error(f"--steps: a multiple of {BLOCK}, got {args.steps}")
    with tempfile.TemporaryDirectory(prefix="elapsed-") as folder:
        record, stopwatch_s = run(args, Path(folder))
    ((steps,),) = record["iters"]
    blocks = [statistics.fmean(steps[at : at + BLOCK]) for at in range(0, len(steps), BLOCK)]
    figures = {
        f"the first {BLOCK} steps": blocks[0],
        "all steps": statistics.fmean(steps),
        "(the median step)": statistics.median(steps),
    }
    print(f"stopwatch around {args.steps} steps: {1e3 * stopwatch_s:.1f} ms a step")
    off = {what: 100 * (step_s / stopwatch_s - 1) for what, step_s in figures.items()}
    for what, step_s in figures.items():
        print(f"{what}: {1e3 * step_s:.1f} ms, {off[what]:+.2f} %")
    print(f"each {BLOCK} steps: {', '.join(f'{1e3 * one:.1f}' for one in blocks)} ms")
    for note in record["notes"]:
        print(f"# {note}")
    judged = list(off.values())[:2]
    return 0 if max(map(abs, judged)) <= BAR_PERCENT else 1


if __name__ == "__main__":
    sys.exit(main())
