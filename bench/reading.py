#!/usr/bin/env python3
"""How long commands take that only read records, on sweeps made from a committed one.

  python bench/reading.py [--repeats 3]

The sweeps have as many trials as said, each as large as those of docs/records/merging. Every
command is a process of its own; the commands take turns, so that a busy moment of the machine meets
them all. The first round is not counted: it leaves behind what Python has compiled.
Exit status: 0 within the bars, 3 not.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.rig import table
from common.results import store
from common.results.shipped import MISSED
from common.results.store import Comparison

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "docs" / "records" / "merging"
PAGE_MB = 3


@dataclass(frozen=True, kw_only=True)
class Command:
    """What is timed, and the bar that it was built to."""

    says: str
    words: list[str]
    bar_s: float
    took_s: list[float] = field(default_factory=list)


def sweep(folder: Path, trials: int) -> Path:
    """A sweep of so many trials; those after the first are copies with another batch size."""
    model = Comparison.load(MODEL).results(MODEL)
    made = []
    for number in range(trials):
        one = model[number % len(model)]
        trial = one.trial | {"batch_size": 32 + number // len(model)}
        made.append(dataclasses.replace(one, hash=f"{number:012}", id=f"t{number}", trial=trial))
    folder.mkdir()
    for one in made:
        store.append(folder / "records.jsonl", one)
    Comparison(compare_to="wfbp", trials=tuple(one.hash for one in made)).save(folder)
    return folder


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3, help="of each command (default: 3)")
    repeats = parser.parse_args(argv).repeats
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryDirectory() as folder:
        fifty, again = (str(sweep(Path(folder, name), 50)) for name in ("fifty", "again"))
        many = str(sweep(Path(folder, "many"), 10_000))
        commands = [
            Command(says="report, 50 trials", words=["report", fifty], bar_s=5),
            Command(says="compare, 50 trials with 50", words=["compare", fifty, again], bar_s=1),
            Command(says="show, 50 trials", words=["show", fifty], bar_s=1),
            Command(says="show, 10,000 trials", words=["show", many], bar_s=10),
        ]
        for _ in range(1 + repeats):
            for command in commands:
                began = time.perf_counter()
                subprocess.run(
                    [sys.executable, "benchmarks.py", *command.words],
                    cwd=ROOT,
                    env=environment,
                    check=True,
                    stdout=subprocess.DEVNULL,
                )
                command.took_s.append(time.perf_counter() - began)
        for one in commands:
            del one.took_s[0]
        rows = [
            [
                *(one.says, table.digits(statistics.median(one.took_s)), str(len(one.took_s))),
                f"{table.digits(min(one.took_s))}-{table.digits(max(one.took_s))}",
                table.digits(one.bar_s),
            ]
            for one in commands
        ]
        print(table.layout(["command", "median s", "n", "range s", "bar s"], rows))
        page_mb = Path(fifty, "report.html").stat().st_size / 1e6
        print(f"the report of 50 trials: {page_mb:.2f} MB (bar {PAGE_MB})")
        slow = [one for one in commands if statistics.median(one.took_s) > one.bar_s]
    return MISSED if slow or page_mb > PAGE_MB else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
