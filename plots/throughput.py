"""Throughput of every algorithm, a panel per model and world size: `python -m plots.throughput`."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import patheffects
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas import DataFrame

from common.results.records import Record
from common.results.rows import Row
from common.results.table import significant
from plots import style, sweep
from plots.sweep import Mark

_GREY = "#666666"
# So that reasons stay readable on lines.
_HALO = [patheffects.withStroke(linewidth=2.5, foreground="white", alpha=0.8)]


TITLE = "Throughput of every algorithm"
NEEDS = "trials that time steps"


def fits(records: Sequence[Record]) -> bool:
    """Whether any trial has timed steps."""
    return bool(sweep.timed(records))


def draw(folder: Path, out: Path) -> list[Path]:
    """Writes throughput.{png,pdf,csv} to `out`, returns the paths."""
    return style.write(figure(folder), out / "throughput")


def figure(folder: Path) -> tuple[Figure, DataFrame]:
    """Bars with intervals; the data are all fields of the table's rows."""
    marks, _ = sweep.load(folder)
    style.setup()
    panels: dict[tuple[Any, ...], list[Mark]] = {}
    singles = [mark for mark in marks if mark.algorithm == sweep.SINGLE]
    for mark in marks:
        if mark not in singles:
            panels.setdefault(mark.row.place, []).append(mark)
    for mark in singles:  # an experiment of single workers only has panels too
        if not any(key[:2] == (mark.row.model, mark.row.batch_size) for key in panels):
            panels[mark.row.place] = [mark]
    drawn, axes = style.stacked([len(panel) for panel in panels.values()], 6.4, 0.34)
    for axis, panel in zip(axes, panels.values(), strict=True):
        # The single worker that the panel's efficiency is relative to.
        own = [mark.row for mark in singles if _task(mark.row) == _task(panel[0].row)]
        _panel(axis, panel, own[0] if own else None)
    style.caption(drawn, _about(marks), [mark.record for mark in marks], 115)
    return drawn, style.data(vars(mark.row) for mark in marks)


def _task(row: Row) -> tuple[Any, ...]:
    return (row.model, row.batch_size, row.network, row.fault)


def _panel(axis: Axes, panel: Sequence[Mark], single: Row | None) -> None:
    rows = [mark.row for mark in panel]
    first = rows[0]
    most = _longest([row for row in rows if not row.doubt] or rows)
    ideal = None
    if single is not None and not single.doubt and single.world_size != first.world_size:
        ideal = single.throughput * first.world_size
        most = max(most, ideal)
    axis.set_xlim(0, most * 1.15)
    for place, mark in enumerate(panel):
        _bar(axis, place, mark)
    style.named_rows(axis, [row.algorithm for row in rows], [bool(row.doubt) for row in rows])
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
    style.title(axis, sweep.title(first))
    axis.set_xlabel(f"{first.unit}, all workers together", fontsize=8)


def _longest(rows: list[Row]) -> float:
    """What the axis must hold: all bars, and intervals unless they are far longer than any bar.

    Few repeats can have such intervals; they leave the figure then.
    """
    most = max(row.throughput for row in rows)
    return max(most, min(max(row.ci_high or 0.0 for row in rows), 1.6 * most))


def _bar(axis: Axes, place: int, mark: Mark) -> None:
    """A bar with its interval and number; a grey one with the reason where it is not believed."""
    row = mark.row
    if row.doubt:
        axis.barh(place, row.throughput, height=0.72, **style.DOUBTED)
        reason = textwrap.shorten(f"({significant(row.throughput)}) {row.doubt}", 75)
        at = (0, place)
        more = {"xytext": (4, 0), "fontsize": 7, "color": _GREY, "path_effects": _HALO}
        axis.annotate(reason, at, textcoords="offset points", va="center", **more)
        return
    axis.barh(place, row.throughput, height=0.72, **mark.look.bar)
    end = row.throughput
    if row.ci_low is not None:
        end = row.ci_high
        error = [[row.throughput - row.ci_low], [row.ci_high - row.throughput]]
        axis.errorbar(row.throughput, place, xerr=error, color="#222222", capsize=2.5, lw=1)
    text, at = significant(row.throughput), (min(end, axis.get_xlim()[1] / 1.15), place)
    more = {"xytext": (5, 0), "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 0.8}}
    axis.annotate(text, at, textcoords="offset points", va="center", **more)


def _about(marks: Sequence[Mark]) -> str:
    text = f"Samples over elapsed time, {sweep.told(marks)}"
    if any(mark.row.ci_low is not None and not mark.row.doubt for mark in marks):
        text += "; whiskers: 95 % t interval of this run, over repeats"
    if any(mark.row.doubt for mark in marks):
        text += "; grey: not believed, for the reason given"
    return text


if __name__ == "__main__":
    style.program(fits, NEEDS, draw, "logs/quick")
