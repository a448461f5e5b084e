"""Timelines of trials for Perfetto, from their evidence.

The first launch of a trial that times steps trains some more after the timed ones, and notes on
every rank when each gradient was there, when each collective was started and ended, and when the
training was held up by one. Each trial gets one file of all ranks, with arrows between them.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.results.exports.traces import merged
from common.results.exports.traces.spans import aligned
from common.results.records import Record
from dear.errors import UserError

MERGED = "merged.json"


def write(folder: Path, records: Sequence[Record], into: Path) -> list[Path]:
    """Writes `merged.json` into a folder for each trial that has a trace.

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
            (place / MERGED).write_text(json.dumps(timeline(told)))
            paths.append(place)
    except OSError as error:
        raise UserError(f"cannot write to {into}: {error.strerror}") from None
    return paths


def timeline(told: dict[str, Any]) -> dict[str, Any]:
    """Returns the Chrome trace of a trial: all its ranks, on one clock.

    Args:
        told: the content of a file of evidence.
    """
    return merged.events(*aligned(told))


def evidence(folder: Path, record: Record) -> dict[str, Any] | None:
    """The raw measurements of a trial's first launch, if they are there and have a trace."""
    path = folder / (record.evidence or "")
    if record.evidence is None or not path.is_file():
        return None
    with gzip.open(path, "rt") as file:
        told = json.load(file)
    return told if told.get("traces") else None
