#!/usr/bin/env python3
"""Time, bandwidth, CPU cost and correctness of collectives, engines interleaved in one run.

  python bench/collectives.py --engines comm_core gloo mpi horovod --sizes 4K 4M 25M -n 4
  python bench/collectives.py --hosts netns --rate 1gbit --congestion cubic -n 4

Time of one operation = that of the slowest rank, after a barrier. Every round measures each
operation and size with every engine in turn; ratios are medians over rounds. Sizes are of the
whole bucket (float32): 25M = 25e6 bytes. Exit status: 0 all well, 1 an engine is missing or
failed or gave a wrong result, 2 a mistake in the options.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.rig import session, table
from bench.rig.limits import Limits
from bench.rig.measure import collective
from bench.rig.output import note
from bench.rig.table import Ratio
from dear.errors import UserError, unknown

HEADER = (
    "op", "engine", "bytes", "time ms", "algbw GB/s", "busbw GB/s", "p50 ms", "p99 ms", "min ms",
    "CPU-s/GB", "iterations", "#wrong",
)  # fmt: skip


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
    measurement = {
        "budget_s": args.seconds,
        "iterations": (args.min_iterations, args.max_iterations),
    }
    sizes = [table.bucket_bytes(table.parse_size(text), args.world) for text in args.sizes]
    cases = {
        (op, nbytes): {"op": op, "nbytes": nbytes, **measurement}
        for nbytes in sizes
        for op in args.ops
    }
    limits = Limits("wire" if args.num_hosts else "memory", cases)
    samples: list[Sample] = []
    with session.started("bench/collectives", args) as running:
        for index in range(args.repeats):
            limits.measure(running, index)
            for (op, nbytes), engine, results in running.round(collective, cases):
                sample = Sample(
                    engine=engine,
                    op=op,
                    nbytes=nbytes,
                    round=index,
                    times_s=[result["times_s"] for result in results],
                    cpu_s=[result["cpu_s"] for result in results],
                    wrong=sum(result["wrong"] for result in results),
                )
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
        (op, engine, str(nbytes)): [
            sample
            for sample in samples
            if (sample.op, sample.engine, sample.nbytes) == (op, engine, nbytes)
        ]
        for op, nbytes in limits.bound_s
        for engine in engines
    }
    header = [*HEADER, "of wire" if limits.kind == "wire" else "x memory"]
    lines = [table.layout(header, table.rows_of(rounds, failures, cells)), *limits.lines(), ""]
    core = [name for name in engines if name.startswith("comm_core")]
    for reference in core or engines[:1]:
        lines += _compared(reference, engines, world, limits.bound_s, times, cpu)
    unit = " of the wire (iperf3)" if limits.kind == "wire" else "x the memory bound"
    for op, nbytes in limits.bound_s:
        for engine in engines:
            if near := limits.nearness((op, nbytes), times[engine, op, nbytes]):
                label = f"{op} {table.human_bytes(nbytes)} n={world}: {engine}"
                lines.append(f"{label} {near.text(unit)} {near.spread()}")
    if wrong := sum(sample.wrong for sample in samples):
        lines.append(f"WRONG RESULTS: {wrong} elements")
    return lines + [f"{name}: {reason}" for name, reason in failures.items()]


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
