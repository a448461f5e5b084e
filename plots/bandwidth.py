"""Throughput and speed-up over networks of different bandwidths: `python -m plots.bandwidth`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from common.results.records import Record
from plots import lines, style, sweep

TITLE = "Bandwidth ladder"
NEEDS = "an algorithm on networks of two bandwidths"


def fits(records: Sequence[Record]) -> bool:
    return lines.fits(records, "network", _gbps)


def figure(folder: Path) -> style.Drawn:
    """Draws throughput and speed-up (y) over networks (x, from slow to fast)."""
    marks, compare_to = sweep.load(folder)
    marks = [mark for mark in marks if _gbps(mark.record) and mark.algorithm != sweep.SINGLE]
    drawn, table = lines.figure(
        marks,
        "network",
        lambda mark: (_gbps(mark.record), mark.row.network),
        lambda step: f"{step[1]}\n{step[0]:g} Gb/s",
        ("speedup", f"times the speed of {compare_to}"),
        "Links from slow to fast, evenly spaced",
    )
    return drawn, table.assign(gbps=[_gbps(mark.record) for mark in marks])


draw = style.writer("bandwidth", figure)


def _gbps(record: Record) -> float | None:
    return (record.fabric.network.requested or {}).get("gbps")


if __name__ == "__main__":
    style.program(fits, NEEDS, draw)
