#!/usr/bin/env python3
"""Time, bandwidth, CPU cost and correctness of collectives, engines interleaved in one run.

  python bench/collectives.py --engines comm_core gloo mpi horovod --sizes 4K 4M 25M -n 4
  python bench/collectives.py --hosts netns --rate 1gbit --congestion cubic -n 4
  python bench/collectives.py --hosts netns --network 10gbe --time-scale 10 --sizes 32Ki 512Ki

Time of one operation = that of the slowest rank, after a barrier. Every round measures each
operation and size with every engine in turn; ratios are medians over rounds. Sizes are of the
whole bucket (float32): 25M = 25e6 bytes. With a network's profile a second table has, by size,
what an operation takes beyond the time of its bytes on the wire. Exit status: 0 all well, 1 an
engine is missing or failed or gave a wrong result, 2 a mistake in the options.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.rig import session, table
from bench.rig.limits import Limits
from bench.rig.output import note
from bench.rig.rank import Place
from bench.rig.table import Ratio
from common.emulation.links.profile import payload_bytes_per_s
from dear.errors import UserError, unknown
from dear.lazy import torch

HEADER = (
    "op", "engine", "bytes", "time ms", "algbw GB/s", "busbw GB/s", "p50 ms", "p99 ms", "min ms",
    "CPU-s/GB", "iterations", "#wrong",
)  # fmt: skip
_WARM_UP_S = 0.05
_SPOILT = -1.0


class _Buffers:
    """Buffers of one operation, filled with integers whose sums float32 holds exactly.

    Element i of rank r is base(i) + 2**r, with base different for neighbouring i: among sums of
    as many terms as there are ranks, only that of every rank once is base * size + 2**size - 1.
    """

    def __init__(self, place: Place, op: str, count: int) -> None:
        self._place, self._op = place, op
        size, part = place.size, count // place.size
        self._mine = slice(place.rank * part, (place.rank + 1) * part)
        prime = 1000003 if size <= 16 else 250007
        if size > 64:
            raise ValueError(f"{size} ranks: sums would not be exact in float32")
        # Ranks beyond 16 reuse the powers; the sum must stay below 2**24.
        self._weights = [float(2 ** (r % 16)) for r in range(size)]
        self._base = ((torch.arange(count) * 48271) % prime).to(torch.float32)
        shard_in = op == "all_gather"
        self.source = place.engine.empty(part if shard_in else count)
        self._shard = None if op in ("all_reduce", "all_gather") else place.engine.empty(part)
        self._whole = place.engine.empty(count) if op in ("all_gather", "rs_ag") else None
        self._result: Any = None

    def run(self) -> None:
        """The operation, once."""
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
        """Runs once on fresh data; the number of wrong elements of the result."""
        weight = self._weights[self._place.rank]
        mine = self._base[self._mine] if self._op == "all_gather" else self._base
        self.source.copy_(mine).add_(weight)
        for output in (self._shard, self._whole):
            if output is not None:
                output.fill_(_SPOILT)
        self._place.meet()
        self.run()
        if self._op == "all_gather":
            rows = self._base.view(self._place.size, -1) + torch.tensor(self._weights)[:, None]
            want = rows.view(-1)
        else:
            base = self._base[self._mine] if self._op == "reduce_scatter" else self._base
            want = base * self._place.size + sum(self._weights)
        if self._result.numel() != want.numel():
            return int(want.numel())
        return int((self._result != want).sum())


def measure(
    place: Place, op: str, nbytes: int, budget_s: float, iterations: tuple[int, int]
) -> dict[str, Any]:
    """One round of one operation on a bucket of `nbytes` in all.

    The timed iterations should take `budget_s` together, and are in the range `iterations`.

    Returns:
        `times_s` of this rank per iteration, its `cpu_s` for all of them, `wrong` elements.
    """
    buffers = _Buffers(place, op, nbytes // 4)
    wrong = buffers.wrong()
    # An all-reduce works in place, so that its numbers grow to infinity; that costs no time.
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
        # What this thread spends in the barrier is the benchmark's, not the engine's; the
        # engine's own threads are counted all the time.
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


def main(argv: list[str]) -> int:
    parser = session.parser_of(__doc__, ["comm_core", "gloo", "mpi", "horovod"], world=4)
    add = parser.add_argument
    add("--ops", nargs="+", default=list(table.OPS), metavar="OP", help="operations")
    add("--sizes", nargs="+", default=["4K", "4M", "25M"], metavar="SIZE", help="bucket sizes")
    add("--repeats", type=int, default=5, help="rounds")
    add("--seconds", type=float, default=0.5, help="timed seconds per engine, case and round")
    add("--min-iterations", type=int, default=3, help="at least so many in a round")
    add("--max-iterations", type=int, default=1000, help="at most so many in a round")
    args = session.parse(parser, argv)
    for op in args.ops:
        if op not in table.OPS:
            raise unknown("operation", op, table.OPS)
    if args.repeats < 1 or not 1 <= args.min_iterations <= args.max_iterations:
        raise UserError("--repeats and the numbers of iterations must be at least 1, min <= max")
    iterations = (args.min_iterations, args.max_iterations)
    measurement = {"budget_s": args.seconds, "iterations": iterations}
    sizes = [table.bucket_bytes(table.parse_size(text), args.world) for text in args.sizes]
    pairs = itertools.product(sizes, args.ops)
    cases = {(op, n): {"op": op, "nbytes": n, **measurement} for n, op in pairs}
    profile = session.profile_of(args)
    wire = None if profile is None else payload_bytes_per_s(profile.gbps) / args.time_scale
    limits = Limits("wire" if args.num_hosts else "memory", cases, wire)
    samples: list[Sample] = []
    with session.started("bench/collectives", args) as running:
        for index in range(args.repeats):
            limits.measure(running, index)
            for (op, nbytes), engine, results in running.round(measure, cases):
                found = {key: [one[key] for one in results] for key in ("times_s", "cpu_s")}
                found["wrong"] = sum(one["wrong"] for one in results)
                sample = Sample(engine=engine, op=op, nbytes=nbytes, round=index, **found)
                samples.append(sample)
                what = f"{op} {table.human_bytes(nbytes)} {engine}"
                note(f"round {index + 1}: {what} {sample.median_s() * 1e3:.3f} ms")
            running.save(
                repeats=args.repeats,
                measurement=measurement,
                samples=[dataclasses.asdict(sample) for sample in samples],
                **limits.record(),
            )
        print("\n".join(report(samples, args.world, args.engines, limits, running.failures)))
        if profile is not None:
            print(above_wire(samples, args.engines, limits, args.time_scale))
        return 1 if running.failures or any(sample.wrong for sample in samples) else 0


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One round of one operation with one engine.

    Attributes:
        nbytes: size of the whole bucket.
        times_s: per rank and iteration.
        cpu_s: per rank, for all iterations.
        wrong: elements that differed from the right result, all ranks.
    """

    engine: str
    op: str
    nbytes: int
    round: int
    times_s: list[list[float]]
    cpu_s: list[float]
    wrong: int

    def steps_s(self) -> list[float]:
        """Seconds per iteration: of the slowest rank."""
        return table.slowest(self.times_s)

    def median_s(self) -> float:
        """The round's figure."""
        return statistics.median(self.steps_s())

    def cpu_s_per_gb(self) -> float:
        """CPU seconds of all ranks per 1e9 bytes of bucket."""
        # The clock is exact, but an engine may truly use none between two readings.
        return max(sum(self.cpu_s) / len(self.times_s[0]) / (self.nbytes / 1e9), 1e-9)


def report(
    samples: Sequence[Sample],
    world: int,
    engines: Sequence[str],
    limits: Limits,
    failures: Mapping[str, str],
) -> list[str]:
    """The table and what follows from it; operations and sizes in the order of the limits."""
    times: Series = defaultdict(dict)
    cpu: Series = defaultdict(dict)
    for sample in samples:
        times[sample.engine, sample.op, sample.nbytes][sample.round] = sample.median_s()
        cpu[sample.engine, sample.op, sample.nbytes][sample.round] = sample.cpu_s_per_gb()

    def cells(kept: list[Sample]) -> list[str]:
        op, nbytes, engine = kept[0].op, kept[0].nbytes, kept[0].engine
        steps = [step for sample in kept for step in sample.steps_s()]
        time_s = statistics.median(times[engine, op, nbytes].values())
        bandwidth = nbytes / time_s / 1e9
        numbers = [time_s * 1e3, bandwidth, bandwidth * table.bus_factor(op, world)]
        numbers += [table.percentile(steps, percent) * 1e3 for percent in (50, 99, 0)]
        numbers.append(statistics.median(cpu[engine, op, nbytes].values()))
        near = limits.nearness((op, nbytes), times[engine, op, nbytes])
        return [
            *(table.digits(number) for number in numbers),
            *(str(len(steps)), str(sum(sample.wrong for sample in kept))),
            table.digits(near.median if near else None),
        ]

    rounds: dict[tuple[str, ...], list[Sample]] = {
        (op, engine, str(nbytes)): [] for op, nbytes in limits.bound_s for engine in engines
    }
    for sample in samples:
        rounds[sample.op, sample.engine, str(sample.nbytes)].append(sample)
    header = [*HEADER, "of wire" if limits.kind == "wire" else "x memory"]
    lines = [table.of_engines(header, rounds, failures, cells), *limits.lines(), ""]
    core = [name for name in engines if name.startswith("comm_core")]
    for reference in core or engines[:1]:
        lines += _compared(reference, engines, world, limits.bound_s, times, cpu)
    unit = " of the wire (iperf3)" if limits.kind == "wire" else "x the memory bound"
    if limits.wire_bytes_per_s is not None:
        unit = " of the wire"
    for op, nbytes in limits.bound_s:
        for engine in engines:
            if near := limits.nearness((op, nbytes), times[engine, op, nbytes]):
                label = f"{op} {table.human_bytes(nbytes)} n={world}: {engine}"
                lines.append(f"{label} {near.text(unit)} {near.spread()}")
    if wrong := sum(sample.wrong for sample in samples):
        lines.append(f"WRONG RESULTS: {wrong} elements")
    return lines + [f"{name}: {reason}" for name, reason in failures.items()]


ABOVE_HEADER = ("op", "engine", "bytes", "wire us", "above us", "low..high", "rounds")


def above_wire(
    samples: Sequence[Sample], engines: Sequence[str], limits: Limits, time_scale: float
) -> str:
    """What operations take beyond the time of their bytes on the wire, in the network's time.

    Args:
        limits: of the wire, whose bounds are in real seconds, for every round.
        time_scale: real seconds of a second of the network.

    Returns:
        A table: the median of the rounds' medians, their range and number.
    """
    kept: dict[tuple[str, ...], list[tuple[float, float]]] = {
        (op, engine, str(nbytes)): [] for op, nbytes in limits.bound_s for engine in engines
    }
    for sample in samples:
        bound_s = limits.bound_s[sample.op, sample.nbytes][sample.round]
        pair = (bound_s / time_scale, (sample.median_s() - bound_s) / time_scale)
        kept[sample.op, sample.engine, str(sample.nbytes)].append(pair)

    def cells(pairs: list[tuple[float, float]]) -> list[str]:
        above = [seconds * 1e6 for _, seconds in pairs]
        numbers = [pairs[0][0] * 1e6, statistics.median(above)]
        spread = f"{min(above):.0f}..{max(above):.0f}"
        return [*(f"{number:.0f}" for number in numbers), spread, str(len(above))]

    title = "\nTime above the wire, in microseconds of the network:\n"
    return title + table.of_engines(ABOVE_HEADER, kept, {}, cells)


Series = dict[tuple[str, str, int], dict[int, float]]
"""A figure by engine, operation and bytes; then by round."""


def _compared(
    reference: str,
    engines: Sequence[str],
    world: int,
    cases: Iterable[tuple[str, int]],
    times: Series,
    cpu: Series,
) -> list[str]:
    """The reference engine against the others: how many times faster, and its CPU."""
    lines = []
    for op, nbytes in cases:
        mine = (reference, op, nbytes)
        for other in engines:
            if other == reference:
                continue
            theirs = (other, op, nbytes)
            found = [(Ratio.of(times[theirs], times[mine]), other)]
            found.append((Ratio.of(cpu[mine], cpu[theirs]), f"the CPU of {other}"))
            if op == "rs_ag":
                whole = times[other, "all_reduce", nbytes]
                found.append((Ratio.of(times[mine], whole), f"the time of {other} all_reduce"))
            label = f"{op} {table.human_bytes(nbytes)} n={world}: {reference}"
            lines += [f"{label} {r.text()} {what} {r.spread()}" for r, what in found if r]
    return lines


if __name__ == "__main__":
    session.program(main)
