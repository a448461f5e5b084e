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
        if groups and size < limit and size <= room:  # what is empty fits where nothing is
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


def padded(numel: int, world_size: int) -> int:
    """The least multiple of `world_size` that holds `numel` elements."""
    return -(-numel // world_size) * world_size


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


class FlatBuffer:
    """One contiguous buffer for the gradients of a group, with a mark per parameter.

    Layout, in elements: the gradients one after another, then one mark per parameter (1 where this
    rank has a gradient, so that after a sum over ranks 0 means nobody has), then zeros up to a
    multiple of the world size.
    """

    def __init__(self, params: Sequence[Parameter], world_size: int) -> None:
        self.params = list(params)
        numel = sum(param.numel() for param in params)
        self.data = torch.zeros(
            padded(numel + len(params), world_size), dtype=params[0].dtype, device=params[0].device
        )
        self.views = []
        """The place of each parameter's gradient in `data`, in the parameter's shape."""
        offset = 0
        for param in params:
            self.views.append(self.data.narrow(0, offset, param.numel()).view(param.shape))
            offset += param.numel()
        self.marks = self.data.narrow(0, offset, len(params))

    def pack(self) -> None:
        """Copies the gradients in; a parameter without one contributes zeros."""
        for param, view in zip(self.params, self.views, strict=True):
            if param.grad is None:
                view.zero_()
            else:
                view.copy_(param.grad)
        self.marks.copy_(torch.tensor([float(p.grad is not None) for p in self.params]))

    def gradients(self) -> list[tuple[Parameter, torch.Tensor | None]]:
        """Each parameter with its place in the buffer, or None if no rank has a gradient for it."""
        marks = self.marks.abs().tolist()
        return [
            (param, view if mark > 0 else None)
            for param, view, mark in zip(self.params, self.views, marks, strict=True)
        ]
