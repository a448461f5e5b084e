"""Where the time of a step goes: `python -m plots.breakdown SWEEP`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from pandas import DataFrame

from common.results.records import Record
from common.results.rows import Row
from common.results.table import significant
from plots import style, sweep
from plots.sweep import Mark

TITLE = "Where the time of a step goes"
NEEDS = "the parts of a step (older records lack them)"
# In the order of a step; told apart by lightness and hatch, too.
_PARTS = {
    "forward_s": ("forward", {"facecolor": "#A9D6F2", "edgecolor": "#5d7f92"}),
    "backward_s": ("backward", {"facecolor": "#0072B2", "edgecolor": "white"}),
    "exposed_comm_s": (
        "exposed communication",
        {"facecolor": "#F2B183", "edgecolor": "#8a3c00", "hatch": "////"},
    ),
    "update_s": ("update", {"facecolor": "#333333", "edgecolor": "white", "hatch": "...."}),
}


def fits(records: Sequence[Record]) -> bool:
    """Whether any trial has parts that add up to its step."""
    found = (one.breakdown for one in sweep.timed(records))
    return any(parts is not None and parts.step_s is not None for parts in found)


def draw(folder: Path, out: Path) -> list[Path]:
    """Writes breakdown.{png,pdf,csv} to `out`, returns the paths."""
    return style.write(figure(folder), out / "breakdown")


def figure(folder: Path) -> tuple[Figure, DataFrame]:
    """A stacked bar for each trial; the data have a row per part."""
    marks, _ = sweep.load(folder)
    style.setup()
    panels = sweep.panels(marks)
    drawn, axes = style.stacked([len(panel) for panel in panels], 7.2, 0.36)
    for axis, panel in zip(axes, panels, strict=True):
        _panel(axis, panel)
    axes[-1].set_xlabel("milliseconds per step", fontsize=8)
    handles = [Patch(**look, lw=0) for _, look in _PARTS.values()]
    names = [name for name, _ in _PARTS.values()]
    place = {"loc": "outside upper center", "ncols": 4, "frameon": False, "fontsize": 8}
    drawn.legend(handles, names, **place)
    records = [mark.record for mark in marks]
    text = "Of the rank that is held up least, of the repeat whose step is the median one; waiting "
    text += "for communication is in its own part, or in the others where an algorithm hides it"
    style.caption(drawn, text + style.doubts(records), records, 130)
    return drawn, style.data(
        {**mark.place, "part": name, "seconds": value, "doubt": mark.row.doubt}
        for mark in marks
        for key, (name, _) in _PARTS.items()
        if (value := getattr(mark.row, key)) is not None
    )


def _panel(axis: Axes, panel: Sequence[Mark]) -> None:
    longest = max(1e3 * _sum(mark.row) for mark in panel) or 1.0
    for place, mark in enumerate(panel):
        row, end = mark.row, 0.0
        for key, (_, look) in _PARTS.items():
            value = 1e3 * max(0.0, getattr(row, key) or 0.0)
            axis.barh(place, value, left=end, height=0.68, lw=0, **look)
            end += value
        if row.doubt:
            axis.barh(place, end, height=0.68, facecolor="white", alpha=0.6, lw=0)
        grey = {"color": "#666666"} if row.doubt else {}
        near = {"xytext": (5, 0), "textcoords": "offset points", "va": "center", "fontsize": 8}
        axis.annotate(_said(row), (end, place), **near, **grey)
    labels = [mark.row.algorithm for mark in panel]
    style.named_rows(axis, labels, [bool(mark.row.doubt) for mark in panel])
    axis.set_xlim(0, longest * 1.45)
    style.title(axis, sweep.title(panel[0].row))


def _sum(row: Row) -> float:
    return sum(max(0.0, getattr(row, key) or 0.0) for key in _PARTS)


def _said(row: Row) -> str:
    """The sum, and what is odd about it."""
    if row.forward_s is None:
        return "no parts on record"
    text = significant(1e3 * sum(getattr(row, key) or 0.0 for key in _PARTS))
    below = [name for key, (name, _) in _PARTS.items() if (getattr(row, key) or 0.0) < -1e-4]
    if below:
        key = next(key for key, (name, _) in _PARTS.items() if name == below[0])
        return f"{text}, of which {below[0]} {1e3 * getattr(row, key):.0f}: not to be trusted"
    if row.exposed_comm_s is None:
        text += ", communication contained"
    return f"({text}) not believed" if row.doubt else text


if __name__ == "__main__":
    style.program(fits, NEEDS, draw, "logs/emulated-quick")
