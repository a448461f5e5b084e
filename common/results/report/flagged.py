"""Trials of a sweep without a valid result, and launches that were repeated."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from common.results.records import Record, grouped
from common.results.store import logs_of
from common.results.validity import flag_text, incorrect

_LOG_BYTES = 3000
"""Bytes at the end of a failed rank's output that the page shows."""


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """Trial without a valid result, and why."""

    title: str
    mark: str
    reason: str
    facts: dict[str, str] = field(default_factory=dict)
    """Facts about a failure: its kind, its rank, and the phase of the rank."""
    log: str | None = None
    """End of the output of the rank that failed."""
    log_name: str | None = None


def title(record: Record) -> str:
    """Returns the title of a trial: algorithm, model, batch size, workers, ..."""
    trial = record.trial
    parts = (record.label, trial["model"], f"batch {trial['batch_size']}")
    parts += (f"{trial['world_size']} workers", trial.get("network"), record.fault)
    return ", ".join(filter(None, parts))


def mark(record: Record) -> str | None:
    """Returns one word for the state of a record without a valid result; None: it is valid."""
    if not record.ok:
        return record.status
    if incorrect(record):
        return "incorrect"
    return None if flag_text(record) is None else "flagged"


def troubles(folder: Path, records: Iterable[Record]) -> list[Trouble]:
    """Returns all trials without a valid result, in the order of the records. `folder` is the
    sweep's, with the output of the ranks."""
    return [_trouble(folder, record, state) for record in records if (state := mark(record))]


def _trouble(folder: Path, record: Record, state: str) -> Trouble:
    trouble = Trouble(title=title(record), mark=state, reason=flag_text(record) or record.status)
    if record.error is None:
        return trouble
    known = {"kind": record.error.kind, "rank": record.error.rank, "while": record.error.where}
    facts = {name: str(value) for name, value in known.items() if value is not None}
    logs = logs_of(folder / record.id, record.error.rank or 0)
    if not logs:
        return dataclasses.replace(trouble, facts=facts)
    end = logs[-1].read_bytes()[-_LOG_BYTES:].decode(errors="replace")
    log_name = str(logs[-1].relative_to(folder))
    return dataclasses.replace(trouble, facts=facts, log=end, log_name=log_name)


def further_notes(records: Iterable[Record]) -> list[tuple[str, list[str]]]:
    """Returns the notes that have not caused a flag, each with the trials that have it."""
    notes = [
        (note.text, title(record))
        for record in records
        for note in record.notes
        if note.text != flag_text(record)
    ]
    groups = grouped(notes, lambda note: note[0])
    return [(text, [trial for _, trial in pairs]) for text, pairs in groups.items()]


def repeated(records: Iterable[Record]) -> list[tuple[str, int, str]]:
    """Returns trial, repeat (from 0) and reason of each launch that was not used but repeated."""
    return [(title(r), run.repeat, run.reason) for r in records for run in r.set_aside]
