"""The page of a sweep: everything that is known of it, put together from what tells it elsewhere.

It is one file. No request leaves it: a policy in it forbids the browser all of them, and pictures
and files to download are inside. Everything that comes from a record is escaped by the template.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from common.paths import COMMAND
from common.results import stats, store
from common.results.committed import catalogue
from common.results.learning.summary import LearnRow
from common.results.records import Record, fabric_words
from common.results.report import environment, flagged
from common.results.report.overview import Overview, overview
from common.results.report.parts import Download, Figures, Grid, download, grid
from common.results.store import Comparison
from common.results.tables.table import Column, Table, csv_text, significant
from common.results.timed import plans, rows

_HERE = Path(__file__).parent
_WHOLE_FILE = 1_500_000
"""Bytes in the page: of a longer file of records only the newest of each trial is inside."""


@dataclass(frozen=True, kw_only=True)
class Commands:
    """What to type, as far as that depends on where files are."""

    sweep: str
    """How `show` takes it."""
    again: Callable[[], tuple[str | None, str]]
    """Asked where no run has left its command: what runs the experiment of its name, if there is
    one, and a sentence on whether that asks for the same trials."""


def build(folder: Path, *, commands: Commands, figures: Figures | None = None) -> str:
    """The page of the sweep in a folder, as HTML.

    Args:
        figures: draws them; None: there are none in it.

    Raises:
        UserError: there is no sweep, or its records cannot be read.
    """
    comparison = Comparison.load(folder)
    records = comparison.results(folder)
    told = overview(records, comparison.compare_to) if records else None
    drawn = figures(folder) if figures is not None and any(one.ok for one in records) else []
    runs, made_by = _runs(folder, records), _made_by(folder)
    script, style, dark = (_text(name) for name in ("page.js", "style.css", "dark.css"))
    jinja = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    jinja.filters["kilobytes"] = _kilobytes
    return jinja.get_template("page.html").render(
        name=folder.name,
        told=told,
        verdicts=told.answers if told else [],
        no_verdict=_no_verdict(records),
        counts=_counts(comparison, records),
        progress=_progress(comparison, records),
        withdrawn=_withdrawn(folder),
        about=fabric_words(records) if records else None,
        when=_when(records),
        results=_results(told, records, comparison.compare_to) if told else None,
        legend=_legend(told, comparison.compare_to) if told else [],
        breakdown=_breakdown(told, records) if told else None,
        breakdown_legend=rows.LEGEND,
        figures=[
            (one, download(f"{one.name}.csv", one.csv, "text/csv"), Markup(one.svg))
            for one in drawn
        ],
        troubles=flagged.troubles(folder, records),
        kept_in_mind=flagged.kept_in_mind(records),
        done_again=flagged.done_again(records),
        plans=[plans.lines(one) for one in records if one.first and one.first.plan],
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
        learned=told is not None and told.kind is LearnRow,
        script=Markup(script),
        script_digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        style=Markup(style),
        dark=Markup(dark),
    )


def _text(name: str) -> str:
    return (_HERE / name).read_text()


def _kilobytes(size: int) -> str:
    if size < 1000:
        return f"{size} bytes"
    return f"{size / 1000:.0f} kB" if size < 1e6 else f"{size / 1e6:.1f} MB"


def _no_verdict(records: Sequence[Record]) -> str:
    """Why there is no sentence about who is fastest."""
    if not records:
        return "No answer yet: no trial has ended."
    good = [one for one in records if one.ok]
    if not good:
        states = Counter(one.status for one in records)
        told = ", ".join(f"{count} {status}" for status, count in states.items())
        return f"No answer: no trial has a result ({told})."
    if all(flagged.mark(one) for one in good):
        return "No answer: no result may be believed, for the reasons below."
    return (
        "No answer: nowhere are there two algorithms, measured in the same place, whose results "
        "may be believed."
    )


def _counts(comparison: Comparison, records: Sequence[Record]) -> list[tuple[int, str, str]]:
    """How many trials are in which state: number, state, and its mark."""
    marks = Counter(flagged.mark(one) or "ok" for one in records)
    missing = len(comparison.trials) - len(records)
    found = [(marks.pop("ok", 0), "believed", "ok")]
    found += [(count, name, name) for name, count in marks.items()]
    return found + ([(missing, "without a record", "missing")] if missing else [])


def _progress(comparison: Comparison, records: Sequence[Record]) -> tuple[int, int]:
    return len(records), len(comparison.trials)


def _withdrawn(folder: Path) -> str | None:
    """Of a record of this repository, why it is withdrawn."""
    own = folder.resolve()
    return catalogue.withdrawn().get(own.name) if own.parent == catalogue.FOLDER.resolve() else None


def _when(records: Sequence[Record]) -> str | None:
    starts = sorted(one.started for one in records if one.started)
    if not starts:
        return None
    ends = dict.fromkeys(
        start.replace("T", " ").replace("+00:00", " UTC") for start in (starts[0], starts[-1])
    )
    spent_s = sum(one.duration_s for one in records)
    text = " to ".join(ends)
    return text + (f", {spent_s / 60:.0f} minutes of launches" if spent_s >= 60 else "")


def _results(told: Overview, records: Sequence[Record], compare_to: str) -> Grid:
    name = "results"
    csv = download("table.csv", csv_text(told.kind, told.rows), "text/csv")
    table = _with_runs(told, records) if told.kind is LearnRow else told.table
    marks = flagged.marks(records, told.rows)
    caption = f"Results, compared to {compare_to}"
    return grid(name, caption, table, marks=marks, csv=csv)


def _with_runs(told: Overview, records: Sequence[Record]) -> Table:
    """Of trials that learn, besides, how many runs a throughput is of, and their range."""
    of = {id(row): record.throughput for row, record in zip(told.rows, records, strict=True)}

    def ends(row: Any) -> str:
        found = of[id(row)]
        if found is None or found.ci_low is None:
            return ""
        return f"{significant(found.ci_low)}-{significant(found.ci_high)}"

    more = [
        Column(title="throughput: lowest and highest run", text=ends),
        Column(title="runs", text=lambda row: str(row.runs or "")),
    ]
    columns = list(told.table.columns)
    place = [column.title for column in columns].index("throughput") + 1
    return Table(told.rows, [*columns[:place], *more, *columns[place:]])


def _breakdown(told: Overview, records: Sequence[Record]) -> Grid | None:
    """Where the time goes, of trials whose steps were timed."""
    if told.kind is not rows.Row:
        return None
    table = rows.breakdown(told.rows)
    if not table.rows:
        return None
    shown = {id(row) for row in table.rows}
    marks = [
        (flagged.mark(one), row.flag)
        for one, row in zip(records, told.rows, strict=True)
        if id(row) in shown
    ]
    return grid("breakdown", "Milliseconds per step", table, marks=marks)


def _legend(told: Overview, compare_to: str) -> list[tuple[str, str]]:
    """What words and columns mean."""
    learned = told.kind is LearnRow
    what = "the time to the target" if learned else "the time of a step"
    alpha, notable, equal = (
        f"{100 * share:g} %" for share in (stats.ALPHA, stats.NOTABLE, stats.EQUAL)
    )
    words = [
        (
            "FASTER, SLOWER",
            f"the difference to {compare_to} in {what} is at least {notable}, and significant at "
            f"{alpha} among all comparisons of its cell (Holm's correction): at most one table in "
            "20 of equal trials has a false one",
        ),
        ("SAME", f"the whole 95 % interval of the ratio lies within {equal} of 1"),
        (
            "UNSURE",
            f"anything else, and always with fewer than {stats.MIN_REPEATS} "
            f"{'runs' if learned else 'repeats'}: nothing can be said",
        ),
        (
            "(in parentheses)",
            "a number that is not believed, for the reason below its row; "
            "nothing is compared with it",
        ),
    ]
    if learned:
        words.append(("95 % CI", "t intervals over the runs, each with a seed of its own"))
        return words
    return [
        *words,
        ("throughput", "samples of all workers over elapsed time"),
        ("95 % CI, this run", "a t interval over repeats, which are separate starts of the "
                              "workers: where half of them would lie in this hour on this machine; "
                              "neither another hour nor what is rarer than the repeats is in it"),
        ("n", "repeats x timed steps of each"),
        ("correct", "whether it was the right training: replicas agree, and it is what its serial "
                    "reference computes"),
    ]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Made:
    """A run, and how many of the page's records are of it."""

    run: store.Run
    trials: int


def _runs(folder: Path, records: Sequence[Record]) -> list[_Made]:
    """The runs that have made records of the page."""
    of = Counter(one.run for one in records)
    return [_Made(run=run, trials=of[run.run]) for run in store.runs(folder) if of[run.run]]


def _made_by(folder: Path) -> list[str]:
    """The commands of a record of this repository."""
    path = folder / catalogue.MADE
    return json.loads(path.read_text())["made_by"] if path.exists() else []


@dataclass(frozen=True, kw_only=True)
class _Downloads:
    """The files of the sweep that are inside of the page."""

    records: Download
    count: int
    whole: bool
    """Whether it is the whole file, older records of the same trials included."""
    experiment: Download


def _downloads(folder: Path, records: Sequence[Record], comparison: Comparison) -> _Downloads:
    path, kind = folder / "records.jsonl", "application/x-ndjson"
    data = path.read_bytes() if path.exists() else b""
    held = download("records.jsonl", data, kind)
    count, whole = len([line for line in data.split(b"\n") if line]), True
    if len(held.url) > _WHOLE_FILE and count > len(records):
        lines = [json.dumps(one.to_json(), separators=(",", ":")) for one in records]
        held = download("records.jsonl", "\n".join([*lines, ""]), kind)
        count, whole = len(records), False
    told = json.dumps({"compare_to": comparison.compare_to, "trials": comparison.trials})
    experiment = download("experiment.json", told, "application/json")
    return _Downloads(records=held, count=count, whole=whole, experiment=experiment)
