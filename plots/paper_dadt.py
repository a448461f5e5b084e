"""DADT's comparison with Horovod, in its form: `python -m plots.paper_dadt SWEEP`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from pandas import DataFrame

from common.results.records import Record
from plots import published, style, sweep

TITLE = "DADT's comparison: throughput beside Horovod's"
NEEDS = "Horovod and DADT believed in one place"
_METHODS = {"horovod": "Horovod", "dadt": "DADT"}


def fits(records: Sequence[Record]) -> bool:
    """Whether both were believed in one place."""
    return published.fits(records, _compared)


def draw(folder: Path, out: Path) -> list[Path]:
    """Writes paper_dadt.{png,pdf,csv} to `out`, returns the paths."""
    return style.write(figure(folder), out / "paper_dadt")


def figure(folder: Path) -> tuple[Figure, DataFrame]:
    """Two bars for each model and network, relative to Horovod since devices differ; published
    ones are outlines. The data have samples per second, too."""
    marks, _ = sweep.load(folder)
    groups: dict[str, list[dict[str, Any]]] = {}
    for panel in published.panels(marks, _compared, each_world=True):
        own = {mark.algorithm: mark for mark in reversed(panel)}  # of variants the first
        record = own["dadt"].record
        name = f"{published.model(record)}\n{published.network(record)}\n"
        name += f"{record.trial['world_size']} workers"
        base = own["horovod"].row.throughput
        groups[name] = [
            {"method": key, "whose": "ours", "samples_per_s": own[key].row.throughput,
             "relative": own[key].row.throughput / base} for key in _METHODS
        ]  # fmt: skip
    table = published.read("dadt")
    for (model, device, gpus), rows in table.groupby(["model", "device", "gpus"], sort=False):
        rates = dict(zip(rows["method"], rows["samples_per_s"], strict=True))
        groups[f"{model}\npublished\n{gpus} x {device}"] = [
            {"method": key, "whose": "published", "samples_per_s": rates[name],
             "relative": rates[name] / rates["Horovod"], "source": rows["source"].iloc[0]}
            for key, name in _METHODS.items()
        ]  # fmt: skip
    style.setup()
    plt.rcParams["axes.grid.axis"] = "y"
    size = (1.8 + 1.15 * len(groups), 3.4)
    drawn, axis = plt.subplots(figsize=size, layout="constrained")
    for number, bars in enumerate(groups.values()):
        for place, one in enumerate(bars):
            look = style.LOOKS[one["method"]]
            shown = published.bar(look) if one["whose"] == "published" else look.bar
            at = number + 0.38 * (place - 0.5)
            axis.bar(at, one["relative"], 0.35, **shown)
            near = {"xytext": (0, 2), "textcoords": "offset points", "ha": "center"}
            axis.annotate(f"{one['relative']:.2f}", (at, one["relative"]), fontsize=8, **near)
    axis.axhline(1.0, color="#777777", lw=1, ls="--")
    axis.set_xticks(range(len(groups)), groups, fontsize=8)
    axis.tick_params(axis="x", length=0)
    axis.set_ylabel("throughput, times Horovod's", fontsize=8)
    axis.margins(y=0.14)
    published.legend(drawn, _METHODS, True)
    used = [mark.record for mark in marks if mark.algorithm in _METHODS]
    text = "Solid: ours; outlines: DADT's README (configs/published)"
    text += "; what is not believed is left out" if style.doubts(used) else ""
    style.caption(drawn, text, used, 100)
    return drawn, style.data(
        {"group": name.replace("\n", ", "), **one} for name, bars in groups.items() for one in bars
    )


def _compared(records: Sequence[Record]) -> bool:
    return set(_METHODS) <= {one.trial["algorithm"] for one in records}


if __name__ == "__main__":
    style.program(fits, NEEDS, draw, "logs/delayed")
