"""Files of a sweep: its records, the list of its trials, and the commands that ran it."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import gc
import json
import logging
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from common.paths import COMMAND
from common.results.records import SCHEMA, JsonObject, Record, typed
from common.results.records.trust import Foreseen
from common.results.validity import flag, passing_flag
from dear.errors import UserError

_LOG = logging.getLogger(__name__)


def append(path: Path, record: Record) -> None:
    """Appends a record as one line and syncs the file, so that no later failure can lose it."""
    line = json.dumps(record.to_json(), separators=(",", ":"), allow_nan=False) + "\n"
    with path.open("a", encoding="utf-8") as file:
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def write_whole(path: Path, text: str) -> None:
    """Writes a file atomically; raises `OSError` with its name, and leaves no part of it behind."""
    half = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        half.write_text(text, encoding="utf-8")
        half.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            half.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from None


def check_room(folder: Path, size: int) -> None:
    """Raises `OSError` with the folder's name if its disk or quota has no room for `size` bytes."""
    with tempfile.TemporaryFile(dir=folder) as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):  # others: nothing can be reserved there
                raise OSError(error.errno, error.strerror, str(folder)) from None


def load(path: Path) -> list[Record]:
    """Reads all records of a file, oldest first, like `each`; the last two files are cached."""
    if not path.exists():
        return []
    state = path.stat()
    return list(_loaded(path.absolute(), state.st_ino, state.st_mtime_ns, state.st_size))


@functools.lru_cache(maxsize=2)
def _loaded(path: Path, *_: int) -> tuple[Record, ...]:
    """Reads a file, with a cache by path and state of the file, for the figures of a page."""
    with no_collector():
        return tuple(each(path))


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    """Turns Python's search for reference cycles off, which would double the time of reading."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def each(path: Path) -> Iterator[Record]:
    """Reads the records of a file one by one, oldest first; none if there is no file.

    Damaged lines are left out; the module's logger warns of them once. An incomplete last line,
    which a crash has cut off, is left out silently.

    Raises:
        UserError: a record has a version of the format that this code cannot read, or a name in it
            leads out of its folder.
    """
    if not path.exists():
        return
    damaged = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line == b"\n":
                continue
            values = _parsed(line)
            if values is None and not line.endswith(b"\n"):
                continue
            if values is not None and values.get("schema") != SCHEMA:
                raise UserError(
                    f"{path} line {number} has schema {values.get('schema')}; this version reads "
                    f"{SCHEMA}"
                )
            try:
                record = Record.from_json(values or {})
            except (AttributeError, KeyError, TypeError):  # keys are missing, or have other types
                damaged.append(number)
                continue
            _check_paths(record, f"{path} line {number}")
            yield record
    if damaged:
        _tell(path, tuple(damaged))


def _check_paths(record: Record, where: str) -> None:
    """Raises `UserError` if a name in the record, which becomes a part of a path, leads elsewhere:
    records may come from others."""
    names = [record.id, *(item.evidence for item in record.results if item.evidence is not None)]
    for name in names:
        if not isinstance(name, str) or PurePath(name).name != name or name == ".." or "\0" in name:
            raise UserError(f"{where}: {name!r} is not the name of a file or folder")
    rank = record.error and record.error.rank
    if rank is not None and not isinstance(rank, int):
        raise UserError(f"{where}: the rank of its error must be a number, got {rank!r}")


@functools.cache
def _tell(path: Path, damaged: tuple[int, ...]) -> None:
    lines = ", ".join(map(str, damaged))
    count = f"{len(damaged)} of its lines {'is' if len(damaged) == 1 else 'are'}"
    _LOG.warning("%s: %s damaged and left out (%s)", path, count, lines)


def _parsed(line: bytes) -> JsonObject | None:
    try:
        value = json.loads(line)
    except ValueError:  # bad JSON or bad UTF-8
        return None
    return value if isinstance(value, dict) else None


def logs_of(folder: Path, rank: int) -> list[Path]:
    """Returns the logs of a rank in the folder of a trial, in the order of its repeats."""
    paths = folder.glob(f"log-*-rank{rank}.txt")
    return sorted(paths, key=lambda path: int(path.name.split("-")[1]))


def latest(records: Iterable[Record]) -> dict[str, Record]:
    """Returns the newest record of each trial by hash, in the order of first appearance."""
    return {record.hash: record for record in records}


def mend(path: Path) -> None:
    """Completes or removes a last line that a crash left incomplete."""
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
    """Merges the records of several parts of one experiment into a new folder: of each part, the
    newest record of a trial.

    If several parts have a trial, the last valid record is used, or else the last one with status
    ok, or else the last one. Logs and raw measurements stay in the parts.

    Raises:
        UserError: a part is no sweep or belongs to another experiment, or `into` exists.
    """
    if into.exists():
        raise UserError(f"{into} exists; merge into a new folder")
    comparisons = [Comparison.load(part) for part in parts]
    for part, comparison in zip(parts, comparisons, strict=True):
        if comparison != comparisons[0]:
            raise UserError(f"{part} and {parts[0]} are parts of different experiments")
    newest = [latest(load(part / "records.jsonl")) for part in parts]
    records = [record for part in newest for record in part.values()]
    into.mkdir(parents=True)
    for record in sorted(records, key=_quality):
        append(into / "records.jsonl", record)
    comparisons[0].save(into)
    save_foreseen(into, [r for part in parts for r in comparisons[0].results(part)])
    for run in dict.fromkeys(run for part in parts for run in runs(part)):
        run.save(into)
    return comparisons[0]


def _quality(record: Record) -> tuple[bool, bool, bool]:
    """Returns a key by which the best record of a trial is the last one."""
    return record.ok, passing_flag(record) is None, flag(record) is None


_EXPERIMENT, _RUNS = "experiment.json", "runs.jsonl"
FORESEEN = "foreseen.json"
"""File with the predicted steps of a sweep."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of a sweep: the command that started it."""

    run: str
    """Name of the run, as in its records."""
    command: str
    """Command line with its paths, quoted for a shell."""
    experiment: str
    """Text of the experiment file, without the changes by the command's flags."""
    commit: str | None = None

    def save(self, folder: Path) -> None:
        """Appends the run to the file beside the records."""
        mend(folder / _RUNS)
        with (folder / _RUNS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(dataclasses.asdict(self)) + "\n")


def runs(folder: Path) -> list[Run]:
    """Reads all runs of a sweep, oldest first."""
    path = folder / _RUNS
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    result, damaged = [], []
    for number, line in enumerate(lines, start=1):
        values = _parsed(line)
        try:
            result += [] if values is None else [typed(Run, values)]
        except TypeError:
            damaged.append(number)
    if damaged:
        _tell(path, tuple(damaged))
    return result


def save_foreseen(folder: Path, records: Iterable[Record]) -> None:
    """Writes the predicted steps of measured records beside them; replaces the earlier ones."""
    known = {
        _measurement(record): dataclasses.asdict(record.foreseen)
        for record in records
        if record.foreseen is not None
    }
    write_whole(folder / FORESEEN, json.dumps(known, indent=1) + "\n")


def load_foreseen(folder: Path) -> dict[str, Foreseen]:
    """Reads what `save_foreseen` wrote, by hash and start of the record; empty if nothing was."""
    path = folder / FORESEEN
    if not path.exists():
        return {}
    try:
        values = json.loads(path.read_bytes())
        return {key: typed(Foreseen, value) for key, value in values.items()}
    except (AttributeError, TypeError, ValueError):
        raise UserError(
            f"{path} is damaged; remove it (`{COMMAND} validate` predicts the steps again)"
        ) from None


def _measurement(record: Record) -> str:
    return f"{record.hash} {record.started}"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Hashes of an experiment's trials, in order, and the label of the baseline. Records of trials
    that earlier versions of the experiment had stay in the file, but tables leave them out."""

    compare_to: str
    trials: tuple[str, ...]
    labels: tuple[str, ...] = ()
    """Labels of the trials, which are not a part of their hashes; empty: those of the records."""
    worlds: tuple[int, ...] = ()
    """Numbers of workers of the trials, without the single worker's."""

    def text(self) -> str:
        """Returns the content of the file that `save` writes."""
        return json.dumps(dataclasses.asdict(self))

    def save(self, folder: Path) -> None:
        """Writes the comparison beside the records."""
        write_whole(folder / _EXPERIMENT, self.text())

    @classmethod
    def load(cls, folder: Path) -> Comparison:
        """Reads the file that `save` wrote; raises `UserError` if the folder has no such file."""
        path = folder / _EXPERIMENT
        if not path.exists():
            raise UserError(
                f"{folder} has no {_EXPERIMENT}: run the sweep again; it continues where it stopped"
            )
        try:
            values = json.loads(path.read_bytes())
            lists = {key: tuple(values.get(key, ())) for key in ("trials", "labels", "worlds")}
            if len(lists["labels"]) not in (0, len(lists["trials"])):
                raise ValueError("a label for each trial, or none")
            return cls(compare_to=values["compare_to"], **lists)
        except (AttributeError, KeyError, TypeError, ValueError):
            raise UserError(
                f"{path} is damaged: run the sweep again; it continues where it stopped"
            ) from None

    def results(self, folder: Path) -> list[Record]:
        """Returns the newest record of each trial that has one, with the trial's present label."""
        newest = latest(load(folder / "records.jsonl"))
        foreseen = load_foreseen(folder)
        labels = dict(zip(self.trials, self.labels, strict=True)) if self.labels else {}
        return [
            dataclasses.replace(
                record,
                trial={**record.trial, "label": labels.get(record.hash, record.label)},
                foreseen=foreseen.get(_measurement(record)),
            )
            for record in (newest[trial] for trial in self.trials if trial in newest)
        ]
