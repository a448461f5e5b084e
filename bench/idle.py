#!/usr/bin/env python3
"""CPU time of a process whose engine has nothing to do: `python bench/idle.py --seconds 60`.

Every rank joins the job, runs one all-reduce, and sleeps. Only one engine's ranks are awake at a
time. Exit status as of collectives.py.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import session, table
from bench.output import Output
from bench.session import Session

if TYPE_CHECKING:
    from bench.rank import Place

_SETTLE_S = 0.5


def measure(place: Place, seconds: float) -> float:
    """CPU seconds of this rank, all threads, while it sleeps for `seconds`."""
    from bench.rank import cpu_seconds

    place.engine.all_reduce(place.engine.empty(1_000_000).fill_(1))
    place.engine.fence()
    place.hub.barrier()
    time.sleep(_SETTLE_S)  # what ends the operation is not yet idleness
    before = cpu_seconds()
    time.sleep(seconds)
    return cpu_seconds() - before


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    session.add_arguments(parser, ["comm_core", "gloo"], world=2)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to be idle")
    args = parser.parse_args(argv)
    args.timeout = max(args.timeout, args.seconds + 60)
    setup = session.setup_from(args)
    used: dict[str, list[float]] = {}
    rows = []
    output = Output(args.json)
    try:
        with Session(setup) as running:
            print("\n".join(running.header()), flush=True)
            for engine in setup.engines:
                cpu = running.call(engine, "bench.idle", "measure", seconds=args.seconds)
                if cpu is None:
                    rows.append([engine, running.failures[engine]])
                    continue
                used[engine] = cpu
                shown = " ".join(table.digits(seconds * 1e3) for seconds in cpu)
                rows.append([engine, shown, table.digits(max(cpu) / args.seconds * 100)])
            output.save(running.record("bench/idle") | {"seconds": args.seconds, "cpu_s": used})
        header = ["engine", f"CPU ms in {args.seconds:g} s, by rank", "most, % of a core"]
        print(table.layout(header, rows))
        return 1 if running.failures else 0
    finally:
        output.close()


if __name__ == "__main__":
    session.program(main)
