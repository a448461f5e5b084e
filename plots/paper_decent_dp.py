"""Figure 6 of the Decent-DP paper, in its form: `python -m plots.paper_decent_dp SWEEP`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from pandas import DataFrame

from common.results.records import Record
from plots import published, style, sweep
from plots.style import Look
from plots.sweep import Mark

TITLE = "Decent-DP's paper: time of an iteration, all-reduce and decentralized"
NEEDS = "DDP and averaging over one-peer-exp or alternating-exp-ring, believed in one place"
_METHODS = {
    "All-Reduce": style.LOOKS["ddp"],
    "SGP(Exp)": style.LOOKS["push-sum"],
    "Decent(Exp)": style.LOOKS["decentralized"],
    "Decent(AER)": style.LOOKS["neighbor"],
}
_TOPOLOGIES = {"one-peer-exp": "Decent(Exp)", "alternating-exp-ring": "Decent(AER)"}


def fits(records: Sequence[Record]) -> bool:
    """Whether both kinds were believed in one place."""
    return published.fits(records, _compared)


def draw(folder: Path, out: Path) -> list[Path]:
    """Writes paper_decent_dp.{png,pdf,csv} to `out`, returns the paths."""
    return style.write(figure(folder), out / "paper_decent_dp")


def figure(folder: Path) -> tuple[Figure, DataFrame]:
    """Above theirs, below ours: milliseconds, and over each bar how many times all-reduce's speed.
    The data have both."""
    marks, _ = sweep.load(folder)
    theirs, ours = _theirs(), _ours(marks)
    groups = max(len({one["group"] for one in side}) for side in (theirs, ours))
    style.setup()
    plt.rcParams["axes.grid.axis"] = "y"
    size = (2.0 + 1.75 * groups, 6.0)
    drawn, axes = plt.subplots(2, 1, figsize=size, layout="constrained")
    _panel(axes[0], theirs, published.bar)
    style.title(axes[0], "published: Transformer, 25 000 tokens in all")
    _panel(axes[1], ours, lambda look: look.bar)
    style.title(axes[1], "ours")
    handles = [Patch(**look.bar) for look in _METHODS.values()]
    place = {"loc": "outside right upper", "frameon": False, "fontsize": 8}
    drawn.legend(handles, list(_METHODS), **place)
    used = [mark.record for mark in marks if _method(mark.record) is not None]
    text = "Numbers over bars: times the speed of all-reduce; ours: all-reduce is DDP, whiskers "
    text += "are 95 % t intervals, one process stands for a GPU; SGP in step is not among "
    text += "our algorithms; published: configs/published"
    left_out = any(mark.row.doubt for mark in marks if _method(mark.record))
    text += "; what is not believed is left out" if left_out else ""
    style.caption(drawn, text, used, 30 + 20 * groups)
    return drawn, style.data([*theirs, *ours])


def _method(record: Record) -> str | None:
    if record.trial["algorithm"] == "ddp" and not record.trial["options"].get("zero"):
        return "All-Reduce"
    if record.trial["algorithm"] == "decentralized":
        return _TOPOLOGIES.get(record.trial["options"].get("topology"))
    return None


def _compared(records: Sequence[Record]) -> bool:
    names = {_method(one) for one in records}
    return "All-Reduce" in names and bool(names & set(_TOPOLOGIES.values()))


def _theirs() -> list[dict[str, Any]]:
    names = {"AllReduce": "All-Reduce"}
    return [
        {
            "whose": "published",
            "group": f"{row.gpus} GPUs, {row.node}\n{row.network}",
            "method": names.get(row.method, row.method),
            "iteration_ms": row.iteration_ms,
            "source": row.source,
        }
        for row in published.read("decent_dp").itertuples()
    ]


def _ours(marks: Sequence[Mark]) -> list[dict[str, Any]]:
    found = []
    for panel in published.panels(marks, _compared, each_world=True):
        own: dict[str, Mark] = {}
        for mark in panel:
            method = _method(mark.record)
            if method is not None:
                own.setdefault(method, mark)
        for method in _METHODS:
            if method in own:
                row, record = own[method].row, own[method].record
                ends = {"low_ms": None, "high_ms": None}
                if row.ci_low is not None:
                    samples = row.batch_size * row.world_size
                    ends = {"low_ms": 1e3 * samples / row.ci_high}
                    ends["high_ms"] = 1e3 * samples / row.ci_low
                group = f"{published.model(record)}, {row.world_size} workers\n"
                group += published.network(record)
                known = {"whose": "ours", "group": group, "method": method}
                found.append({**known, "iteration_ms": 1e3 * row.step_s, **ends})
    return found


def _panel(axis: Axes, bars: Sequence[dict[str, Any]], shown: Any) -> None:
    groups = list(dict.fromkeys(one["group"] for one in bars))
    methods = [method for method in _METHODS if any(one["method"] == method for one in bars)]
    width = 0.84 / len(methods)
    bases = {o["group"]: o["iteration_ms"] for o in bars if o["method"] == "All-Reduce"}
    for one in bars:
        look: Look = _METHODS[one["method"]]
        aside = methods.index(one["method"]) - (len(methods) - 1) / 2
        at, top = groups.index(one["group"]) + width * aside, one["iteration_ms"]
        axis.bar(at, top, width * 0.92, **shown(look))
        if one.get("low_ms") is not None:
            error = [[top - one["low_ms"]], [one["high_ms"] - top]]
            axis.errorbar(at, top, yerr=error, color="#222222", capsize=1.5, lw=0.8)
            top = one["high_ms"]
        near = {"xytext": (0, 2), "textcoords": "offset points", "ha": "center", "fontsize": 7}
        axis.annotate(f"{bases[one['group']] / one['iteration_ms']:.2f}", (at, top), **near)
    axis.set_xticks(range(len(groups)), groups, fontsize=7)
    axis.tick_params(axis="x", length=0)
    axis.set_ylabel("milliseconds per iteration", fontsize=8)
    axis.margins(y=0.12)


if __name__ == "__main__":
    style.program(fits, NEEDS, draw, "logs/decentralized")
