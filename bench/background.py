#!/usr/bin/env python3
"""Collectives in the background: the cost for compute, and the delay of an urgent message.

  python bench/background.py overlap --engines comm_core gloo -n 4
  python bench/background.py urgent -n 4 --hosts netns --rate 1gbit

overlap: every rank multiplies matrices on one thread, alone and while several reduce-scatters are
in flight. No Python thread drives them. Open MPI makes progress only in its calls, so that `mpi`
communicates afterwards, as its total time shows.

urgent: the time of a small all-gather while a large all-reduce runs on another group. With
comm_core it has `comm_core.priority(1)`; gloo, which has no priorities, is the baseline.

A time is that of the slowest rank. Engines are interleaved. Exit status as of collectives.py.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.rig import program, session, table
from bench.rig.output import note
from bench.rig.rank import Place
from bench.rig.table import Ratio
from common.results.table import significant
from dear.errors import UserError
from dear.lazy import dist, torch
from dear.options import at_least

_SIDE = 384
_urgent_groups: dict[str, Any] = {}  # a process makes a group once, not in every round

Ranks = list[dict[str, float]]
"""Measurements of a round, by rank."""


def overlap(place: Place, nbytes: int, flights: int, calls: int) -> dict[str, float]:
    """Measures one round on one rank: seconds, and CPU seconds of communication alone."""
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
    start = meet()
    compute()
    alone = time.perf_counter() - start

    start, cpu = meet(), time.process_time()
    for finish in submit():
        finish()
    comm, cpu = time.perf_counter() - start, time.process_time() - cpu

    # The time of submitting counts: an engine that works inside the call takes it from the caller.
    start = meet()
    waiting = submit()
    compute()
    computed = time.perf_counter() - start
    for finish in waiting:
        finish()
    total = time.perf_counter() - start
    meet()
    return {
        "alone_s": alone,
        "comm_s": comm,
        "compute_s": computed,
        "total_s": total,
        "comm_cpu_s": cpu,
    }


def urgent(place: Place, large: int, small: int, delay_s: float) -> dict[str, float]:
    """Measures one round on one rank.

    Returns:
        `urgent_s`: the small operation, started `delay_s` after the large one; `large_s`: the large
        one; `alone_s` and `large_alone_s`: each of them alone; `overtook`: 1 if the small one ended
        first; `wrong`: number of wrong elements.
    """
    if place.name == "comm_core":
        import comm_core
    if place.name not in _urgent_groups:
        _urgent_groups[place.name] = dist.new_group(backend=place.name)
    group = _urgent_groups[place.name]
    bulk = torch.empty(large // 4)
    shard = torch.full((small // 4 // place.size,), float(place.rank + 1))
    whole = torch.empty(small // 4)

    def start_urgent() -> Any:
        with comm_core.priority(1) if place.name == "comm_core" else contextlib.nullcontext():
            return dist.all_gather_into_tensor(whole, shard, group=group, async_op=True)

    def meet() -> float:
        bulk.fill_(place.rank + 1)
        whole.fill_(-1)
        place.barrier()
        return time.perf_counter()

    start_urgent().wait()  # connects
    start = meet()
    start_urgent().wait()
    alone = time.perf_counter() - start

    start = meet()
    dist.all_reduce(bulk)
    large_alone = time.perf_counter() - start

    start = meet()
    work = dist.all_reduce(bulk, async_op=True)
    time.sleep(delay_s)
    place.barrier()
    behind = time.perf_counter()
    start_urgent().wait()
    took = time.perf_counter() - behind
    running = not work.is_completed()
    work.wait()
    large_s = time.perf_counter() - start

    want = torch.arange(1.0, place.size + 1).repeat_interleave(shard.numel())
    wrong = int((whole != want).sum())
    wrong += int((bulk != place.size * (place.size + 1) / 2).sum())
    return {
        "urgent_s": took,
        "alone_s": alone,
        "large_s": large_s,
        "large_alone_s": large_alone,
        "overtook": float(running),
        "wrong": float(wrong),
    }


def main(argv: list[str]) -> int:
    parser = session.parser(__doc__, ["comm_core", "gloo"], world=2)
    add = parser.add_argument
    add("what", choices=("overlap", "urgent"))
    add("--size", default="25M", help="overlap: bucket of a reduce-scatter")
    add("--flights", type=int, default=4, help="overlap: reduce-scatters in flight")
    add("--calls", type=int, default=600, help=f"overlap: products of {_SIDE} x {_SIDE} matrices")
    add("--large", default="100M", help="urgent: bytes of the all-reduce")
    add("--small", default="64K", help="urgent: bytes of the all-gather")
    add("--delay-ms", type=float, default=100.0, help="urgent: head start of the all-reduce")
    args = session.parse(parser, argv)
    function, measurement = (_overlap if args.what == "overlap" else _urgent)(args)
    rounds: dict[str, list[Ranks]] = {name: [] for name in args.engines}
    with session.started(f"bench/background {args.what}", args) as running:
        for index in range(args.repeats):
            for _, engine, ranks in running.round(function, {"": measurement}):
                rounds[engine].append(ranks)
                note(f"round {index + 1}: {engine}")
            running.save(measurement=measurement, rounds=rounds)
        print(f"# {measurement}")
        show = overlap_table if args.what == "overlap" else urgent_table
        print(show(rounds, running.failures))
        every = [rank for kept in rounds.values() for ranks in kept for rank in ranks]
        return 1 if running.failures or any(rank.get("wrong") for rank in every) else 0


def _overlap(args: argparse.Namespace) -> tuple[Callable[..., Any], dict[str, Any]]:
    at_least("--flights", args.flights, 1)
    at_least("--calls", args.calls, 1)
    nbytes = table.bucket_bytes(args.size, args.world)
    return overlap, {"nbytes": nbytes, "flights": args.flights, "calls": args.calls}


def _urgent(args: argparse.Namespace) -> tuple[Callable[..., Any], dict[str, Any]]:
    if not set(args.engines) <= {"comm_core", "gloo"}:
        raise UserError("--engines can be comm_core and gloo here")
    large, small = (table.bucket_bytes(text, args.world) for text in (args.large, args.small))
    return urgent, {"large": large, "small": small, "delay_s": args.delay_ms / 1e3}


def _slowest(kept: list[Ranks], key: str) -> list[float]:
    """Returns the largest value of the ranks, by round."""
    return [max(rank[key] for rank in ranks) for ranks in kept]


def overlap_table(rounds: Mapping[str, list[Ranks]], failures: Mapping[str, str]) -> str:
    """Returns a row per engine, and the compute time of the first one over that of the others."""
    keys = ("alone_s", "comm_s", "compute_s", "total_s")
    header = ["engine", "slowdown", "range", *(f"{key[:-2]} s" for key in keys), "comm CPU-s"]

    def cells(kept: list[Ranks]) -> list[str]:
        pairs = zip(_slowest(kept, "compute_s"), _slowest(kept, "alone_s"), strict=True)
        slow = [100 * (computed / alone - 1) for computed, alone in pairs]
        numbers = [statistics.median(_slowest(kept, key)) for key in keys]
        cpu = [sum(rank["comm_cpu_s"] for rank in ranks) for ranks in kept]
        numbers.append(statistics.median(cpu))
        spread = f"{min(slow):+.1f}..{max(slow):+.1f}"
        return [f"{statistics.median(slow):+.1f} %", spread, *map(significant, numbers)]

    lines = [table.of_engines(header, rounds, failures, cells)]
    computed = {engine: _slowest(kept, "compute_s") for engine, kept in rounds.items()}
    first, *others = rounds
    for other in others:
        if ratio := Ratio.of(computed[first], computed[other]):
            lines.append(f"{first} {ratio.text(f'x the overlapped compute time of {other}')}")
    return "\n".join(lines)


def urgent_table(rounds: Mapping[str, list[Ranks]], failures: Mapping[str, str]) -> str:
    """Returns a row per engine."""
    keys = ("urgent_s", "alone_s", "large_s", "large_alone_s")
    header = ["engine", "range ms", *(f"{key[:-2].replace('_', ' ')} ms" for key in keys)]

    def cells(kept: list[Ranks]) -> list[str]:
        times = [1e3 * seconds for seconds in _slowest(kept, "urgent_s")]
        medians = [1e3 * statistics.median(_slowest(kept, key)) for key in keys]
        overtook = sum(all(rank["overtook"] for rank in ranks) for ranks in kept)
        wrong = int(sum(rank["wrong"] for ranks in kept for rank in ranks))
        spread = f"{significant(min(times))}..{significant(max(times))}"
        shown = map(significant, medians)
        return [spread, *shown, f"{overtook}/{len(kept)}", str(wrong)]

    return table.of_engines([*header, "overtook", "#wrong"], rounds, failures, cells)


if __name__ == "__main__":
    program.run(main)
