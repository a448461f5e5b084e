#!/usr/bin/env python3
"""How long an urgent small all-gather takes while a large all-reduce runs on another group.

  python bench/preempt.py -n 4 --rate 1gbit      (as root: virtual hosts)

For comm_core the urgent one has `comm_core.priority(1)`; gloo, which has no priorities, is the
yardstick. A time is that of the slowest rank. Exit status as of collectives.py, and 1 for a wrong
result.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.rig import session, table
from bench.rig.output import note
from bench.rig.rank import Place
from bench.rig.table import worst
from dear.errors import UserError
from dear.lazy import dist, torch

_ENGINES = ("comm_core", "gloo")
_urgent_groups: dict[str, Any] = {}  # one per process: a group cannot be made in every round


def measure(place: Place, large: int, small: int, delay_s: float) -> dict[str, float]:
    """One repetition on one rank.

    Returns:
        `alone_s`: the small one by itself; `urgent_s`: behind the large one, that was submitted
        `delay_s` before; `large_alone_s` and `large_s`: the large one without and with it;
        `wrong`: elements.
    """
    if place.name == "comm_core":
        import comm_core
    if place.name not in _urgent_groups:
        _urgent_groups[place.name] = dist.new_group(backend=place.name)
    urgent = _urgent_groups[place.name]
    bulk = torch.empty(large // 4)
    shard = torch.full((small // 4 // place.size,), float(place.rank + 1))
    whole = torch.empty(small // 4)

    def start_urgent() -> Any:
        with comm_core.priority(1) if place.name == "comm_core" else contextlib.nullcontext():
            return dist.all_gather_into_tensor(whole, shard, group=urgent, async_op=True)

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
        "alone_s": alone,
        "urgent_s": took,
        "overtook": float(running),
        "large_alone_s": large_alone,
        "large_s": large_s,
        "wrong": float(wrong),
    }


def main(argv: list[str]) -> int:
    parser = session.parser_of(__doc__, _ENGINES, world=4)
    parser.set_defaults(hosts="netns")
    add = parser.add_argument
    add("--large", default="100M", help="bytes of the running all-reduce")
    add("--small", default="64K", help="bytes of the urgent all-gather")
    add("--delay-ms", type=float, default=100.0, help="how long the large one has run by then")
    add("--repeats", type=int, default=5, help="rounds")
    args = session.parse(parser, argv)
    if not set(args.engines) <= set(_ENGINES):
        raise UserError(f"--engines can be {' and '.join(_ENGINES)} here")
    measurement = {
        "large": table.bucket_bytes(table.parse_size(args.large), args.world),
        "small": table.bucket_bytes(table.parse_size(args.small), args.world),
        "delay_s": args.delay_ms / 1e3,
    }
    rounds: Rounds = {name: [] for name in args.engines}
    with session.started("bench/preempt", args) as running:
        for index in range(args.repeats):
            for _, engine, results in running.round(measure, {"": measurement}):
                rounds[engine].append(results)
                took = worst(results, "urgent_s") * 1e3
                note(f"round {index + 1}: {engine} {took:.2f} ms")
            running.save(measurement=measurement, rounds=rounds)
        print(rendered(rounds, running.failures))
        wrong = any(one["wrong"] for kept in rounds.values() for ranks in kept for one in ranks)
        return 1 if wrong or running.failures else 0


Rounds = dict[str, list[list[dict[str, float]]]]
"""By engine, for each round: what every rank measured."""


def rendered(rounds: Rounds, failures: Mapping[str, str]) -> str:
    """A row per engine."""
    keys = ("urgent_s", "alone_s", "large_s", "large_alone_s")
    header = ["engine", "urgent ms", "range", "alone ms", "large ms", "large alone ms"]
    header += ["overtook", "#wrong"]

    def cells(kept: list[list[dict[str, float]]]) -> list[str]:
        slowest = {key: [worst(ranks, key) * 1e3 for ranks in kept] for key in keys}
        wrong = int(sum(one["wrong"] for ranks in kept for one in ranks))
        overtook = sum(all(one["overtook"] for one in ranks) for ranks in kept)
        urgent, *others = [table.digits(statistics.median(slowest[key])) for key in keys]
        low, high = min(slowest["urgent_s"]), max(slowest["urgent_s"])
        spread = f"{table.digits(low)}..{table.digits(high)}"
        return [urgent, spread, *others, f"{overtook}/{len(kept)}", str(wrong)]

    return table.of_engines(header, rounds, failures, cells)


if __name__ == "__main__":
    session.program(main)
