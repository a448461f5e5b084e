"""What is wrong with the trials of a sweep, in full: failures, doubts, launches done again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from common.results.records import Record
from common.results.validity import flag_text, incorrect

_LOG_BYTES = 3000
"""Of the end of a failed rank's output."""


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """A trial without a number that may be believed."""

    title: str
    mark: str
    reason: str
    facts: dict[str, str] = field(default_factory=dict)
    """What else is known of a failure: its kind, rank, and what that was doing."""
    log: str | None = None
    """The end of that rank's output."""
    log_name: str | None = None


def title(record: Record) -> str:
    """Which trial it is, in words."""
    trial = record.trial
    parts = [record.label, trial["model"], f"batch {trial['batch_size']}"]
    parts.append(f"{trial['world_size']} workers")
    return ", ".join([*parts, *filter(None, (trial.get("network"), record.fault))])


def mark(record: Record) -> str | None:
    """What a reader must see at once; None of a number that may be believed."""
    if not record.ok:
        return record.status
    if incorrect(record):
        return "incorrect"
    return None if flag_text(record) is None else "doubted"


def marks(records: Iterable[Record], rows: Sequence[object]) -> list[tuple[str | None, str | None]]:
    """Of each row its mark, and all that is noted of it."""
    return [(mark(one), row.reason) for one, row in zip(records, rows, strict=True)]


def troubles(folder: Path, records: Iterable[Record]) -> list[Trouble]:
    """All that is not believed, in the order of the records.

    Args:
        folder: of the sweep, where ranks have left their output.
    """
    return [_trouble(folder, one) for one in records if mark(one) is not None]


def _trouble(folder: Path, record: Record) -> Trouble:
    facts: dict[str, str] = {}
    log = None
    if record.error is not None:
        error = record.error
        known = {"kind": error.kind, "rank": error.rank, "while": error.where}
        facts = {name: str(value) for name, value in known.items() if value is not None}
        logs = sorted((folder / record.id).glob(f"log-*-rank{error.rank or 0}.txt"))
        log = logs[-1] if logs else None
    return Trouble(
        title=title(record),
        mark=mark(record) or "",
        reason=flag_text(record) or record.status,
        facts=facts,
        log=None if log is None else log.read_bytes()[-_LOG_BYTES:].decode(errors="replace"),
        log_name=None if log is None else str(log.relative_to(folder)),
    )


def kept_in_mind(records: Iterable[Record]) -> list[tuple[str, list[str]]]:
    """Every other note, and the trials that it is of."""
    found: dict[str, list[str]] = {}
    for one in records:
        for note in one.notes:
            if note.text != flag_text(one):
                found.setdefault(note.text, []).append(title(one))
    return list(found.items())


def done_again(records: Iterable[Record]) -> list[tuple[str, int, str]]:
    """Launches that went well and were set aside: trial, repeat from 0, and why."""
    return [(title(one), aside.repeat, aside.reason) for one in records for aside in one.set_aside]
