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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(1, str(Path(__file__).parents[1] / "examples" / "mnist"))

import dear
from bench.rig import session, table
from bench.rig.output import Output, note
from bench.rig.trainings import parsed_algorithm, run_ranks
from dear.errors import UserError, unknown
from dear.lazy import torch
from dear.options import Options, at_least
from dear.training.algorithm import algorithm_class

TASKS = {"mnist": (0, 16), "bert_base": (20, 2)}
"""Steps (0: an epoch) and batch size by default."""
LIMIT_S = 1800.0


def main(argv: list[str]) -> int:
    args = _arguments(argv)
    chosen = [parsed_algorithm(text) for text in args.algorithms]
    curves: list[dict[str, Any]] = []
    with Output(args.json) as output:
        for task in args.tasks:
            steps, batch = TASKS[task]
            sizes = (args.steps or steps, args.batch_size or batch)
            for text, (name, options) in zip(args.algorithms, chosen, strict=True):
                wanted = (task, args.data_dir, *sizes, name, options)
                losses = run_ranks(_losses, args.ranks, *wanted, limit_s=LIMIT_S)[0]
                curves.append({"task": task, "algorithm": text, "losses": losses})
                note(f"{task} {text}: {len(losses)} steps, {losses[-1]:.4f} at the end")
                record = {"schema": 1, "kind": "loss_curves", "ranks": args.ranks}
                output.save({**record, "machine": output.card, "curves": curves})
    print(render(curves))
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


def _losses(
    task: str,
    data_dir: Path | None,
    steps: int,
    batch_size: int,
    name: str,
    options: Options,
) -> list[float]:
    """The mean over ranks of each step's loss, on every rank."""
    from dear.comm import runtime

    communicator = runtime.communicator()
    torch.manual_seed(1)
    if task == "mnist":
        model, optimizer, losses_of = _mnist(data_dir, steps, batch_size)
    else:
        model, optimizer, losses_of = _bert(steps, batch_size)
    dear.broadcast_parameters(model.state_dict())
    model, optimizer = algorithm_class(name)().wrap(model, optimizer, communicator, options)
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


Task = tuple["torch.nn.Module", "torch.optim.Optimizer", Callable[..., Iterator["torch.Tensor"]]]


def _mnist(data_dir: Path | None, steps: int, batch_size: int) -> Task:
    from torch.nn.functional import cross_entropy
    from train import Net

    from common.models.datasets import load_digits, load_mnist

    (images, labels), _ = load_digits() if data_dir is None else load_mnist(data_dir)
    images, labels = images[dear.rank() :: dear.size()], labels[dear.rank() :: dear.size()]
    count = len(labels) // batch_size
    model = Net()

    def losses(model: torch.nn.Module) -> Iterator[torch.Tensor]:
        for step in range(min(steps or count, count)):
            part = slice(step * batch_size, (step + 1) * batch_size)
            yield cross_entropy(model(images[part]), labels[part])

    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5), losses


def _bert(steps: int, batch_size: int) -> Task:
    from common.models.registry import build

    batches = torch.Generator().manual_seed(dear.rank())
    workload = build("bert_base", batch_size, 32, batches)

    def losses(model: torch.nn.Module) -> Iterator[torch.Tensor]:
        workload.model = model
        for _ in range(steps):
            yield workload.loss()

    return workload.model, torch.optim.AdamW(workload.model.parameters(), lr=5e-5), losses


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
