"""Timelines of trials for Perfetto, in Chrome's trace format.

The first launch of a trial that times steps trains a few more steps after the timed ones. Each rank
writes down when each gradient was ready, when each collective started and ended, and when the
training waited for one (the trial's evidence). Each trial gets one trace with all ranks.

A process of the trace is a rank. Arrows connect the computation of a transfer's last gradient, the
transfer, and the wait for it. Other arrows connect all ranks' parts of a collective, in the order
in which they end.

Meta's Holistic Trace Analysis reads another folder, with a file for each rank: its computations and
transfers as kernels of a GPU.
"""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from common.results.exports.spans import Clocks, Evidence, RankSpans, Span, aligned, lanes
from common.results.records import JsonObject, Record
from common.virtual.world.trace import Trace
from dear.errors import UserError

MERGED = "merged.json"
KERNELS = "hta"
"""Folder of the files for Holistic Trace Analysis, which takes any JSON beside them for a rank."""
_SENT_BY = "ncclDevKernel_"
"""Start of the names by which Holistic Trace Analysis knows transfers."""
NEAR_US = 1000.0
"""Largest delay from the end of a transfer to the end of the wait for it, in microseconds of the
trial's cluster."""
_STEPS, _COMPUTES, _WAITS, _GRADIENTS, _LAYERS, _TRANSFERS = 0, 1, 2, 3, 4, 10
_ROWS = {
    _STEPS: "steps",
    _COMPUTES: "training",
    _WAITS: "waits for communication",
    _GRADIENTS: "gradients",
}
Event: TypeAlias = JsonObject
Track: TypeAlias = tuple[int, int]
"""Numbers of the process (rank) and the thread (row) of an event."""


def write(folder: Path, records: Sequence[Record], into: Path) -> list[Path]:
    """Writes `merged.json` into a folder for each trial that has a trace, and returns the folders.
    `folder` is the sweep's, with the evidence beside the records. `into` is the parent of the new
    folders; it is made if it does not exist. Raises `UserError` if no trial has a trace, or the
    folder cannot be written."""
    traced = {r.id: raw for r in records if (raw := evidence(folder, r)) is not None}
    on_gpus = {record.id for record in records if record.trial["device"] != "cpu"}
    if not traced:
        if any(record.evidence for record in records):
            raise UserError(
                f"{folder}: the folders of the trials, with their traces, are not here; they stay "
                "where the trials were measured"
            )
        raise UserError(f"{folder}: no trial has a trace: only trials that time steps have one")
    try:
        for name, raw in traced.items():
            ranks = aligned(raw)[0]
            _save(into / name, timeline(raw), ranks, len(raw["traces"]), gpu=name in on_gpus)
    except OSError as error:
        raise UserError(f"cannot write to {into}: {error.strerror}") from None
    return [into / name for name in traced]


def write_predicted(trace: Trace, ranks: int, folder: Path) -> None:
    """Writes `merged.json` of a predicted trial into a new folder; one rank stands for `ranks`."""
    traced, _ = aligned({"traces": [trace.to_json()], "time_scale": 1.0})
    content = events(traced, Clocks(aligned_by="the virtual clock", uncertainty_us=0.0))
    content["metadata"] |= {"predicted": True, "equal_ranks": ranks}
    _save(folder, content, traced, ranks)


def _save(
    folder: Path, content: Event, traced: Sequence[RankSpans], ranks: int, gpu: bool = False
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MERGED).write_text(json.dumps(content), encoding="utf-8")
    for rank in traced:
        # Phases contain untraced waits: on GPUs those of streams, with DDP those of torch.
        computes = rank.layers or (rank.computes and rank.waits and not gpu)
        if computes and rank.transfers and len(rank.steps) > 1:  # the first is left out
            path = folder / KERNELS / f"rank{rank.number}.json"
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(kernels(rank, ranks)), encoding="utf-8")


def evidence(folder: Path, record: Record) -> Evidence | None:
    """Returns the raw measurements of a trial's first launch; None without a trace."""
    path = folder / (record.evidence or "")
    if record.evidence is None or not path.is_file():
        return None
    with gzip.open(path, "rt", encoding="utf-8") as file:
        raw: Evidence = json.load(file)
    return raw if raw.get("traces") else None


def timeline(raw: Evidence) -> Event:
    """Returns the Chrome trace of a trial: all its ranks, on one clock."""
    return events(*aligned(raw))


def events(ranks: Sequence[RankSpans], clocks: Clocks) -> Event:
    """Returns the content of a trace; times are in microseconds of the trial's cluster."""
    listed: list[Event] = []
    numbers = itertools.count(1)
    for rank in ranks:
        listed += _rows(rank)
        listed += _arrows(rank, numbers)
    listed += _between(ranks, numbers)
    metadata = {"clocks": dataclasses.asdict(clocks)}
    return {"traceEvents": listed, "displayTimeUnit": "ms", "metadata": metadata}


def kernels(rank: RankSpans, ranks: int) -> Event:
    """Returns a rank's computations and transfers as kernels of a GPU, with a stream for each lane.
    The first step is left out, because transfers from before it are missing. Times are whole
    microseconds: Holistic Trace Analysis shortens each kernel with other times."""
    begin_us, end_us = rank.steps[1].start_us, rank.steps[-1].end_us
    listed: list[Event] = []
    rows = ((0, "", rank.layers or rank.computes), (_TRANSFERS, _SENT_BY, rank.transfers))
    for first, prefix, spans in rows:
        for lane, span in lanes(spans):
            if span.end_us <= begin_us or span.start_us >= end_us:
                continue
            start, end = round(max(span.start_us, begin_us)), round(min(span.end_us, end_us))
            event = {"ph": "X", "cat": "kernel", "name": prefix + span.name, "pid": rank.number}
            place = {"tid": first + lane, "args": {"stream": first + lane}}
            listed.append({**event, **place, "ts": start, "dur": end - start})
    world = {"rank": rank.number, "world_size": ranks}
    return {"distributedInfo": world, "traceEvents": listed, "displayTimeUnit": "ms"}


def _rows(rank: RankSpans) -> Iterator[Event]:
    pid, placed, layers = rank.number, lanes(rank.transfers), lanes(rank.layers)
    yield {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": f"rank {pid}"}}
    yield {"name": "process_sort_index", "ph": "M", "pid": pid, "args": {"sort_index": pid}}
    names = _ROWS | {_LAYERS + lane: f"layers {lane}" for lane, _ in layers}
    names |= {_TRANSFERS + lane: f"transfers {lane}" for lane, _ in placed}
    for tid, name in names.items():
        row = {"ph": "M", "pid": pid, "tid": tid}
        yield {"name": "thread_name", **row, "args": {"name": name}}
        yield {"name": "thread_sort_index", **row, "args": {"sort_index": tid}}
    for tid, spans in ((_STEPS, rank.steps), (_COMPUTES, rank.computes), (_WAITS, rank.waits)):
        yield from (_slice(pid, tid, span) for span in spans)
    for span in rank.gradients:
        moment = {"ph": "i", "s": "t", "ts": span.start_us, "pid": pid, "tid": _GRADIENTS}
        yield {"name": span.name, "args": span.args, **moment}
    for first, row_of in ((_LAYERS, layers), (_TRANSFERS, placed)):
        yield from (_slice(pid, first + lane, span) for lane, span in row_of)


def _slice(pid: int, tid: int, span: Span) -> Event:
    times = {"ts": span.start_us, "dur": round(span.length_us, 3)}
    return {"ph": "X", "name": span.name, "pid": pid, "tid": tid, **times, "args": span.args}


def _arrows(rank: RankSpans, numbers: Iterator[int]) -> Iterator[Event]:
    """Yields the arrows from computations to transfers, and from transfers to waits."""
    computes, waits = (rank.number, _COMPUTES), (rank.number, _WAITS)
    for lane, span in lanes(rank.transfers):
        here = (rank.number, _TRANSFERS + lane)
        ready = _last_gradient(rank, span.args["enqueued_us"])
        if ready is not None:
            yield from _arrow("sends", [(computes, ready), (here, span.start_us)], next(numbers))
        for wait in rank.waits:
            if wait.start_us < span.end_us and 0 <= wait.end_us - span.end_us <= NEAR_US:
                end = max(_inside(span), _inside(wait))
                ends = [(here, _inside(span)), (waits, end)]
                yield from _arrow("waited for", ends, next(numbers))
                break


def _last_gradient(rank: RankSpans, before_us: float) -> float | None:
    """Returns when the last gradient before `before_us` was ready; None without a computation."""
    times = [span.start_us for span in rank.gradients if span.start_us <= before_us]
    moment = max(times, default=None)
    if moment is None:
        return None
    inside = any(span.start_us <= moment <= span.end_us for span in rank.computes)
    return moment if inside else None


def _inside(span: Span) -> float:
    """Returns a time just before the span's end: an arrow belongs to the slice at its time."""
    return round(span.start_us + 0.999 * span.length_us, 3)


def _between(ranks: Sequence[RankSpans], numbers: Iterator[int]) -> Iterator[Event]:
    """Yields the arrows through all ranks' parts of each collective. The n-th collective of a name
    and channel is the same on all ranks. If ranks have different numbers of them, there are no
    arrows."""
    parts: dict[tuple[str, object], list[list[tuple[Track, float]]]]
    parts = defaultdict(lambda: [[] for _ in ranks])
    for rank in ranks:
        for lane, span in lanes(rank.transfers):
            end = ((rank.number, _TRANSFERS + lane), _inside(span))
            parts[span.name, span.args["channel"]][rank.number].append(end)
    for by_rank in parts.values():
        if len(set(map(len, by_rank))) == 1 and len(by_rank) > 1:
            for ends in zip(*by_rank, strict=True):
                ordered = sorted(ends, key=lambda end: end[1])
                yield from _arrow("same collective", ordered, next(numbers))


def _arrow(name: str, ends: Sequence[tuple[Track, float]], number: int) -> Iterator[Event]:
    for step, ((pid, tid), moment) in enumerate(ends):
        kind = "s" if step == 0 else "f" if step == len(ends) - 1 else "t"
        event = {"ph": kind, "cat": "arrows", "name": name, "id": number, "pid": pid, "tid": tid}
        yield {**event, "ts": moment, **({"bp": "e"} if kind == "f" else {})}
