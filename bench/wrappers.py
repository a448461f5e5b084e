#!/usr/bin/env python3
"""Cost of each algorithm's wrapper for a training script: time per step, and memory.

  python bench/wrappers.py overhead --algorithms ddp dear --tensors 1 200 --ranks 1 2
  python bench/wrappers.py memory --model resnet50 --algorithms ddp dear:update=replicated

overhead: the time per step that a wrapper adds to plain torch. The model has tensors of one
element, so the step is nearly all hooks, bookkeeping and calls. With 1 rank there is no
communication; 2 ranks communicate some bytes through shared memory. Every round times plain torch
and all algorithms in turn, in the same process. The table has the median over rounds, and the
range. `us/tensor` is the added time divided by the number of tensors. `CPU us/tensor` counts only
the time in which the training thread ran on a core, not the time in which it waited.

memory: the peak of a rank's resident memory, minus the memory before the model was built
(interpreter, libraries). It contains parameters, gradients, optimizer state, buffers of the
algorithm and of the transport, and activations, which the small batch keeps small. Each algorithm
trains in new processes. They use TCP, because each rank would count memory that ranks share. The
table shows the largest rank; `x ddp` compares with the first algorithm.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import psutil
import yaml

import dear
from bench.rig import program, table
from bench.rig.output import Output, note
from common.harness.worker.timing.device_use import PeakMemory
from common.launch.ranks import RankLost, Ranks, gather, rank_env
from dear.errors import Unavailable, UserError
from dear.lazy import torch
from dear.options import Options, at_least
from dear.training.algorithm import algorithm_class, algorithm_names, algorithm_options

MIB = 2**20
MEMORY_STEPS = 3
LIMIT_S, _END_S = 600.0, 10.0
PLAIN = "plain"
CLOCKS = {"seconds_per_step": time.perf_counter, "cpu_seconds_per_step": time.thread_time}
"""Clocks: elapsed time, and the time for which the training thread ran on a core."""
# Horovod's threads never sleep, and would slow down the other algorithms.
_NOT_BY_DEFAULT = "horovod"

Row = dict[str, Any]


def main(argv: list[str]) -> int:
    args = _arguments(argv)
    measure, render = BENCHES[args.what]
    rows: list[Row] = []
    with Output(args.json) as output:
        for row in measure(args):
            rows.append(row)
            output.save(f"bench/wrappers {args.what}", {"rows": rows})
    print(render(rows))
    return 0


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = program.parser(__doc__, json=False)
    verbs = parser.add_subparsers(dest="what", required=True)
    verb = verbs.add_parser("overhead", help="time per step that each wrapper adds")
    program.add_json(verb)
    add = verb.add_argument
    add("--algorithms", nargs="+", help=f"default: all but {_NOT_BY_DEFAULT}")
    add("--tensors", type=int, nargs="+", default=[1, 160], help="parameter tensors of the model")
    add("--ranks", type=int, nargs="+", default=[1, 2], help="worlds to measure")
    add("--backend", help="default: as for training")
    add("--steps", type=int, default=20, help="steps of a timing")
    add("--rounds", type=int, default=9, help="timings of each algorithm, interleaved")
    add("--warmup", type=int, default=10, help="steps before the first timing")
    verb = verbs.add_parser("memory", help="peak memory of a rank that trains")
    program.add_json(verb)
    add = verb.add_argument
    compared = ["ddp", "ddp:gradient_as_bucket_view=true", "dear:update=replicated", "dear"]
    add("--algorithms", nargs="+", default=compared, metavar="NAME[:OPTION=VALUE,...]")
    add("--model", default="bert_base")
    add("--batch-size", type=int, default=1)
    add("--sentence-len", type=int, default=16, help="for models that read text")
    add("--optimizer", choices=["adamw", "sgd"], default="adamw")
    add("--ranks", type=int, default=4)
    args = parser.parse_args(argv)
    for name, value in vars(args).items():
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int):
                at_least(f"--{name.replace('_', '-')}", number, 1)
    args.algorithms = args.algorithms or [
        name
        for name in algorithm_names()
        if name != _NOT_BY_DEFAULT and algorithm_class(name).unavailable() is None
    ]
    # An unknown algorithm is an error before anything starts.
    args.chosen = {text: parsed_algorithm(text) for text in args.algorithms}
    return args


def parsed_algorithm(text: str) -> tuple[str, Options]:
    """Reads `dear:update=sharded,fusion=none` as a name and its options."""
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
) -> list[Any]:
    """Runs `function(*arguments)` in a new process per rank, and returns the results. `function`,
    of a module's top level, runs after `dear.init(backend=backend)`. `environment` is set before
    anything is imported. Raises `UserError` if a rank failed, died, or did not end within
    `LIMIT_S`."""
    results = {}
    with tempfile.TemporaryDirectory() as folder, Ranks() as started:
        for rank in range(ranks):
            env = {**(environment or {}), **rank_env(rank, ranks, store=Path(folder, "store"))}
            started.function(
                _rank, backend, function, arguments, env=env, piped=True, method="spawn"
            )
        try:
            for rank, (ok, value) in gather(started.pipes, LIMIT_S):
                if not ok:
                    raise UserError(f"rank {rank}: {value}")
                results[rank] = value
        except RankLost as lost:
            raise UserError(f"{lost}; its output is above") from None
        started.stop(_END_S)
    return [results[rank] for rank in range(ranks)]


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


def overhead(args: argparse.Namespace) -> Iterator[Row]:
    """Yields the slowest rank's times of each algorithm, by world size and number of tensors."""
    for ranks in args.ranks:
        for tensors in args.tensors:
            results = run_ranks(_timings, ranks, args, tensors, backend=args.backend)
            for name in results[0]:
                row = {"algorithm": name, "ranks": ranks, "tensors": tensors}
                for clock in CLOCKS:
                    row[clock] = table.slowest([result[name][clock] for result in results])
                yield row


def _timings(args: argparse.Namespace, tensors: int) -> dict[str, dict[str, list[float]]]:
    """Returns this rank's seconds per step, by algorithm, clock and round."""
    from dear.comm import runtime

    communicator = runtime.communicator()
    trainings = {name: _Training(name, tensors) for name in (PLAIN, *args.algorithms)}
    for training in trainings.values():
        training.run(args.warmup)
    seconds: dict[str, dict[str, list[float]]] = {
        name: {clock: [] for clock in CLOCKS} for name in trainings
    }
    for _ in range(args.rounds):
        for name, training in trainings.items():
            communicator.barrier()
            began = [clock() for clock in CLOCKS.values()]
            training.run(args.steps)
            for (clock, read), start in zip(CLOCKS.items(), began, strict=True):
                seconds[name][clock].append((read() - start) / args.steps)
    communicator.barrier()
    return seconds


class _Training:
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
    """Returns the table of the added time per tensor: median and range over rounds, by clock."""
    plain = {(row["ranks"], row["tensors"]): row for row in rows if row["algorithm"] == PLAIN}
    header = ["algorithm", "ranks", "tensors", "us/step", "us/tensor", "range"]
    lines = []
    for row in rows:
        base = plain[row["ranks"], row["tensors"]]
        line = [row["algorithm"], str(row["ranks"]), str(row["tensors"])]
        line.append(f"{statistics.median(row['seconds_per_step']) * 1e6:.0f}")
        for clock in CLOCKS:
            pairs = zip(row[clock], base[clock], strict=True)
            added = sorted((a - b) * 1e6 / row["tensors"] for a, b in pairs)
            line.append(f"{statistics.median(added):.1f}" if row is not base else "-")
            line.append(f"{added[0]:.1f}..{added[-1]:.1f}" if row is not base else "-")
        lines.append(line)
    return table.layout([*header, "CPU us/tensor", "range"], lines)


def memory(args: argparse.Namespace) -> Iterator[Row]:
    """Trains with each algorithm in new processes, and yields the memory of its ranks."""
    for text, chosen in args.chosen.items():
        environment = {"COMM_CORE_TRANSPORT": "tcp"}
        results = run_ranks(_peak, args.ranks, args, *chosen, environment=environment)
        note(f"{text}: {max(result['peak_bytes'] for result in results) / MIB:.0f} MiB")
        yield {"algorithm": text, "model": args.model, "ranks": results}
    print(f"# {args.model}, {args.optimizer}, {args.ranks} ranks, batch {args.batch_size}")


def _peak(args: argparse.Namespace, name: str, options: Options) -> dict[str, int]:
    """Returns this rank's bytes before the model was built, and how many more the peak had."""
    from common.models.registry import build, model_entry
    from dear.comm import runtime

    communicator = runtime.communicator()
    entry = model_entry(args.model)
    importlib.import_module(entry.module)
    communicator.barrier()
    added = AddedMemory()
    batch = torch.Generator().manual_seed(communicator.rank)
    length = args.sentence_len if entry.sentence_len is not None else None
    workload = build(args.model, args.batch_size, length, batch)
    kinds = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    optimizer = kinds[args.optimizer](workload.model.parameters(), lr=1e-4)
    workload.model, optimizer = algorithm_class(name)().wrap(
        workload.model, optimizer, communicator, options
    )
    for _ in range(MEMORY_STEPS):
        optimizer.zero_grad()
        workload.loss().backward()
        optimizer.step()
    optimizer.synchronize()
    communicator.barrier()
    return {
        "before_bytes": added.before_bytes,
        "peak_bytes": added.peak_bytes,
        "parameter_bytes": sum(param.nbytes for param in workload.model.parameters()),
    }


class AddedMemory:
    """Memory that this process needs on top of what it had when the object was created.

    Attributes:
        before_bytes: resident memory at that time.
    """

    def __init__(self) -> None:
        self.before_bytes = psutil.Process().memory_info().rss
        self._peak = PeakMemory(torch.device("cpu"))

    @property
    def peak_bytes(self) -> int:
        """Peak of the resident memory since then, minus `before_bytes`."""
        peak = self._peak.read()
        if peak is None:
            raise Unavailable("this kernel does not report the peak of a process's memory")
        return peak - self.before_bytes


def memory_table(rows: list[Row]) -> str:
    """Returns the table: a row per algorithm, with the numbers of its largest rank."""
    header = ["algorithm", "peak MiB", "x parameters", f"x {rows[0]['algorithm']}"]
    largest = [max(row["ranks"], key=lambda rank: rank["peak_bytes"]) for row in rows]
    lines = []
    for row, rank in zip(rows, largest, strict=True):
        peak = rank["peak_bytes"]
        cells = [row["algorithm"], f"{peak / MIB:.0f}", f"{peak / rank['parameter_bytes']:.2f}"]
        lines.append([*cells, f"{peak / largest[0]['peak_bytes']:.3f}"])
    return table.layout(header, lines)


BENCHES = {"overhead": (overhead, overhead_table), "memory": (memory, memory_table)}
"""Functions of each benchmark: the first measures, the second renders the rows."""

if __name__ == "__main__":
    program.run(main)
