"""Processes that predict many steps, one on each core."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Sequence
from typing import Any

from common.machine.processes import spread

PRELOAD = ("torch._dynamo", "common.virtual.world.run")
"""Modules that a prediction needs; the first optimizer takes torch._dynamo."""


def mapped(call: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Returns the results of a call with each of these arguments, in their order."""
    return spread(call, *zip(*arguments, strict=True), begin=begin, preload=PRELOAD)


def begin() -> None:
    """Prepares a process: a single thread, and garbage collections that are rare and skip torch."""
    torch: Any = importlib.import_module("torch")
    torch.set_num_threads(1)  # there is a process for each core
    importlib.import_module("common.virtual.world.run")
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
