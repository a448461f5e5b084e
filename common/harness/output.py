"""Output of a sweep in its folder: tables on the terminal and in files, plans and timelines."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from common.harness.trial import BASELINE, Trial
from common.machine.processes import spread
from common.paths import COMMAND, LOGS, RECORDS, short
from common.results import store
from common.results.exports.reference_reports import reports
from common.results.records import Record, fabric_words, is_learning, machine_words
from common.results.report.overview import has_valid, no_answer, overview
from common.results.tables.table import csv_text
from common.results.timed import rows
from common.results.validity import flag_text, incorrect
from dear.errors import Unavailable, UserError

if TYPE_CHECKING:
    from common.virtual.setting import Setting


def find_sweep(name: str | None, logs: Path, *, begun: bool = False) -> Path:
    """Returns the folder of a sweep.

    Args:
        name: a path, or the name of a folder in `logs`; None: the newest sweep there.
        begun: True to accept a sweep that has no record yet.

    Raises:
        UserError: there is no such sweep.
    """
    files = (RECORDS, "experiment.json") if begun else (RECORDS,)
    paths = [path for file in files for path in logs.glob(f"*/{file}")]
    paths.sort(key=lambda path: path.stat().st_mtime)
    if name is None and not paths:
        raise UserError(f"no records in {logs}: nothing has run yet")
    if name is None:
        return paths[-1].parent
    for folder in (logs / name, Path(name)):
        if any((folder / file).exists() for file in files):
            return folder
    known = dict.fromkeys(sorted(path.parent.name for path in paths))
    raise UserError(f"no records in {logs / name}; sweeps there: {', '.join(known) or 'none'}")


def write(folder: Path, records: Sequence[Record], compare_to: str) -> None:
    """Writes table.md, table.tex, table.csv and, for timed trials, reports.json into the folder."""
    summary = overview(records, compare_to)
    store.write_whole(folder / "table.md", summary.table.markdown())
    store.write_whole(folder / "table.tex", summary.table.latex())
    store.write_whole(folder / "table.csv", csv_text(summary.kind, summary.rows))
    if summary.kind is rows.Row:
        lines = reports(records, store.Comparison.load(folder).worlds)
        store.write_whole(folder / "reports.json", json.dumps(lines, indent=2))


def write_whole(path: Path, text: str) -> None:
    """Writes a file that a user has named; raises `UserError` if it cannot be written.

    A regular file is written atomically. A link stays, and the file to which it points is written.
    A device or a pipe is written as it is.
    """
    special = path.exists() and not (path.is_file() or path.is_dir())
    try:
        # /dev/stdout may be a regular file, to which others are writing.
        if special or str(path).startswith(("/dev/", "/proc/")):
            with path.open("a", encoding="utf-8") as file:
                file.write(text)
        else:
            store.write_whole(path.resolve() if path.is_symlink() else path, text)
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"cannot write {path}: {reason}") from None


def show(folder: Path, records: Sequence[Record], compare_to: str) -> None:
    """Prints the table, the sentences below it, all failures with their logs, and next commands."""
    summary = overview(records, compare_to)
    if not has_valid(records):
        print(no_answer(records))
    summary.table.print(_title(folder, records))
    for line in summary.lines:
        print(line)
    for record in filter(incorrect, records):
        print(f"trained incorrectly: {record.id} ({flag_text(record)})")
    for record in records:
        if record.error is not None and record.status not in ("unsupported", "interrupted"):
            logs = store.logs_of(folder / record.id, record.error.rank or 0)
            print(f"{record.status}: {record.id}: {record.error.message}")
            missing = "no log here: it never started, or its folder was not copied"
            print(f"    log: {short(str(logs[-1]))}" if logs else f"    {missing}")
    print(f"records, table.md, table.csv: {short(str(folder))}")
    name, logs = shlex.quote(folder.name), shlex.quote(short(str(folder.parent)))
    here = "" if folder.parent == LOGS else f" --logs {logs}"
    print(f"report in one HTML file: {COMMAND} report {name}{here}")
    if any(record.bound for record in records):
        print(f"where the time goes: {COMMAND} show {name} --breakdown{here}")


def show_breakdown(folder: Path, records: Sequence[Record], compare_to: str) -> None:
    """Prints the phases of each trial's step.

    Raises:
        UserError: these are training trials (`learn:`), which do not time steps.
    """
    if is_learning(records):
        raise UserError(f"--breakdown: {folder.name} has training trials, which do not time steps")
    table = rows.breakdown(rows.make_rows(records, compare_to))
    if not table.rows:
        print(f"{folder.name}: no trial has a result")
        return
    table.print(_title(folder, records))
    print(rows.LEGEND)


def show_plans(folder: Path, records: Sequence[Record]) -> None:
    """Prints each trial's plan: its buckets, their predicted times, and what a tuner tried."""
    from common.results.timed import plans

    print(_title(folder, records))
    for record in records:
        print("\n".join(plans.lines(record)))


def write_traces(
    folder: Path, records: Sequence[Record], into: Path, *, quiet: bool = False
) -> None:
    """Writes a timeline of each trial that has one."""
    from common.results.exports import traces

    paths = traces.write(folder, records, into)
    if not quiet:
        here = short(str(into))
        number = f"{len(paths)} timeline{'s' * (len(paths) != 1)}"
        print(f"{number} in {here}: open merged.json in ui.perfetto.dev")


def check_predicted(timelines: Path | None, chakra: Path | None, *, series: bool) -> None:
    """Raises `UserError` for folders of `write_predicted` that cannot be written."""
    if series and (timelines or chakra):
        raise UserError("--trace and --chakra show trials as they are: leave --over out")
    if chakra is not None:
        from common.results.exports.chakra import schema

        schema()


def write_predicted(
    trials: Sequence[Trial],
    setting_of: Callable[[Trial], Setting],
    timelines: Path | None,
    chakra: Path | None,
) -> None:
    """Writes timelines and Chakra traces of trials' predicted steps into folders of each trial.

    Raises:
        UserError: no trial has a trace, or a folder cannot be written.
    """
    many = [trial for trial in trials if trial.algorithm != BASELINE]
    write_each = partial(_write_predicted, setting_of=setting_of, folders=(timelines, chakra))
    reasons = spread(write_each, [trial.to_json() for trial in many])
    for trial, reason in zip(many, reasons, strict=True):
        if reason is not None:
            print(f"{trial.title}: {reason}", file=sys.stderr)
    if all(reasons):
        raise UserError("no trial has a trace of predicted steps")
    for folder in filter(None, (timelines, chakra)):
        print(f"{reasons.count(None)} traces in {short(str(folder))}", file=sys.stderr)


def _write_predicted(
    planned: Mapping[str, object],
    setting_of: Callable[[Trial], Setting],
    folders: tuple[Path | None, Path | None],
) -> str | None:
    """Writes the traces of a trial, given as `Trial.to_json()`; returns why one is missing."""
    from common.results.exports import chakra, traces
    from common.virtual.passes import UnmodelledError
    from common.virtual.training.run import traced

    trial = Trial.from_json(planned)
    try:
        trace = traced(setting_of(trial))
        writers = traces.write_predicted, chakra.write
        for folder, write_trace in zip(folders, writers, strict=True):
            if folder is not None:
                write_trace(trace, trial.world_size, folder / trial.id)
    except (UserError, Unavailable, UnmodelledError) as error:
        return str(error)
    except OSError as error:
        raise UserError(f"cannot write {error.filename}: {error.strerror}") from None
    return None


def _title(folder: Path, records: Sequence[Record]) -> str:
    if not records:
        return folder.name
    return f"{folder.name}: {fabric_words(records)} {machine_words(records)}"
