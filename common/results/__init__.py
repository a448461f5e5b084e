"""Records, and what is derived from them: statistics, tables.

import common.results
common.results.frame("logs/emulated-quick")  # one row per trial
common.results.steps("logs/emulated-quick")  # one row per step
"""

from __future__ import annotations

import importlib
from typing import Any

_FRAMES = ("frame", "steps")


def __getattr__(name: str) -> Any:
    """pandas is loaded by who asks for it."""
    if name not in _FRAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.frames"), name)
