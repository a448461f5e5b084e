#!/usr/bin/env python3
"""How much a reduce-scatter in the background slows compute: engines interleaved, medians.

  python bench/overlap.py --engines comm_core gloo -n 4
  python bench/overlap.py --engines comm_core gloo -n 2 --hosts netns --rate 1gbit

Every rank multiplies matrices on one thread: alone, and with several reduce-scatters in flight that
were all submitted before. No Python thread drives them. (Open MPI makes progress only inside of its
calls, so `mpi` communicates afterwards: see its total.) Exit status as of collectives.py.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import session, table
from bench.output import Output
from bench.session import Session
from bench.table import Ratio
from dear.errors import UserError

if TYPE_CHECKING:
    from bench.rank import Place

_SIDE = 384


def measure(place: Place, nbytes: int, flights: int, calls: int) -> dict[str, float]:
    """One repetition on one rank; seconds, CPU seconds of communication alone."""
    import torch

    from bench.rank import cpu_seconds

    engine, count = place.engine, nbytes // 4
    left, right, out = (torch.ones(_SIDE, _SIDE) for _ in range(3))
    buckets = [engine.empty(count).fill_(1) for _ in range(flights)]
    shards = [engine.empty(count // place.size).fill_(0) for _ in range(flights)]

    def meet() -> float:
        engine.fence()
        place.hub.barrier()
        return time.perf_counter()

    def submit() -> list[Any]:
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

    start, cpu = meet(), cpu_seconds()
    for finish in submit():
        finish()
    comm, cpu = time.perf_counter() - start, cpu_seconds() - cpu

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
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    session.add_arguments(parser, ["comm_core", "gloo"], world=2)
    add = parser.add_argument
    add("--size", default="25M", help="bucket of one reduce-scatter")
    add("--flights", type=int, default=None, help="in flight; default 12 local, 4 on netns")
    add("--calls", type=int, default=600, help=f"multiplications of {_SIDE} x {_SIDE} matrices")
    add("--repeats", type=int, default=5, help="rounds")
    args = parser.parse_args(argv)
    setup = session.setup_from(args)
    nbytes = table.bucket_bytes(table.parse_size(args.size), setup.world)
    flights = args.flights or (4 if setup.hosts == "netns" else 12)
    if min(flights, args.calls, args.repeats) < 1:
        raise UserError("--flights, --calls and --repeats must be at least 1")
    arguments = {"nbytes": nbytes, "flights": flights, "calls": args.calls}
    rounds: dict[str, list[list[dict[str, float]]]] = {name: [] for name in setup.engines}
    output = Output(args.json)
    try:
        with Session(setup) as running:
            print("\n".join(running.header()), flush=True)
            for index in range(args.repeats):
                for engine in setup.engines:
                    results = running.call(engine, "bench.overlap", "measure", **arguments)
                    if results is not None:
                        rounds[engine].append(results)
                        session.note(f"round {index + 1}: {engine} {_slowdown(results):+.1f} %")
                output.save(
                    running.record("bench/overlap") | {"measurement": arguments, "rounds": rounds}
                )
        print(f"# {flights} reduce-scatters of {table.human_bytes(nbytes)}, {args.calls} calls")
        _print(rounds, running.failures)
        return 1 if running.failures else 0
    finally:
        output.close()


def _worst(results: list[dict[str, float]], key: str) -> float:
    return max(result[key] for result in results)


def _slowdown(results: list[dict[str, float]]) -> float:
    """Per cent that the slowest rank's compute takes longer than the slowest alone."""
    return (_worst(results, "compute_s") / _worst(results, "alone_s") - 1) * 100


def _print(
    rounds: dict[str, list[list[dict[str, float]]]], failures: dict[str, str]
) -> None:  # fmt: skip
    keys = ("alone_s", "comm_s", "compute_s", "total_s")
    header = ["engine", "slowdown", "range", *(f"{key[:-2]} s" for key in keys), "comm CPU-s"]
    rows = []
    for engine, repetitions in rounds.items():
        if repetitions:
            slow = [_slowdown(results) for results in repetitions]
            medians = [statistics.median(_worst(r, key) for r in repetitions) for key in keys]
            cpu = statistics.median(sum(x["comm_cpu_s"] for x in r) for r in repetitions)
            rows.append(
                [
                    engine,
                    f"{statistics.median(slow):+.1f} %",
                    f"{min(slow):+.1f}..{max(slow):+.1f}",
                    *(table.digits(value) for value in (*medians, cpu)),
                ]
            )
        if engine in failures:
            rows.append([engine, failures[engine]])
    print(table.layout(header, rows))
    first, *others = rounds
    for other in others:
        pairs = list(zip(rounds[first], rounds[other], strict=False))
        if pairs:
            mine = [_worst(a, "compute_s") for a, _ in pairs]
            theirs = [_worst(b, "compute_s") for _, b in pairs]
            ratio = Ratio.of(mine, theirs)
            what = f"the overlapped compute time with {other}"
            print(f"{first} {ratio.text()} {what} {ratio.spread()}")


if __name__ == "__main__":
    session.program(main)
