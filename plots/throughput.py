"""Throughput of every algorithm, a panel per model and world size: `python -m plots.throughput`."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

from matplotlib import patheffects
from matplotlib.axes import Axes

from common.results import rows
from common.results.records import Record
from common.results.rows import Row
from common.results.store import Comparison
from common.results.table import csv_text, significant
from plots import style

_GREY = "#666666"
# So that reasons stay readable on lines.
_HALO = [patheffects.withStroke(linewidth=2.5, foreground="white", alpha=0.8)]


def draw(folder: Path, out: Path) -> list[Path]:
    """Reads `folder/records.jsonl`; writes throughput.{png,pdf,csv} to `out`, returns the paths."""
    comparison = Comparison.load(folder)
    good = [record for record in comparison.results(folder) if record.ok]
    good.sort(key=lambda record: style.order(record.trial["algorithm"]))
    table = rows.make_rows(good, comparison.compare_to)
    names = [record.trial["algorithm"] for record in good]
    colour = style.colours(sorted(set(names), key=style.order))

    style.setup()
    panels: dict[tuple[Any, ...], list[tuple[Row, str]]] = {}
    singles = [row for row, name in zip(table, names, strict=True) if name == "none"]
    for row, name in zip(table, names, strict=True):
        if name != "none":
            panels.setdefault(row.place, []).append((row, name))
    for row in singles:  # an experiment of single workers only has panels too
        if not any(key[:2] == (row.model, row.batch_size) for key in panels):
            panels[row.place] = [(row, "none")]
    figure, axes = style.stacked([len(panel) for panel in panels.values()], 6.4, 0.34)
    for axis, panel in zip(axes, panels.values(), strict=True):
        # The single worker that the panel's efficiency is relative to.
        own = [row for row in singles if _task(row) == _task(panel[0][0])]
        _panel(axis, panel, colour, own[0] if own else None)
    style.caption(figure, _about(good, table), good, 115)

    out.mkdir(parents=True, exist_ok=True)
    data = out / "throughput.csv"
    data.write_text(csv_text(Row, table))
    return [*style.save(figure, out / "throughput"), data]


def _task(row: Row) -> tuple[Any, ...]:
    return (row.model, row.batch_size, row.network, row.fault)


def _panel(
    axis: Axes, rows: list[tuple[Row, str]], colour: dict[str, str], single: Row | None
) -> None:
    first = rows[0][0]
    most = _longest([row for row, _ in rows if not row.doubt] or [row for row, _ in rows])
    ideal = None
    if single is not None and not single.doubt and single.world_size != first.world_size:
        ideal = single.throughput * first.world_size
        most = max(most, ideal)
    axis.set_xlim(0, most * 1.15)
    for place, (row, name) in enumerate(rows):
        _bar(axis, place, row, colour[name])
    axis.set_yticks(range(len(rows)), [_wrapped(row.algorithm) for row, _ in rows])
    for label, (row, _) in zip(axis.get_yticklabels(), rows, strict=True):
        label.set_color(_GREY if row.doubt else "black")
        label.set_fontsize(6.5 if "\n" in label.get_text() else 9)
    axis.invert_yaxis()
    axis.tick_params(axis="y", length=0)
    if ideal is not None:
        axis.axvline(ideal, color="#777777", lw=1, ls="--")
        axis.annotate(
            f"{first.world_size} x single worker",
            (ideal, -0.62),
            ha="right" if ideal > 0.4 * most else "left",
            va="bottom",
            xytext=(-3 if ideal > 0.4 * most else 3, 0),
            textcoords="offset points",
            fontsize=7,
            color="#555555",
        )
    axis.set_ylim(len(rows) - 0.5, -1.0)
    where = "".join(f", {name}" for name in (first.network, first.fault) if name)
    feed = f"batch {first.batch_size} per worker, {first.world_size} workers"
    style.title(axis, f"{first.model}, {feed}{where}")
    axis.set_xlabel(f"{first.unit}, all workers together", fontsize=8)


def _longest(rows: list[Row]) -> float:
    """What the axis must hold: all bars, and intervals unless they are far longer than any bar.

    Few repeats can have such intervals; they leave the figure then.
    """
    most = max(row.throughput for row in rows)
    return max(most, min(max(row.ci_high or 0.0 for row in rows), 1.6 * most))


def _bar(axis: Axes, place: int, row: Row, colour: str) -> None:
    """A bar with its interval and number; a grey one with the reason where it is not believed."""
    if row.doubt:
        axis.barh(place, row.throughput, color="#e4e4e4", height=0.72)
        reason = textwrap.shorten(f"({significant(row.throughput)}) {row.doubt}", 75)
        at = (0, place)
        more = {"xytext": (4, 0), "fontsize": 7, "color": _GREY, "path_effects": _HALO}
        axis.annotate(reason, at, textcoords="offset points", va="center", **more)
        return
    axis.barh(place, row.throughput, color=colour, height=0.72)
    end = row.throughput
    if row.ci_low is not None:
        end = row.ci_high
        error = [[row.throughput - row.ci_low], [row.ci_high - row.throughput]]
        axis.errorbar(row.throughput, place, xerr=error, color="#222222", capsize=2.5, lw=1)
    text, at = significant(row.throughput), (min(end, axis.get_xlim()[1] / 1.15), place)
    more = {"xytext": (5, 0), "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 0.8}}
    axis.annotate(text, at, textcoords="offset points", va="center", **more)


def _wrapped(label: str) -> str:
    """On lines that leave most of the figure to the bars."""
    return "\n".join(textwrap.wrap(re.sub(r",\s*", ", ", label), 30)) if len(label) > 26 else label


def _about(good: list[Record], table: list[Row]) -> str:
    def told(values: list[int]) -> str:
        least, most = min(values), max(values)
        return f"{least}" if least == most else f"{least} to {most}"

    counts = [row.repeats for row in table]
    text = f"Samples over elapsed time, n = {told(counts)} "
    text += "repeat" if max(counts) == 1 else "repeats, in turns,"
    text += f" of {told([round(row.n / row.repeats) for row in table])} steps"
    if any(row.ci_low is not None and not row.doubt for row in table):
        text += "; whiskers: 95 % t interval over repeats"
    if any(row.doubt for row in table):
        text += "; grey: not believed, for the reason given"
    return text


if __name__ == "__main__":
    style.program(draw, "logs/quick")
