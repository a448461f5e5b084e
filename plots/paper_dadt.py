"""Figure as in DADT's comparison with Horovod: `python -m plots.paper_dadt SWEEP`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from common.results.records import Record
from plots import published, style, sweep
from plots.looks import LOOKS

TITLE = "DADT's comparison: throughput beside Horovod's"
NEEDS = "Horovod and DADT, both valid, in one cell"
_METHODS = {"horovod": "Horovod", "dadt": "DADT"}


def fits(records: Sequence[Record]) -> bool:
    return published.fits(records, _compared)


def figure(folder: Path) -> style.Drawn:
    """Draws two bars for each model and network: throughput divided by Horovod's. Absolute
    throughputs would compare devices, because the published ones are from GPUs."""
    marks = [mark for mark in sweep.load(folder)[0] if _method(mark.record)]
    bars = []
    for panel in published.panels(marks, _method, _compared):
        base = panel["Horovod"].row.throughput
        for method in _METHODS.values():
            rate = panel[method].row.throughput
            bar = published.ours(panel[method], method, rate / base)
            group = f"{bar['model']}\n{bar['network']}\n{bar['workers']} workers"
            bars.append({**bar, "samples_per_s": rate, "group": group})
    table = published.read("dadt")
    base = table[table["method"] == "Horovod"].set_index("model")["samples_per_s"]
    for row in table.itertuples():
        bar = published.theirs(row, row.method, row.samples_per_s / base[row.model])
        group = f"{row.model}\npublished\n{row.gpus} x {row.device}"
        bars.append({**bar, "samples_per_s": row.samples_per_s, "group": group})
    looks = {name: LOOKS[method] for method, name in _METHODS.items()}
    text = "Solid: ours; outlines: DADT's README (configs/published)"
    drawn = published.figure(bars, looks, "throughput, times Horovod's", text, marks)
    drawn.axes[0].axhline(1.0, color="#777777", lw=1, ls="--")
    return drawn, published.data(bars, "relative")


draw = style.writer("paper_dadt", figure)


def _method(record: Record) -> str | None:
    return _METHODS.get(record.trial["algorithm"])


def _compared(records: Sequence[Record]) -> bool:
    return set(_METHODS.values()) <= set(map(_method, records))


if __name__ == "__main__":
    style.program(fits, NEEDS, draw)
