"""Accuracy and loss of training, with and without faults: `python -m plots.learning SWEEP`."""

from __future__ import annotations

import dataclasses
import statistics
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from common.results.learning import race, summary
from common.results.learning.summary import LearnRow
from common.results.records import Record
from common.results.records.learned import Evaluation
from common.results.store import Comparison
from common.results.tables.cells import percent
from dear.errors import UserError
from plots import style
from plots.looks import GREY, Look, looks, order

TITLE = "Accuracy and loss over time"
NEEDS = "training trials (`learn:`)"
_X = {"seconds": "seconds of training", "steps": "steps per rank", "epoch": "epochs"}
_Y = {
    "accuracy": "test accuracy",
    "loss": "test loss",
    "train_loss": "training loss",
    "consensus_distance": "consensus distance\n(unless equal)",
    "staleness": "steps that the stalest\nneighbour is behind",
}
_LOGARITHMIC = ("loss", "train_loss", "consensus_distance")
_FIELDS = ["model", "batch", "world_size", "network", "fault", "algorithm", "flag"]
_FIELDS += ["repeat", "seed", "at_s", "epoch", "seconds", "steps"]
_FIELDS += [f"{what}{end}" for what in ("accuracy", "loss") for end in ("", "_min", "_max")]
_FIELDS += ["accuracy_top5", "train_loss", "consensus_distance", "staleness"]


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Training trial, as drawn in a figure; a flagged trial is grey."""

    record: Record
    row: LearnRow
    look: Look


Cells = Mapping[str, Sequence[Mark]]
"""Trials of each cell (those that are compared with each other), by the cell's title."""


def fits(records: Sequence[Record]) -> bool:
    return any(record.ok and record.learning for record in records)


def figure(folder: Path) -> style.Drawn:
    """Draws accuracy and loss; for trials without data, draws steps per second. The returned data
    have a row per evaluation."""
    comparison = Comparison.load(folder)
    records = [record for record in comparison.results(folder) if record.ok and record.learning]
    if not records:
        raise UserError(f"{folder}: no training trial (`learn:`) has succeeded")
    records.sort(key=lambda record: order(record.trial["algorithm"]))
    rows, by_label = summary.make_rows(records, comparison.compare_to), looks(records)
    marks = []
    for record, row in zip(records, rows, strict=True):
        look = by_label[record.label]
        look = dataclasses.replace(look, colour=GREY) if row.flag else look
        marks.append(Mark(record=record, row=row, look=look))
    judged = any(each.accuracy is not None for record in records for each in _evaluations(record))
    drawn = (_curves if judged else _paces)(_cells(marks))
    style.caption(drawn, _caption(rows, records, judged), records, 120)
    return drawn, style.data(_data(marks), _FIELDS)[_FIELDS]


draw = style.writer("learning", figure)


def _cells(marks: Sequence[Mark]) -> Cells:
    cells: dict[tuple[Any, ...], list[Mark]] = {}
    singles = [mark for mark in marks if mark.record.trial["algorithm"] == "none"]
    for mark in marks:
        if mark not in singles:
            cells.setdefault(mark.row.place, []).append(mark)
    for mark in singles:
        model, batch, _, network, _ = mark.row.place
        # It trains without faults; workers with unequal batches have none of their own.
        same = [c for c in cells if (c[0], c[3], c[4]) == (model, network, None)]
        alike = [c for c in same if c[1] == batch or _unequal(cells[c])]
        for cell in alike or [mark.row.place]:
            cells.setdefault(cell, []).insert(0, mark)
    titles = [
        f"{model}, batch {batch}, {world} workers{f' on {network}' if network else ''}\n"
        f"{fault or 'no fault'}"
        for model, batch, world, network, fault in cells
    ]
    return dict(zip(titles, cells.values(), strict=True))


def _unequal(marks: Sequence[Mark]) -> bool:
    """Returns whether the workers of a cell have batches of their own."""
    return any(mark.record.trial["learn"].get("batch_sizes") for mark in marks)


def _curves(cells: Cells) -> Figure:
    marks = [mark for cell in cells.values() for mark in cell]
    learn = marks[0].record.trial["learn"]
    # The x axis has seconds, because all algorithms make equally many steps in an epoch.
    x = "epoch" if learn.get("epochs") else "seconds"
    curves = [("accuracy", "seconds"), ("accuracy", "epoch" if x == "epoch" else "steps")]
    curves += [("loss", x), ("train_loss", x)] if x == "epoch" else [("loss", x)]
    for y in ("consensus_distance", "staleness"):
        if any(getattr(each, y) for mark in marks for each in _evaluations(mark.record)):
            curves.append((y, "seconds"))
    panels: list[Callable[..., None]] = [partial(_curve, y=y, x=x) for y, x in curves]
    heights = [2.1] * len(panels)
    if learn["target_accuracy"] is not None:
        panels.insert(0, _race)
        heights.insert(0, 0.5 + 0.27 * max(map(len, cells.values())))
    style.setup()
    size = (2.4 + 4.1 * len(cells), sum(heights) + 0.5)
    shape = {"squeeze": False, "sharex": "row", "height_ratios": heights}
    figure, axes = plt.subplots(
        len(panels), len(cells), figsize=size, layout="constrained", **shape
    )
    for column, (title, cell) in enumerate(cells.items()):
        for row, panel in enumerate(panels):
            panel(axes[row, column], cell)
        # A line must not be wider than a panel, or it would run into the next one or the legend.
        lines = [textwrap.fill(line, 36) for line in title.splitlines()]
        style.title(axes[0, column], "\n".join(lines))
    for row in axes[len(axes) - len(curves) :]:
        limits = [axis.get_ylim() for axis in row]
        for axis in row:
            axis.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
    # The legend has the colour of an algorithm, not grey, if it is valid in any cell.
    shown = {mark.row.algorithm: mark.look for mark in marks}
    shown |= {mark.row.algorithm: mark.look for mark in marks if not mark.row.flag}
    style.legend(figure, shown)
    return figure


def _race(axis: Axes, marks: Sequence[Mark]) -> None:
    learn = marks[0].record.trial["learn"]
    # The last step may end after the budget.
    longest = max(each.seconds for mark in marks for each in _evaluations(mark.record))
    if not learn.get("epochs"):
        longest = max(longest, learn["budget_s"])
    for index, mark in enumerate(marks):
        row, colour = mark.row, mark.look.colour
        there = [run.seconds for run in race.finishes(mark.record) if run.there]
        axis.plot(there, [index] * len(there), "o", ms=3.5, mfc="none", mec=colour, alpha=0.7)
        if row.to_target_s is not None:
            axis.plot([row.to_target_s], [index], marker="D", ms=5, color=colour)
        if row.to_target_low_s is not None:
            axis.plot([row.to_target_low_s, row.to_target_high_s], [index] * 2, color=colour, lw=2)
        if row.reached != row.runs:
            text = f"{row.reached} of {row.runs} in {row.limit}"
            style.write_at(
                axis, text, (longest, index), (0, 0), ha="right", va="center", fontsize=7
            )
    style.named_rows(axis, [mark.row for mark in marks])
    axis.set_xlim(0, longest * 1.02)
    text = f"seconds of training to {percent(learn['target_accuracy'])} test accuracy"
    axis.set_xlabel(text, fontsize=8)


def _curve(axis: Axes, marks: Sequence[Mark], *, y: str, x: str) -> None:
    along = "mean_steps" if x == "steps" else x
    for number, mark in enumerate(sorted(marks, key=lambda mark: not mark.row.flag)):
        points = []
        for runs in zip(*(run.evaluations for run in mark.record.learning), strict=True):
            values = [getattr(each, y) for each in runs]
            if None not in values and not (y == "consensus_distance" and 0.0 in values):
                at = statistics.fmean(getattr(each, along) for each in runs)
                points.append((at, statistics.fmean(values), min(values), max(values)))
        if not points:
            continue
        at, mean, low, high = zip(*points, strict=True)
        look, every = mark.look, max(1, len(at) // 5)
        # The markers of the lines are at different points.
        marked = {"markevery": (number % every, every), "markersize": 0.7 * look.size}
        axis.plot(at, mean, lw=1.3, **look.curve | marked)
        if low != high:
            axis.fill_between(at, low, high, color=look.colour, alpha=0.13, lw=0)
    axis.set_xlabel(_X[x], fontsize=8)
    axis.set_ylabel(_Y[y], fontsize=8)
    axis.grid(True, axis="both")
    axis.set_xlim(left=0)
    if y in _LOGARITHMIC:
        axis.set_yscale("log")
    if y == "accuracy":
        target = marks[0].record.trial["learn"]["target_accuracy"]
        if target is not None:
            axis.axhline(target, color="#777777", lw=1, ls="--")
        known = [each for mark in marks for each in _evaluations(mark.record) if each.at_s > 0]
        least = sorted(each.accuracy for each in known)[len(known) // 4]
        # Every curve ends inside.
        ends = [run.evaluations[-1].accuracy for mark in marks for run in mark.record.learning]
        axis.set_ylim(max(0.0, min(0.8, least - 0.05, *(end - 0.05 for end in ends))), 1.0)
        axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def _paces(cells: Cells) -> Figure:
    figure, axes = style.stacked([len(cell) for cell in cells.values()], 6.8, 0.42, sharex=True)
    rows = [mark.row for cell in cells.values() for mark in cell]
    known = [row.steps_per_s_high or row.steps_per_s or row.slowed_steps_per_s for row in rows]
    axes[0].set_xlim(0, 1.25 * max(filter(None, known), default=1.0))
    for axis, (title, marks) in zip(axes, cells.items(), strict=True):
        for index, mark in enumerate(marks):
            row = mark.row
            kept = "" if row.kept is None else f" ({row.kept:.2f} of no fault)"
            ends = (row.steps_per_s_low, row.steps_per_s_high)
            if row.steps_per_s is None:
                where = (0.0, index)
                style.write_at(axis, "a fault slows every rank", where, (4, 0), va="center")
            else:
                style.row_bar(axis, index, row.steps_per_s, ends, mark.look, row.flag, kept)
            if row.slowed_steps_per_s is not None:
                axis.plot([row.slowed_steps_per_s], [index - 0.36], "v", color="#222222", ms=5)
        style.named_rows(axis, [mark.row for mark in marks])
        style.title(axis, title.replace("\n", ", "))
    text = "steps per second of the slowest rank that no fault slows; triangles: the slowed host"
    axes[-1].set_xlabel(text, fontsize=8)
    return figure


def _evaluations(record: Record) -> Iterator[Evaluation]:
    return (each for run in record.learning for each in run.evaluations)


def _caption(rows: Sequence[LearnRow], records: Sequence[Record], judged: bool) -> str:
    first = records[0]
    learn, runs = first.trial["learn"], max(len(record.learning) for record in records)
    numbers = style.count(len(record.learning) for record in records)
    text = f"n = {numbers} {'run' if runs == 1 else 'runs'} of {summary.limit(learn)} each"
    if judged:
        text += f" on {learn['data']}"
        data = first.results[0].data
        if data is not None:
            text += f" (trained on {data.title})"
        text += ", each with its own seed" if runs > 1 else ""
        text += "; lines: the mean model of all ranks"
        text += ", mean over the runs; bands: range of the runs" if runs > 1 else ""
        if learn["target_accuracy"] is not None:
            text += "; circles: runs"
            text += ", diamonds: geometric mean with its 95 % t interval" if runs > 1 else ""
            missed = any(row.reached not in (row.runs, 0) for row in rows)
            text += " (the median, if a run missed the target)" if missed else ""
    elif runs > 1:
        text += "; whiskers: 95 % t interval of the geometric mean"
    return text + style.flags(records)


def _data(marks: Sequence[Mark]) -> Iterator[dict[str, Any]]:
    names = ("model", "batch", "world_size", "network", "fault", "algorithm", "flag")
    for mark in marks:
        for number, run in enumerate(mark.record.learning):
            known = {name: getattr(mark.row, name) for name in names}
            known |= {"repeat": number, "seed": run.seed}
            for each in run.evaluations:
                steps = " ".join("-" if count is None else str(count) for count in each.steps)
                yield {**vars(each), **known, "steps": steps}


if __name__ == "__main__":
    style.program(fits, NEEDS, draw)
