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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import session, table
from bench.output import Output
from bench.processes import run_ranks
from dear.options import at_least
from dear.training.algorithm import algorithm_class, algorithm_names, algorithm_options

if TYPE_CHECKING:
    import torch

PLAIN = "plain"
# Its threads never rest, and would slow what is measured beside it.
APART = ("horovod",)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What every rank measures."""

    algorithms: tuple[str, ...]
    tensors: int
    steps: int
    rounds: int
    warmup: int
    backend: str | None


def main(argv: list[str]) -> int:
    args = _arguments(argv)
    chosen = tuple(args.algorithms or _default_algorithms())
    for name in chosen:
        algorithm_options(name, {})  # an unknown one is named before anything starts
    output = Output(args.json)
    rows: list[dict[str, Any]] = []
    try:
        for ranks in args.ranks:
            for tensors in args.tensors:
                setup = Setup(
                    algorithms=chosen,
                    tensors=tensors,
                    steps=args.steps,
                    rounds=args.rounds,
                    warmup=args.warmup,
                    backend=args.backend,
                )
                rows += measure(setup, ranks)
                output.save({"schema": 1, "kind": "overhead", "rows": rows})
        print(render(rows))
    finally:
        output.close()
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
    return args


def _default_algorithms() -> list[str]:
    return [
        name
        for name in algorithm_names()
        if name not in APART
        and algorithm_class(name).unavailable() is None
        and algorithm_class(name).capabilities.consistency == "synchronous"
    ]


def measure(setup: Setup, ranks: int) -> list[dict[str, Any]]:
    """Runs `setup` on `ranks` processes; returns a row per algorithm. The slowest rank counts."""
    answers = run_ranks(_timings, ranks, setup)
    return [
        {
            "algorithm": name,
            "ranks": ranks,
            "tensors": setup.tensors,
            "seconds_per_step": [
                max(times) for times in zip(*(answer[name] for answer in answers), strict=True)
            ],
        }
        for name in (PLAIN, *setup.algorithms)
    ]


def _timings(setup: Setup) -> dict[str, list[float]]:
    import torch

    import dear
    from dear.comm import runtime

    torch.set_num_threads(1)
    dear.init(backend=setup.backend)
    communicator = runtime.communicator()
    trainings = {name: _Training(name, setup.tensors) for name in (PLAIN, *setup.algorithms)}
    for training in trainings.values():
        training.run(setup.warmup)
    seconds: dict[str, list[float]] = {name: [] for name in trainings}
    for _ in range(setup.rounds):
        for name, training in trainings.items():
            communicator.barrier()
            began = communicator.clock()
            training.run(setup.steps)
            seconds[name].append((communicator.clock() - began) / setup.steps)
    communicator.barrier()
    return seconds


class _Training:
    """The ordinary loop on a model of one-element tensors."""

    def __init__(self, name: str, tensors: int) -> None:
        import torch

        import dear

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
    import torch
    from torch import nn

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    return nn.Sequential(*(Scale() for _ in range(tensors)))


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
