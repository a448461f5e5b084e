"""Throughput of every algorithm, a panel per model and world size: `python -m plots.throughput`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes

from common.results.records import Record
from common.results.timed.rows import Row
from plots import style, sweep
from plots.sweep import Mark

TITLE = "Throughput of every algorithm"
NEEDS = "trials that time steps"


def fits(records: Sequence[Record]) -> bool:
    return bool(sweep.timed(records))


def figure(folder: Path) -> style.Drawn:
    """Draws bars with intervals; the returned data have all fields of the table's rows."""
    marks, _ = sweep.load(folder)
    singles = [mark for mark in marks if mark.algorithm == sweep.SINGLE]
    panels = sweep.panels([mark for mark in marks if mark not in singles] or marks)
    drawn, axes = style.stacked([len(panel) for panel in panels], 6.4, 0.34)
    for axis, panel in zip(axes, panels, strict=True):
        same = sweep.panels([panel[0], *singles], "world_size")[0][1:]
        _panel(axis, panel, same[0].row if same else None)
    text = f"Samples over elapsed time, {sweep.sample_size(marks)}"
    if any(mark.row.ci_low is not None and not mark.row.flag for mark in marks):
        text += "; whiskers: 95 % t interval of this run, over repeats"
    if any(mark.row.flag for mark in marks):
        text += "; grey: flagged, with the reason"
    style.caption(drawn, text, [mark.record for mark in marks], 115)
    return drawn, style.data(vars(mark.row) for mark in marks)


draw = style.writer("throughput", figure)


def _panel(axis: Axes, panel: Sequence[Mark], single: Row | None) -> None:
    rows = [mark.row for mark in panel]
    workers = rows[0].world_size
    most = _longest([row for row in rows if not row.flag] or rows)
    ideal = None
    if single is not None and not single.flag and single.world_size != workers:
        ideal = single.throughput * workers
        most = max(most, ideal)
    axis.set_xlim(0, most * 1.15)
    for index, mark in enumerate(panel):
        row = mark.row
        style.row_bar(axis, index, row.throughput, (row.ci_low, row.ci_high), mark.look, row.flag)
    style.named_rows(axis, rows)
    if ideal is not None:
        axis.axvline(ideal, color="#777777", lw=1, ls="--")
        left = ideal > 0.4 * most
        look = {"ha": "right" if left else "left", "va": "bottom", "color": "#555555"}
        text, offset = f"{workers} x single worker", (-3 if left else 3, 0)
        style.write_at(axis, text, (ideal, -0.62), offset, fontsize=7, **look)
    axis.set_ylim(len(rows) - 0.5, -1.0)
    style.title(axis, sweep.title(rows[0]))
    axis.set_xlabel(f"{rows[0].unit}, all workers together", fontsize=8)


def _longest(rows: list[Row]) -> float:
    """Returns the end of the x axis; an interval far longer than every bar may end outside."""
    most = max(row.throughput for row in rows)
    return max(most, min(max(row.ci_high or 0.0 for row in rows), 1.6 * most))


if __name__ == "__main__":
    style.program(fits, NEEDS, draw)
