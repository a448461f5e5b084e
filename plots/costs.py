"""What a collective costs by its size, as the trials' bounds and plans assume it:
`python -m plots.costs SWEEP`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas import DataFrame

from common.results import traces
from common.results.records import Record
from dear.cost.collectives import TABLES, table_costs
from dear.cost.fit import AlphaBeta
from plots import style, sweep
from plots.style import Look

TITLE = "What a collective costs: start-up and time per byte"
NEEDS = "fitted costs of collectives"
_OPERATIONS = {
    "all_reduce": Look(colour="#0072B2", marker="o", hatch="", line="-"),
    "reduce_scatter": Look(colour="#D55E00", marker="s", hatch="", line="--"),
    "all_gather": Look(colour="#009E73", marker="^", hatch="", line="-."),
    "exchange": Look(colour="#CC79A7", marker="D", hatch="", line=(0, (2, 1))),
}
_SPARE = Look(colour="#333333", marker="v", hatch="", line=(0, (4, 1, 1, 1)))
_PUBLISHED_FROM = 8
"""Workers; what is published of fewer is of one host, whatever its network."""
_SIZES = [2.0 ** (power / 4) for power in range(40, 113)]
"""In bytes, 1 kB to 256 MB."""


def fits(records: Sequence[Record]) -> bool:
    """Whether the costs of collectives were fitted."""
    return any(one.costs for one in sweep.timed(records))


def draw(folder: Path, out: Path) -> list[Path]:
    """Writes costs.{png,pdf,csv} to `out`, returns the paths."""
    return style.write(figure(folder), out / "costs")


def figure(folder: Path) -> tuple[Figure, DataFrame]:
    """A line for each operation, points for single collectives where a trace is there, and the
    published line where there is one of that network."""
    marks, _ = sweep.load(folder)
    panels: list[tuple[dict[str, AlphaBeta], list[Record]]] = []
    for record in (mark.record for mark in marks if mark.record.costs):
        # Trials of one cell have the same costs: those that one of them has measured.
        same = next((own for known, own in panels if known == record.costs), None)
        if same is None:
            panels.append((record.costs, [record]))
        else:
            same.append(record)
    style.setup()
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    size = (1.2 + 4.6 * columns, 3.9 * lines + 0.5)
    drawn, axes = plt.subplots(lines, columns, figsize=size, squeeze=False, layout="constrained")
    found: list[dict[str, Any]] = []
    for axis, (costs, records) in zip(axes.flat, panels, strict=False):
        found += _panel(axis, costs, records, folder)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    records = [record for _, own in panels for record in own]
    text = "Lines: seconds = start-up + bytes x time per byte, fitted to the whole collective's "
    text += "size; points: single collectives while the model trained, from the last rank's "
    text += "start to the last one's end, the median of each size"
    if not any(mark["kind"] == "traced" for mark in found):
        text += " (no trace lies beside these records)"
    if any(mark["kind"] == "published" for mark in found):
        text += "; dotted: all-reduce of as many GPUs on such a network, as MG-WFBP's and DeAR's "
        text += "programs have it"
    style.caption(drawn, text, records, 65 * columns + 25)
    return drawn, style.data(found)


def _panel(
    axis: Axes, costs: dict[str, AlphaBeta], records: Sequence[Record], folder: Path
) -> list[dict[str, Any]]:
    trial = records[0].trial
    network, world = trial.get("network"), trial["world_size"]
    models = list(dict.fromkeys(one.trial["model"] for one in records))
    known = {"network": network, "world_size": world, "models": " ".join(models)}
    found: list[dict[str, Any]] = []
    points = _traced(records, folder)
    for operation, cost in costs.items():
        look = _OPERATIONS.get(operation, _SPARE)
        label = f"{operation.replace('_', '-')}: {_in_words(cost)}"
        ms = [1e3 * cost(size) for size in _SIZES]
        axis.plot(_SIZES, ms, color=look.colour, ls=look.line, lw=1.4, label=label)
        fitted = {"alpha_s": cost.alpha_s, "beta_s_per_byte": cost.beta_s_per_byte}
        found.append({**known, "operation": operation, "kind": "fitted", **fitted})
        seen = sorted(points.get(operation, {}).items())
        shown = {"marker": look.marker, "ms": 4.5, "mfc": "none", "mec": look.colour}
        axis.plot([n for n, _ in seen], [1e3 * s for _, s in seen], ls="none", **shown)
        found += [
            {**known, "operation": operation, "kind": "traced", "bytes": size, "seconds": seconds}
            for size, seconds in seen
        ]
    if network in TABLES and world >= _PUBLISHED_FROM:
        cost = table_costs(network, world)
        ms = [1e3 * cost(size) for size in _SIZES]
        label = f"published all-reduce: {_in_words(cost)}"
        axis.plot(_SIZES, ms, color="#555555", ls=":", lw=1.4, label=label)
        fitted = {"alpha_s": cost.alpha_s, "beta_s_per_byte": cost.beta_s_per_byte}
        found.append({**known, "operation": "all_reduce", "kind": "published", **fitted})
    axis.set_xscale("log")
    axis.set_yscale("log")
    style.plain_numbers(axis.yaxis)
    sizes = {2.0**10: "1 kB", 2.0**15: "32 kB", 2.0**20: "1 MB", 2.0**25: "32 MB"}
    axis.set_xticks(list(sizes), list(sizes.values()))
    axis.xaxis.set_minor_locator(plt.NullLocator())
    axis.set_xlim(_SIZES[0] / 1.3, _SIZES[-1] * 1.3)
    # Where many tiny ones were traced, one that its peers had waited for took no time of its own.
    axis.set_ylim(bottom=0.3e3 * min(cost.alpha_s or 1e-6 for cost in costs.values()))
    axis.set_xlabel("bytes of the whole buffer", fontsize=8)
    axis.set_ylabel("milliseconds", fontsize=8)
    axis.grid(True, axis="both")
    axis.legend(fontsize=7, frameon=False, loc="upper left", handlelength=3)
    check = next((one.cost_check for one in records if one.cost_check), None)
    about = f"{world} workers" + (f", {network}" if network else "")
    if check is not None:
        about += f"; {check.residual:.0%} off the fit at worst"
    style.title(axis, f"{', '.join(models)}\n{about}")
    return found


def _in_words(cost: AlphaBeta) -> str:
    return f"{1e6 * cost.alpha_s:.3g} us + {1e9 * cost.beta_s_per_byte:.3g} ns per byte"


def _traced(records: Sequence[Record], folder: Path) -> dict[str, dict[int, float]]:
    """Seconds by operation and bytes, where all ranks were on one machine, which has one clock."""
    seconds: dict[str, dict[int, list[float]]] = {}
    for record in records:
        told = traces.evidence(folder, record)
        machines = {one.get("machine") for one in (told or {}).get("pressure") or ()}
        if told is None or len(machines) != 1:
            continue
        calls: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for trace in told["traces"]:
            for one in trace["transfers"]:
                key = (one["operation"], one["group"], one["sequence"], one["nbytes"])
                calls.setdefault(key, []).append(one)
        for (operation, _, _, nbytes), own in calls.items():
            # Those of parts of the ranks have costs of their own.
            if len(own) == len(told["traces"]) and operation in (record.costs or {}):
                began = max(one["started_s"] for one in own)
                took = max(one["finished_s"] for one in own) - began
                at_size = seconds.setdefault(operation, {}).setdefault(nbytes, [])
                at_size.append(took / told["time_scale"])
    return {
        operation: {size: statistics.median(found) for size, found in by_size.items()}
        for operation, by_size in seconds.items()
    }


if __name__ == "__main__":
    style.program(fits, NEEDS, draw, "logs/emulated-quick")
