"""Predicted steps: speed-ups (`predict --figure`), or series over workers, bandwidth, latency, ...

`predict --over AXIS --figure FOLDER` draws a series.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, NullLocator

from common.results.records import grouped
from common.results.tables.predicted import PredictedRow
from common.virtual.over import AXES, Point
from dear.errors import UserError
from plots import style
from plots.looks import FLAGGED, Look, looks_of

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


def draw(rows: Sequence[PredictedRow], out: Path, base: str) -> list[Path]:
    """Writes AXIS.png (speed-up.png without a series), .pdf and, with the data, .csv.

    Args:
        rows: rows of all trials; those without a prediction are left out.
        base: label of the algorithm to which the others are compared.

    Returns:
        Paths of the files.

    Raises:
        UserError: there is nothing to draw.
    """
    valid = [row for row in rows if row.step_s is not None]
    if not valid or (valid[0].point is None and not _compared(valid, base)):
        raise UserError(f"--figure: no trial has a prediction that is compared with {base}")
    point = valid[0].point
    if point is None:
        return style.writer("speed-up", lambda _: speed_ups(valid, base))(out, out)
    return style.writer(point.axis, lambda _: figure(valid, point))(out, out)


def _compared(rows: Sequence[PredictedRow], base: str) -> list[PredictedRow]:
    """Returns the rows, without those of `base`, to which it has a row."""
    places = {row.place for row in rows if row.algorithm == base}
    return [row for row in rows if row.place in places and row.algorithm != base]


def speed_ups(rows: Sequence[PredictedRow], base: str) -> style.Drawn:
    """Draws the speed-up of each algorithm over `base` with its range. Each number of workers,
    network and fault has a panel."""
    bases = {row.place: row for row in rows if row.algorithm == base}
    compared = _compared(rows, base)
    looks = looks_of({row.algorithm: row.kind for row in compared})
    panels = grouped(compared, lambda row: (row.world_size, row.network or "", *_fault(row, rows)))
    style.setup(grid="y")
    drawn, axes = plt.subplots(
        len(panels), 1, figsize=(11.5, 0.8 + 2.5 * len(panels)), squeeze=False, layout="constrained"
    )
    data = []
    for axis, ((workers, *place), here) in zip(axes[:, 0], panels.items(), strict=True):
        style.title(axis, ", ".join(filter(None, (f"{workers} workers", *place))))
        axis.axhline(1, color="#555555", lw=1, zorder=3)
        axis.set_ylabel(f"speed-up over {base}", fontsize=8)
        cells = grouped(here, lambda row: (row.model, row.batch))
        axis.set_xticks(
            range(len(cells)), [f"{name.partition('@')[0]}, {batch}" for name, batch in cells]
        )
        width = 0.84 / len(looks)
        for place, cell in enumerate(cells.values()):
            for row in cell:
                at = place + width * (list(looks).index(row.algorithm) - (len(looks) - 1) / 2)
                ratio, low, high = row.speed_up(bases[row.place])
                flag = row.flag or bases[row.place].flag
                axis.bar(at, ratio, 0.9 * width, **(FLAGGED if flag else looks[row.algorithm].bar))
                style.whisker(axis, at, ratio, (low, high))
                data.append({**_named(row, rows), "speed_up": ratio, "low": low, "high": high})
    handles = [Patch(**look.bar) for look in looks.values()]
    drawn.legend(handles, list(looks), loc="outside right upper", frameon=False, fontsize=8)
    _note(
        drawn,
        f"Computed on a virtual clock (docs/prediction.md): steps of {base} / steps of "
        "the algorithm; labels: model, batch; whiskers: range of costs and compute; grey: the "
        f"algorithm or {base} is flagged",
    )
    return drawn, style.data(data)


def figure(rows: Sequence[PredictedRow], point: Point) -> style.Drawn:
    """Draws throughput, efficiency and exposed communication, with a line for each algorithm."""
    places = grouped(rows, lambda row: (*_place(row, point), *_fault(row, rows)))
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
    style.legend(drawn, looks, hollow=any(row.flag for row in rows))
    text = "Computed on a virtual clock (docs/prediction.md); efficiency: step of one GPU alone / "
    _note(drawn, f"{text}step; dotted: throughput at an efficiency of 1")
    return drawn, style.data(_data(row, rows) for row in rows)


def _place(row: PredictedRow, point: Point) -> tuple[str, ...]:
    workers = f"{row.world_size} workers" if point.axis != "workers" else ""
    network = row.network or ""
    return tuple(
        filter(None, (row.model.partition("@")[0], f"batch {row.batch}", workers, network))
    )


def _fault(row: PredictedRow, rows: Sequence[PredictedRow]) -> tuple[str, ...]:
    """Returns the fault of a row, if any of the rows has one."""
    return (row.fault or "no fault",) if any(each.fault for each in rows) else ()


def _lines(axis: Axes, rows: Sequence[PredictedRow], looks: dict[str, Look], value: Value) -> None:
    for label, points in grouped(rows, lambda row: row.algorithm).items():
        for look, some in (
            (looks[label].curve, [row for row in points if not row.flag]),
            (looks[label].hollow, [row for row in points if row.flag]),
        ):
            curve = [(_x(row), y) for row in some if (y := value(row)) is not None]
            if curve:
                x, y = zip(*sorted(curve), strict=True)
                axis.plot(x, y, **{"lw": 1.2, **look, "markersize": 4.5})


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


def _note(drawn: Figure, text: str) -> None:
    lines = "\n".join(textwrap.wrap(text, 180))
    drawn.supxlabel(lines, fontsize=7, color="#555555", x=0.01, ha="left")


def _named(row: PredictedRow, rows: Sequence[PredictedRow]) -> dict[str, object]:
    """Returns what names a row, its steps and, if any of the rows has one, its fault and flag."""
    names = ["model", "batch", "world_size", "network", "algorithm"]
    names += [name for name in ("fault", "flag") if any(getattr(each, name) for each in rows)]
    names += ["step_s", "step_low_s", "step_high_s", "compute_s"]
    return {name: getattr(row, name) for name in names}


def _data(row: PredictedRow, rows: Sequence[PredictedRow]) -> dict[str, object]:
    panels = {name: value(row) for name, _, value in _PANELS}
    return {"axis": row.point and row.point.axis, "value": _x(row), **_named(row, rows), **panels}
