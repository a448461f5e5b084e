"""The published throughput of ddl-benchmarks, the suite that DeAR's grew from, beside ours:
`python -m plots.paper_suite SWEEP`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas import DataFrame

from common.results.records import Record
from plots import published, style, sweep
from plots.sweep import Mark

TITLE = "DeAR's parent suite: throughput of a worker, published and ours"
NEEDS = "a model, batch size, network and method that ddl-benchmarks has published"
_METHODS = {
    "allreduce": ("BSP-A2A", "BSP"),
    "wfbp": ("WFBP-A2A", "WFBP"),
    "mgwfbp": ("MG-WFBP", "MG-WFBP"),
    "bytescheduler": ("ByteScheduler-A2A", "ByteScheduler"),
}
"""Ours, what its table calls it, and what figures do."""
_DEVICE, _SENTENCE_LEN = "rtx2080ti", 64
"""On which it is published."""


def fits(records: Sequence[Record]) -> bool:
    """Whether two believed methods were measured where they have been published."""
    return published.fits(records, _compared)


def draw(folder: Path, out: Path) -> list[Path]:
    """Writes paper_suite.{png,pdf,csv} to `out`, returns the paths."""
    return style.write(figure(folder), out / "paper_suite")


def figure(folder: Path) -> tuple[Figure, DataFrame]:
    """Two bars for each method, a panel for each model and network.
    The data have samples per second and worker of both."""
    marks, _ = sweep.load(folder)
    panels = [
        [mark for mark in panel if _method(mark.record)]
        for panel in published.panels(marks, _compared, each_world=True)
    ]
    style.setup()
    plt.rcParams["axes.grid.axis"] = "y"
    size = (2.0 + 3.1 * len(panels), 3.6)
    drawn, axes = plt.subplots(1, len(panels), figsize=size, squeeze=False, layout="constrained")
    found: list[dict[str, Any]] = []
    for axis, panel in zip(axes[0], panels, strict=True):
        found += _panel(axis, panel)
    published.legend(drawn, {key: name for key, (_, name) in _METHODS.items()}, True)
    used = [mark for panel in panels for mark in panel]
    theirs = [one for one in found if one["whose"] == "published"]
    text = f"Solid: ours, {sweep.told(used)}; outlines: ddl-benchmarks, "
    text += f"{style.count(one['workers'] for one in theirs)} GPUs, 4 on each host "
    text += "(configs/published); whiskers: 95 % t interval, of theirs 2 standard deviations"
    if any(mark.row.doubt for mark in marks if _method(mark.record)):
        text += "; what is not believed is left out"
    style.caption(drawn, text, [mark.record for mark in used], 40 + 42 * len(panels))
    return drawn, style.data(found)


def _method(record: Record) -> str | None:
    """Which method of the table a trial is, if the table has its model, batch size and network."""
    name, options = record.trial["algorithm"], record.trial["options"]
    if name not in _METHODS or options.get("compression", "none") != "none":
        return None
    return None if _rows(record).empty else name


def _compared(records: Sequence[Record]) -> bool:
    return len({_method(one) for one in records} - {None}) > 1


def _rows(record: Record) -> DataFrame:
    """Of the table: the same model, batch size and network, if its GPU is the one replayed."""
    table, trial = published.read("ddl_benchmarks"), record.trial
    if not trial["model"].partition("@")[2].startswith(_DEVICE):
        return table[:0]
    if trial.get("sentence_len") not in (None, _SENTENCE_LEN):
        return table[:0]
    same = table["model"] == published.model(record)
    same &= table["batch_size"] == trial["batch_size"]
    return table[same & (table["network"] == published.network(record))]


def _panel(axis: Axes, panel: Sequence[Mark]) -> list[dict[str, Any]]:
    own: dict[str, Mark] = {}
    for mark in panel:  # of variants the first
        own.setdefault(mark.algorithm, mark)
    record = panel[0].record
    table = _rows(record)
    # As many hosts as ours where they had so many, else their most.
    hosts = record.hosts if record.hosts in set(table["hosts"]) else table["hosts"].max()
    table = table[table["hosts"] == hosts]
    found = []
    known = {"model": published.model(record), "network": published.network(record)}
    for place, (method, (called, _)) in enumerate(_METHODS.items()):
        look = style.LOOKS[method]
        if method in own:
            row = own[method].row
            shares = [value and value / row.world_size for value in (row.ci_low, row.ci_high)]
            rate = row.throughput / row.world_size
            _bar(axis, place - 0.2, rate, *shares, look.bar)
            one = {**known, "method": method, "whose": "ours", "label": row.algorithm}
            one |= {"workers": row.world_size, "hosts": record.hosts or None}
            found.append({**one, "rate": rate, "low": shares[0], "high": shares[1]})
        for row in table[table["method"] == called].itertuples():
            rate, spread = row.samples_per_s / row.gpus, 2 * row.std / row.gpus
            _bar(axis, place + 0.2, rate, rate - spread, rate + spread, published.bar(look))
            one = {**known, "method": method, "whose": "published", "workers": row.gpus}
            one |= {"hosts": row.hosts, "rate": rate, "low": rate - spread, "high": rate + spread}
            found.append({**one, "source": row.source})
    axis.set_xticks(range(len(_METHODS)), [name for _, name in _METHODS.values()], fontsize=7)
    axis.tick_params(axis="x", length=0)
    axis.set_ylabel(f"{panel[0].row.unit} of one worker", fontsize=8)
    axis.margins(y=0.12)
    ours, theirs = panel[0].row.world_size, table["gpus"].iloc[0]
    title = f"{known['model']}, {known['network']}\n{ours} workers; {theirs} GPUs on {hosts} hosts"
    style.title(axis, title)
    return found


def _bar(
    axis: Axes, at: float, rate: float, low: float | None, high: float | None, look: dict[str, Any]
) -> None:
    axis.bar(at, rate, 0.37, **look)
    if low is not None and high is not None:
        error = [[rate - low], [high - rate]]
        axis.errorbar(at, rate, yerr=error, color="#222222", capsize=1.5, lw=0.8)
    near = {"xytext": (0, 3), "textcoords": "offset points", "ha": "center", "fontsize": 7}
    axis.annotate(f"{rate:.0f}", (at, max(rate, high or rate)), **near)


if __name__ == "__main__":
    style.program(fits, NEEDS, draw, "logs/emulated")
