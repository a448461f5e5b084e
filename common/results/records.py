"""Records: one JSON line per trial in an append-only file; all results come from them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from dear.errors import UserError

SCHEMA = 1
STATUSES = ("ok", "failed", "timeout", "oom", "unsupported", "interrupted")

Record = dict[str, Any]
"""Keys: schema, id, hash, trial, status, error, started, duration_s, machine, network, repeats,
loss, breakdown, compute, costs, bound, bytes, check, throughput, learning, notes. Seconds and
bytes throughout. Older records lack some, such as compute, costs and bound. `learning` (see
docs/measurement.md) is that of trials which train for a time; their `repeats` hold no steps."""


def append(path: Path, record: Record) -> None:
    """Adds one line and forces it to disk, so that nothing later can lose it."""
    line = json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n"
    with path.open("a") as file:
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def load(path: Path) -> list[Record]:
    """All records of a file, oldest first; a last line cut off by a crash is left out.

    Raises:
        UserError: a line in the middle is damaged, or a schema is newer than this code.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        record = _parsed(line)
        if record is None:
            if number == len(lines):
                continue
            raise UserError(f"{path} line {number} is damaged; delete that line and run again")
        if record.get("schema") != SCHEMA:
            raise UserError(
                f"{path} line {number} has schema {record.get('schema')}; this version reads "
                f"{SCHEMA}"
            )
        records.append(record)
    return records


def _parsed(line: bytes) -> Record | None:
    """The record in a line, or None if there is none (whole)."""
    try:
        value = json.loads(line)
    except ValueError:  # bad JSON or bad UTF-8
        return None
    return value if isinstance(value, dict) else None


def latest(records: list[Record]) -> dict[str, Record]:
    """The newest record of each trial, by hash, in the order in which trials first appeared."""
    found: dict[str, Record] = {}
    for record in records:
        found[record["hash"]] = record
    return found


def mend(path: Path) -> None:
    """Ends or cuts off a last line that a crash left incomplete; the next one starts cleanly."""
    if not path.exists():
        return
    data = path.read_bytes()
    start = data.rfind(b"\n") + 1
    if start == len(data):
        return
    with path.open("r+b") as file:
        if _parsed(data[start:]) is None:
            file.truncate(start)
        else:
            file.seek(0, os.SEEK_END)
            file.write(b"\n")
