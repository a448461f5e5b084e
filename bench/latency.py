#!/usr/bin/env python3
"""Latency of small all-reduces, back to back: median and p99, engines interleaved.

  python bench/latency.py --engines comm_core gloo mpi -n 4 --sizes 4K

No barrier between two of them: none can end before every rank has begun it. A time is that of the
slowest rank. Exit status as of collectives.py.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[1]))

import itertools

from bench import session, table
from bench.output import Output
from bench.session import Session
from bench.table import Ratio
from dear.errors import UserError

if TYPE_CHECKING:
    from bench.rank import Place

_WARM_UP = 50


def measure(place: Place, nbytes: int, iterations: int) -> list[float]:
    """Seconds of every all-reduce on one rank.

    Raises:
        ArithmeticError: the sum was wrong.
    """
    bucket = place.engine.empty(nbytes // 4)
    bucket.fill_(place.rank + 1)
    place.engine.all_reduce(bucket)
    if not bool((bucket == place.size * (place.size + 1) / 2).all()):
        raise ArithmeticError(f"wrong sum on rank {place.rank}")
    bucket.zero_()
    place.hub.barrier()
    stamps = [0.0] * (_WARM_UP + iterations + 1)
    for index in range(len(stamps)):
        stamps[index] = time.perf_counter()
        place.engine.all_reduce(bucket)
    place.engine.fence()
    place.hub.barrier()
    kept = stamps[_WARM_UP:]
    return [after - before for before, after in itertools.pairwise(kept)]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    session.add_arguments(parser, ["comm_core", "gloo", "mpi"], world=4)
    add = parser.add_argument
    add("--sizes", nargs="+", default=["4K"], metavar="SIZE", help="bytes of the all-reduce")
    add("--iterations", type=int, default=1000, help="all-reduces in one round")
    add("--repeats", type=int, default=5, help="rounds")
    args = parser.parse_args(argv)
    setup = session.setup_from(args)
    if min(args.iterations, args.repeats) < 1:
        raise UserError("--iterations and --repeats must be at least 1")
    sizes = [table.bucket_bytes(table.parse_size(text), setup.world) for text in args.sizes]
    keys = [(nbytes, engine) for nbytes in sizes for engine in setup.engines]
    rounds: dict[tuple[int, str], list[list[list[float]]]] = {key: [] for key in keys}
    output = Output(args.json)
    try:
        with Session(setup) as running:
            print("\n".join(running.header()), flush=True)
            for index in range(args.repeats):
                for nbytes, engine in keys:
                    arguments = {"nbytes": nbytes, "iterations": args.iterations}
                    times = running.call(engine, "bench.latency", "measure", **arguments)
                    if times is not None:
                        rounds[nbytes, engine].append(times)
                        middle = statistics.median(table.slowest(times)) * 1e3
                        session.note(f"round {index + 1}: {engine} {middle:.4f} ms")
                raw = [[*key, times] for key, times in rounds.items()]
                output.save(running.record("bench/latency") | {"rounds": raw})
        _print(rounds, setup.engines[0], running.failures)
        return 1 if running.failures else 0
    finally:
        output.close()


def _print(
    rounds: dict[tuple[int, str], list[list[list[float]]]],
    reference: str,
    failures: dict[str, str],
) -> None:
    rows, lines = [], []
    medians: dict[tuple[int, str], list[float]] = {}
    for (nbytes, engine), repetitions in rounds.items():
        label = ["all_reduce", engine, str(nbytes)]
        steps = [table.slowest(times) for times in repetitions]
        medians[nbytes, engine] = [statistics.median(step) for step in steps]
        if steps:
            pooled = [time for step in steps for time in step]
            shown = [
                statistics.median(medians[nbytes, engine]),
                table.percentile(pooled, 99),
                min(pooled),
            ]
            rows.append([*label, *(table.digits(s * 1e3) for s in shown), str(len(pooled))])
        if engine in failures:
            rows.append([*label, failures[engine]])
        mine = medians[nbytes, reference]
        if engine != reference and steps and len(mine) == len(steps):
            ratio = Ratio.of(medians[nbytes, engine], mine)
            size = table.human_bytes(nbytes)
            lines.append(f"all_reduce {size}: {reference} {ratio.text()} {engine} {ratio.spread()}")
    header = ["op", "engine", "bytes", "median ms", "p99 ms", "min ms", "iterations"]
    print(table.layout(header, rows))
    print("\n".join(lines))


if __name__ == "__main__":
    session.program(main)
