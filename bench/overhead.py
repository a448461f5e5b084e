#!/usr/bin/env python3
"""Time per step that each algorithm's wrapper adds to plain torch, without a network in the way.

  python bench/overhead.py
  python bench/overhead.py --algorithms ddp dear wfbp --tensors 1 200 --ranks 1 2 --json out.json

A model of one-element tensors leaves nothing to compute and nothing to send: what is left is the
cost of hooks, bookkeeping and calls. With 1 rank there is no communication; with 2 ranks on this
machine (shared memory, no bandwidth limit) there is one of bytes. Every round times all algorithms
in turn, plain torch included, each in the same process; shown are medians over rounds, and the
range. `us/tensor` divides what is added by the number of tensors.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import dear
from bench.rig import session, table
from bench.rig.output import Output
from bench.rig.trainings import run_ranks
from dear.lazy import torch
from dear.options import at_least
from dear.training.algorithm import algorithm_class, algorithm_names, algorithm_options

PLAIN = "plain"
# Its threads never rest, and would slow what is measured beside it.
APART = ("horovod",)


def main(argv: list[str]) -> int:
    args = _arguments(argv)
    rows: list[dict[str, Any]] = []
    with Output(args.json) as output:
        for ranks in args.ranks:
            for tensors in args.tensors:
                rows += measure(args, ranks, tensors)
                output.save({"schema": 1, "kind": "overhead", "rows": rows})
    print(render(rows))
    return 0


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--algorithms", nargs="+", help=f"default: all that are available but {APART[0]}")
    add("--tensors", type=int, nargs="+", default=[1, 100], help="parameter tensors of the model")
    add("--ranks", type=int, nargs="+", default=[1, 2], help="worlds to measure")
    add("--backend", default=None, help="default: as for training")
    add("--steps", type=int, default=20, help="steps of one timing")
    add("--rounds", type=int, default=9, help="timings of each algorithm, interleaved")
    add("--warmup", type=int, default=10, help="steps before the first timing")
    add("--json", type=Path, default=None, help="keeps every timing")
    args = parser.parse_args(argv)
    for name in ("steps", "rounds", "warmup"):
        at_least(f"--{name}", getattr(args, name), 1)
    at_least("--tensors", min(args.tensors), 1)
    at_least("--ranks", min(args.ranks), 1)
    args.algorithms = args.algorithms or [
        name
        for name in algorithm_names()
        if name not in APART
        and algorithm_class(name).unavailable() is None
        and algorithm_class(name).capabilities.consistency == "synchronous"
    ]
    for name in args.algorithms:
        algorithm_options(name, {})  # an unknown one is named before anything starts
    return args


def measure(args: argparse.Namespace, ranks: int, tensors: int) -> list[dict[str, Any]]:
    """Times all algorithms on new processes; a row for each. The slowest rank counts."""
    answers = run_ranks(_timings, ranks, args, tensors, backend=args.backend)
    return [
        {
            "algorithm": name,
            "ranks": ranks,
            "tensors": tensors,
            "seconds_per_step": table.slowest([answer[name] for answer in answers]),
        }
        for name in answers[0]
    ]


def _timings(args: argparse.Namespace, tensors: int) -> dict[str, list[float]]:
    """This rank's seconds per step, by algorithm and round."""
    from dear.comm import runtime

    communicator = runtime.communicator()
    trainings = {name: _Training(name, tensors) for name in (PLAIN, *args.algorithms)}
    for training in trainings.values():
        training.run(args.warmup)
    seconds: dict[str, list[float]] = {name: [] for name in trainings}
    for _ in range(args.rounds):
        for name, training in trainings.items():
            communicator.barrier()
            began = communicator.clock()
            training.run(args.steps)
            seconds[name].append((communicator.clock() - began) / args.steps)
    communicator.barrier()
    return seconds


class _Training:
    """The ordinary loop on a model of one-element tensors."""

    def __init__(self, name: str, tensors: int) -> None:
        self._model = _chain(tensors)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-6)
        self._input = torch.ones(1)
        if name != PLAIN:
            self._optimizer = dear.DistributedOptimizer(
                self._optimizer, self._model, algorithm=name
            )

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self._optimizer.zero_grad()
            self._model(self._input).backward()
            self._optimizer.step()


def _chain(tensors: int) -> torch.nn.Module:
    class Scale(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    return torch.nn.Sequential(*(Scale() for _ in range(tensors)))


def render(rows: list[dict[str, Any]]) -> str:
    """The table: medians over rounds; what is added is the median of the rounds' differences."""
    plain = {
        (row["ranks"], row["tensors"]): row["seconds_per_step"]
        for row in rows
        if row["algorithm"] == PLAIN
    }
    header = ["algorithm", "ranks", "tensors", "us/step", "added us", "range", "us/tensor"]
    lines = []
    for row in rows:
        times = row["seconds_per_step"]
        base = plain[row["ranks"], row["tensors"]]
        added = sorted((a - b) * 1e6 for a, b in zip(times, base, strict=True))
        middle = statistics.median(added)
        cells = [row["algorithm"], row["ranks"], row["tensors"]]
        cells.append(f"{statistics.median(times) * 1e6:.0f}")
        if row["algorithm"] == PLAIN:
            cells += ["-"] * 3
        else:
            cells += [f"{middle:.0f}", f"{added[0]:.0f}..{added[-1]:.0f}"]
            cells.append(f"{middle / row['tensors']:.1f}")
        lines.append([str(cell) for cell in cells])
    return table.layout(header, lines)


if __name__ == "__main__":
    session.program(main)
