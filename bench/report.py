"""From samples to the table and the lines below it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bench import table
from bench.table import Ratio

HEADER = (
    "op", "engine", "bytes", "time ms", "algbw GB/s", "busbw GB/s", "p50 ms", "p99 ms", "min ms",
    "CPU-s/GB", "iterations", "#wrong",
)  # fmt: skip
# Below this a wire's token bucket and a memory's caches hold the whole operation.
LIMIT_FROM = 1_000_000


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
        return sum(self.cpu_s) / len(self.times_s[0]) / (self.nbytes / 1e9)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the wire or the memory allows.

    Attributes:
        kind: "wire" or "memory".
        bound_s: the least time by (op, bytes, round).
    """

    kind: str
    bound_s: dict[tuple[str, int, int], float]

    def ratio(self, samples: Sequence[Sample]) -> Ratio | None:
        """How near one engine's rounds came: wire, of 1; memory, times the bound."""
        known = [s for s in samples if (s.op, s.nbytes, s.round) in self.bound_s]
        if not known or known[0].nbytes < LIMIT_FROM:
            return None
        bounds = [self.bound_s[s.op, s.nbytes, s.round] for s in known]
        times = [s.median_s() for s in known]
        return Ratio.of(bounds, times) if self.kind == "wire" else Ratio.of(times, bounds)


class Report:
    """All samples of a run, by operation, size and engine in the order that was asked for."""

    def __init__(self, samples: Iterable[Sample], world: int, failures: dict[str, str]) -> None:
        self._world, self._failures = world, failures
        self._samples: dict[tuple[str, int, str], list[Sample]] = {}
        for sample in samples:
            key = (sample.op, sample.nbytes, sample.engine)
            self._samples.setdefault(key, []).append(sample)

    def rows(self, cases: Sequence[tuple[str, int]], engines: Sequence[str], limits: Limits) -> str:
        """The table; an engine that is missing or failed has a row that says so."""
        rows: list[list[str]] = []
        for op, nbytes in cases:
            for engine in engines:
                if samples := self._samples.get((op, nbytes, engine)):
                    rows.append(self._row(samples, limits))
                if engine in self._failures:
                    rows.append([op, engine, str(nbytes), self._failures[engine]])
        heading = "of wire" if limits.kind == "wire" else "x memory"
        return table.layout([*HEADER, heading], rows)

    def _row(self, samples: list[Sample], limits: Limits) -> list[str]:
        first = samples[0]
        time_s = statistics.median(s.median_s() for s in samples)
        steps = [step for s in samples for step in s.steps_s()]
        bandwidth = first.nbytes / time_s / 1e9
        numbers = [
            time_s * 1e3,
            bandwidth,
            bandwidth * table.bus_factor(first.op, self._world),
            table.percentile(steps, 50) * 1e3,
            table.percentile(steps, 99) * 1e3,
            min(steps) * 1e3,
            statistics.median(s.cpu_s_per_gb() for s in samples),
        ]
        ratio = limits.ratio(samples)
        return [
            *(first.op, first.engine, str(first.nbytes)),
            *(table.digits(number) for number in numbers),
            *(str(len(steps)), str(sum(s.wrong for s in samples))),
            table.digits(ratio.median if ratio else None),
        ]

    def ratios(
        self, cases: Sequence[tuple[str, int]], engines: Sequence[str], reference: str
    ) -> list[str]:
        """The reference engine against the others: how many times faster, and its CPU."""
        lines = []
        for op, nbytes in cases:
            label = f"{op} {table.human_bytes(nbytes)} n={self._world}: {reference}"
            for other in engines:
                if other == reference:
                    continue
                mine, theirs = self._paired((op, nbytes, reference), (op, nbytes, other))
                if mine:
                    speed = Ratio.of(_times(theirs), _times(mine))
                    lines.append(f"{label} {speed.text()} {other} {speed.spread()}")
                    cpu = Ratio.of(_cpu(mine), _cpu(theirs))
                    lines.append(f"{label} {cpu.text()} the CPU of {other} {cpu.spread()}")
                if op == "rs_ag":
                    pair = self._paired((op, nbytes, reference), ("all_reduce", nbytes, other))
                    if pair[0]:
                        time = Ratio.of(_times(pair[0]), _times(pair[1]))
                        what = f"the time of {other} all_reduce"
                        lines.append(f"{label} {time.text()} {what} {time.spread()}")
        return lines

    def nearness(
        self, cases: Sequence[tuple[str, int]], engines: Sequence[str], limits: Limits
    ) -> list[str]:
        """Every engine against the wire or the memory."""
        unit = " of the wire (iperf3)" if limits.kind == "wire" else "x the memory bound"
        lines = []
        for op, nbytes in cases:
            for engine in engines:
                ratio = limits.ratio(self._samples.get((op, nbytes, engine), []))
                if ratio is not None:
                    label = f"{op} {table.human_bytes(nbytes)} n={self._world}: {engine}"
                    lines.append(f"{label} {ratio.text(unit)} {ratio.spread()}")
        return lines

    def _paired(
        self, first: tuple[str, int, str], second: tuple[str, int, str]
    ) -> tuple[list[Sample], list[Sample]]:
        """The samples of the rounds that both have."""
        one = {s.round: s for s in self._samples.get(first, [])}
        two = {s.round: s for s in self._samples.get(second, [])}
        rounds = sorted(one.keys() & two.keys())
        return [one[r] for r in rounds], [two[r] for r in rounds]


def _times(samples: Sequence[Sample]) -> list[float]:
    return [s.median_s() for s in samples]


def _cpu(samples: Sequence[Sample]) -> list[float]:
    # The clock of CPU time is exact, but an engine may truly use none between two readings.
    return [max(s.cpu_s_per_gb(), 1e-9) for s in samples]
