#!/usr/bin/env python3
"""Latency of small all-reduces, back to back: median and p99, engines interleaved.

  python bench/latency.py --engines comm_core gloo mpi -n 4 --sizes 4K

No barrier between two of them: none can end before every rank has begun it. A time is that of the
slowest rank. Exit status as of collectives.py.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.rig import session, table
from bench.rig.output import note
from bench.rig.rank import Place
from bench.rig.table import Ratio
from dear.errors import UserError

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
    place.barrier()
    stamps = [0.0] * (_WARM_UP + iterations + 1)
    for index in range(len(stamps)):
        stamps[index] = time.perf_counter()
        place.engine.all_reduce(bucket)
    place.meet()
    kept = stamps[_WARM_UP:]
    return [after - before for before, after in itertools.pairwise(kept)]


def main(argv: list[str]) -> int:
    parser = session.parser_of(__doc__, ["comm_core", "gloo", "mpi"], world=4)
    add = parser.add_argument
    add("--sizes", nargs="+", default=["4K"], metavar="SIZE", help="bytes of the all-reduce")
    add("--iterations", type=int, default=1000, help="all-reduces in one round")
    add("--repeats", type=int, default=5, help="rounds")
    args = session.parse(parser, argv)
    if min(args.iterations, args.repeats) < 1:
        raise UserError("--iterations and --repeats must be at least 1")
    sizes = [table.bucket_bytes(table.parse_size(text), args.world) for text in args.sizes]
    cases = {nbytes: {"nbytes": nbytes, "iterations": args.iterations} for nbytes in sizes}
    keys = [(nbytes, engine) for nbytes in sizes for engine in args.engines]
    raw: dict[tuple[int, str], list[list[list[float]]]] = {key: [] for key in keys}
    slowest: Rounds = {key: [] for key in keys}
    with session.started("bench/latency", args) as running:
        for index in range(args.repeats):
            for nbytes, engine, times in running.round(measure, cases):
                raw[nbytes, engine].append(times)
                slowest[nbytes, engine].append(table.slowest(times))
                middle = statistics.median(slowest[nbytes, engine][-1]) * 1e3
                note(f"round {index + 1}: {engine} {middle:.4f} ms")
            running.save(rounds=[[*key, times] for key, times in raw.items()])
        print(rendered(slowest, args.engines[0], running.failures))
        return 1 if running.failures else 0


Rounds = dict[tuple[int, str], list[list[float]]]
"""By bytes and engine, for each round: seconds of each all-reduce, of its slowest rank."""


def rendered(rounds: Rounds, reference: str, failures: Mapping[str, str]) -> str:
    """The table, and how many times faster the reference engine is than each other one."""

    def cells(kept: list[list[float]]) -> list[str]:
        pooled = [time for steps in kept for time in steps]
        middle = statistics.median(map(statistics.median, kept))
        shown = (middle, table.percentile(pooled, 99), min(pooled))
        return [*(table.digits(seconds * 1e3) for seconds in shown), str(len(pooled))]

    by_label = {("all_reduce", engine, str(n)): kept for (n, engine), kept in rounds.items()}
    header = ["op", "engine", "bytes", "median ms", "p99 ms", "min ms", "iterations"]
    lines = [table.of_engines(header, by_label, failures, cells)]
    medians = {key: [*map(statistics.median, kept)] for key, kept in rounds.items()}
    for (nbytes, engine), theirs in medians.items():
        ratio = Ratio.of(theirs, medians[nbytes, reference])
        if ratio and engine != reference:
            size = table.human_bytes(nbytes)
            lines.append(f"all_reduce {size}: {reference} {ratio.text()} {engine} {ratio.spread()}")
    return "\n".join(lines)


if __name__ == "__main__":
    session.program(main)
