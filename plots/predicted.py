"""Series of predictions over workers, bandwidth, latency, ...: `predict --over AXIS --figure`."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

from common.results.records import grouped
from common.results.tables.predicted import PredictedRow
from common.virtual.over import AXES, Point
from plots import style
from plots.looks import Look, looks_of

_MOST_TICKS = 8
Value = Callable[[PredictedRow], float | None]


def _throughput(row: PredictedRow) -> float | None:
    return row.samples_per_s(row.step_s)


def _efficiency(row: PredictedRow) -> float | None:
    return None if row.step_s is None or row.compute_s is None else row.compute_s / row.step_s


def _exposed(row: PredictedRow) -> float | None:
    return None if row.exposed_s is None else 1e3 * row.exposed_s


_PANELS: tuple[tuple[str, str, Value], ...] = (
    ("throughput", "samples/s, all workers together", _throughput),
    ("efficiency", "efficiency", _efficiency),
    ("exposed", "exposed communication, ms per step", _exposed),
)


def draw(rows: Sequence[PredictedRow], out: Path) -> list[Path]:
    """Writes AXIS.png, .pdf and, with the data, .csv; returns the paths.

    Args:
        rows: rows of a series; those without a prediction are left out.
    """
    valid = [row for row in rows if row.step_s is not None and row.point is not None]
    point = next(row.point for row in rows if row.point is not None)
    return style.writer(point.axis, lambda _: figure(valid, point))(out, out)


def figure(rows: Sequence[PredictedRow], point: Point) -> style.Drawn:
    """Draws throughput, efficiency and exposed communication, with a line for each algorithm."""
    places = grouped(rows, lambda row: _place(row, point))
    style.setup(grid="both")
    size = (11.5, 0.8 + 2.9 * len(places))
    drawn, axes = plt.subplots(len(places), 3, figsize=size, squeeze=False, layout="constrained")
    looks = looks_of({row.algorithm: row.kind for row in rows})
    for line, (place, here) in zip(axes, places.items(), strict=True):
        style.title(line[0], ", ".join(place))
        for axis, (name, label, value) in zip(line, _PANELS, strict=True):
            _lines(axis, here, looks, value)
            axis.set_ylabel(label, fontsize=8)
            _x_axis(axis, here, point)
            if name == "throughput":
                _ideal(axis, here, point)
            else:
                axis.set_ylim(0, 1.08 if name == "efficiency" else None)
    style.legend(drawn, looks)
    text = "Computed on a virtual clock (docs/prediction.md); efficiency: step of one GPU alone / "
    text += "step; dotted: throughput at an efficiency of 1"
    drawn.supxlabel(
        "\n".join(textwrap.wrap(text, 180)), fontsize=7, color="#555555", x=0.01, ha="left"
    )
    return drawn, style.data(map(_data, rows))


def _place(row: PredictedRow, point: Point) -> tuple[str, ...]:
    workers = f"{row.world_size} workers" if point.axis != "workers" else ""
    network = row.network or ""
    return tuple(
        filter(None, (row.model.partition("@")[0], f"batch {row.batch}", workers, network))
    )


def _lines(axis: Axes, rows: Sequence[PredictedRow], looks: dict[str, Look], value: Value) -> None:
    for label, points in grouped(rows, lambda row: row.algorithm).items():
        curve = [(_x(row), y) for row in points if (y := value(row)) is not None]
        axis.plot(
            *zip(*sorted(curve), strict=True), lw=1.2, **{**looks[label].curve, "markersize": 4.5}
        )


def _x(row: PredictedRow) -> float:
    assert row.point is not None, "a row of a series has its point"
    return row.point.value


def _x_axis(axis: Axes, rows: Sequence[PredictedRow], point: Point) -> None:
    values = sorted({_x(row) for row in rows})
    every = math.ceil(len(values) / _MOST_TICKS)
    axis.set_xscale("log")
    axis.set_xticks(values[::every])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.tick_params(axis="x", labelsize=7)
    axis.set_xlabel(AXES[point.axis].label, fontsize=8)


def _ideal(axis: Axes, rows: Sequence[PredictedRow], point: Point) -> None:
    """Draws the throughput without communication; the axis is logarithmic over workers."""
    ideal = sorted({(_x(row), row.samples_per_s(row.compute_s)) for row in rows if row.compute_s})
    axis.plot(*zip(*ideal, strict=True), color="#777777", lw=1, ls=":", zorder=1)
    if point.axis == "workers":
        axis.set_yscale("log")
    else:
        axis.set_ylim(0, None)


def _data(row: PredictedRow) -> dict[str, object]:
    names = ["model", "batch", "world_size", "network", "algorithm"]
    names += ["step_s", "step_low_s", "step_high_s", "compute_s"]
    values = {name: getattr(row, name) for name in names}
    panels = {name: value(row) for name, _, value in _PANELS}
    return {"axis": row.point and row.point.axis, "value": _x(row), **values, **panels}
