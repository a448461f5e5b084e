"""Throughput and efficiency over the size of batches: `python -m plots.batches SWEEP`."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from plots import lines, style, sweep

TITLE = "Batch sizes"
NEEDS = "an algorithm at two batch sizes"


fits = partial(lines.fits, free="batch_size")


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
