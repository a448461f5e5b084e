"""Published numbers (configs/published) beside ours, as grouped bars."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from common.paths import CONFIGS
from common.results.records import Record, grouped
from common.virtual.published.study import declared
from plots import style, sweep
from plots.looks import Look
from plots.sweep import Mark

_FOLDER = CONFIGS / "published"
_MODELS = {
    "resnet50": "ResNet-50",
    "resnet101": "ResNet-101",
    "densenet201": "DenseNet-201",
    "inceptionv4": "Inception-v4",
    "bert_base": "BERT-Base",
    "bert": "BERT-Large",
}
# Arguments of a published number's bar; the outline has the colour of the method.
_OUTLINE = {"facecolor": "white", "linewidth": 1.1, "linestyle": (0, (2, 1))}
_DRAWN = ("value", "base", "group", "line", "column", "text")

Bar = dict[str, Any]
"""Bar of a figure, which is also a row of the figure's data.

`method` is the display name; `whose` is `ours` or `published`; `value`, `low` and `high` are the
height and its interval. Optional keys: `group` (label on the x axis), `line` and `column` (position
of the panel), `text` (above the bar), and `base` (the method that the value is relative to).
"""


def read(name: str) -> pd.DataFrame:
    """Reads a file of published numbers; the column `source` says where a row was published."""
    return pd.read_csv(_FOLDER / f"{name}.csv")


def suite() -> pd.DataFrame:
    """Reads the throughputs of ddl-benchmarks, with the number of hosts."""
    table = read("ddl_benchmarks")
    names = {"batch_per_gpu": "batch_size", "samples_per_s_total": "samples_per_s"}
    return table.rename(columns=names).assign(hosts=table["gpus"] // declared().gpus_per_host)


def model(record: Record) -> str:
    """Returns the name of the model in papers; a replayed model has the name of its original."""
    return model_name(record.trial["model"])


def model_name(given: str) -> str:
    """Returns the name in papers of a model of this project."""
    name = given.partition("@")[0]
    return _MODELS.get(name, name)


def network(record: Record) -> str:
    """Returns the name of the network in papers: `10gbe` is 10GbE."""
    return network_name(record.trial.get("network"))


def network_name(given: str | None) -> str:
    """Returns the name in papers of a network of this project."""
    return (given or "this machine").replace("gbe", "GbE").replace("gbib", "GbIB")


def fits(records: Sequence[Record], compared: Callable[[Sequence[Record]], bool]) -> bool:
    """Returns True if valid trials without a fault contain what a paper compares. `compared`
    decides this for the records of a cell (trials that are compared with each other)."""
    calm = [record for record in records if not record.fault]
    return any(map(compared, sweep.variants(calm, "label")))


def panels(
    marks: Sequence[Mark],
    method: Callable[[Record], str | None],
    compared: Callable[[Sequence[Record]], bool],
) -> list[dict[str, Mark]]:
    """Returns the valid marks (trials) by method, for each cell for which `compared` is true. Uses
    only the largest batch size of a cell, and the first variant of a method."""
    valid = [mark for mark in marks if not mark.row.flag and not mark.row.fault]
    chosen: dict[tuple[str, str, int], list[Mark]] = {}
    for panel in sweep.panels(valid):
        row, record = panel[0].row, panel[0].record
        key = (model(record), network(record), row.world_size)
        larger = row.batch_size >= chosen.get(key, panel)[0].row.batch_size
        if larger and compared([mark.record for mark in panel]):
            chosen[key] = panel
    return [
        {name: mark for mark in reversed(panel) if (name := method(mark.record)) is not None}
        for panel in chosen.values()
    ]


def ours(mark: Mark, method: str, value: float, ends: Sequence[float | None] = ()) -> Bar:
    """Returns the bar of a trial; `ends` are the ends of the value's interval."""
    record = mark.record
    low, high = ends or (None, None)
    facts = {"model": model(record), "network": network(record), "method": method}
    facts |= {"whose": "ours", "label": record.label, "workers": record.trial["world_size"]}
    return {**facts, "hosts": record.hosts or None, "value": value, "low": low, "high": high}


def theirs(row: Any, method: str, value: float, **more: Any) -> Bar:
    """Returns the bar of a published number; `row` comes from `DataFrame.itertuples`."""
    names = ("model", "network", "device", "node", "hosts", "source")
    facts = {name: getattr(row, name) for name in names if hasattr(row, name)}
    facts |= {"method": method, "whose": "published", "workers": row.gpus, "value": value}
    return facts | more


def figure(
    bars: Sequence[Bar], looks: Mapping[str, Look], y_label: str, text: str, marks: Sequence[Mark]
) -> Figure:
    """Draws a panel for each `line` and `column` of the bars; published bars are outlines.

    Args:
        looks: looks by method, in the order of bars.
        y_label: label of the y axis; empty: the label names the `base` of the bars.
        text: beginning of the caption, which also says where the marks (trials) were measured.
    """
    shapes = [list(dict.fromkeys(bar.get(key, "") for bar in bars)) for key in ("line", "column")]
    grid = [[_at(bars, line, column) for column in shapes[1]] for line in shapes[0]]
    style.setup(grid="y")
    most = max(len(here) for line in grid for here in line)
    size = (2.0 + len(shapes[1]) * max(2.6, 0.8 + 0.42 * most), 0.7 + 2.9 * len(shapes[0]))
    drawn, axes = plt.subplots(
        len(grid), len(grid[0]), figsize=size, squeeze=False, sharey="row", layout="constrained"
    )
    for axis, here in zip(axes.flat, [here for line in grid for here in line], strict=True):
        axis.set_visible(bool(here))
        if here:
            _panel(axis, here, list(looks), looks)
    for line, here in zip(axes, grid, strict=True):
        line[0].set_ylabel(y_label or f"times {here[0][0]['base']}", fontsize=8)
    shown = [name for name in looks if any(bar["method"] == name for bar in bars)]
    handles = [Patch(**looks[name].bar) for name in shown]
    if any(bar["whose"] == "published" for bar in bars):
        handles.append(Patch(**_OUTLINE, edgecolor="#444444"))
        shown.append("published")
    drawn.legend(handles, shown, loc="outside right upper", frameon=False, fontsize=8)
    if any(mark.row.flag for mark in marks):
        text += "; flagged results are left out"
    style.caption(drawn, text, [mark.record for mark in marks], int(16 * size[0]))
    return drawn


def _at(bars: Sequence[Bar], line: str, column: str) -> list[Bar]:
    return [bar for bar in bars if (bar.get("line", ""), bar.get("column", "")) == (line, column)]


def _panel(
    axis: Axes, bars: Sequence[Bar], order: Sequence[str], looks: Mapping[str, Look]
) -> None:
    ordered = sorted(bars, key=lambda bar: (order.index(bar["method"]), bar["whose"]))
    groups = grouped(ordered, lambda bar: bar.get("group", bar["method"]))
    most = max(map(len, groups.values()))
    names = sorted(groups, key=[bar.get("group", bar["method"]) for bar in bars].index)
    for center, name in enumerate(names):
        for index, bar in enumerate(groups[name]):
            look, value = looks[bar["method"]], bar["value"]
            outline = {**_OUTLINE, "edgecolor": look.colour, "hatch": look.hatch}
            at = center + 0.84 / most * (index - (len(groups[name]) - 1) / 2)
            axis.bar(at, value, 0.77 / most, **(look.bar if bar["whose"] == "ours" else outline))
            style.whisker(axis, at, value, (bar.get("low"), bar.get("high")))
            place = {"ha": "center", "va": "bottom", "fontsize": 7}
            text = bar.get("text", f"{value:.2f}")
            style.write_at(axis, text, (at, bar.get("high") or value), (0, 3), **place)
    axis.set_xticks(range(len(names)), names, fontsize=7)
    axis.set_xlim(-0.55, len(names) - 0.45)
    axis.tick_params(axis="x", length=0)
    axis.margins(y=0.15)
    style.title(axis, ", ".join(filter(None, (bars[0].get("column"), bars[0].get("line")))))


def data(bars: Sequence[Bar], value: str) -> pd.DataFrame:
    """Returns the data of a figure; renames the column of heights to the text in `value`."""
    rows = [{key: item for key, item in bar.items() if key not in _DRAWN} for bar in bars]
    return style.data({**row, value: bar["value"]} for row, bar in zip(rows, bars, strict=True))
