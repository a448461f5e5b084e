"""In which order a model's parameters are read and get their gradients, as its first step shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dear.buckets.grouping import by_count, by_ramp, by_threshold, by_wait, layers

if TYPE_CHECKING:
    from torch.nn import Module, Parameter

    from dear.comm.communicator import Communicator


@dataclass(frozen=True, kw_only=True)
class RunOrder:
    """What one rank saw; parameters by their place in the list of trained ones."""

    reads: list[int]
    """As forward passes first read them; those that were not seen are missing."""
    arrivals: list[int]
    """As their gradients arrive; those without are missing."""
    waits_s: list[float]
    """In that order: seconds from the arrival to the end of the pass."""


@dataclass(frozen=True, kw_only=True)
class Fusion:
    """A rule for which layers travel together."""

    rule: str
    """`none`, `nearby_layers`, `threshold` or `wait_time`."""
    threshold: float = 0.0
    """Bytes."""
    first: float | None = None
    """Bytes; None: groups at the ends are as large as any."""
    nearby: int = 1
    cycle_s: float = 0.0


def agree(mine: RunOrder, communicator: Communicator) -> RunOrder:
    """The order of the first rank that saw a backward pass, on all ranks; a collective call."""
    seen = communicator.gather_objects(mine)
    return next((order for order in seen if order.arrivals), seen[0])


def group(
    model: Module, params: Sequence[Parameter], order: RunOrder, fusion: Fusion
) -> list[list[Parameter]]:
    """Groups of `params` in the order in which the next forward pass needs them.

    Neighbours are layers whose gradients arrive one after another. Devices and dtypes are never
    mixed, nor parameters with and without a gradient: these would hold up the others.
    """
    place = {param: i for i, param in enumerate(params)}
    arrival = {params[index]: i for i, index in enumerate(order.arrivals)}
    waits = dict(zip((params[index] for index in order.arrivals), order.waits_s, strict=True))
    units = [[param] for param in params] if fusion.rule == "none" else layers(model, params)
    kinds: dict[tuple, list[list[Parameter]]] = {}
    for unit in units:
        split: dict[tuple, list[Parameter]] = {}
        for param in unit:
            split.setdefault((param.device, param.dtype, param in arrival), []).append(param)
        for kind, alike in split.items():
            kinds.setdefault(kind, []).append(alike)
    groups = []
    for (*_, arrived), same in kinds.items():
        if arrived:
            same.sort(key=lambda unit: max(arrival[param] for param in unit), reverse=True)
        sizes = [sum(param.nbytes for param in unit) for unit in same]
        wait = [min(waits[param] for param in unit) if arrived else 0.0 for unit in same]
        for members in _joined(sizes, wait, fusion):
            groups.append([param for index in members for param in same[index]])
    last = len(params)
    read = {params[index]: i for i, index in enumerate(order.reads)}

    def needed(group: list[Parameter]) -> tuple[bool, int, int]:
        unused = group[0] not in arrival
        return unused, min(read.get(p, last) for p in group), min(place[p] for p in group)

    return sorted(groups, key=needed)


def launch_order(
    groups: Sequence[Sequence[Parameter]], params: Sequence[Parameter], order: RunOrder
) -> list[int]:
    """Groups as they are complete in a backward pass; those without gradients come last."""
    arrival = {params[index]: i for i, index in enumerate(order.arrivals)}
    complete = [max(arrival.get(param, len(params)) for param in members) for members in groups]
    return sorted(range(len(groups)), key=lambda index: (complete[index], -index))


def _joined(sizes: list[float], waits_s: list[float], fusion: Fusion) -> list[list[int]]:
    if fusion.rule == "none":
        return by_count(len(sizes), 1)
    if fusion.rule == "nearby_layers":
        return by_count(len(sizes), fusion.nearby)
    if fusion.rule == "wait_time":
        return by_wait(waits_s, fusion.cycle_s)
    if fusion.first is None:
        return by_threshold(sizes, fusion.threshold)
    return by_ramp(sizes, fusion.threshold, fusion.first)
