"""The DeAR paper's comparison, in its form: `python -m plots.paper_dear SWEEP`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas import DataFrame

from common.results.records import Record
from common.results.rows import difference
from plots import published, style, sweep
from plots.sweep import Mark

TITLE = "DeAR's paper: speed-up for each model, without and with tensor fusion"
NEEDS = "DeAR and WFBP, or DeAR and Horovod, believed in one place"
# As its suite runs them: what each half is relative to comes first.
_WITHOUT = {"wfbp": "WFBP", "bytescheduler": "ByteScheduler", "dear": "DeAR"}
_WITH = {"horovod": "Horovod", "ddp": "PyTorch-DDP", "mgwfbp": "MG-WFBP", "dear": "DeAR"}
_HALVES = {"without tensor fusion": _WITHOUT, "with tensor fusion": _WITH}
_PUBLISHED = {"WFBP-A2A": "wfbp", "ByteScheduler-A2A": "bytescheduler", "MG-WFBP": "mgwfbp"}


def fits(records: Sequence[Record]) -> bool:
    """Whether DeAR was believed beside what one half of the figure is relative to."""
    return any(published.fits(records, partial(_compared, half)) for half in _HALVES)


def draw(folder: Path, out: Path) -> list[Path]:
    """Writes paper_dear.{png,pdf,csv} to `out`, returns the paths."""
    return style.write(figure(folder), out / "paper_dear")


def figure(folder: Path) -> tuple[Figure, DataFrame]:
    """Bars by model, a column for each network; published ones of the same model and network are
    outlines. The data have ours and theirs."""
    marks, _ = sweep.load(folder)
    found = []
    for half in _HALVES:
        ours = _ours(marks, half)
        places = dict.fromkeys((one["model"], one["network"]) for one in ours)
        found += [{"half": half, **one} for one in [*ours, *_theirs(places, half)]]
    halves = list(dict.fromkeys(one["half"] for one in found))
    networks = list(dict.fromkeys(one["network"] for one in found))
    style.setup()
    plt.rcParams["axes.grid.axis"] = "y"
    models = list(dict.fromkeys(one["model"] for one in found))
    drawn, axes = plt.subplots(
        *(len(halves), len(networks)),
        figsize=(2.4 + len(networks) * (1.2 + 1.5 * len(models)), 2.9 * len(halves) + 0.7),
        squeeze=False,
        sharey="row",
        layout="constrained",
    )
    for row, half in zip(axes, halves, strict=True):
        for axis, network in zip(row, networks, strict=True):
            here = [o for o in found if o["half"] == half and o["network"] == network]
            _panel(axis, here, models, list(_HALVES[half]))
            style.title(axis, f"{network}, {half}")
        row[0].set_ylabel(f"times {next(iter(_HALVES[half].values()))}", fontsize=8)
    shown = {one["method"] for one in found}
    names = {k: name for half in halves for k, name in _HALVES[half].items() if k in shown}
    published.legend(drawn, names, any(one["whose"] == "published" for one in found))
    style.caption(drawn, _about(found, marks), [mark.record for mark in marks], 140)
    return drawn, style.data(found)


def _method(record: Record, half: str) -> str | None:
    """Which bar of a half a trial is; None if it belongs to none."""
    name, options = record.trial["algorithm"], record.trial["options"]
    if name not in _HALVES[half] or options.get("compression", "none") != "none":
        return None
    if name == "dear" and (options.get("fusion") == "none") != (half == "without tensor fusion"):
        return None
    return name


def _compared(half: str, records: Sequence[Record]) -> bool:
    names = [_method(one, half) for one in records]
    return next(iter(_HALVES[half])) in names and "dear" in names


def _ours(marks: Sequence[Mark], half: str) -> list[dict[str, Any]]:
    """Of variants of one method the first: DeAR's own with its default, MG-WFBP's own merging."""
    base_name = next(iter(_HALVES[half]))
    found = []
    for panel in published.panels(marks, partial(_compared, half), each_world=False):
        own: dict[str, Mark] = {}
        for mark in panel:
            method = _method(mark.record, half)
            if method is not None:
                own.setdefault(method, mark)
        base = own[base_name]
        for method in _HALVES[half]:
            if method in own:
                record = own[method].record
                ratio = difference(record, base.record).ratio
                known = {"model": published.model(record), "network": published.network(record)}
                known |= {"method": method, "whose": "ours", "label": record.label}
                known |= {"workers": record.trial["world_size"], "hosts": record.hosts or None}
                alone = method == base_name
                ends = {"low": None, "high": None} if alone else vars(ratio)
                known |= {"speedup": 1.0 if alone else ratio.value}
                found.append({**known, "low": ends["low"], "high": ends["high"]})
    return found


def _theirs(places: Iterable[tuple[str, str]], half: str) -> list[dict[str, Any]]:
    """Published speed-ups over the same base, of these models and networks."""
    if half == "with tensor fusion":  # of these methods only MG-WFBP is published, without its base
        return []
    table = published.read("ddl_benchmarks")
    found = []
    for model, network in places:
        here = table[(table["model"] == model) & (table["network"] == network)]
        here = here[here["gpus"] == here["gpus"].max()]
        rates = {_PUBLISHED.get(row.method): row for row in here.itertuples()}
        for method in _HALVES[half]:
            if method in rates and "wfbp" in rates:
                row = rates[method]
                known = {"model": model, "network": network, "method": method}
                known |= {"whose": "published", "workers": row.gpus, "hosts": row.hosts}
                speedup = row.samples_per_s / rates["wfbp"].samples_per_s
                found.append({**known, "speedup": speedup, "source": row.source})
    return found


def _panel(
    axis: Axes, here: Sequence[dict[str, Any]], models: Sequence[str], methods: Sequence[str]
) -> None:
    axis.axhline(1.0, color="#777777", lw=1, ls="--")
    kinds = dict.fromkeys((one["method"], one["whose"]) for one in here)
    bars = [(method, whose) for method in methods for whose in ("ours", "published")]
    bars = [bar for bar in bars if bar in kinds]
    width = 0.86 / max(1, len(bars))
    for one in here:
        number = bars.index((one["method"], one["whose"]))
        at = models.index(one["model"]) + width * (number - (len(bars) - 1) / 2)
        look = style.LOOKS[one["method"]]
        shown = published.bar(look) if one["whose"] == "published" else look.bar
        axis.bar(at, one["speedup"], width * 0.92, **shown)
        top = one["speedup"]
        if one.get("low") is not None:
            error = [[one["speedup"] - one["low"]], [one["high"] - one["speedup"]]]
            axis.errorbar(at, one["speedup"], yerr=error, color="#222222", capsize=1.5, lw=0.8)
            top = one["high"]
        near = {"xytext": (0, 3), "textcoords": "offset points", "ha": "center", "va": "bottom"}
        turned = 90 if len(bars) > 3 else 0
        axis.annotate(f"{one['speedup']:.2f}", (at, top), fontsize=7, rotation=turned, **near)
    axis.set_xticks(range(len(models)), models)
    axis.set_xlim(-0.55, len(models) - 0.45)
    axis.tick_params(axis="x", length=0)
    axis.margins(y=0.16)


def _about(found: Sequence[dict[str, Any]], marks: Sequence[Mark]) -> str:
    ours = [one for one in found if one["whose"] == "ours"]
    text = f"Solid: ours, {style.count(one['workers'] for one in ours)} workers, "
    text += f"{sweep.told(marks)}; whiskers: 95 % t interval"
    theirs = [one for one in found if one["whose"] == "published"]
    if theirs:
        text += f"; outlines: ddl-benchmarks, {theirs[0]['workers']} GPUs on "
        text += f"{theirs[0]['hosts']} hosts (configs/published)"
    claims = published.read("dear")
    said = [
        f"{row.speedup_at_most:.2f} on {row.network}"
        for row in claims.itertuples()
        if row.network in {one["network"] for one in found}
    ]
    if said:
        text += f"; the paper claims for DeAR up to {' and '.join(said)} over the best of the "
        text += f"others, {claims['gpus'].iloc[0]} GPUs"
    return text


if __name__ == "__main__":
    style.program(fits, NEEDS, draw, "logs/suite")
