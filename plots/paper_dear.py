"""Figure as in the DeAR paper's comparison: `python -m plots.paper_dear SWEEP`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from common.results.records import Record
from common.results.timed.rows import difference
from plots import published, style, sweep
from plots.looks import LOOKS
from plots.published import Bar
from plots.sweep import Mark

TITLE = "DeAR's paper: speed-up for each model, without and with tensor fusion"
NEEDS = "DeAR and WFBP, or DeAR and Horovod, both valid, in one cell"
_METHODS = {
    "horovod": "Horovod",
    "ddp": "PyTorch-DDP",
    "mgwfbp": "MG-WFBP",
    "wfbp": "WFBP",
    "bytescheduler": "ByteScheduler",
    "dear": "DeAR",
}
_WITHOUT, _WITH = "without tensor fusion", "with tensor fusion"
# Methods of the paper's suite without and with tensor fusion; the first of each is the baseline.
_HALVES = {
    _WITHOUT: ("WFBP", "ByteScheduler", "DeAR"),
    _WITH: ("Horovod", "PyTorch-DDP", "MG-WFBP", "DeAR"),
}


def fits(records: Sequence[Record]) -> bool:
    return any(published.fits(records, partial(_compared, half)) for half in _HALVES)


def figure(folder: Path) -> style.Drawn:
    """Draws speed-ups by model, with a column of panels for each network. Outlined bars are
    published results of the same models and networks."""
    marks, _ = sweep.load(folder)
    bars = _ours(marks, _WITHOUT)
    bars += _theirs(list(dict.fromkeys((bar["model"], bar["network"]) for bar in bars)))
    bars += _ours(marks, _WITH)
    for bar in bars:
        bar |= {"line": bar["half"], "column": bar["network"], "group": bar["model"]}
        bar["base"] = _HALVES[bar["half"]][0]
        if len({bar["workers"] for bar in bars if bar["whose"] == "ours"}) > 1:
            bar["group"] += f"\n{bar['workers']} workers"
    looks = {name: LOOKS[method] for method, name in _METHODS.items()}
    drawn = published.figure(bars, looks, "", _caption(bars, marks), marks)
    for axis in drawn.axes:
        axis.axhline(1.0, color="#777777", lw=1, ls="--")
    return drawn, published.data(bars, "speedup")


draw = style.writer("paper_dear", figure)


def _method(half: str, record: Record) -> str | None:
    """Returns the name of a record's method; None if the half (without or with fusion) lacks it."""
    options = record.trial["options"]
    name = _METHODS.get(record.trial["algorithm"])
    if name not in _HALVES[half] or options.get("compression", "none") != "none":
        return None
    fused = options.get("fusion") != "none"
    return None if name == "DeAR" and fused != (half == _WITH) else name


def _compared(half: str, records: Sequence[Record]) -> bool:
    return {_HALVES[half][0], "DeAR"} <= {_method(half, record) for record in records}


def _ours(marks: Sequence[Mark], half: str) -> list[Bar]:
    bars = []
    method, compared = partial(_method, half), partial(_compared, half)
    baseline = _HALVES[half][0]
    for panel in published.panels(marks, method, compared):
        for name, mark in panel.items():
            bar = published.ours(mark, name, 1.0)
            if name != baseline:
                ratio = difference(mark.record, panel[baseline].record).ratio
                bar |= {"value": ratio.value, "low": ratio.low, "high": ratio.high}
            bars.append({"half": half, **bar})
    return bars


def _theirs(cells: Sequence[tuple[str, str]]) -> list[Bar]:
    """Returns published speed-ups over WFBP; with tensor fusion, no baseline is published."""
    table = published.suite()
    table["method"] = table["method"].str.removesuffix("-A2A")
    bars = []
    for model, network in cells:
        here = table[(table["model"] == model) & (table["network"] == network)]
        here = here[(here["gpus"] == here["gpus"].max()) & here["method"].isin(_HALVES[_WITHOUT])]
        for row in here.itertuples():
            base = here[here["method"] == "WFBP"]["samples_per_s"].iloc[0]
            bar = published.theirs(row, row.method, row.samples_per_s / base)
            bars.append({"half": _WITHOUT, **bar})
    return bars


def _caption(bars: Sequence[Bar], marks: Sequence[Mark]) -> str:
    workers = style.count(bar["workers"] for bar in bars if bar["whose"] == "ours")
    text = f"Solid: ours, {workers} workers, {sweep.sample_size(marks)}; "
    text += "whiskers: 95 % t interval"
    theirs = next((bar for bar in bars if bar["whose"] == "published"), None)
    if theirs:
        text += f"; outlines: ddl-benchmarks, {theirs['workers']} GPUs on "
        text += f"{theirs['hosts']} hosts (configs/published)"
    claims = published.read("dear")
    claims = claims[claims["network"].isin([bar["network"] for bar in bars])]
    if len(claims):
        most = [f"{row.speedup_at_most:.2f} on {row.network}" for row in claims.itertuples()]
        text += f"; the paper claims for DeAR up to {' and '.join(most)} over the best of the "
        text += f"others, {claims['gpus'].iloc[0]} GPUs"
    return text


if __name__ == "__main__":
    style.program(fits, NEEDS, draw)
