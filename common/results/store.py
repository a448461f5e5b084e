"""The files of a sweep: its records, one JSON line each, and which trials they are compared by."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.results.records import SCHEMA, Record, typed
from dear.errors import UserError

_LOG = logging.getLogger(__name__)


def append(path: Path, record: Record) -> None:
    """Adds one line and forces it to disk, so that nothing later can lose it."""
    line = json.dumps(record.to_json(), separators=(",", ":"), allow_nan=False) + "\n"
    with path.open("a") as file:
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def load(path: Path) -> list[Record]:
    """All good records of a file, oldest first; a last line cut off by a crash is left out.

    Lines that hold no record are counted and named, once, to the log of this module.

    Raises:
        UserError: a schema is not the one that this code reads.
    """
    if not path.exists():
        return []
    facts = path.stat()
    return list(_loaded(path.absolute(), facts.st_ino, facts.st_mtime_ns, facts.st_size))


@functools.lru_cache(maxsize=2)
def _loaded(path: Path, *_: int) -> tuple[Record, ...]:
    """The same, once for each state of the file: a page's figures all read the same records."""
    with no_collector():
        return tuple(_read(path))


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    """Without Python's search for cycles, which takes half of the time: what is read is in none."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _read(path: Path) -> list[Record]:
    lines = path.read_bytes().split(b"\n")
    records, damaged = [], []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        values = _parsed(line)
        if values is None and number == len(lines):
            continue
        if values is not None and values.get("schema") != SCHEMA:
            raise UserError(
                f"{path} line {number} has schema {values.get('schema')}; this version reads "
                f"{SCHEMA}"
            )
        try:
            records.append(Record.from_json(values or {}))
        except TypeError:  # keys are missing
            damaged.append(number)
    if damaged:
        _tell(path, tuple(damaged))
    return records


@functools.cache
def _tell(path: Path, damaged: tuple[int, ...]) -> None:
    lines = ", ".join(map(str, damaged))
    count = f"{len(damaged)} of its lines {'is' if len(damaged) == 1 else 'are'}"
    _LOG.warning("%s: %s damaged and left out (%s)", path, count, lines)


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The object in a line, or None if there is none (whole)."""
    try:
        value = json.loads(line)
    except ValueError:  # bad JSON or bad UTF-8
        return None
    return value if isinstance(value, dict) else None


def latest(records: list[Record]) -> dict[str, Record]:
    """The newest record of each trial, by hash, in the order in which trials first appeared."""
    return {record.hash: record for record in records}


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


def merge(parts: Sequence[Path], into: Path) -> Comparison:
    """Makes one folder of records of several, each a part of one experiment.

    Of a trial that stands in several the last good record counts, else the last.

    Raises:
        UserError: a part is no sweep, or of another experiment; or `into` exists.
    """
    if into.exists():
        raise UserError(f"{into} exists; merge into a new folder")
    comparisons = [Comparison.load(part) for part in parts]
    for part, comparison in zip(parts, comparisons, strict=True):
        if comparison != comparisons[0]:
            raise UserError(f"{part} is not a part of what {parts[0]} is a part of")
    records = [record for part in parts for record in load(part / "records.jsonl")]
    into.mkdir(parents=True)
    for record in sorted(records, key=lambda record: record.ok):
        append(into / "records.jsonl", record)
    comparisons[0].save(into)
    for run in dict.fromkeys(run for part in parts for run in runs(part)):
        run.save(into)
    return comparisons[0]


_EXPERIMENT, _RUNS = "experiment.json", "runs.jsonl"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of a sweep: how it was asked for."""

    run: str
    """As the records that it has made say."""
    command: str
    """As it was given, with its paths, for a shell."""
    experiment: str
    """The experiment file's text; the command's flags come on top of it."""
    commit: str | None = None

    def save(self, folder: Path) -> None:
        """Adds it to those beside the records."""
        with (folder / _RUNS).open("a") as file:
            file.write(json.dumps(dataclasses.asdict(self)) + "\n")


def runs(folder: Path) -> list[Run]:
    """All runs of a sweep, oldest first; those of older versions have left no trace."""
    path = folder / _RUNS
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    return [typed(Run, values) for line in lines if (values := _parsed(line)) is not None]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The trials of an experiment, by hash and in its order, and what they are relative to.

    A folder's records may hold trials of earlier versions of its experiment; they stay, but are not
    mixed with those of the current one.
    """

    compare_to: str
    trials: tuple[str, ...]

    def save(self, folder: Path) -> None:
        """Writes it beside the records."""
        (folder / _EXPERIMENT).write_text(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def load(cls, folder: Path) -> Comparison:
        """Reads what `save` wrote; raises `UserError` if the sweep has never got so far."""
        path = folder / _EXPERIMENT
        if not path.exists():
            raise UserError(f"{folder} has no {_EXPERIMENT}: run the sweep again, it goes on")
        values = json.loads(path.read_text())
        return cls(compare_to=values["compare_to"], trials=tuple(values["trials"]))

    def results(self, folder: Path) -> list[Record]:
        """The newest record of each trial that has one."""
        found = latest(load(folder / "records.jsonl"))
        return [found[trial] for trial in self.trials if trial in found]
