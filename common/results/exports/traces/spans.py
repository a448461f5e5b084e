"""What ranks did in the traced steps, as spans of one clock, in microseconds of the fabric."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

PHASES = ("forward", "backward", "update")


@dataclass(frozen=True, kw_only=True)
class Span:
    """From `start_us` to `end_us`, since the first rank began."""

    name: str
    start_us: float
    end_us: float
    args: dict[str, Any] = field(default_factory=dict)

    @property
    def length_us(self) -> float:
        return self.end_us - self.start_us


@dataclass(frozen=True, kw_only=True)
class RankSpans:
    """One rank; every list in the order of begins."""

    number: int
    steps: list[Span]
    computes: list[Span]
    """Forward, backward, update: without the waits inside them. None where the trace does not tell.
    """
    waits: list[Span]
    """The training was held up by communication."""
    gradients: list[Span]
    """Moments: each ends where it begins."""
    transfers: list[Span]
    """From when a collective could start to its end; `args` has bytes, channel and queueing."""

    @property
    def overlap(self) -> float | None:
        """Share of the communication that the training did not wait for; None without any.

        Times in which several transfers are under way count once.
        """
        sent_us = covered_us(self.transfers)
        if not sent_us or not self.computes:
            return None
        waited_us = sum(
            max(0.0, min(end, wait.end_us) - max(start, wait.start_us))
            for wait in self.waits
            for start, end in joined(self.transfers)
        )
        return 1 - waited_us / sent_us


@dataclass(frozen=True, kw_only=True)
class Clocks:
    """How the clocks of ranks were made one."""

    aligned_by: str
    uncertainty_us: float | None
    """By how much two ranks may still be apart (95 % of all ends); microseconds of the fabric.
    None: nothing is known of it."""


def aligned(told: dict[str, Any]) -> tuple[list[RankSpans], Clocks]:
    """The ranks of a file of evidence, on one clock.

    Ranks of one machine share its clock. Those of several are moved so that their collectives end
    together, in the median: no rank can end one before the last has begun it, and a ring's ranks
    end within a message's time of each other. What is left is told.
    """
    traces, scale = told["traces"], told["time_scale"]
    machines = {rank.get("machine") for rank in told.get("pressure", [])}
    offsets_s, clocks = [0.0] * len(traces), Clocks(aligned_by="one machine", uncertainty_us=0.0)
    if len(machines) > 1:
        ends = [_ends(trace) for trace in traces]
        count = min(map(len, ends))
        if count:
            apart = [[b - a for a, b in zip(ends[0], own, strict=False)] for own in ends]
            offsets_s = [statistics.median(one[:count]) for one in apart]
            left = [
                abs(value - offset)
                for one, offset in zip(apart, offsets_s, strict=True)
                for value in one[:count]
            ]
            spread_us = 1e6 * statistics.quantiles([*left, 0.0], n=20)[-1] / scale
            clocks = Clocks(
                aligned_by=f"the ends of {count} collectives", uncertainty_us=round(spread_us, 3)
            )
        else:
            clocks = Clocks(aligned_by="nothing: no collective", uncertainty_us=None)
    began = min(trace["marks_s"][0] - off for trace, off in zip(traces, offsets_s, strict=True))

    def clock(offset_s: float) -> Callable[[float], float]:
        return lambda seconds: round((seconds - offset_s - began) / scale * 1e6, 3)

    found = [_spans(i, trace, clock(offsets_s[i])) for i, trace in enumerate(traces)]
    return found, clocks


def _ends(trace: dict[str, Any]) -> list[float]:
    return [one["finished_s"] for one in _known(trace)]


def _known(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """What was sent. DDP's buckets are known to the comm core only."""
    found = [one for one in trace["collectives"] if "started_s" in one] or [
        {**one, "name": one["operation"], "channel": one["group"], "bytes": one["nbytes"]}
        for one in trace["transfers"]
    ]
    return sorted(found, key=lambda one: one["started_s"])


def _spans(number: int, trace: dict[str, Any], at: Callable[[float], float]) -> RankSpans:
    steps = [
        Span(name=f"step {step}", start_us=at(start), end_us=at(end))
        for step, (start, end) in enumerate(pairwise(trace["marks_s"]), start=1)
    ]
    waits = [
        Span(name="wait", start_us=at(start), end_us=at(end))
        for start, end in sorted(trace.get("waits_s", []))
    ]
    gradients = [
        Span(name=one["name"], start_us=at(one["at_s"]), end_us=at(one["at_s"]),
             args={"bytes": one["bytes"], "step": step})
        for step, arrived in enumerate(trace["gradients"], start=1)
        for one in arrived
    ]  # fmt: skip
    transfers = [
        Span(
            name=one["name"],
            start_us=at(one["started_s"]),
            end_us=at(one["finished_s"]),
            args={
                "bytes": one["bytes"],
                "channel": one["channel"],
                "enqueued_us": at(one["enqueued_s"]),
                "waited_us": round(at(one["started_s"]) - at(one["enqueued_s"]), 3),
            },
        )
        for one in _known(trace)
    ]
    return RankSpans(
        number=number,
        steps=steps,
        computes=_computes(trace, waits, at),
        waits=waits,
        gradients=gradients,
        transfers=transfers,
    )


def _computes(
    trace: dict[str, Any], waits: Sequence[Span], at: Callable[[float], float]
) -> list[Span]:
    found = []
    held = joined(waits)
    for step, marks in enumerate(trace.get("phases_s", []), start=1):
        for name, (start, end) in zip(PHASES, pairwise(map(at, marks)), strict=True):
            for begin, stop in without((start, end), held):
                found.append(Span(name=name, start_us=begin, end_us=stop, args={"step": step}))
    return found


def joined(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """Where any of them is, without overlap, in order."""
    found: list[tuple[float, float]] = []
    for start, end in sorted((one.start_us, one.end_us) for one in spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def covered_us(spans: Iterable[Span]) -> float:
    """How long any of them is."""
    return sum(end - start for start, end in joined(spans))


def without(
    whole: tuple[float, float], held: Iterable[tuple[float, float]]
) -> list[tuple[float, float]]:
    """What is left of an interval without these, which do not overlap and are in order."""
    start, end = whole
    found = []
    for begin, stop in held:
        if stop <= start or begin >= end:
            continue
        if begin > start:
            found.append((start, begin))
        start = max(start, stop)
    if start < end:
        found.append((start, end))
    return found


def lanes(spans: Sequence[Span]) -> list[tuple[int, Span]]:
    """Each with the first lane that is free, so that no two of a lane overlap."""
    free_us: list[float] = []
    found = []
    for span in sorted(spans, key=lambda one: one.start_us):
        lane = next((i for i, free in enumerate(free_us) if free <= span.start_us), len(free_us))
        free_us[lane:] = [span.end_us, *free_us[lane + 1 :]]
        found.append((lane, span))
    return found
