"""Time of each phase of a step: `python -m plots.breakdown SWEEP`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from common.results.records import Record
from common.results.tables.cells import significant
from common.results.timed.rows import Row
from plots import style, sweep
from plots.sweep import Mark

TITLE = "Time of each phase of a step"
NEEDS = "the phases of a step"
# In the order of a step. Phases differ in lightness and hatch, too, for prints in grey.
_PHASES = {
    "forward_s": ("forward", {"facecolor": "#A9D6F2", "edgecolor": "#5d7f92"}),
    "backward_s": ("backward", {"facecolor": "#0072B2", "edgecolor": "white"}),
    "exposed_comm_s": (
        "exposed communication",
        {"facecolor": "#F2B183", "edgecolor": "#8a3c00", "hatch": "////"},
    ),
    "update_s": ("update", {"facecolor": "#333333", "edgecolor": "white", "hatch": "...."}),
}


def fits(records: Sequence[Record]) -> bool:
    return any(r.breakdown and r.breakdown.step_s is not None for r in sweep.timed(records))


def figure(folder: Path) -> style.Drawn:
    """Draws a stacked bar for each trial; the data have a row per phase."""
    marks, _ = sweep.load(folder)
    panels = sweep.panels(marks)
    drawn, axes = style.stacked([len(panel) for panel in panels], 7.2, 0.36)
    for axis, panel in zip(axes, panels, strict=True):
        _panel(axis, panel)
    axes[-1].set_xlabel("milliseconds per step", fontsize=8)
    handles = [Patch(**look, lw=0) for _, look in _PHASES.values()]
    names = [name for name, _ in _PHASES.values()]
    place = {"loc": "outside upper center", "ncols": 4, "frameon": False, "fontsize": 8}
    drawn.legend(handles, names, **place)
    records = [mark.record for mark in marks]
    text = "The rank that waits least, in the repeat with the median step; waiting for "
    text += "communication is shown by itself, or in the other phases if an algorithm hides it"
    style.caption(drawn, text + style.flags(records), records, 130)
    return drawn, style.data(
        {**mark.data(), "part": name, "seconds": value, "flag": mark.row.flag}
        for mark in marks
        for key, (name, _) in _PHASES.items()
        if (value := getattr(mark.row, key)) is not None
    )


draw = style.writer("breakdown", figure)


def _panel(axis: Axes, panel: Sequence[Mark]) -> None:
    longest = 0.0
    for index, mark in enumerate(panel):
        end = 0.0
        for key, (_, look) in _PHASES.items():
            value = 1e3 * max(0.0, getattr(mark.row, key) or 0.0)
            axis.barh(index, value, left=end, height=0.68, lw=0, **look)
            end += value
        if mark.row.flag:
            axis.barh(index, end, height=0.68, facecolor="white", alpha=0.6, lw=0)
        look = {"color": "#666666"} if mark.row.flag else {}
        style.write_at(axis, _text(mark.row), (end, index), (5, 0), va="center", fontsize=8, **look)
        longest = max(longest, end)
    style.named_rows(axis, [mark.row for mark in panel])
    axis.set_xlim(0, (longest or 1.0) * 1.45)
    style.title(axis, sweep.title(panel[0].row))


def _text(row: Row) -> str:
    if row.forward_s is None:
        return "no phases on record"
    seconds = {name: getattr(row, key) or 0.0 for key, (name, _) in _PHASES.items()}
    text = significant(1e3 * sum(seconds.values()))
    for name, value in seconds.items():
        if value < -1e-4:
            return f"{text}, {name} of {1e3 * value:.0f} included: not reliable"
    if row.exposed_comm_s is None:
        text += ", communication contained"
    return f"({text}) flagged" if row.flag else text


if __name__ == "__main__":
    style.program(fits, NEEDS, draw)
