"""Throughput and efficiency over the number of workers: `python -m plots.scaling SWEEP`."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from plots import lines, style, sweep

TITLE = "Scaling and efficiency over workers"
NEEDS = "an algorithm at two numbers of workers"


fits = partial(lines.fits, free="world_size")


def figure(folder: Path) -> style.Drawn:
    """Draws throughput and efficiency over the number of workers."""
    marks, _ = sweep.load(folder)
    return lines.figure(
        marks,
        "world_size",
        lambda mark: mark.row.world_size,
        lambda workers: f"{workers} worker{'s' if workers > 1 else ''}",
        ("efficiency", "efficiency"),
        "Efficiency: throughput over workers times the single worker's",
    )


draw = style.writer("scaling", figure)

if __name__ == "__main__":
    style.program(fits, NEEDS, draw)
