"""All ranks of a trial in one file of Chrome's trace format, with arrows, for Perfetto.

A process is a rank. An arrow leads from the computation that has made the last gradient of a
transfer to the transfer, from there to where the training had waited for it, and through all ranks'
parts of a collective, in the order in which they end.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from common.results.exports.traces.spans import Clocks, RankSpans, Span, lanes

_STEPS, _COMPUTES, _WAITS, _GRADIENTS, _TRANSFERS = 0, 1, 2, 3, 10
_ROWS = {_STEPS: "steps", _COMPUTES: "training", _WAITS: "waits for communication",
         _GRADIENTS: "gradients"}  # fmt: skip
NEAR_US = 1000.0
"""A wait that ends so soon after a transfer was for that one; microseconds of the fabric."""


def events(ranks: Sequence[RankSpans], clocks: Clocks) -> dict[str, Any]:
    """What is in the file; times are those of what the fabric stands for."""
    listed: list[dict[str, Any]] = []
    numbers = itertools.count(1)
    for rank in ranks:
        listed += _rows(rank)
        listed += _arrows(rank, numbers)
    listed += _between(ranks, numbers)
    return {
        "traceEvents": listed,
        "displayTimeUnit": "ms",
        "metadata": {"clocks": dataclasses.asdict(clocks)},
    }


def _rows(rank: RankSpans) -> Iterator[dict[str, Any]]:
    pid, placed = rank.number, lanes(rank.transfers)
    yield {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": f"rank {pid}"}}
    yield {"name": "process_sort_index", "ph": "M", "pid": pid, "args": {"sort_index": pid}}
    names = _ROWS | {_TRANSFERS + lane: f"transfers {lane}" for lane, _ in placed}
    for tid, name in names.items():
        yield {"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
        yield {"name": "thread_sort_index", "ph": "M", "pid": pid, "tid": tid,
               "args": {"sort_index": tid}}  # fmt: skip
    for tid, spans in ((_STEPS, rank.steps), (_COMPUTES, rank.computes), (_WAITS, rank.waits)):
        yield from (_slice(pid, tid, span) for span in spans)
    for span in rank.gradients:
        moment = {"ph": "i", "s": "t", "ts": span.start_us, "pid": pid, "tid": _GRADIENTS}
        yield {"name": span.name, "args": span.args, **moment}
    for lane, span in placed:
        yield _slice(pid, _TRANSFERS + lane, span)


def _slice(pid: int, tid: int, span: Span) -> dict[str, Any]:
    times = {"ts": span.start_us, "dur": round(span.length_us, 3)}
    return {"ph": "X", "name": span.name, "pid": pid, "tid": tid, **times, "args": span.args}


def _arrows(rank: RankSpans, numbers: Iterator[int]) -> Iterator[dict[str, Any]]:
    """Within a rank."""
    for lane, span in lanes(rank.transfers):
        here = (rank.number, _TRANSFERS + lane)
        made = _made(rank, span.args["enqueued_us"])
        if made is not None:
            yield from _arrow("sends", [((rank.number, _COMPUTES), made), (here, span.start_us)],
                              next(numbers))  # fmt: skip
        wait = next(
            (w for w in rank.waits
             if w.start_us < span.end_us and 0 <= w.end_us - span.end_us <= NEAR_US), None
        )  # fmt: skip
        if wait is not None:
            let_go = max(_inside(span), _inside(wait))
            ends = [(here, _inside(span)), ((rank.number, _WAITS), let_go)]
            yield from _arrow("waited for", ends, next(numbers))


def _made(rank: RankSpans, before_us: float) -> float | None:
    """When the last gradient was there, in what computed then."""
    came = [one.start_us for one in rank.gradients if one.start_us <= before_us]
    moment = max(came, default=None)
    if moment is None:
        return None
    inside = any(span.start_us <= moment <= span.end_us for span in rank.computes)
    return moment if inside else None


def _inside(span: Span) -> float:
    """Just before its end: an arrow belongs to the slice that is there at its time."""
    return round(span.start_us + 0.999 * span.length_us, 3)


def _between(ranks: Sequence[RankSpans], numbers: Iterator[int]) -> Iterator[dict[str, Any]]:
    """Through all ranks' parts of a collective; the n-th of a name and channel is the same on all
    ranks, if all have as many of it."""
    parts: dict[Any, list[list[tuple[tuple[int, int], Span]]]] = defaultdict(
        lambda: [[] for _ in ranks]
    )
    for rank in ranks:
        for lane, span in lanes(rank.transfers):
            place = (rank.number, _TRANSFERS + lane)
            parts[span.name, span.args["channel"]][rank.number].append((place, span))
    for by_rank in parts.values():
        if len(set(map(len, by_rank))) != 1 or len(by_rank) < 2:
            continue
        for same in zip(*by_rank, strict=True):
            ends = sorted(((place, _inside(span)) for place, span in same), key=lambda end: end[1])
            yield from _arrow("same collective", ends, next(numbers))


def _arrow(
    name: str, ends: Sequence[tuple[tuple[int, int], float]], number: int
) -> Iterator[dict[str, Any]]:
    """Through these places, (process, thread) and time each."""
    for step, ((pid, tid), moment) in enumerate(ends):
        kind = "s" if step == 0 else "f" if step == len(ends) - 1 else "t"
        how = {"bp": "e"} if kind == "f" else {}
        yield {"ph": kind, "cat": "arrows", "name": name, "id": number, "pid": pid, "tid": tid,
               "ts": moment, **how}  # fmt: skip
