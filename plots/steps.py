"""Every timed step: `python -m plots.steps SWEEP`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas import DataFrame

import common.results
from common.results.records import Record
from plots import style, sweep
from plots.sweep import Mark

TITLE = "Distribution of steps"
NEEDS = "trials that time steps"


def fits(records: Sequence[Record]) -> bool:
    """Whether any trial has timed steps."""
    return bool(sweep.timed(records))


def draw(folder: Path, out: Path) -> list[Path]:
    """Writes steps.{png,pdf,csv} to `out`, returns the paths."""
    return style.write(figure(folder), out / "steps")


def figure(folder: Path) -> tuple[Figure, DataFrame]:
    """A point for each step, a row of points for each repeat; the data are all steps."""
    marks, _ = sweep.load(folder)
    known = DataFrame(
        {"id": m.record.id, "network": m.row.network, "fault": m.row.fault, "doubt": m.row.doubt}
        for m in marks
    )
    table = pd.merge(known, common.results.steps(folder), on="id")
    style.setup()
    panels = sweep.panels(marks)
    drawn, axes = style.stacked([len(panel) for panel in panels], 7.2, 0.46)
    times = dict(tuple(table.groupby("id", sort=False)))
    for axis, panel in zip(axes, panels, strict=True):
        _panel(axis, panel, times)
    axes[-1].set_xlabel("milliseconds of a step", fontsize=8)
    records = [mark.record for mark in marks]
    text = f"{sweep.told(marks)}; each row of points is a repeat, the first one above; line: "
    text += "median of all steps, bar: the middle half of them, cross: the 95th percentile"
    style.caption(drawn, text + style.doubts(records), records, 130)
    return drawn, table.convert_dtypes()


def _panel(axis: Axes, panel: Sequence[Mark], times: dict[str, DataFrame]) -> None:
    for place, mark in enumerate(panel):
        look = style.seen(mark.record, {mark.row.algorithm: mark.look})
        found = times[mark.record.id]
        ms = 1e3 * found["step_s"].astype(float)
        repeats = found["repeat"].astype(int)
        between = 0.62 / max(1, repeats.max())
        rows = place - 0.31 + between * repeats if repeats.max() else repeats * 0.0 + place
        low, middle, high, late = ms.quantile([0.25, 0.5, 0.75, 0.95])
        box = {"left": low, "height": 0.8, "lw": 0, "facecolor": look.colour, "alpha": 0.28}
        axis.barh(place, high - low, zorder=1, **box)
        more = {"ms": 3.2, "alpha": 0.75, "mew": 0, "ls": "none", "zorder": 2}
        axis.plot(ms, rows, color=look.colour, marker=look.marker, **more)
        axis.plot([middle, middle], [place - 0.42, place + 0.42], color="#222222", lw=1.4, zorder=3)
        axis.plot([late], [place], "x", color="#222222", ms=6, mew=1.4, zorder=3)
    labels = [mark.row.algorithm for mark in panel]
    style.named_rows(axis, labels, [bool(mark.row.doubt) for mark in panel])
    style.title(axis, sweep.title(panel[0].row))


if __name__ == "__main__":
    style.program(fits, NEEDS, draw, "logs/quick")
