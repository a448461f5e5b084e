"""Timelines of trials, for Perfetto (ui.perfetto.dev) and chrome://tracing, from their evidence.

The first launch of a trial that times steps trains some more after the timed ones, and notes when
each gradient was there and when each collective was started and ended, on every rank.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from common.results.records import Record
from dear.errors import UserError

_STEPS, _GRADIENTS = 0, 1


def write(folder: Path, records: Sequence[Record], into: Path) -> list[Path]:
    """One file per trial that has a trace, all of its ranks in it.

    Args:
        folder: of the sweep, where evidence lies beside the records.
        into: a folder, made if it is not there.

    Raises:
        UserError: no trial has one, or the folder cannot be written.
    """
    found = {one.id: told for one in records if (told := evidence(folder, one)) is not None}
    if not found:
        raise UserError(f"{folder}: no trial has a trace: they are of trials that time steps")
    paths = []
    try:
        into.mkdir(parents=True, exist_ok=True)
        for name, told in found.items():
            path = into / f"{name}.json"
            path.write_text(json.dumps(events(told)))
            paths.append(path)
    except OSError as error:
        raise UserError(f"cannot write to {into}: {error.strerror}") from None
    return paths


def evidence(folder: Path, record: Record) -> dict[str, Any] | None:
    """The raw measurements of a trial's first launch, if they are there and have a trace."""
    path = folder / (record.evidence or "")
    if record.evidence is None or not path.is_file():
        return None
    with gzip.open(path, "rt") as file:
        told = json.load(file)
    return told if told.get("traces") else None


def events(told: dict[str, Any]) -> dict[str, Any]:
    """In Chrome's trace format; a process is a rank, and times those of what the fabric stands for.

    Hosts of one machine share its clock; ranks of several may be apart by as much as their clocks.

    Args:
        told: a file of evidence.
    """
    began = min(rank["marks_s"][0] for rank in told["traces"])

    def at(seconds: float) -> float:
        return round((seconds - began) / told["time_scale"] * 1e6, 3)

    listed: list[dict[str, Any]] = []
    for rank, trace in enumerate(told["traces"]):
        listed.append(_named("process_name", f"rank {rank}", pid=rank))
        for row, name in ((_STEPS, "steps"), (_GRADIENTS, "gradients")):
            listed.append(_named("thread_name", name, pid=rank, tid=row))
        for step, (start, end) in enumerate(pairwise(trace["marks_s"]), start=1):
            span = {"ph": "X", "ts": at(start), "dur": at(end) - at(start)}
            listed.append({"name": f"step {step}", "pid": rank, "tid": _STEPS, **span})
        for step in trace["gradients"]:
            for one in step:
                moment = {"ph": "i", "s": "t", "ts": at(one["at_s"]), "pid": rank}
                facts = {"args": {"bytes": one["bytes"]}}
                listed.append({"name": one["name"], "tid": _GRADIENTS, **moment, **facts})
        listed += _collectives(rank, trace, at)
    return {"traceEvents": listed, "displayTimeUnit": "ms"}


def _collectives(rank: int, trace: dict[str, Any], at: Any) -> Iterator[dict[str, Any]]:
    """Spans that may overlap, so each has a number; DDP's are known to the comm core only."""
    known = [one for one in trace["collectives"] if "started_s" in one] or [
        {**one, "name": one["operation"], "channel": one["group"], "bytes": one["nbytes"]}
        for one in trace["transfers"]
    ]
    for number, one in enumerate(known):
        same = {"name": one["name"], "cat": f"channel {one['channel']}", "pid": rank, "tid": 2}
        same["id"] = f"{rank}.{number}"
        waited_us = at(one["started_s"]) - at(one["enqueued_s"])
        facts = {"bytes": one["bytes"], "waited_us": round(waited_us, 3)}
        yield {**same, "ph": "b", "ts": at(one["started_s"]), "args": facts}
        yield {**same, "ph": "e", "ts": at(one["finished_s"])}


def _named(kind: str, name: str, **place: int) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "args": {"name": name}, **place}
