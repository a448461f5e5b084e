#!/usr/bin/env python3
"""Do algorithms train to the same loss curve: real compute, real ranks, the loss of every step.

  python bench/loss_curves.py --data-dir DIR_WITH_MNIST
  python bench/loss_curves.py --tasks bert_base --algorithms ddp dear dear:fusion=none --steps 50

Tasks: `mnist`, the net of examples/mnist on its images (without --data-dir: scikit-learn's digits),
one epoch with momentum; `bert_base` on made-up sentences, AdamW. All algorithms start from the same
parameters, see the same samples in the same order and draw the same dropout masks; synchronous ones
differ by rounding only. The first algorithm is what the others are compared with. A loss is the
mean over ranks.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(1, str(Path(__file__).parents[1] / "examples" / "mnist"))

from bench import session, table
from bench.memory import parsed_algorithm
from bench.output import Output
from bench.processes import run_ranks
from common.machine import machine_card
from dear.errors import UserError, unknown
from dear.options import at_least
from dear.training.algorithm import algorithm_class, algorithm_options

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

TASKS = ("mnist", "bert_base")
LIMIT_S = 1800.0


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What every rank trains."""

    task: str
    data_dir: Path | None
    steps: int
    batch_size: int


def main(argv: list[str]) -> int:
    args = _arguments(argv)
    chosen = [parsed_algorithm(text) for text in args.algorithms]
    output = Output(args.json)
    curves: list[dict[str, Any]] = []
    try:
        for task in args.tasks:
            steps = args.steps or {"mnist": 0, "bert_base": 20}[task]
            batch = args.batch_size or {"mnist": 16, "bert_base": 2}[task]
            setup = Setup(task=task, data_dir=args.data_dir, steps=steps, batch_size=batch)
            for text, (name, options) in zip(args.algorithms, chosen, strict=True):
                losses = run_ranks(_losses, args.ranks, setup, name, options, limit_s=LIMIT_S)[0]
                curves.append({"task": task, "algorithm": text, "losses": losses})
                session.note(f"{task} {text}: {len(losses)} steps, {losses[-1]:.4f} at the end")
                output.save(
                    {
                        "schema": 1,
                        "kind": "loss_curves",
                        "ranks": args.ranks,
                        "machine": machine_card(),
                        "curves": curves,
                    }
                )
        print(render(curves))
    finally:
        output.close()
    return 0


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--algorithms", nargs="+", default=["ddp", "dear"], metavar="NAME[:OPTION=VALUE,...]")
    add("--tasks", nargs="+", default=list(TASKS))
    add("--data-dir", type=Path, default=None, help="MNIST's IDX files")
    add("--steps", type=int, default=None, help="default: an epoch of mnist, 20 of bert_base")
    add("--batch-size", type=int, default=None, help="per rank; default 16 and 2")
    add("--ranks", type=int, default=4)
    add("--json", type=Path, default=None, help="keeps every loss")
    args = parser.parse_args(argv)
    for task in args.tasks:
        if task not in TASKS:
            raise unknown("task", task, TASKS)
    for name in ("steps", "batch_size"):
        if getattr(args, name) is not None:
            at_least(f"--{name.replace('_', '-')}", getattr(args, name), 1)
    at_least("--ranks", args.ranks, 2)
    if args.data_dir is not None and not args.data_dir.is_dir():
        raise UserError(f"--data-dir {args.data_dir}: there is no such folder")
    return args


def _losses(setup: Setup, name: str, options: dict[str, Any]) -> list[float]:
    """The mean over ranks of each step's loss, on every rank."""
    import torch

    import dear
    from dear.comm import runtime

    torch.set_num_threads(1)
    dear.init()
    communicator = runtime.communicator()
    torch.manual_seed(1)
    model, optimizer, losses_of = {"mnist": _mnist, "bert_base": _bert}[setup.task](setup)
    dear.broadcast_parameters(model.state_dict())
    model, optimizer = algorithm_class(name)().wrap(
        model, optimizer, communicator, algorithm_options(name, options)
    )
    torch.manual_seed(1000 + communicator.rank)
    own = []
    for loss in losses_of(model):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        own.append(loss.detach())
    optimizer.close()
    mean = torch.stack(own)
    communicator.all_reduce(mean, op="mean").wait()
    return mean.tolist()


Task = tuple["torch.nn.Module", "torch.optim.Optimizer", "Callable[..., Any]"]


def _mnist(setup: Setup) -> Task:
    import torch
    from torch.nn.functional import cross_entropy
    from train import Net

    import dear
    from common.models.datasets import load_digits, load_mnist

    (images, labels), _ = load_digits() if setup.data_dir is None else load_mnist(setup.data_dir)
    images, labels = images[dear.rank() :: dear.size()], labels[dear.rank() :: dear.size()]
    count = len(labels) // setup.batch_size
    steps = min(setup.steps or count, count)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)

    def losses(model: torch.nn.Module) -> Any:
        for step in range(steps):
            part = slice(step * setup.batch_size, (step + 1) * setup.batch_size)
            yield cross_entropy(model(images[part]), labels[part])

    return model, optimizer, losses


def _bert(setup: Setup) -> Task:
    import torch

    import dear
    from common.models.registry import build

    batches = torch.Generator().manual_seed(dear.rank())
    workload = build("bert_base", setup.batch_size, 32, batches)
    optimizer = torch.optim.AdamW(workload.model.parameters(), lr=5e-5)

    def losses(model: torch.nn.Module) -> Any:
        workload.model = model
        for _ in range(setup.steps):
            yield workload.loss()

    return workload.model, optimizer, losses


def render(curves: list[dict[str, Any]]) -> str:
    """A row per task and algorithm: first and last loss, and the largest difference of any step."""
    header = ["task", "algorithm", "steps", "first loss", "last loss", "max difference", "relative"]
    lines = []
    for curve in curves:
        base = next(c for c in curves if c["task"] == curve["task"])["losses"]
        pairs = list(zip(curve["losses"], base, strict=True))
        cells = [curve["task"], curve["algorithm"], str(len(pairs))]
        cells += [f"{curve['losses'][0]:.5f}", f"{curve['losses'][-1]:.5f}"]
        cells += [f"{max(abs(a - b) for a, b in pairs):.2e}"]
        cells += [f"{max(abs(a / b - 1) for a, b in pairs):.2e}"]
        lines.append(cells)
    return table.layout(header, lines)


if __name__ == "__main__":
    session.program(main)
