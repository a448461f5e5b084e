"""Figure as figure 6 of the Decent-DP paper: `python -m plots.paper_decent_dp SWEEP`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from common.results.records import Record
from plots import published, style, sweep
from plots.looks import LOOKS
from plots.published import Bar

TITLE = "Decent-DP's paper: time of an iteration, all-reduce and decentralized"
NEEDS = "DDP and averaging over one-peer-exp or alternating-exp-ring, both valid, in one cell"
_BASE = "All-Reduce"
_LOOKS = {
    _BASE: LOOKS["ddp"],
    "SGP(Exp)": LOOKS["push-sum"],
    "Decent(Exp)": LOOKS["decentralized"],
    "Decent(AER)": LOOKS["neighbor"],
}
_TOPOLOGIES = {"one-peer-exp": "Decent(Exp)", "alternating-exp-ring": "Decent(AER)"}


def fits(records: Sequence[Record]) -> bool:
    return published.fits(records, _compared)


def figure(folder: Path) -> style.Drawn:
    """Draws milliseconds per iteration: the published times in the upper panels, ours below."""
    marks = [mark for mark in sweep.load(folder)[0] if _method(mark.record)]
    bars: list[Bar] = []
    for row in published.read("decent_dp").itertuples():
        bar = published.theirs(row, row.method.replace("AllReduce", _BASE), row.iteration_ms)
        bar["line"] = "published: Transformer, 25 000 tokens in all"
        bars.append({**bar, "group": f"{row.gpus} GPUs, {row.node}\n{row.network}"})
    for panel in published.panels(marks, _method, _compared):
        for method, mark in panel.items():
            row, samples = mark.row, 1e3 * mark.row.batch_size * mark.row.world_size
            ends = [rate and samples / rate for rate in (row.ci_high, row.ci_low)]
            bar = published.ours(mark, method, 1e3 * row.step_s, ends)
            group = f"{bar['model']}, {bar['workers']} workers\n{bar['network']}"
            bars.append({**bar, "group": group, "line": "ours"})
    base = {bar["group"]: bar["value"] for bar in bars if bar["method"] == _BASE}
    for bar in bars:
        bar["text"] = f"{base[bar['group']] / bar['value']:.2f}"
    text = "Numbers over bars: times the speed of all-reduce; ours: all-reduce is DDP, whiskers "
    text += "are 95 % t intervals, a process replaces a GPU; there is no synchronous SGP here; "
    text += "published: configs/published"
    drawn = published.figure(bars, _LOOKS, "milliseconds per iteration", text, marks)
    return drawn, published.data(bars, "iteration_ms")


draw = style.writer("paper_decent_dp", figure)


def _method(record: Record) -> str | None:
    algorithm, options = record.trial["algorithm"], record.trial["options"]
    if algorithm == "ddp" and not options.get("zero"):
        return _BASE
    return _TOPOLOGIES.get(options.get("topology")) if algorithm == "decentralized" else None


def _compared(records: Sequence[Record]) -> bool:
    names = set(map(_method, records))
    return _BASE in names and bool(names & set(_TOPOLOGIES.values()))


if __name__ == "__main__":
    style.program(fits, NEEDS, draw)
