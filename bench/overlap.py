#!/usr/bin/env python3
"""How much a reduce-scatter in the background slows compute: engines interleaved, medians.

  python bench/overlap.py --engines comm_core gloo -n 4
  python bench/overlap.py --engines comm_core gloo -n 2 --hosts netns --rate 1gbit

Every rank multiplies matrices on one thread: alone, and with several reduce-scatters in flight that
were all submitted before. No Python thread drives them. (Open MPI makes progress only inside of its
calls, so `mpi` communicates afterwards: see its total.) Exit status as of collectives.py.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.rig import session, table
from bench.rig.output import note
from bench.rig.rank import Place
from bench.rig.table import Ratio, worst
from dear.errors import UserError
from dear.lazy import torch

_SIDE = 384


def measure(place: Place, nbytes: int, flights: int, calls: int) -> dict[str, float]:
    """One repetition on one rank; seconds, CPU seconds of communication alone."""
    engine, count = place.engine, nbytes // 4
    left, right, out = (torch.ones(_SIDE, _SIDE) for _ in range(3))
    buckets = [engine.empty(count).fill_(1) for _ in range(flights)]
    shards = [engine.empty(count // place.size).fill_(0) for _ in range(flights)]

    def meet() -> float:
        place.meet()
        return time.perf_counter()

    def submit() -> list[Callable[[], Any]]:
        pairs = zip(shards, buckets, strict=True)
        return [engine.start_reduce_scatter(shard, bucket) for shard, bucket in pairs]

    def compute() -> None:
        for _ in range(calls):
            torch.mm(left, right, out=out)

    for finish in submit():
        finish()
    compute_start = meet()
    compute()
    alone = time.perf_counter() - compute_start

    start, cpu = meet(), time.process_time()
    for finish in submit():
        finish()
    comm, cpu = time.perf_counter() - start, time.process_time() - cpu

    start = meet()
    waiting = submit()
    submitted = time.perf_counter()
    compute()
    computed = time.perf_counter()
    for finish in waiting:
        finish()
    total = time.perf_counter() - start
    meet()
    return {
        "alone_s": alone,
        "comm_s": comm,
        "comm_cpu_s": cpu,
        "submit_s": submitted - start,
        # Submitting counts: an engine that works inside of the call takes that from the caller.
        "compute_s": computed - start,
        "total_s": total,
    }


def main(argv: list[str]) -> int:
    parser = session.parser_of(__doc__, ["comm_core", "gloo"], world=2)
    add = parser.add_argument
    add("--size", default="25M", help="bucket of one reduce-scatter")
    add("--flights", type=int, default=None, help="in flight; default 12 local, 4 on netns")
    add("--calls", type=int, default=600, help=f"multiplications of {_SIDE} x {_SIDE} matrices")
    add("--repeats", type=int, default=5, help="rounds")
    args = session.parse(parser, argv)
    nbytes = table.bucket_bytes(table.parse_size(args.size), args.world)
    flights = args.flights or (4 if args.hosts == "netns" else 12)
    if min(flights, args.calls, args.repeats) < 1:
        raise UserError("--flights, --calls and --repeats must be at least 1")
    measurement = {"nbytes": nbytes, "flights": flights, "calls": args.calls}
    rounds: Rounds = {name: [] for name in args.engines}
    with session.started("bench/overlap", args) as running:
        for index in range(args.repeats):
            for _, engine, results in running.round(measure, {nbytes: measurement}):
                rounds[engine].append(results)
                note(f"round {index + 1}: {engine} {_slowdown(results):+.1f} %")
            running.save(measurement=measurement, rounds=rounds)
        print(f"# {flights} reduce-scatters of {table.human_bytes(nbytes)}, {args.calls} calls")
        print(rendered(rounds, running.failures))
        return 1 if running.failures else 0


Rounds = dict[str, list[list[dict[str, float]]]]
"""By engine, for each round: what every rank measured."""


def _slowdown(results: list[dict[str, float]]) -> float:
    """Per cent that the slowest rank's compute takes longer than the slowest alone."""
    return (worst(results, "compute_s") / worst(results, "alone_s") - 1) * 100


def rendered(rounds: Rounds, failures: Mapping[str, str]) -> str:
    """The table, and the first engine's overlapped compute beside that of the others."""
    keys = ("alone_s", "comm_s", "compute_s", "total_s")
    header = ["engine", "slowdown", "range", *(f"{key[:-2]} s" for key in keys), "comm CPU-s"]

    def cells(kept: list[list[dict[str, float]]]) -> list[str]:
        slow = [_slowdown(ranks) for ranks in kept]
        medians = [statistics.median(worst(ranks, key) for ranks in kept) for key in keys]
        medians.append(statistics.median(sum(one["comm_cpu_s"] for one in ranks) for ranks in kept))
        spread = f"{min(slow):+.1f}..{max(slow):+.1f}"
        return [f"{statistics.median(slow):+.1f} %", spread, *map(table.digits, medians)]

    lines = [table.of_engines(header, rounds, failures, cells)]
    computed = {
        engine: [worst(ranks, "compute_s") for ranks in kept] for engine, kept in rounds.items()
    }
    first, *others = rounds
    for other in others:
        if ratio := Ratio.of(computed[first], computed[other]):
            what = f"the overlapped compute time with {other}"
            lines.append(f"{first} {ratio.text()} {what} {ratio.spread()}")
    return "\n".join(lines)


if __name__ == "__main__":
    session.program(main)
