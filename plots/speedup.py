"""How much faster than what all are compared to: `python -m plots.speedup SWEEP`."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas import DataFrame

from common.results.records import Record
from common.results.stats import EQUAL
from plots import style, sweep
from plots.sweep import Mark

TITLE = "Speed-up, with its interval and the word for it"
NEEDS = "two believed trials that are compared with each other"
_FIELDS = ("speedup", "speedup_low", "speedup_high", "verdict", "detectable", "paired", "doubt")


def fits(records: Sequence[Record]) -> bool:
    """Whether two believed algorithms have trained the same in the same place."""
    places = sweep.variants(records, "label")
    return any(len(found) > 1 for found in places.values())


def draw(folder: Path, out: Path) -> list[Path]:
    """Writes speedup.{png,pdf,csv} to `out`, returns the paths."""
    return style.write(figure(folder), out / "speedup")


def figure(folder: Path) -> tuple[Figure, DataFrame]:
    """A point with its interval for each trial; the data are these."""
    marks, compare_to = sweep.load(folder)
    rivals = [mark for mark in marks if mark.algorithm != sweep.SINGLE]
    style.setup()
    panels = sweep.panels(rivals)
    counts = [len(panel) for panel in panels]
    drawn, axes = style.stacked(counts, 6.4, 0.34, sharex=True)
    _limits(axes, rivals)
    for axis, panel in zip(axes, panels, strict=True):
        _panel(axis, panel)
    axes[-1].set_xlabel(f"times the speed of {compare_to} (elapsed time per step)", fontsize=8)
    text = f"Speed-up over {compare_to}, {sweep.told(rivals)}; whiskers: 95 % t interval; band: "
    text += f"within {EQUAL:.0%} of 1; words hold for all trials of a panel together (Holm)"
    records = [mark.record for mark in rivals]
    style.caption(drawn, text + style.doubts(records), records, 115)
    return drawn, style.data(
        {
            **mark.place,
            "compared_to": mark.row.compared_to,
            **{name: getattr(mark.row, name) for name in _FIELDS},
        }
        for mark in rivals
    )


def _panel(axis: Axes, panel: Sequence[Mark]) -> None:
    axis.axvspan(1 / (1 + EQUAL), 1 + EQUAL, color="#f0f0f0", lw=0, zorder=0)
    axis.axvline(1.0, color="#777777", lw=1, ls="--", zorder=1)
    base = next((mark.row.compared_to for mark in panel if mark.row.compared_to), None)
    for place, mark in enumerate(panel):
        row, grey = mark.row, {"color": "#666666", "fontsize": 7}
        if row.speedup is None:
            why = f"({row.doubt})" if row.doubt else f"(not compared: {base} is not believed)"
            if row.algorithm == base and not row.doubt:
                axis.plot([1.0], [place], **mark.look.point)
                why = "what the others are compared to"
            elif base is None:
                why = "(nothing to compare it to)"
            _beside(axis, 1.0, place, textwrap.shorten(why, 70), **grey)
            continue
        end = row.speedup
        if row.speedup_low is not None:
            error = [[row.speedup - row.speedup_low], [row.speedup_high - row.speedup]]
            axis.errorbar(row.speedup, place, xerr=error, color="#222222", capsize=2.5, lw=1)
            end = row.speedup_high
        axis.plot([row.speedup], [place], **mark.look.point)
        low, high = axis.get_xlim()  # an interval may leave the figure, its number may not
        end = min(end, high - 0.28 * (high - low))
        _beside(axis, end, place, f"{row.speedup:.2f} {row.verdict}", fontsize=8)
    labels = [mark.row.algorithm for mark in panel]
    style.named_rows(axis, labels, [bool(mark.row.doubt) for mark in panel])
    style.title(axis, sweep.title(panel[0].row))


def _beside(axis: Axes, x: float, place: int, text: str, **more: object) -> None:
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.8}
    at = {"xytext": (8, 0), "textcoords": "offset points", "va": "center", "bbox": box}
    axis.annotate(text, (x, place), **at, **more)


def _limits(axes: Sequence[Axes], marks: Sequence[Mark]) -> None:
    """All points, and intervals unless they are far longer than any distance from 1."""
    found = [mark.row for mark in marks if mark.row.speedup is not None]
    values = [1.0, *(row.speedup for row in found)]
    room = max(0.1, 0.7 * (max(values) - min(values)))
    lows = [max(row.speedup_low, row.speedup - room) for row in found if row.speedup_low]
    highs = [min(row.speedup_high, row.speedup + room) for row in found if row.speedup_high]
    low, high = min([*values, *lows]), max([*values, *highs])
    wide = high - low or 1.0
    # Right of the last one stands its word.
    axes[0].set_xlim(low - 0.06 * wide, high + 0.4 * wide)


if __name__ == "__main__":
    style.program(fits, NEEDS, draw, "logs/quick")
