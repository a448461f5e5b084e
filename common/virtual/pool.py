"""Processes that predict many steps, one on each core."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

from common.machine.cgroups import usable_cores
from common.machine.processes import spread

PRELOAD = ("torch._dynamo", "common.virtual.training.run")
"""Modules that a prediction needs; the first optimizer takes torch._dynamo."""


def mapped(
    call: Callable[..., Any],
    arguments: Sequence[tuple[Any, ...]],
    together: Sequence[Hashable] | None = None,
) -> list[Any]:
    """Returns the results of a call with each of these arguments, in their order.

    Args:
        together: key of each of `arguments`; those with equal keys share work if a process gets all
            of them (`common.virtual.training.tape`). None: nothing is shared.
    """
    groups: dict[Hashable, list[int]] = {}
    for place, key in enumerate(together or ()):
        groups.setdefault(key, []).append(place)
    parts = list(groups.values())
    if len(parts) < usable_cores():  # each process does the common work, and no core is idle
        parts = [[place] for place in range(len(arguments))]
    tasks = [[arguments[place] for place in part] for part in parts]
    results = spread(partial(_in_turn, call), tasks, begin=begin, preload=PRELOAD) if tasks else []
    ordered: dict[int, Any] = {}
    for part, values in zip(parts, results, strict=True):
        ordered.update(zip(part, values, strict=True))
    return [ordered[place] for place in range(len(arguments))]


def _in_turn(call: Callable[..., Any], tasks: Sequence[tuple[Any, ...]]) -> list[Any]:
    results = []
    for task in tasks:
        results.append(call(*task))
        if gc.get_freeze_count():  # this process has begun as below
            gc.collect()  # a model that was trained is full of cycles
            gc.freeze()
    return results


def begin() -> None:
    """Prepares a process: a single thread, and garbage collections that are rare and skip torch."""
    torch: Any = importlib.import_module("torch")
    torch.set_num_threads(1)  # there is a process for each core
    importlib.import_module("common.virtual.training.run")
    gc.freeze()
    gc.set_threshold(200_000, 20, 20)
