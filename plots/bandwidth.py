"""Throughput and speed-up over networks of different bandwidths: `python -m plots.bandwidth`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from pandas import DataFrame

from common.results.records import Record
from plots import lines, style, sweep
from plots.sweep import Mark

TITLE = "Bandwidth ladder"
NEEDS = "an algorithm on networks of two bandwidths"
_FIELDS = ("throughput", "ci_low", "ci_high", "unit", "compared_to", "speedup", "speedup_low")
_FIELDS += ("speedup_high", "doubt")


def fits(records: Sequence[Record]) -> bool:
    """Whether something was believed on links of two bandwidths, all else the same."""
    found = sweep.variants(records, "network").values()
    return any(len({_gbps(one) for one in same} - {None}) > 1 for same in found)


def draw(folder: Path, out: Path) -> list[Path]:
    """Writes bandwidth.{png,pdf,csv} to `out`, returns the paths."""
    return style.write(figure(folder), out / "bandwidth")


def figure(folder: Path) -> tuple[Figure, DataFrame]:
    """Left throughput, right speed-up, a step of the ladder for each network."""
    every, compare_to = sweep.load(folder)
    marks = [
        mark for mark in every if _gbps(mark.record) is not None and mark.algorithm != sweep.SINGLE
    ]
    style.setup()
    panels = sweep.panels(marks, lambda row: (row.model, row.batch_size, row.world_size, row.fault))
    drawn, axes = plt.subplots(
        *(len(panels), 2),
        figsize=(9.2, 2.9 * len(panels) + 0.6),
        squeeze=False,
        layout="constrained",
    )
    for (left, right), panel in zip(axes, panels, strict=True):
        steps = sorted({(_gbps(mark.record), mark.row.network) for mark in panel})
        at = partial(_at, steps)
        lines.draw(left, panel, "throughput", "ci", at)
        left.set_ylabel(f"{panel[0].row.unit}, all workers together", fontsize=8)
        left.set_ylim(0, 1.08 * max(left.get_ylim()))
        right.axhline(1.0, color="#777777", lw=1, ls="--")
        lines.draw(right, panel, "speedup", "speedup", at)
        right.set_ylabel(f"times the speed of {compare_to}", fontsize=8)
        for axis in (left, right):
            names = [f"{network}\n{gbps:g} Gb/s" for gbps, network in steps]
            axis.set_xticks(range(len(steps)), names)
            axis.set_xlim(-0.35, len(steps) - 0.65)
            axis.grid(True, axis="y")
            axis.grid(False, axis="x")
        style.title(left, sweep.title(panel[0].row, network=False))
    style.legend(drawn, {mark.row.algorithm: mark.look for mark in marks})
    records = [mark.record for mark in marks]
    text = f"Links from slow to fast, evenly spaced; {sweep.told(marks)}; whiskers: 95 % t "
    text += "interval; hollow and grey: not believed, and on no line"
    style.caption(drawn, text + style.doubts(records), records, 150)
    return drawn, style.data(
        {
            **mark.place,
            "gbps": _gbps(mark.record),
            **{name: getattr(mark.row, name) for name in _FIELDS},
        }
        for mark in marks
    )


def _gbps(record: Record) -> float | None:
    """Of a virtual host's link; None where nothing says."""
    return (record.fabric.network.requested or {}).get("gbps")


def _at(steps: Sequence[tuple[float | None, str | None]], mark: Mark, aside: float) -> float:
    return steps.index((_gbps(mark.record), mark.row.network)) + 0.2 * aside


if __name__ == "__main__":
    style.program(fits, NEEDS, draw, "logs/emulated")
