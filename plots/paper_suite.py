"""Published throughput of ddl-benchmarks (the suite that DeAR's stems from) beside ours:
`python -m plots.paper_suite SWEEP`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pandas import DataFrame

from common.results.records import Record
from plots import published, style, sweep
from plots.looks import LOOKS
from plots.published import Bar
from plots.sweep import Mark

TITLE = "DeAR's parent suite: throughput of a worker, published and ours"
NEEDS = "a model, batch size, network and method that ddl-benchmarks has published"
_METHODS = {
    "allreduce": "BSP",
    "wfbp": "WFBP",
    "mgwfbp": "MG-WFBP",
    "bytescheduler": "ByteScheduler",
}
# Device and sentence length of the published numbers.
_DEVICE, _SENTENCE_LEN = "rtx2080ti", 64


def fits(records: Sequence[Record]) -> bool:
    return published.fits(records, _compared)


def figure(folder: Path) -> style.Drawn:
    """Draws a published bar and ours for each method, in a panel for each model and network."""
    marks = [mark for mark in sweep.load(folder)[0] if _method(mark.record)]
    panels = published.panels(marks, _method, _compared)
    bars = [bar for panel in panels for bar in _bars(panel)]
    used = [mark for panel in panels for mark in panel.values()]
    gpus = style.count(bar["workers"] for bar in bars if bar["whose"] == "published")
    text = f"Solid: ours, {sweep.sample_size(used)}; outlines: ddl-benchmarks, {gpus} GPUs, 4 on "
    text += "each host (configs/published); whiskers: 95 % t interval, 2 standard deviations of "
    text += "the published values"
    looks = {name: LOOKS[method] for method, name in _METHODS.items()}
    unit, *others = dict.fromkeys(mark.row.unit for mark in used)
    label = f"{'samples/s' if others else unit} of one worker"
    drawn = published.figure(bars, looks, label, text, marks)
    return drawn, published.data(bars, "rate")


draw = style.writer("paper_suite", figure)


def _method(record: Record) -> str | None:
    """Returns a record's method; None if it is not published for the model, batch and network."""
    plain = record.trial["options"].get("compression", "none") == "none"
    name = _METHODS.get(record.trial["algorithm"]) if plain else None
    return None if name is None or _table(record).empty else name


def _compared(records: Sequence[Record]) -> bool:
    return len(set(map(_method, records)) - {None}) > 1


def _table(record: Record) -> DataFrame:
    table, trial = published.suite(), record.trial
    device = trial["model"].partition("@")[2]
    if not device.startswith(_DEVICE) or trial.get("sentence_len") not in (None, _SENTENCE_LEN):
        return table[:0]
    same = table["model"] == published.model(record)
    same &= table["batch_size"] == trial["batch_size"]
    return table[same & (table["network"] == published.network(record))]


def _bars(panel: dict[str, Mark]) -> list[Bar]:
    first = next(iter(panel.values())).record
    table, workers = _table(first), first.trial["world_size"]
    # Published numbers for our number of hosts are used, or else those for the most hosts.
    hosts = first.hosts if first.hosts in set(table["hosts"]) else table["hosts"].max()
    bars = []
    for method, mark in panel.items():
        ends = [rate and rate / workers for rate in (mark.row.ci_low, mark.row.ci_high)]
        bars.append(published.ours(mark, method, mark.row.throughput / workers, ends))
    for row in table[table["hosts"] == hosts].itertuples():
        rate, spread = row.samples_per_s / row.gpus, 2 * row.std / row.gpus
        bar = published.theirs(row, row.method.removesuffix("-A2A"), rate)
        bars.append({**bar, "low": rate - spread, "high": rate + spread})
    bars.sort(key=lambda bar: list(_METHODS.values()).index(bar["method"]))
    title = f"{published.model(first)}, {published.network(first)}\n{workers} workers; "
    title += f"{table[table['hosts'] == hosts]['gpus'].iloc[0]} GPUs on {hosts} hosts"
    return [{**bar, "column": title, "text": f"{bar['value']:.0f}"} for bar in bars]


if __name__ == "__main__":
    style.program(fits, NEEDS, draw)
