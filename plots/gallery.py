"""All figures that a sweep has the data for: `python -m plots.gallery SWEEP`."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from common.results.store import Comparison
from plots import (
    bandwidth,
    breakdown,
    learning,
    paper_dadt,
    paper_dear,
    paper_decent_dp,
    paper_suite,
    scaling,
    speedup,
    style,
    throughput,
)

FIGURES: tuple[ModuleType, ...] = (
    throughput,
    speedup,
    scaling,
    bandwidth,
    breakdown,
    learning,
    paper_dear,
    paper_suite,
    paper_dadt,
    paper_decent_dp,
)
"""In the order of a report. Each has `TITLE`, `NEEDS` (what `fits` asks for, in a few words),
`fits`, `figure` and `draw`."""


def fitting(folder: Path) -> list[ModuleType]:
    """Those that a sweep's records have the data for; raises `UserError` if it is no sweep."""
    records = Comparison.load(folder).results(folder)
    return [one for one in FIGURES if one.fits(records)]


def name(module: ModuleType) -> str:
    """Of a figure, and of its files."""
    return module.__name__.rpartition(".")[2]


def draw(folder: Path, out: Path) -> list[Path]:
    """Writes all that fit to `out`, returns the paths."""
    return [path for one in fitting(folder) for path in one.draw(folder, out)]


def announced(folder: Path, out: Path) -> list[Path]:
    """The same, and says what did not fit and why."""
    found = fitting(folder)
    for one in FIGURES:
        if one not in found:
            print(f"no {name(one)}: it needs {one.NEEDS}")
    return draw(folder, out)


if __name__ == "__main__":
    style.program(bool, "a trial that has ended", announced, "logs/quick")
