"""All figures that a sweep has the data for: `python -m plots.gallery SWEEP`."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

from common.results.store import Comparison
from plots import style

_GENERAL = ("throughput", "speedup", "scaling", "bandwidth", "breakdown", "learning")
_PAPERS = ("paper_dear", "paper_suite", "paper_dadt", "paper_decent_dp")
FIGURES = tuple(importlib.import_module(f"{__package__}.{name}") for name in _GENERAL + _PAPERS)
"""Figures in the order of a report. Each module has `TITLE`, `NEEDS` (the records that `fits` asks
for, in a few words), `fits`, `figure` and `draw`."""


def fitting(folder: Path) -> list[ModuleType]:
    """Returns the figures that a sweep has the data for.

    Raises:
        UserError: the folder is no sweep.
    """
    records = Comparison.load(folder).results(folder)
    return [module for module in FIGURES if module.fits(records)]


def name(module: ModuleType) -> str:
    """Returns the name of a figure and of its files."""
    return module.__name__.rpartition(".")[2]


def draw(folder: Path, out: Path) -> list[Path]:
    """Writes all figures that fit to `out`, returns the paths, and prints what others need."""
    modules = fitting(folder)
    for module in FIGURES:
        if module not in modules:
            print(f"no {name(module)}: it needs {module.NEEDS}")
    return [path for module in modules for path in module.draw(folder, out)]


if __name__ == "__main__":
    style.program(bool, "a trial that has ended", draw)
