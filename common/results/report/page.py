"""HTML page of a sweep, with all data of its records.

The page is one file, which contains its pictures and downloads. Its content security policy forbids
the browser all requests. The template escapes all text that comes from a record.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from common.paths import COMMAND
from common.results import stats, store
from common.results.committed import catalogue
from common.results.learning.summary import LearnRow
from common.results.learning.tables import with_runs
from common.results.records import Record, fabric_words
from common.results.report import environment, flagged
from common.results.report.overview import Overview, no_answer, overview
from common.results.report.parts import Download, Figures, Grid, download, grid
from common.results.store import Comparison
from common.results.tables.table import csv_text
from common.results.timed import plans, rows
from common.results.timed.rows import Row

_HERE = Path(__file__).parent
_WHOLE_FILE = 1_500_000
"""Largest size in bytes of a file of records that the page contains completely. Of a larger file,
the page contains only the newest record of each trial."""


@dataclass(frozen=True, kw_only=True)
class Commands:
    """Commands that the page shows."""

    sweep: str
    """Name of the sweep, as an argument of `show`."""
    again: Callable[[], tuple[str | None, str]]
    """Function that is called if the command of the sweep is not recorded. It returns a command
    that runs the experiment of this name (or None), and a sentence that says whether its trials are
    the same."""


def build(folder: Path, *, commands: Commands, figures: Figures | None = None) -> str:
    """Returns the page of the sweep in a folder, as HTML. `figures` draws the figures; if it is
    None, the page has none. Raises `UserError` if there is no sweep, or its records cannot be
    read."""
    comparison = Comparison.load(folder)
    records = comparison.results(folder)
    summary = overview(records, comparison.compare_to) if records else None
    trials = Counter(record.run for record in records)
    runs = [{"run": r, "trials": trials[r.run]} for r in store.runs(folder) if trials[r.run]]
    manifest = folder / catalogue.MANIFEST
    made_by = json.loads(manifest.read_bytes())["made_by"] if manifest.exists() else []
    return _template().render(
        name=folder.name,
        summary=summary,
        no_answer=no_answer(records),
        counts=_counts(comparison, records),
        progress=(len(records), len(comparison.trials)),
        withdrawn=_withdrawn(folder),
        about=fabric_words(records) if records else None,
        when=_when(records),
        results=_results(summary, records, comparison.compare_to) if summary else None,
        legend=_legend(summary, comparison.compare_to) if summary else [],
        breakdown=_breakdown(summary, records) if summary else None,
        breakdown_legend=rows.LEGEND,
        figures=_figures(folder, records, figures),
        troubles=flagged.troubles(folder, records),
        notes=flagged.further_notes(records),
        repeated=flagged.repeated(records),
        plans=[plans.lines(record) for record in records if record.first and record.first.plan],
        machines=environment.machines(records),
        scales=environment.scales(records),
        links=environment.links(records),
        settings=environment.settings(records),
        options=environment.options(records),
        runs=runs,
        made_by=made_by,
        again=None if runs or made_by else commands.again(),
        sweep=commands.sweep,
        harness=COMMAND,
        downloads=_downloads(folder, records, comparison),
        learned=summary is not None and summary.kind is LearnRow,
        **_looks(),
    )


def _template() -> Template:
    jinja = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    jinja.filters["kilobytes"] = _kilobytes
    return jinja.get_template("page.html")


def _kilobytes(size: int) -> str:
    if size < 1000:
        return f"{size} bytes"
    return f"{size / 1000:.0f} kB" if size < 1e6 else f"{size / 1e6:.1f} MB"


def _looks() -> dict[str, str]:
    script, style, dark = (
        (_HERE / n).read_text(encoding="utf-8") for n in ("page.js", "style.css", "dark.css")
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    looks = {"script": Markup(script), "style": Markup(style), "dark": Markup(dark)}
    return {**looks, "script_digest": digest}


def _figures(
    folder: Path, records: Sequence[Record], figures: Figures | None
) -> list[tuple[object, Download, Markup]]:
    drawn = figures(folder) if figures is not None and any(r.ok for r in records) else []
    return [(f, download(f"{f.name}.csv", f.csv, "text/csv"), Markup(f.svg)) for f in drawn]


def _counts(comparison: Comparison, records: Sequence[Record]) -> list[tuple[int, str, str]]:
    marks = Counter(flagged.mark(record) or "ok" for record in records)
    missing = len(comparison.trials) - len(records)
    counts = [(marks.pop("ok", 0), "valid", "ok")]
    counts += [(count, name, name) for name, count in marks.items()]
    return counts + ([(missing, "without a record", "missing")] if missing else [])


def _withdrawn(folder: Path) -> str | None:
    path = folder.resolve()
    if path.parent != catalogue.FOLDER.resolve():
        return None
    return catalogue.withdrawn().get(path.name)


def _when(records: Sequence[Record]) -> str | None:
    starts = sorted(record.started for record in records if record.started)
    if not starts:
        return None
    ends = dict.fromkeys(
        start.replace("T", " ").replace("+00:00", " UTC") for start in (starts[0], starts[-1])
    )
    spent_s = sum(record.duration_s for record in records)
    text = " to ".join(ends)
    return text + (f", {spent_s / 60:.0f} minutes of launches" if spent_s >= 60 else "")


def _results(summary: Overview, records: Sequence[Record], compare_to: str) -> Grid:
    csv = download("table.csv", csv_text(summary.kind, summary.rows), "text/csv")
    reasons = [row.reason for row in summary.rows]
    marks = list(zip(map(flagged.mark, records), reasons, strict=True))
    table = summary.table
    if summary.learned is not None:
        rates = zip(summary.learned.rows, records, strict=True)
        runs = {id(row): record.throughput for row, record in rates if record.throughput}
        table = with_runs(summary.learned, runs)
    return grid("results", f"Results, compared to {compare_to}", table, marks=marks, csv=csv)


def _breakdown(summary: Overview, records: Sequence[Record]) -> Grid | None:
    shown = [(r, row) for r, row in zip(records, summary.rows, strict=True) if row.status == "ok"]
    timed = [row for _, row in shown if isinstance(row, Row)]
    if not timed:
        return None
    marks = [(flagged.mark(record), row.flag) for record, row in shown]
    return grid("breakdown", "Milliseconds per step", rows.breakdown(timed), marks=marks)


_LEGEND = (
    ("throughput", "samples of all workers over elapsed time"),
    (
        "95 % CI, this run",
        "a t interval over repeats, which are separate starts of the workers; it covers neither "
        "the machine at another hour nor events that are rarer than the repeats",
    ),
    ("n", "repeats x timed steps of each"),
    (
        "correct",
        "whether the training was right: replicas agree, and it is equal to its serial reference",
    ),
)


def _legend(summary: Overview, compare_to: str) -> list[tuple[str, str]]:
    learned = summary.kind is LearnRow
    what, several = ("the time of a step", "repeats")
    if learned:
        what, several = ("the time to the target", "runs")
    alpha, notable, equal = (
        f"{100 * share:g} %" for share in (stats.ALPHA, stats.NOTABLE, stats.EQUAL)
    )
    faster = (
        f"the difference to {compare_to} in {what} is at least {notable}, and significant at "
        f"{alpha} among all comparisons of its cell (Holm's correction): at most one table in 20 "
        "of equal trials has a false verdict"
    )
    unsure = (
        f"anything else, and always with fewer than {stats.MIN_REPEATS} {several}: nothing can be "
        "concluded"
    )
    intervals = ("95 % CI", "t intervals over the runs, each with its own seed")
    return [
        ("FASTER, SLOWER", faster),
        ("SAME", f"the whole 95 % interval of the ratio lies within {equal} of 1"),
        ("UNSURE", unsure),
        (
            "(in parentheses)",
            "a flagged number, with the reason below its row; nothing is compared with it",
        ),
        *([intervals] if learned else _LEGEND),
    ]


def _downloads(
    folder: Path, records: Sequence[Record], comparison: Comparison
) -> dict[str, Download | int | bool]:
    """Returns the files, and the `count` of records in them.

    `whole` is True for the whole file, with older records of the same trials.
    """
    path, kind = folder / "records.jsonl", "application/x-ndjson"
    data = path.read_bytes() if path.exists() else b""
    file = download("records.jsonl", data, kind)
    count, whole = len(store.load(path)), True  # without damaged and unfinished lines
    if len(file.url) > _WHOLE_FILE and count > len(records):
        lines = [json.dumps(record.to_json(), separators=(",", ":")) for record in records]
        file = download("records.jsonl", "\n".join([*lines, ""]), kind)
        count, whole = len(records), False
    experiment = download("experiment.json", comparison.text(), "application/json")
    files = {"records": file, "count": count, "whole": whole, "experiment": experiment}
    path = folder / store.FORESEEN
    if path.exists():
        files["predicted"] = download(path.name, path.read_bytes(), "application/json")
    return files
