"""Processes that predict many steps, one on each core."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from common.machine.cgroups import usable_cores


def mapped(call: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Returns the results of a call with each of these arguments, in their order."""
    # A forked process cannot use torch if this process has done so, as in a test.
    context = multiprocessing.get_context("spawn")
    count = max(1, min(usable_cores(), len(arguments)))
    with ProcessPoolExecutor(count, context, initializer=begin) as pool:
        return list(pool.map(call, *zip(*arguments, strict=True)))


def begin() -> None:
    """Makes garbage collections of this process rare, and keeps them off the modules of torch."""
    importlib.import_module("common.virtual.world.run")
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
