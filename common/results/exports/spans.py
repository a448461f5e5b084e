"""Spans (begin and end) of the ranks' work in traced steps, on one clock.

Times are in microseconds of the trial's cluster: on an emulated cluster, real time / time scale.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

from common.results.records import JsonObject

PHASES = ("forward", "backward", "update")
Evidence: TypeAlias = JsonObject
"""Content of a file with a trial's raw measurements (evidence), or one rank's trace in it."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """Named interval; its times count from the start of the first rank."""

    name: str
    start_us: float
    end_us: float
    args: JsonObject = field(default_factory=dict)

    @property
    def length_us(self) -> float:
        return self.end_us - self.start_us


@dataclass(frozen=True, kw_only=True)
class RankSpans:
    """Spans of a rank; every list is in the order of starts."""

    number: int
    steps: list[Span]
    computes: list[Span]
    """Phases of the steps, without the waits inside; empty if the trace has no phases."""
    waits: list[Span]
    gradients: list[Span]
    """Times at which gradients became ready, as spans of length 0."""
    transfers: list[Span]
    """Collectives, from when they could start to their end; `args`: bytes, channel, waiting."""
    layers: list[Span] = field(default_factory=list)
    """Work of the device, module by module; only predicted traces have it."""


@dataclass(frozen=True, kw_only=True)
class Clocks:
    """Alignment of the ranks' clocks, and its precision."""

    aligned_by: str
    uncertainty_us: float | None
    """Remaining difference of two ranks' clocks, as the 95 % quantile over ends of collectives;
    None: unknown."""


def aligned(raw: Evidence) -> tuple[list[RankSpans], Clocks]:
    """Returns the spans of all ranks in a trial's raw measurements, on one clock. Ranks on one
    machine share a clock. Clocks of several machines are shifted so that collectives end at the
    same time on all ranks, in the median. This is right to within one message: all ranks of a ring
    end within the time of a message."""
    traces, scale = raw["traces"], raw["time_scale"]
    machines = {rank.get("machine") for rank in raw.get("pressure", [])}
    offsets_s, clocks = [0.0] * len(traces), Clocks(aligned_by="one machine", uncertainty_us=0.0)
    if len(machines) > 1:
        ends = [[call["finished_s"] for call in _collectives(trace)] for trace in traces]
        count = min(map(len, ends))
        clocks = Clocks(aligned_by="nothing: no collective", uncertainty_us=None)
        if count:
            apart = [
                [b - a for a, b in zip(ends[0][:count], own_ends, strict=False)]
                for own_ends in ends
            ]
            offsets_s = list(map(statistics.median, apart))
            left = [
                abs(value - offset)
                for values, offset in zip(apart, offsets_s, strict=True)
                for value in values
            ]
            spread_us = 1e6 * statistics.quantiles([*left, 0.0], n=20)[-1] / scale
            clocks = Clocks(
                aligned_by=f"the ends of {count} collectives", uncertainty_us=round(spread_us, 3)
            )
    began = min(trace["marks_s"][0] - off for trace, off in zip(traces, offsets_s, strict=True))

    def clock(offset_s: float) -> Callable[[float], float]:
        return lambda seconds: round((seconds - offset_s - began) / scale * 1e6, 3)

    return [_spans(i, trace, clock(offsets_s[i])) for i, trace in enumerate(traces)], clocks


def _collectives(trace: Evidence) -> list[JsonObject]:
    """Returns the collectives of a rank; only the comm core knows the buckets of DDP."""
    calls = [call for call in trace["collectives"] if "started_s" in call] or [
        {**call, "name": call["operation"], "channel": call["group"], "bytes": call["nbytes"]}
        for call in trace["transfers"]
    ]
    return sorted(calls, key=lambda call: call["started_s"])


def _spans(number: int, trace: Evidence, at: Callable[[float], float]) -> RankSpans:
    steps = [
        Span(name=f"step {step}", start_us=at(start), end_us=at(end))
        for step, (start, end) in enumerate(pairwise(trace["marks_s"]), start=1)
    ]
    waits = [
        Span(name="wait", start_us=at(start), end_us=at(end))
        for start, end in sorted(trace.get("waits_s", []))
    ]
    gradients = [
        Span(
            name=gradient["name"],
            start_us=at(gradient["at_s"]),
            end_us=at(gradient["at_s"]),
            args={"bytes": gradient["bytes"], "step": step},
        )
        for step, arrived in enumerate(trace["gradients"], start=1)
        for gradient in arrived
    ]
    transfers = [
        Span(
            name=call["name"],
            start_us=at(call["started_s"]),
            end_us=at(call["finished_s"]),
            args={
                "bytes": call["bytes"],
                "channel": call["channel"],
                "enqueued_us": at(call["enqueued_s"]),
                "waited_us": round(at(call["started_s"]) - at(call["enqueued_s"]), 3),
            },
        )
        for call in _collectives(trace)
    ]
    held = joined(waits)
    computes = [
        Span(name=name, start_us=begin, end_us=stop, args={"step": step})
        for step, marks in enumerate(trace.get("phases_s", []), start=1)
        for name, phase in zip(PHASES, pairwise(map(at, marks)), strict=True)
        for begin, stop in without(phase, held)
    ]
    layers = [
        Span(name=work["name"], start_us=at(work["started_s"]), end_us=at(work["finished_s"]))
        for work in trace.get("computations", [])
    ]
    return RankSpans(
        number=number,
        steps=steps,
        computes=computes,
        waits=waits,
        gradients=gradients,
        transfers=transfers,
        layers=layers,
    )


def joined(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """Returns the union of spans as intervals without overlap, in order."""
    union: list[tuple[float, float]] = []
    for start, end in sorted((span.start_us, span.end_us) for span in spans):
        if union and start <= union[-1][1]:
            union[-1] = union[-1][0], max(end, union[-1][1])
        else:
            union.append((start, end))
    return union


def without(
    whole: tuple[float, float], held: Iterable[tuple[float, float]]
) -> list[tuple[float, float]]:
    """Returns the parts of `whole` outside the spans `held`, which are in order and disjoint."""
    start, end = whole
    parts = []
    for begin, stop in held:
        if stop <= start or begin >= end:
            continue
        if begin > start:
            parts.append((start, begin))
        start = max(start, stop)
    if start < end:
        parts.append((start, end))
    return parts


def lanes(spans: Sequence[Span]) -> list[tuple[int, Span]]:
    """Returns each span with the number of a lane, such that spans of a lane never overlap."""
    free_us: list[float] = []
    placed = []
    for span in sorted(spans, key=lambda span: span.start_us):
        lane = next((i for i, free in enumerate(free_us) if free <= span.start_us), len(free_us))
        free_us[lane:] = [span.end_us, *free_us[lane + 1 :]]
        placed.append((lane, span))
    return placed
