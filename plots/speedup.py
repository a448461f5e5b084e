"""Speed-up over the trial that all others are compared to: `python -m plots.speedup SWEEP`."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes

from common.results.records import Record
from common.results.stats import EQUAL
from common.results.timed.rows import Row
from plots import style, sweep
from plots.sweep import Mark

TITLE = "Speed-up, with its interval and verdict"
NEEDS = "two valid trials that are compared with each other"


def fits(records: Sequence[Record]) -> bool:
    return any(len(group) > 1 for group in sweep.variants(records, "label"))


def figure(folder: Path) -> style.Drawn:
    """Draws a point with its interval for each trial."""
    marks, compare_to = sweep.load(folder)
    rivals = [mark for mark in marks if mark.algorithm != sweep.SINGLE]
    panels = sweep.panels(rivals)
    drawn, axes = style.stacked([len(panel) for panel in panels], 6.4, 0.34, sharex=True)
    rows = [mark.row for mark in rivals if mark.row.speedup is not None]
    values = [1.0, *(row.speedup for row in rows)]
    room = max(0.1, 0.7 * (max(values) - min(values)))  # a longer whisker leaves the figure
    values += [max(row.speedup_low, row.speedup - room) for row in rows if row.speedup_low]
    values += [min(row.speedup_high, row.speedup + room) for row in rows if row.speedup_high]
    width = max(values) - min(values) or 1.0
    axes[0].set_xlim(min(values) - 0.06 * width, max(values) + 0.4 * width)
    for axis, panel in zip(axes, panels, strict=True):
        _panel(axis, panel)
    axes[-1].set_xlabel(f"times the speed of {compare_to} (elapsed time per step)", fontsize=8)
    text = f"Speed-up over {compare_to}, {sweep.sample_size(rivals)}; whiskers: 95 % t interval; "
    text += f"band: within {EQUAL:.0%} of 1; verdicts are corrected for all comparisons of a panel"
    records = [mark.record for mark in rivals]
    style.caption(drawn, text + " (Holm)" + style.flags(records), records, 115)
    fields = ("compared_to", "speedup", "speedup_low", "speedup_high", "verdict", "detectable")
    return drawn, style.data(mark.data(*fields, "paired", "flag") for mark in rivals)


draw = style.writer("speedup", figure)


def _panel(axis: Axes, panel: Sequence[Mark]) -> None:
    axis.axvspan(1 / (1 + EQUAL), 1 + EQUAL, color="#f0f0f0", lw=0, zorder=0)
    axis.axvline(1.0, color="#777777", lw=1, ls="--", zorder=1)
    base = next((mark.row.compared_to for mark in panel if mark.row.compared_to), None)
    for index, mark in enumerate(panel):
        row = mark.row
        if row.speedup is None:
            if row.algorithm == base and not row.flag:
                axis.plot([1.0], [index], **mark.look.curve)
            text = textwrap.shorten(_reason(row, base), 70)
            _beside(axis, 1.0, index, text, color="#666666", fontsize=7)
            continue
        style.whisker(axis, row.speedup, index, (row.speedup_low, row.speedup_high), upright=False)
        axis.plot([row.speedup], [index], **mark.look.curve)
        low, high = axis.get_xlim()  # an interval may leave the figure, but not its number
        end = min(row.speedup_high or row.speedup, high - 0.28 * (high - low))
        _beside(axis, end, index, f"{row.speedup:.2f} {row.verdict}", fontsize=8)
    style.named_rows(axis, [mark.row for mark in panel])
    style.title(axis, sweep.title(panel[0].row))


def _reason(row: Row, base: str | None) -> str:
    if row.algorithm == base and not row.flag:
        return "baseline of the comparison"
    if base is None:
        return "(no baseline to compare it to)"
    return f"({row.flag or f'not compared: {base} is flagged'})"


def _beside(axis: Axes, x: float, y: float, text: str, **look: object) -> None:
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.8}
    style.write_at(axis, text, (x, y), (8, 0), va="center", bbox=box, **look)


if __name__ == "__main__":
    style.program(fits, NEEDS, draw)
