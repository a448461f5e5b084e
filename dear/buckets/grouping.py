"""Which tensors travel together, and the flat buffers they travel in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dear.lazy import torch

if TYPE_CHECKING:
    from torch.nn import Module, Parameter

KIB, MIB = 2**10, 2**20


def by_threshold(sizes: Sequence[float], threshold: float) -> list[list[int]]:
    """Neighbours joined as long as the group stays below `threshold` (same unit as `sizes`).

    A group always takes its first item; DeAR (arXiv 2302.12445) fuses layers so, in forward order.
    """
    groups: list[list[int]] = []
    total = 0.0
    for index, size in enumerate(sizes):
        if groups and total + size < threshold:
            groups[-1].append(index)
            total += size
        else:
            groups.append([index])
            total = size
    return groups


def by_buffer(sizes: Sequence[float], limit: float) -> list[list[int]]:
    """Neighbours packed into buffers of at most `limit` (same unit as `sizes`).

    An item that fills a buffer by itself travels alone; with a limit of 0 every item does. DADT
    splits so what is ready in one cycle.
    """
    groups: list[list[int]] = []
    room = 0.0
    for index, size in enumerate(sizes):
        if size < limit and size <= room:
            groups[-1].append(index)
            room -= size
        else:
            groups.append([index])
            room = limit - size if size < limit else 0.0
    return groups


def by_ramp(sizes: Sequence[float], threshold: float, first: float) -> list[list[int]]:
    """Like `by_threshold`, with smaller groups at both ends.

    A group stays below the total that lies before it, and below what follows it, but may always
    reach `first`: at the ends, where nothing hides its transfer, little is waited for.
    """
    groups: list[list[int]] = []
    total = before = 0.0
    after = float(sum(sizes))
    for index, size in enumerate(sizes):
        after -= size
        limit = min(threshold, max(first, min(before, after)))
        if groups and total + size < limit:
            groups[-1].append(index)
            total += size
        else:
            before += total
            groups.append([index])
            total = size
    return groups


def by_count(count: int, nearby: int) -> list[list[int]]:
    """`count` neighbours in groups of `nearby`, the last one with the rest; below 0: all in one."""
    if nearby < 0:
        nearby = max(count, 1)
    return [list(range(i, min(i + nearby, count))) for i in range(0, count, nearby)]


def by_wait(waits_s: Sequence[float], cycle_s: float) -> list[list[int]]:
    """Joins neighbours whose gradients arrive within the same cycle.

    Args:
        waits_s: how long each gradient waits for the end of the pass, in forward order (rising).
        cycle_s: length of a cycle in seconds; the first starts at the end of the pass.
    """
    groups: list[list[int]] = []
    cycle = -1
    for index, wait_s in enumerate(waits_s):
        if groups and int(wait_s // cycle_s) <= cycle:
            groups[-1].append(index)
        else:
            groups.append([index])
            cycle = int(wait_s // cycle_s)
    return groups


def layers(model: Module, trained: Sequence[Parameter]) -> list[list[Parameter]]:
    """The `trained` parameters by the module that owns them, in registration order.

    A parameter shared by modules belongs to the first; modules that own none are left out.
    """
    wanted = set(trained)
    result = []
    for module in model.modules():
        own = [param for param in module.parameters(recurse=False) if param in wanted]
        wanted.difference_update(own)
        if own:
            result.append(own)
    return result


def fuse(units: Sequence[Sequence[Parameter]], threshold: float) -> list[list[Parameter]]:
    """Joins neighbouring units below `threshold` bytes; dtypes and devices are never mixed."""
    runs: list[list[list[Parameter]]] = []
    kind = None
    for unit in units:
        for same in _split_by_kind(unit):
            if (same[0].dtype, same[0].device) != kind:
                kind = (same[0].dtype, same[0].device)
                runs.append([])
            runs[-1].append(same)
    groups = []
    for run in runs:
        sizes = [sum(param.nbytes for param in unit) for unit in run]
        for members in by_threshold(sizes, threshold):
            groups.append([param for index in members for param in run[index]])
    return groups


def _split_by_kind(unit: Sequence[Parameter]) -> list[list[Parameter]]:
    kinds: dict[tuple[torch.dtype, torch.device], list[Parameter]] = {}
    for param in unit:
        kinds.setdefault((param.dtype, param.device), []).append(param)
    return list(kinds.values())
