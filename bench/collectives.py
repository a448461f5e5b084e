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

import argparse
import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import session, table
from bench.limits import LimitError, MemoryBound, iperf_bytes_per_s
from bench.output import Output
from bench.report import LIMIT_FROM, Limits, Report, Sample
from bench.session import Session
from dear.errors import UserError, unknown


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    session.add_arguments(parser, ["comm_core", "gloo", "mpi", "horovod"], world=4)
    add = parser.add_argument
    add("--ops", nargs="+", default=list(table.OPS), metavar="OP", help="operations")
    add("--sizes", nargs="+", default=["4K", "4M", "25M"], metavar="SIZE", help="bucket sizes")
    add("--repeats", type=int, default=5, help="rounds")
    add("--seconds", type=float, default=0.5, help="timed seconds per engine, case and round")
    add("--min-iterations", type=int, default=3, help="at least so many in a round")
    add("--max-iterations", type=int, default=1000, help="at most so many in a round")
    args = parser.parse_args(argv)
    setup = session.setup_from(args)
    for op in args.ops:
        if op not in table.OPS:
            raise unknown("operation", op, table.OPS)
    if args.repeats < 1 or not 1 <= args.min_iterations <= args.max_iterations:
        raise UserError("--repeats and the numbers of iterations must be at least 1, min <= max")
    sizes = [table.bucket_bytes(table.parse_size(text), setup.world) for text in args.sizes]
    cases = [(op, nbytes) for nbytes in sizes for op in args.ops]
    output = Output(args.json)
    try:
        with Session(setup) as running:
            print("\n".join(running.header()), flush=True)
            run = Run(running, cases, args)
            for index in range(args.repeats):
                run.round(index)
                output.save(run.record(args))
        return run.print()
    finally:
        output.close()


class Run:
    """Collects samples and limits, round by round."""

    def __init__(
        self, running: Session, cases: list[tuple[str, int]], args: argparse.Namespace
    ) -> None:
        self._running, self._cases = running, cases
        self._measurement = {
            "budget_s": args.seconds,
            "iterations": (args.min_iterations, args.max_iterations),
        }
        self._samples: list[Sample] = []
        self._iperf: list[float] = []
        self._limit_failure: str | None = None
        self._memory = MemoryBound(running.folder)
        self._limits = Limits(kind="wire" if running.hosts.virtual else "memory", bound_s={})

    def round(self, index: int) -> None:
        """Every case with every engine, once."""
        self._measure_limits(index)
        for op, nbytes in self._cases:
            for engine in self._running.setup.engines:
                results = self._running.call(
                    engine, "bench.measure", "collective",
                    op=op, nbytes=nbytes, **self._measurement,
                )  # fmt: skip
                if results is None:
                    continue
                sample = Sample(
                    engine=engine,
                    op=op,
                    nbytes=nbytes,
                    round=index,
                    times_s=[result["times_s"] for result in results],
                    cpu_s=[result["cpu_s"] for result in results],
                    wrong=sum(result["wrong"] for result in results),
                )
                self._samples.append(sample)
                what = f"{op} {table.human_bytes(nbytes)} {engine}"
                session.note(f"round {index + 1}: {what} {sample.median_s() * 1e3:.3f} ms")

    def _measure_limits(self, index: int) -> None:
        if self._limit_failure is not None:
            return
        world, hosts = self._running.setup.world, self._running.hosts.all
        bounds = self._limits.bound_s
        cases = [case for case in self._cases if case[1] >= LIMIT_FROM]
        try:
            if self._limits.kind == "wire" and len(hosts) > 1:
                rate = iperf_bytes_per_s(hosts[0], hosts[1])
                self._iperf.append(rate)
                for op, nbytes in cases:
                    bounds[op, nbytes, index] = nbytes * table.bus_factor(op, world) / rate
            elif self._limits.kind == "memory" and self._running.setup.transport != "tcp":
                for nbytes in {nbytes for _, nbytes in cases}:
                    bound = self._memory.measure(world, nbytes)
                    for op in {op for op, _ in self._cases}:
                        bounds[op, nbytes, index] = bound[op]
        except LimitError as error:
            self._limit_failure = str(error)
            session.note(f"no {self._limits.kind} limit: {error}")

    def record(self, args: argparse.Namespace) -> dict[str, object]:
        """Everything measured so far."""
        return self._running.record("bench/collectives") | {
            "repeats": args.repeats,
            "measurement": self._measurement,
            "samples": [dataclasses.asdict(sample) for sample in self._samples],
            "iperf3_bytes_per_s": self._iperf,
            "limit": self._limits.kind,
            "limit_failure": self._limit_failure,
            "bounds_s": [[*key, value] for key, value in self._limits.bound_s.items()],
        }

    def print(self) -> int:
        """The table and what follows from it; the exit status."""
        names, failures = self._running.setup.engines, self._running.failures
        report = Report(self._samples, self._running.setup.world, failures)
        print(report.rows(self._cases, names, self._limits))
        for line in self._limit_lines():
            print(line)
        print()
        core = [name for name in names if name.startswith("comm_core")]
        for reference in core or names[:1]:
            for line in report.ratios(self._cases, names, reference):
                print(line)
        for line in report.nearness(self._cases, names, self._limits):
            print(line)
        wrong = sum(sample.wrong for sample in self._samples)
        if wrong:
            print(f"WRONG RESULTS: {wrong} elements")
        for name, reason in failures.items():
            print(f"{name}: {reason}")
        return 1 if wrong or failures else 0

    def _limit_lines(self) -> list[str]:
        if self._limit_failure is not None:
            return [f"# no {self._limits.kind} limit: {self._limit_failure}"]
        if self._iperf:
            rates = ", ".join(f"{rate * 8 / 1e9:.3f}" for rate in self._iperf)
            return [f"# iperf3, one connection between two hosts: {rates} Gb/s by round"]
        lines = []
        for op, nbytes in self._cases:
            times = [v for key, v in self._limits.bound_s.items() if key[:2] == (op, nbytes)]
            if times:
                values = ", ".join(table.digits(t * 1e3) for t in times)
                size = table.human_bytes(nbytes)
                lines.append(f"# memory bound {op} {size}: {values} ms by round")
        return lines


if __name__ == "__main__":
    session.program(main)
