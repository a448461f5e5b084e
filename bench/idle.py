#!/usr/bin/env python3
"""CPU time of a process whose engine has nothing to do: `python bench/idle.py --seconds 60`.

Every rank joins the job, runs one all-reduce, and sleeps. Only one engine's ranks are awake at a
time. Exit status as of collectives.py.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.rig import session, table
from bench.rig.rank import Place

_SETTLE_S = 0.5


def measure(place: Place, seconds: float) -> float:
    """CPU seconds of this rank, all threads, while it sleeps for `seconds`."""
    place.engine.all_reduce(place.engine.empty(1_000_000).fill_(1))
    place.meet()
    time.sleep(_SETTLE_S)  # what ends the operation is not yet idleness
    before = time.process_time()
    time.sleep(seconds)
    return time.process_time() - before


def main(argv: list[str]) -> int:
    parser = session.parser_of(__doc__, ["comm_core", "gloo"], world=2)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to be idle")
    args = session.parse(parser, argv)
    args.timeout_s = max(args.timeout_s, args.seconds + 60)
    with session.started("bench/idle", args) as running:
        used: dict[str, list[float]] = {name: [] for name in args.engines}
        for _, engine, cpu in running.round(measure, {"": {"seconds": args.seconds}}):
            used[engine] = cpu
        running.save(seconds=args.seconds, cpu_s={name: cpu for name, cpu in used.items() if cpu})

        def cells(cpu: list[float]) -> list[str]:
            shown = " ".join(table.digits(seconds * 1e3) for seconds in cpu)
            return [shown, table.digits(max(cpu) / args.seconds * 100)]

        header = ["engine", f"CPU ms in {args.seconds:g} s, by rank", "most, % of a core"]
        print(table.of_engines(header, used, running.failures, cells))
        return 1 if running.failures else 0


if __name__ == "__main__":
    session.program(main)
