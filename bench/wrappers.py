#!/usr/bin/env python3
"""What the wrapper of each algorithm costs a training script, and whether losses stay the same.

  python bench/wrappers.py overhead --algorithms ddp dear --tensors 1 200 --ranks 1 2
  python bench/wrappers.py memory --model resnet50 --algorithms ddp dear:update=replicated
  python bench/wrappers.py loss_curves --data-dir DIR_WITH_MNIST

overhead: the time per step that a wrapper adds to plain torch. A model of one-element tensors
leaves nothing to compute and nothing to send: what is left is the cost of hooks, bookkeeping and
calls. With 1 rank there is no communication; with 2 ranks on this machine (shared memory, no
bandwidth limit) there is one of bytes. Every round times all algorithms in turn, plain torch
included, each in the same process; shown are medians over rounds, and the range. `us/tensor`
divides what is added by the number of tensors.

memory: the highest resident memory of a rank since before the model was built, less what was
resident then (interpreter, libraries): parameters, gradients, state of the optimizer, buffers of
the algorithm and of the transport, and activations, which the small batch keeps small. Each
algorithm trains in new processes, over TCP, as on hosts of their own: the shared memory of ranks
of one host would be counted by each of them. The largest rank counts; `x ddp` compares with the
first algorithm.

loss_curves: real compute, real ranks, the loss of every step, a mean over ranks. Tasks: `mnist`,
the net of examples/mnist on its images (without --data-dir: scikit-learn's digits), one epoch with
momentum; `bert_base` on made-up sentences, AdamW. All algorithms start from the same parameters,
see the same samples in the same order and draw the same dropout masks; synchronous ones differ by
rounding only. The first algorithm is what the others are compared with.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import yaml

import dear
from bench.rig import session, table
from bench.rig.output import Output, note
from common.launch.ranks import RankLost, Ranks, gather, rank_env
from dear.errors import UserError, unknown
from dear.lazy import torch
from dear.options import Options, at_least
from dear.training.algorithm import algorithm_class, algorithm_names, algorithm_options

MIB = 2**20
MEMORY_STEPS = 3
ANSWER_S, CURVE_S, _END_S = 600.0, 1800.0, 10.0
PLAIN = "plain"
# Its threads never rest, and would slow what is measured beside it.
APART = ("horovod",)
TASKS = {"mnist": (0, 16), "bert_base": (20, 2)}
"""Steps (0: an epoch) and batch size by default."""

Row = dict[str, Any]
"""What was measured of an algorithm; the file holds a list of them."""


def main(argv: list[str]) -> int:
    args = _arguments(argv)
    measure, render, key = BENCHES[args.what]
    rows: list[Row] = []
    with Output(args.json) as output:
        for about, row in measure(args):
            rows.append(row)
            record = {"schema": 1, "kind": args.what, "machine": output.card, **about}
            output.save({**record, key: rows})
    print(render(rows))
    return 0


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    whats = parser.add_subparsers(dest="what", required=True)
    adders = {}
    for what, text in (
        ("overhead", "time per step that each wrapper adds to plain torch"),
        ("memory", "peak memory of a rank while it trains"),
        ("loss_curves", "the loss of every step, in real training"),
    ):
        made = whats.add_parser(what, help=text, description=text)
        made.add_argument("--json", type=Path, default=None, help="keeps all that was measured")
        adders[what] = made.add_argument
    options = "NAME[:OPTION=VALUE,...]"
    add = adders["overhead"]
    add("--algorithms", nargs="+", help=f"default: all that are available but {APART[0]}")
    add("--tensors", type=int, nargs="+", default=[1, 100], help="parameter tensors of the model")
    add("--ranks", type=int, nargs="+", default=[1, 2], help="worlds to measure")
    add("--backend", default=None, help="default: as for training")
    add("--steps", type=int, default=20, help="steps of one timing")
    add("--rounds", type=int, default=9, help="timings of each algorithm, interleaved")
    add("--warmup", type=int, default=10, help="steps before the first timing")
    add = adders["memory"]
    compared = ["ddp", "ddp:gradient_as_bucket_view=true", "dear:update=replicated", "dear"]
    add("--algorithms", nargs="+", default=compared, metavar=options)
    add("--model", default="bert_base")
    add("--batch-size", type=int, default=1)
    add("--sentence-len", type=int, default=16, help="of models that read text")
    add("--optimizer", choices=["adamw", "sgd"], default="adamw")
    add("--ranks", type=int, default=4)
    add = adders["loss_curves"]
    add("--algorithms", nargs="+", default=["ddp", "dear"], metavar=options)
    add("--tasks", nargs="+", default=list(TASKS))
    add("--data-dir", type=Path, default=None, help="MNIST's IDX files")
    add("--steps", type=int, default=None, help="default: an epoch of mnist, 20 of bert_base")
    add("--batch-size", type=int, default=None, help="per rank; default 16 and 2")
    add("--ranks", type=int, default=4)
    args = parser.parse_args(argv)
    for name, value in vars(args).items():
        least = 2 if (args.what, name) == ("loss_curves", "ranks") else 1
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int):
                at_least(f"--{name.replace('_', '-')}", number, least)
    if args.what == "overhead":  # by their defaults, as `DistributedOptimizer` has them
        for name in args.algorithms or ():
            algorithm_options(name, {})
    if args.what == "loss_curves":
        for task in args.tasks:
            if task not in TASKS:
                raise unknown("task", task, TASKS)
        if args.data_dir is not None and not args.data_dir.is_dir():
            raise UserError(f"--data-dir {args.data_dir}: there is no such folder")
    args.algorithms = args.algorithms or [
        name
        for name in algorithm_names()
        if name not in APART
        and algorithm_class(name).unavailable() is None
        and algorithm_class(name).capabilities.consistency == "synchronous"
    ]
    # An unknown one is named before anything starts.
    args.chosen = {text: parsed_algorithm(text) for text in args.algorithms}
    return args


def parsed_algorithm(text: str) -> tuple[str, Options]:
    """`dear:update=sharded,fusion=none` as a name and its options; raises `UserError`."""
    name, _, rest = text.partition(":")
    pairs = (pair.partition("=") for pair in rest.split(",") if pair)
    options = {key: yaml.safe_load(value) for key, _, value in pairs}
    return name, algorithm_options(name, options)


def run_ranks(
    function: Callable[..., Any],
    ranks: int,
    *arguments: Any,
    backend: str | None = None,
    environment: Mapping[str, str] | None = None,
    limit_s: float = ANSWER_S,
) -> list[Any]:
    """What `function(*arguments)` returns on each rank; processes are new, and gone afterwards.

    Args:
        function: of a module's top level; called after `dear.init(backend=backend)`.
        environment: variables that are set before anything is imported.

    Raises:
        UserError: a rank failed, died, or did not answer within `limit_s`.
    """
    answers = {}
    with tempfile.TemporaryDirectory() as folder, Ranks() as started:
        for rank in range(ranks):
            place = rank_env(rank, ranks, store=Path(folder, "store"))
            env = {**(environment or {}), **place}
            started.function(
                _rank, backend, function, arguments, env=env, piped=True, method="spawn"
            )
        try:
            for rank, (ok, value) in gather(started.pipes, limit_s):
                if not ok:
                    raise UserError(f"rank {rank}: {value}")
                answers[rank] = value
        except RankLost as lost:
            raise UserError(f"{lost}; last words, if any, are above") from None
        started.stop(_END_S)
    return [answers[rank] for rank in range(ranks)]


def _rank(
    pipe: Connection, backend: str | None, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> int:
    try:
        torch.set_num_threads(1)
        dear.init(backend=backend)
        pipe.send((True, function(*arguments)))
    except Exception as error:
        pipe.send((False, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"))
        return 1
    return 0


# Overhead -----------------------------------------------------------------------------------------


def overhead(args: argparse.Namespace) -> Iterator[tuple[Row, Row]]:
    """Times all algorithms on new processes for each world and model. The slowest rank counts."""
    for ranks in args.ranks:
        for tensors in args.tensors:
            answers = run_ranks(_timings, ranks, args, tensors, backend=args.backend)
            for name in answers[0]:
                times = table.slowest([answer[name] for answer in answers])
                row = {"algorithm": name, "ranks": ranks, "tensors": tensors}
                yield {}, {**row, "seconds_per_step": times}


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
        class Scale(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = torch.nn.Parameter(torch.ones(1))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x * self.weight

        self._model = torch.nn.Sequential(*(Scale() for _ in range(tensors)))
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


def overhead_table(rows: list[Row]) -> str:
    """Medians over rounds; what is added is the median of the rounds' differences."""
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


# Memory -------------------------------------------------------------------------------------------


def memory(args: argparse.Namespace) -> Iterator[tuple[Row, Row]]:
    """Trains by each algorithm on new processes."""
    setup = {name: getattr(args, name) for name in ("model", "batch_size", "sentence_len")}
    setup |= {"optimizer": args.optimizer, "steps": MEMORY_STEPS}
    for text, chosen in args.chosen.items():
        environment = {"COMM_CORE_TRANSPORT": "tcp"}
        answers = run_ranks(_peak, args.ranks, setup, *chosen, environment=environment)
        note(f"{text}: {max(a['peak_bytes'] for a in answers) / MIB:.0f} MiB")
        yield {"setup": setup}, {"algorithm": text, "ranks": answers}
    print(f"# {args.model}, {args.optimizer}, {args.ranks} ranks, batch {args.batch_size}")


def _peak(setup: dict[str, Any], name: str, options: Options) -> dict[str, int]:
    """Bytes of this rank: before the model was built, and at most afterwards beyond that."""
    from common.models.registry import build, model_entry
    from dear.comm import runtime

    communicator = runtime.communicator()
    entry = model_entry(setup["model"])
    importlib.import_module(entry.module)
    communicator.barrier()
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    batch = torch.Generator().manual_seed(communicator.rank)
    length = setup["sentence_len"] if entry.sentence_len is not None else None
    workload = build(setup["model"], setup["batch_size"], length, batch)
    kinds = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    optimizer = kinds[setup["optimizer"]](workload.model.parameters(), lr=1e-4)
    workload.model, optimizer = algorithm_class(name)().wrap(
        workload.model, optimizer, communicator, options
    )
    for _ in range(setup["steps"]):
        optimizer.zero_grad()
        workload.loss().backward()
        optimizer.step()
    optimizer.synchronize()
    communicator.barrier()
    return {
        "before_bytes": before,
        "peak_bytes": _status("VmHWM") - before,
        "parameter_bytes": sum(param.nbytes for param in workload.model.parameters()),
    }


def _status(key: str) -> int:
    """A size in /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


def memory_table(rows: list[Row]) -> str:
    """A row per algorithm: its largest rank."""
    header = ["algorithm", "peak MiB", "x parameters", f"x {rows[0]['algorithm']}"]
    largest = [max(row["ranks"], key=lambda rank: rank["peak_bytes"]) for row in rows]
    lines = []
    for row, rank in zip(rows, largest, strict=True):
        peak = rank["peak_bytes"]
        cells = [row["algorithm"], f"{peak / MIB:.0f}", f"{peak / rank['parameter_bytes']:.2f}"]
        lines.append([*cells, f"{peak / largest[0]['peak_bytes']:.3f}"])
    return table.layout(header, lines)


# Loss curves --------------------------------------------------------------------------------------


def loss_curves(args: argparse.Namespace) -> Iterator[tuple[Row, Row]]:
    """Trains each task by each algorithm on new processes."""
    for task in args.tasks:
        steps, batch = TASKS[task]
        sizes = (args.steps or steps, args.batch_size or batch)
        for text, chosen in args.chosen.items():
            wanted = (task, args.data_dir, *sizes, *chosen)
            losses = run_ranks(_losses, args.ranks, *wanted, limit_s=CURVE_S)[0]
            note(f"{task} {text}: {len(losses)} steps, {losses[-1]:.4f} at the end")
            yield {"ranks": args.ranks}, {"task": task, "algorithm": text, "losses": losses}


def _losses(
    task: str, data_dir: Path | None, steps: int, batch_size: int, name: str, options: Options
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

    from common.models.datasets.digits import load_digits
    from common.models.datasets.mnist import load_mnist
    from examples.mnist.train import Net

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


def loss_table(rows: list[Row]) -> str:
    """A row per task and algorithm: first and last loss, and the largest difference of any step."""
    header = ["task", "algorithm", "steps", "first loss", "last loss", "max difference", "relative"]
    lines = []
    for curve in rows:
        base = next(c for c in rows if c["task"] == curve["task"])["losses"]
        pairs = list(zip(curve["losses"], base, strict=True))
        cells = [curve["task"], curve["algorithm"], str(len(pairs))]
        cells += [f"{curve['losses'][0]:.5f}", f"{curve['losses'][-1]:.5f}"]
        cells += [f"{max(abs(a - b) for a, b in pairs):.2e}"]
        cells += [f"{max(abs(a / b - 1) for a, b in pairs):.2e}"]
        lines.append(cells)
    return table.layout(header, lines)


BENCHES = {
    "overhead": (overhead, overhead_table, "rows"),
    "memory": (memory, memory_table, "rows"),
    "loss_curves": (loss_curves, loss_table, "curves"),
}
"""What measures, what shows the rows, and what the file calls them."""

if __name__ == "__main__":
    session.program(main)
