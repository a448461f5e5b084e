"""All figures that a sweep has the data for: `python -m plots.gallery SWEEP`."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from common.results.records import Record, is_learning
from common.results.store import Comparison
from plots import batches, learning, scaling, style, throughput

_GENERAL = ("throughput", "speedup", "scaling", "batches", "bandwidth", "breakdown", "learning")
_PAPERS = ("paper_dear", "paper_suite", "paper_dadt", "paper_decent_dp")
FIGURES = tuple(importlib.import_module(f"{__package__}.{name}") for name in _GENERAL + _PAPERS)
"""Modules of the figures, in the order of a report. Each has `TITLE`, `NEEDS` (what a sweep must
contain, in a few words), `fits` (whether it does), `figure` and `draw`."""


def fitting(folder: Path) -> list[ModuleType]:
    """Returns the figures that a sweep has the data for. Raises `UserError` if the folder is no
    sweep."""
    records = Comparison.load(folder).results(folder)
    return [module for module in FIGURES if module.fits(records)]


def main_figure(records: Sequence[Record]) -> ModuleType:
    """Returns the figure that is drawn at the end of a sweep."""
    if is_learning(records):
        return learning
    return next((module for module in (scaling, batches) if module.fits(records)), throughput)


def name(module: ModuleType) -> str:
    """Returns the name of a figure and of its files."""
    return module.__name__.rpartition(".")[2]


def draw(folder: Path, out: Path) -> list[Path]:
    """Writes all figures that fit to `out`; prints what the others need. Returns the paths."""
    modules = fitting(folder)
    for module in FIGURES:
        if module not in modules:
            print(f"no {name(module)}: it needs {module.NEEDS}")
    return [path for module in modules for path in module.draw(folder, out)]


if __name__ == "__main__":
    style.program(bool, "a trial that has ended", draw)
