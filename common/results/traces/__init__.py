"""Timelines of trials, from their evidence: for Perfetto, and for HolisticTraceAnalysis.

The first launch of a trial that times steps trains some more after the timed ones, and notes on
every rank when each gradient was there, when each collective was started and ended, and when the
training was held up by one. Per trial there is a folder with a file per rank, in the form of
PyTorch's profiler (`kineto`), and one file of all ranks with arrows between them (`merged`).
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.results.records import Record
from common.results.traces import kineto, merged
from common.results.traces.spans import aligned
from dear.errors import UserError

MERGED = "merged.json"


def write(folder: Path, records: Sequence[Record], into: Path) -> list[Path]:
    """A folder per trial that has a trace: `merged.json`, and `rank<k>.json` for each rank.

    Args:
        folder: of the sweep, where evidence lies beside the records.
        into: a folder, made if it is not there.

    Returns:
        The folders of the trials.

    Raises:
        UserError: no trial has one, or the folder cannot be written.
    """
    found = {one.id: told for one in records if (told := evidence(folder, one)) is not None}
    if not found:
        raise UserError(f"{folder}: no trial has a trace: they are of trials that time steps")
    paths = []
    try:
        for name, told in found.items():
            place = into / name
            place.mkdir(parents=True, exist_ok=True)
            for file, events in files(told).items():
                (place / file).write_text(json.dumps(events))
            paths.append(place)
    except OSError as error:
        raise UserError(f"cannot write to {into}: {error.strerror}") from None
    return paths


def files(told: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What is in each file of a trial, by name.

    Args:
        told: a file of evidence. Of older versions it lacks the phases of steps, and what waited:
            then a rank's file has communication only, and says so.
    """
    ranks, clocks = aligned(told)
    found = {MERGED: merged.events(ranks, clocks)}
    for rank in ranks:
        found[f"rank{rank.number}.json"] = kineto.events(rank, len(ranks))
    return found


def evidence(folder: Path, record: Record) -> dict[str, Any] | None:
    """The raw measurements of a trial's first launch, if they are there and have a trace."""
    path = folder / (record.evidence or "")
    if record.evidence is None or not path.is_file():
        return None
    with gzip.open(path, "rt") as file:
        told = json.load(file)
    return told if told.get("traces") else None
