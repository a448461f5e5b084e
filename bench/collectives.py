#!/usr/bin/env python3
"""Time, bandwidth, CPU cost and correctness of collectives, for several engines in one run.

  python bench/collectives.py --engines comm_core gloo mpi horovod --sizes 4K 4M 25M -n 4
  python bench/collectives.py --hosts netns --rate 1gbit --congestion cubic -n 4
  python bench/collectives.py --hosts netns --network 10gbe --time-scale 10 --sizes 32Ki 512Ki

An engine is a library of collectives: the comm core, Gloo, MPI or Horovod. An operation begins
after a barrier, and its time is the slowest rank's. Every round measures each operation and size
with every engine in turn; ratios are medians over rounds. A size is that of the whole bucket
(float32): 25M is 25e6 bytes. `of wire` is the achieved share of the links' bandwidth (for TCP's
payload). `above us` is the measured time minus the time of the bytes on the wire, in the network's
time. Exit status: 0; 1 if an engine is missing, failed or gave a wrong result; 2 for a user error.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.rig import program, session, table
from bench.rig.output import note
from bench.rig.rank import Place
from bench.rig.table import Ratio
from common.emulation.links.profile import network_profile, payload_bytes_per_s
from common.results.tables.cells import significant
from dear.errors import UserError, unknown
from dear.lazy import np, torch

HEADER = (
    "op", "engine", "bytes", "time ms", "algbw GB/s", "busbw GB/s", "p50 ms", "p99 ms", "min ms",
    "CPU-s/GB", "iterations", "#wrong", "of wire", "above us",
)  # fmt: skip
_WARM_UP_S = 0.05
_INVALID = -1.0

Case = tuple[str, int]
"""Operation and size in bytes."""
Bounds = Mapping[Case, float | None]
"""Shortest real time of each case; None: unknown."""
Rounds = dict[tuple[str, ...], list["Sample"]]
"""Samples by operation, engine and bytes."""


class _Buffers:
    """Buffers of an operation, filled with integers whose sums float32 holds exactly. Element i of
    rank r is base(i) + 2**r, and neighbouring elements have different bases. So the sum is right
    only if it contains each rank exactly once."""

    def __init__(self, place: Place, op: str, count: int) -> None:
        self._place, self._op = place, op
        size, part = place.size, count // place.size
        self._mine = slice(place.rank * part, (place.rank + 1) * part)
        # Ranks beyond 16 reuse the powers; the sum must stay below 2**24.
        prime = 1000003 if size <= 16 else 250007
        self._weights = [float(2 ** (r % 16)) for r in range(size)]
        self._base = ((torch.arange(count) * 48271) % prime).to(torch.float32)
        self.source = place.engine.empty(part if op == "all_gather" else count)
        self._shard = None if op in ("all_reduce", "all_gather") else place.engine.empty(part)
        self._whole = place.engine.empty(count) if op in ("all_gather", "rs_ag") else None
        self._result: Any = None

    def run(self) -> None:
        """Runs the operation once."""
        engine = self._place.engine
        if self._op == "all_reduce":
            self._result = engine.all_reduce(self.source)
        elif self._op == "all_gather":
            self._result = engine.all_gather(self._whole, self.source)
        else:
            self._result = engine.reduce_scatter(self._shard, self.source)
            if self._op == "rs_ag":
                self._result = engine.all_gather(self._whole, self._result)

    def wrong(self) -> int:
        """Runs the operation on new data and returns the number of wrong elements of the result."""
        mine = self._base[self._mine]
        given = mine if self._op == "all_gather" else self._base
        self.source.copy_(given).add_(self._weights[self._place.rank])
        for output in (self._shard, self._whole):
            if output is not None:
                output.fill_(_INVALID)
        self._place.meet()
        self.run()
        if self._op == "all_gather":
            rows = self._base.view(self._place.size, -1) + torch.tensor(self._weights)[:, None]
            want = rows.view(-1)
        else:
            base = mine if self._op == "reduce_scatter" else self._base
            want = base * self._place.size + sum(self._weights)
        if self._result.numel() != want.numel():
            return int(want.numel())
        return int((self._result != want).sum())


def measure(
    place: Place, op: str, nbytes: int, budget_s: float, iterations: tuple[int, int]
) -> dict[str, Any]:
    """Measures one round of an operation on a bucket of `nbytes`, on one rank. `budget_s` is the
    wanted time of all timed iterations. `iterations` has the smallest and the largest number of
    them. Returns `times_s` per iteration, `cpu_s` of all iterations, and the number of `wrong`
    elements."""
    buffers = _Buffers(place, op, nbytes // 4)
    wrong = buffers.wrong()
    # An all-reduce works in place, so its numbers grow to infinity. This does not change the time.
    took = statistics.median(_timed(place, buffers, 3)[0])
    count = min(50, int(_WARM_UP_S / took))
    took = statistics.median([*_timed(place, buffers, int(place.barrier(count)))[0], took])
    count = max(iterations[0], min(iterations[1], int(budget_s / took)))
    times, cpu = _timed(place, buffers, int(place.barrier(count)))
    wrong += buffers.wrong()
    place.barrier()
    return {"times_s": times, "cpu_s": cpu, "wrong": wrong}


def _timed(place: Place, buffers: _Buffers, count: int) -> tuple[list[float], float]:
    times = []
    gc.collect()
    gc.disable()
    cpu = time.process_time()
    for _ in range(count):
        # The CPU time of this thread in the barrier is the benchmark's, so it is not counted. The
        # CPU time of the engine's threads is always counted.
        between = time.thread_time()
        place.meet()
        cpu += time.thread_time() - between
        start = time.perf_counter()
        buffers.run()
        times.append(time.perf_counter() - start)
    place.engine.fence()
    cpu = time.process_time() - cpu
    gc.enable()
    return times, cpu


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Measurement of one operation with one engine in one round.

    Attributes:
        nbytes: size of the whole bucket.
        times_s: seconds per rank and iteration.
        cpu_s: CPU seconds per rank, of all iterations.
        wrong: number of wrong elements of all ranks.
    """

    engine: str
    op: str
    nbytes: int
    round: int
    times_s: list[list[float]]
    cpu_s: list[float]
    wrong: int

    def steps_s(self) -> list[float]:
        """Returns the seconds of the slowest rank per iteration."""
        return table.slowest(self.times_s)

    def median_s(self) -> float:
        """Returns the median of the iterations."""
        return statistics.median(self.steps_s())

    def cpu_s_per_gb(self) -> float:
        """Returns the CPU seconds of all ranks per 1e9 bytes of bucket."""
        # An engine may use no CPU time at all between two readings of the clock.
        return max(sum(self.cpu_s) / len(self.times_s[0]) / (self.nbytes / 1e9), 1e-9)


def main(argv: list[str]) -> int:
    parser = session.parser(__doc__, ["comm_core", "gloo", "mpi", "horovod"], world=4)
    add = parser.add_argument
    add("--ops", nargs="+", default=list(table.OPS), metavar="OP", help="operations")
    add("--sizes", nargs="+", default=["4K", "4M", "25M"], metavar="SIZE", help="bucket sizes")
    add("--seconds", type=float, default=0.5, help="timed seconds per engine, case and round")
    add("--min-iterations", type=int, default=3, help="least number in a round")
    add("--max-iterations", type=int, default=1000, help="largest number in a round")
    args = session.parse(parser, argv)
    for op in args.ops:
        if op not in table.OPS:
            raise unknown("operation", op, table.OPS)
    if not 1 <= args.min_iterations <= args.max_iterations:
        raise UserError("the numbers of iterations must be at least 1, and min <= max")
    measurement = {"budget_s": args.seconds}
    measurement |= {"iterations": (args.min_iterations, args.max_iterations)}
    sizes = [table.bucket_bytes(text, args.world) for text in args.sizes]
    pairs = itertools.product(sizes, args.ops)
    cases = {(op, n): {"op": op, "nbytes": n, **measurement} for n, op in pairs}
    bounds = bounds_s(cases, args)
    samples: list[Sample] = []
    with session.started("bench/collectives", args) as running:
        for index in range(args.repeats):
            for (op, nbytes), engine, ranks in running.round(measure, cases):
                sample = Sample(
                    engine=engine,
                    op=op,
                    nbytes=nbytes,
                    round=index,
                    times_s=[rank["times_s"] for rank in ranks],
                    cpu_s=[rank["cpu_s"] for rank in ranks],
                    wrong=sum(rank["wrong"] for rank in ranks),
                )
                samples.append(sample)
                what = f"{op} {table.human_bytes(nbytes)} {engine}"
                note(f"round {index + 1}: {what} {sample.median_s() * 1e3:.3f} ms")
            running.save(
                repeats=args.repeats,
                measurement=measurement,
                samples=[dataclasses.asdict(sample) for sample in samples],
                bounds_s=[[*case, bound_s] for case, bound_s in bounds.items()],
            )
        print("\n".join(report(samples, args, bounds, running.failures)))
        return 1 if running.failures or any(sample.wrong for sample in samples) else 0


def bounds_s(cases: Iterable[Case], args: argparse.Namespace) -> Bounds:
    """Returns the shortest real time of each case by the bandwidth of the links."""
    name = args.network or args.rate
    if not args.num_hosts or name == "none":
        return dict.fromkeys(cases)
    rate = payload_bytes_per_s(network_profile(name).gbps) / args.time_scale
    # With --rate, the kernel's full token bucket lets a smaller operation pass without delay.
    least = 0 if args.network else 1_000_000
    return {
        (op, nbytes): nbytes * table.bus_factor(op, args.world) / rate if nbytes >= least else None
        for op, nbytes in cases
    }


def report(
    samples: Sequence[Sample], args: argparse.Namespace, bounds: Bounds, failures: Mapping[str, str]
) -> list[str]:
    """Returns the lines of the table and of the comparisons, in the order of `bounds`."""

    def cells(kept: list[Sample]) -> list[str]:
        op, nbytes, bound_s = kept[0].op, kept[0].nbytes, bounds[kept[0].op, kept[0].nbytes]
        steps = [step for sample in kept for step in sample.steps_s()]
        time_s = statistics.median(sample.median_s() for sample in kept)
        bandwidth = nbytes / time_s / 1e9
        numbers = [time_s * 1e3, bandwidth, bandwidth * table.bus_factor(op, args.world)]
        numbers += [1e3 * np.quantile(steps, q, method="inverted_cdf") for q in (0.5, 0.99, 0)]
        numbers.append(statistics.median(sample.cpu_s_per_gb() for sample in kept))
        wire = ["-", "-"]
        if bound_s is not None:
            above_us = 1e6 * (time_s - bound_s) / args.time_scale
            wire = [significant(bound_s / time_s), f"{above_us:.0f}"]
        wrong = sum(sample.wrong for sample in kept)
        return [*map(significant, numbers), str(len(steps)), str(wrong), *wire]

    engines = args.engines
    rounds: Rounds = {(op, name, str(nbytes)): [] for op, nbytes in bounds for name in engines}
    for sample in samples:
        rounds[sample.op, sample.engine, str(sample.nbytes)].append(sample)
    rows = []
    for label, kept in rounds.items():
        if kept:
            rows.append([*label, *cells(kept)])
        if label[1] in failures:
            rows.append([*label, failures[label[1]]])
    lines = [table.layout(HEADER, rows), ""]
    core = [name for name in engines if name.startswith("comm_core")]
    for reference in core or engines[:1]:
        for other in engines:
            if other != reference:
                lines += _compared(reference, other, args.world, rounds, bounds)
    if wrong := sum(sample.wrong for sample in samples):
        lines.append(f"WRONG RESULTS: {wrong} elements")
    return lines + [f"{name}: {reason}" for name, reason in failures.items()]


def _compared(
    reference: str, other: str, world: int, rounds: Rounds, cases: Iterable[Case]
) -> list[str]:
    """Compares the time and the CPU cost of two engines; returns a line per operation and ratio."""
    lines = []
    for op, nbytes in cases:
        mine, theirs = (rounds[op, name, str(nbytes)] for name in (reference, other))
        cpu, other_cpu = ({s.round: s.cpu_s_per_gb() for s in kept} for kept in (mine, theirs))
        ratios = {f"x {other}": Ratio.of(_times(theirs), _times(mine))}
        ratios[f"x the CPU of {other}"] = Ratio.of(cpu, other_cpu)
        if op == "rs_ag":
            whole = rounds.get(("all_reduce", other, str(nbytes)), [])
            ratios[f"x the time of {other} all_reduce"] = Ratio.of(_times(mine), _times(whole))
        label = f"{op} {table.human_bytes(nbytes)} n={world}: {reference}"
        lines += [f"{label} {ratio.text(unit)}" for unit, ratio in ratios.items() if ratio]
    return lines


def _times(kept: list[Sample]) -> dict[int, float]:
    return {sample.round: sample.median_s() for sample in kept}


if __name__ == "__main__":
    program.run(main)
