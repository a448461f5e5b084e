"""Figures with a line per algorithm: throughput, and beside it a relative measure.

The positions on the x axis (worlds, batch sizes or networks) are evenly spaced and called steps. A
mark is a trial in a figure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from common.results.records import Record
from plots import style, sweep
from plots.sweep import Mark

Step = Callable[[Mark], Any]
"""Function from a mark to the sort key of its step."""


def fits(records: Sequence[Record], free: str, step: Callable[[Record], Any] | None = None) -> bool:
    """Returns True if some algorithm has two steps; flagged trials count.

    `free` is the key of a trial in which the points of a line differ. `step` returns the step of a
    record, or None; by default, it is the value of the key."""
    step = step or (lambda record: record.trial[free])
    groups = sweep.variants(records, free, flagged=True)
    return any(len(set(map(step, group)) - {None}) > 1 for group in groups)


def figure(
    marks: Sequence[Mark],
    free: str,
    step: Step,
    tick: Callable[[Any], str],
    relative: tuple[str, str],
    text: str,
) -> style.Drawn:
    """Draws two panels side by side for each group of marks, with the data behind them.

    Args:
        free: field of a row in which the marks of a panel differ.
        tick: returns the label of a step on the x axis.
        relative: name of the field that the right panel shows, and the label of its y axis.
        text: beginning of the caption.
    """
    style.setup(grid="y")
    panels = sweep.panels(marks, free)
    size = (9.2, 2.9 * len(panels) + 0.6)
    drawn, axes = plt.subplots(len(panels), 2, figsize=size, squeeze=False, layout="constrained")
    for (left, right), panel in zip(axes, panels, strict=True):
        steps = sorted(set(map(step, panel)))
        style.title(left, sweep.title(panel[0].row, free))
        _draw(left, panel, steps, step, "throughput", "ci")
        left.set_ylabel(f"{panel[0].row.unit}, all workers together", fontsize=8)
        left.set_ylim(0, 1.08 * max(left.get_ylim()))
        rivals = [mark for mark in panel if mark.algorithm != sweep.SINGLE]
        right.axhline(1.0, color="#777777", lw=1, ls="--")
        _draw(right, rivals, steps, step, relative[0], relative[0])
        right.set_ylabel(relative[1], fontsize=8)
        if relative[0] == "efficiency":  # a share of what is possible
            right.set_ylim(0, max(1.08, *right.get_ylim()))
        if all(getattr(mark.row, relative[0]) is None for mark in rivals):
            look = {"transform": right.transAxes, "ha": "center", "va": "center", "fontsize": 8}
            flagged = all(mark.row.flag for mark in rivals)
            why = "all points are flagged" if flagged else "there is no valid baseline"
            right.text(0.5, 0.5, f"no {relative[0]}: {why}", **look)
        for axis in (left, right):
            axis.set_xticks(range(len(steps)), map(tick, steps))
            axis.set_xlim(-0.35, len(steps) - 0.65)
    hollow = any(mark.row.flag for mark in marks)
    style.legend(drawn, {mark.row.algorithm: mark.look for mark in marks}, hollow=hollow)
    records = [mark.record for mark in marks]
    text += f"; {sweep.sample_size(marks)}; whiskers: 95 % t interval"
    text += style.flags(records, "hollow, and on no line")
    style.caption(drawn, text, records, 150)
    fields = [f"{name}{end}" for name in (relative[0],) for end in ("", "_low", "_high")]
    fields += ["throughput", "ci_low", "ci_high", "unit", "compared_to", "flag"]
    return drawn, style.data(mark.data(*fields) for mark in marks)


def _draw(
    axis: Axes, panel: Sequence[Mark], steps: Sequence[Any], step: Step, field: str, ends: str
) -> None:
    """Draws a line for each algorithm through its valid results; flagged results are hollow points.
    The points of a step are side by side, so that algorithms do not hide each other."""
    labels = list(dict.fromkeys(mark.row.algorithm for mark in panel))
    for number, label in enumerate(labels):
        aside = 0.12 * ((2 * number + 1) / len(labels) - 1)
        points = sorted(
            (steps.index(step(mark)) + aside, getattr(mark.row, field), mark.row)
            for mark in panel
            if mark.row.algorithm == label and getattr(mark.row, field) is not None
        )
        look = next(mark.look for mark in panel if mark.row.algorithm == label)
        valid = [(x, y) for x, y, row in points if not row.flag]
        if valid:
            axis.plot(*zip(*valid, strict=True), lw=1.3, **look.curve)
        for x, y, row in points:
            low, high = (getattr(row, f"{ends}_{end}") for end in ("low", "high"))
            if row.flag:
                axis.plot([x], [y], zorder=3, **look.hollow)
            elif low is not None:
                error = [[y - low], [high - y]]
                axis.errorbar(x, y, error, capsize=2, lw=0.8, color=look.colour)
