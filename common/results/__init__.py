"""Records, and their tables, statistics and reports.

import common.results
common.results.frame("logs/emulated-quick")  # one row per trial
common.results.steps("logs/emulated-quick")  # one row per step
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.results.exports.frames import frame as frame
    from common.results.exports.frames import steps as steps


def __getattr__(name: str) -> object:
    """Imports the functions that need pandas when they are first used."""
    if name not in ("frame", "steps"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.exports.frames"), name)
