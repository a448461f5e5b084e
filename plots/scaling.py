"""Throughput and efficiency over the number of workers: `python -m plots.scaling SWEEP`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from pandas import DataFrame

from common.results.records import Record
from plots import lines, style, sweep
from plots.sweep import Mark

TITLE = "Scaling and efficiency over workers"
NEEDS = "an algorithm at two numbers of workers"
_FIELDS = ("throughput", "ci_low", "ci_high", "unit", "efficiency", "efficiency_low")
_FIELDS += ("efficiency_high", "doubt")


def fits(records: Sequence[Record]) -> bool:
    """Whether something was believed at two world sizes, all else the same."""
    found = sweep.variants(records, "world_size").values()
    return any(len({one.trial["world_size"] for one in same}) > 1 for same in found)


def draw(folder: Path, out: Path) -> list[Path]:
    """Writes scaling.{png,pdf,csv} to `out`, returns the paths."""
    return style.write(figure(folder), out / "scaling")


def figure(folder: Path) -> tuple[Figure, DataFrame]:
    """Left throughput, right efficiency; a line for each algorithm, and its points as data."""
    marks, _ = sweep.load(folder)
    style.setup()
    panels = sweep.panels(marks, lambda row: (row.model, row.batch_size, row.network, row.fault))
    drawn, axes = plt.subplots(
        *(len(panels), 2),
        figsize=(9.2, 2.9 * len(panels) + 0.6),
        squeeze=False,
        layout="constrained",
    )
    for (left, right), panel in zip(axes, panels, strict=True):
        _throughput(left, panel)
        _efficiency(right, panel)
        worlds = [mark.row.world_size for mark in panel]
        for axis in (left, right):
            axis.set_xscale("log", base=2)
            style.plain_numbers(axis.xaxis, worlds)
            axis.set_xlabel("workers", fontsize=8)
            axis.set_ylim(0, 1.08 * max(axis.get_ylim()))
            axis.grid(True, axis="both")
        style.title(left, sweep.title(panel[0].row, world=False))
    style.legend(drawn, {mark.row.algorithm: mark.look for mark in marks})
    records = [mark.record for mark in marks]
    text = f"{sweep.told(marks)}; whiskers: 95 % t interval; efficiency: throughput over workers "
    text += "times the single worker's; hollow and grey: not believed, and on no line"
    style.caption(drawn, text + style.doubts(records), records, 150)
    return drawn, style.data(
        {**mark.place, **{name: getattr(mark.row, name) for name in _FIELDS}} for mark in marks
    )


def _throughput(axis: Axes, panel: Sequence[Mark]) -> None:
    first = min(panel, key=lambda mark: mark.row.world_size).row
    single = [m.row for m in panel if m.algorithm == sweep.SINGLE and not m.row.doubt]
    if single:
        most = max(mark.row.world_size for mark in panel)
        ends = [single[0].throughput, single[0].throughput * most]
        axis.plot([1, most], ends, color="#777777", lw=1, ls="--")
        more = {"xytext": (-4, 0), "textcoords": "offset points", "color": "#555555"}
        axis.annotate("single worker x workers", (most, ends[1]), ha="right", fontsize=7, **more)
    lines.draw(axis, panel, "throughput", "ci", _at)
    axis.set_ylabel(f"{first.unit}, all workers together", fontsize=8)


def _efficiency(axis: Axes, panel: Sequence[Mark]) -> None:
    axis.set_ylabel("efficiency", fontsize=8)
    axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    rivals = [mark for mark in panel if mark.algorithm != sweep.SINGLE]
    if not any(mark.row.efficiency for mark in rivals):
        text = "no single worker was measured that is believed:\nthere is nothing to relate it to"
        axis.text(0.5, 0.5, text, transform=axis.transAxes, ha="center", va="center", fontsize=8)
        axis.set_yticks([])
        return
    axis.axhline(1.0, color="#777777", lw=1, ls="--")
    lines.draw(axis, rivals, "efficiency", "efficiency", _at)


def _at(mark: Mark, aside: float) -> float:
    return mark.row.world_size * (1 + 0.06 * aside)


if __name__ == "__main__":
    style.program(fits, NEEDS, draw, "logs/quick")
