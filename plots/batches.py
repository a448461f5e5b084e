"""Throughput and efficiency over the size of batches: `python -m plots.batches SWEEP`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from common.results.records import Record
from plots import lines, style, sweep

TITLE = "Batch sizes"
NEEDS = "an algorithm at two batch sizes"


def fits(records: Sequence[Record]) -> bool:
    return lines.fits(records, "batch_size", lambda record: record.trial["batch_size"])


def figure(folder: Path) -> style.Drawn:
    """Draws throughput and efficiency (y) over the samples per worker and step (x)."""
    marks, _ = sweep.load(folder)
    return lines.figure(
        [mark for mark in marks if mark.algorithm != sweep.SINGLE],
        "batch_size",
        lambda mark: mark.row.batch_size,
        lambda size: f"{size} samples",
        ("efficiency", "efficiency"),
        "Efficiency: throughput over workers times the single worker's with the same batch size",
    )


draw = style.writer("batches", figure)

if __name__ == "__main__":
    style.program(fits, NEEDS, draw)
