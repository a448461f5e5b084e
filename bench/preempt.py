#!/usr/bin/env python3
"""How long an urgent small all-gather takes while a large all-reduce runs on another group.

  python bench/preempt.py -n 4 --rate 1gbit      (as root: virtual hosts)

For comm_core the urgent one has `comm_core.priority(1)`; gloo, which has no priorities, is the
yardstick. A time is that of the slowest rank. Exit status as of collectives.py, and 1 for a wrong
result.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import session, table
from bench.output import Output
from bench.session import Session
from dear.errors import UserError

if TYPE_CHECKING:
    from bench.rank import Place

_ENGINES = ("comm_core", "gloo")
_urgent_groups: dict[str, Any] = {}  # one per process: a group cannot be made in every round


def measure(place: Place, large: int, small: int, delay_s: float) -> dict[str, float]:
    """One repetition on one rank.

    Returns:
        `alone_s`: the small one by itself; `urgent_s`: behind the large one, that was submitted
        `delay_s` before; `large_alone_s` and `large_s`: the large one without and with it;
        `wrong`: elements.
    """
    import torch
    import torch.distributed as dist

    if place.name not in _urgent_groups:
        _urgent_groups[place.name] = dist.new_group(backend=place.name)
    urgent = _urgent_groups[place.name]
    bulk = torch.empty(large // 4)
    shard = torch.full((small // 4 // place.size,), float(place.rank + 1))
    whole = torch.empty(small // 4)

    def start_urgent() -> Any:
        with _priority(place.name):
            return dist.all_gather_into_tensor(whole, shard, group=urgent, async_op=True)

    def meet() -> float:
        bulk.fill_(place.rank + 1)
        whole.fill_(-1)
        place.hub.barrier()
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
    place.hub.barrier()
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


def _priority(name: str) -> contextlib.AbstractContextManager[Any]:
    if name != "comm_core":
        return contextlib.nullcontext()
    import comm_core

    priority: contextlib.AbstractContextManager[Any] = comm_core.priority(1)
    return priority


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    session.add_arguments(parser, _ENGINES, world=4)
    parser.set_defaults(hosts="netns")
    add = parser.add_argument
    add("--large", default="100M", help="bytes of the running all-reduce")
    add("--small", default="64K", help="bytes of the urgent all-gather")
    add("--delay-ms", type=float, default=100.0, help="how long the large one has run by then")
    add("--repeats", type=int, default=5, help="rounds")
    args = parser.parse_args(argv)
    setup = session.setup_from(args)
    if not set(setup.engines) <= set(_ENGINES):
        raise UserError(f"--engines can be {' and '.join(_ENGINES)} here")
    arguments = {
        "large": table.bucket_bytes(table.parse_size(args.large), setup.world),
        "small": table.bucket_bytes(table.parse_size(args.small), setup.world),
        "delay_s": args.delay_ms / 1e3,
    }
    rounds: dict[str, list[list[dict[str, float]]]] = {name: [] for name in setup.engines}
    output = Output(args.json)
    try:
        with Session(setup) as running:
            print("\n".join(running.header()), flush=True)
            for index in range(args.repeats):
                for engine in setup.engines:
                    results = running.call(engine, "bench.preempt", "measure", **arguments)
                    if results is not None:
                        rounds[engine].append(results)
                        took = max(result["urgent_s"] for result in results)
                        session.note(f"round {index + 1}: {engine} {took * 1e3:.2f} ms")
                output.save(
                    running.record("bench/preempt") | {"measurement": arguments, "rounds": rounds}
                )
        return _print(rounds, running.failures)
    finally:
        output.close()


def _print(rounds: dict[str, list[list[dict[str, float]]]], failures: dict[str, str]) -> int:
    keys = ("urgent_s", "alone_s", "large_s", "large_alone_s")
    header = ["engine", "urgent ms", "range", "alone ms", "large ms", "large alone ms"]
    header += ["overtook", "#wrong"]
    rows, wrong = [], 0
    for engine, repetitions in rounds.items():
        if repetitions:
            worst = {k: [max(r[k] for r in results) * 1e3 for results in repetitions] for k in keys}
            errors = int(sum(r["wrong"] for results in repetitions for r in results))
            overtook = sum(all(r["overtook"] for r in results) for results in repetitions)
            middle = [table.digits(statistics.median(worst[key])) for key in keys]
            urgent = worst["urgent_s"]
            spread = f"{table.digits(min(urgent))}..{table.digits(max(urgent))}"
            row = [engine, middle[0], spread, *middle[1:]]
            rows.append([*row, f"{overtook}/{len(repetitions)}", str(errors)])
            wrong += errors
        if engine in failures:
            rows.append([engine, failures[engine]])
    print(table.layout(header, rows))
    return 1 if wrong or failures else 0


if __name__ == "__main__":
    session.program(main)
