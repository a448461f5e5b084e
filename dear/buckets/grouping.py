"""Which gradients travel together, and the order of a model's parameters that this goes by."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from dear.comm.communicator import Communicator
from dear.lazy import torch

KIB, MIB = 2**10, 2**20
Cost = Callable[[float], float]
"""Seconds of one message by its size."""
Groups = list[list[int]]
"""Neighbours by their places in a list."""

# --- rules over sizes and times, in any units that agree ------------------------------------------


def by_threshold(sizes: Sequence[float], threshold: float) -> Groups:
    """Neighbours joined as long as the group stays below `threshold` (same unit as `sizes`).

    A group always takes its first item; DeAR (arXiv 2302.12445) fuses layers so, in forward order.
    """
    groups: Groups = []
    total = 0.0
    for index, size in enumerate(sizes):
        if groups and total + size < threshold:
            groups[-1].append(index)
            total += size
        else:
            groups.append([index])
            total = size
    return groups


def by_buffer(sizes: Sequence[float], limit: float) -> Groups:
    """Neighbours packed into buffers of at most `limit` (same unit as `sizes`).

    An item that fills a buffer by itself travels alone; with a limit of 0 every item does. DADT
    splits so what is ready in one cycle.
    """
    groups: Groups = []
    room = 0.0
    for index, size in enumerate(sizes):
        if groups and size < limit and size <= room:  # what is empty fits where nothing is
            groups[-1].append(index)
            room -= size
        else:
            groups.append([index])
            room = limit - size if size < limit else 0.0
    return groups


def by_ramp(sizes: Sequence[float], threshold: float, first: float) -> Groups:
    """Like `by_threshold`, with smaller groups at both ends.

    A group stays below the total that lies before it, and below what follows it, but may always
    reach `first`: at the ends, where nothing hides its transfer, little is waited for.
    """
    groups: Groups = []
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


def by_count(count: int, nearby: int) -> Groups:
    """`count` neighbours in groups of `nearby`, the last one with the rest; below 0: all in one."""
    if nearby < 0:
        nearby = max(count, 1)
    return [list(range(i, min(i + nearby, count))) for i in range(0, count, nearby)]


def by_wait(waits_s: Sequence[float], cycle_s: float) -> Groups:
    """Joins neighbours whose gradients arrive within the same cycle.

    Args:
        waits_s: how long each gradient waits for the end of the pass, in forward order (rising).
        cycle_s: length of a cycle in seconds; the first starts at the end of the pass.
    """
    groups: Groups = []
    cycle = -1
    for index, wait_s in enumerate(waits_s):
        if groups and int(wait_s // cycle_s) <= cycle:
            groups[-1].append(index)
        else:
            groups.append([index])
            cycle = int(wait_s // cycle_s)
    return groups


def by_total(
    sizes: Sequence[float],
    threshold: float,
    kinds: Sequence[Hashable] | None = None,
    *,
    first: float | None = None,
) -> Groups:
    """Closes a group once it has reached `threshold`; 0 leaves every gradient alone.

    Gradients of different `kinds` (dtypes, devices) are never merged.

    Args:
        first: the threshold of the first group; None: the same.
    """
    plan: Groups = []
    total = 0.0
    for index, size in enumerate(sizes):
        alike = index and (kinds is None or kinds[index - 1] == kinds[index])
        least = threshold if first is None or len(plan) > 1 else first
        if not alike or total >= least:
            plan.append([])
            total = 0.0
        plan[-1].append(index)
        total += size
    return plan


def greedy(
    sizes: Sequence[float],
    arrivals: Sequence[float],
    cost: Cost,
    *,
    wait: bool = True,
    least: float = 0.0,
    kinds: Sequence[Hashable] | None = None,
) -> Groups:
    """The rule of MG-WFBP (Shi et al., INFOCOM 2019, arXiv 1811.11141).

    Gradients are numbered in the order in which they arrive in the backward pass. Messages go one
    after another, each when its last gradient has arrived.

    A message that the next gradient would find unfinished takes it in, if it could not have started
    by then, or if waiting costs less than the start-up that is saved.

    Args:
        wait: with the second condition; without it this is ASC-WFBP (INFOCOM 2021).
        least: messages below this size always take in the next gradient.
        kinds: as for `by_total`.
    """
    plan: Groups = [[0]] if sizes else []
    size = sizes[0] if sizes else 0.0
    free = 0.0
    for following in range(1, len(sizes)):
        last = following - 1
        start = max(free, arrivals[last])
        end = start + cost(size)
        arrival = arrivals[following]
        pays = False
        if arrival < end:
            saved = cost(size) + cost(sizes[following]) - cost(size + sizes[following])
            pays = start > arrival or (wait and arrival - start < saved)
        alike = kinds is None or kinds[last] == kinds[following]
        if alike and (pays or size < least):
            plan[-1].append(following)
            size += sizes[following]
        else:
            plan.append([following])
            size = sizes[following]
            free = end
    return plan


def optimal(
    sizes: Sequence[float],
    arrivals: Sequence[float],
    cost: Cost,
    *,
    kinds: Sequence[Hashable] | None = None,
) -> Groups:
    """The plan with the earliest finish, by dynamic programming over the last group.

    Exact for any cost function: a message's end never gets later if what precedes it ends earlier.
    Among plans that end alike it prefers few messages. Time grows with the square of the number of
    gradients.
    """
    # best[n]: the earliest end and the number of messages of the first n gradients.
    best: list[tuple[float, int]] = [(0.0, 0)]
    cuts = [0]
    for count in range(1, len(sizes) + 1):
        total = 0.0
        chosen: tuple[float, int] | None = None
        cut = 0
        for first in range(count - 1, -1, -1):
            if kinds is not None and kinds[first] != kinds[count - 1]:
                break
            total += sizes[first]
            end, messages = best[first]
            candidate = (max(end, arrivals[count - 1]) + cost(total), messages + 1)
            if chosen is None or candidate < chosen:
                chosen, cut = candidate, first
        assert chosen is not None
        best.append(chosen)
        cuts.append(cut)
    plan: Groups = []
    end = len(sizes)
    while end:
        plan.append(list(range(cuts[end], end)))
        end = cuts[end]
    return plan[::-1]


@dataclass(frozen=True, kw_only=True)
class Arrived:
    """The gradients of a backward pass in the order in which they arrive, without a model."""

    sizes: Sequence[int]
    """Bytes."""
    arrivals_s: Sequence[float]
    """From the begin of the pass."""
    owners: Sequence[Hashable]
    """The layer of each."""
    end_s: float
    """Of the pass."""

    def by_layer(self) -> Groups:
        """Those of each layer, layers in the order in which they are complete."""
        found: dict[Hashable, list[int]] = {}
        for place, owner in enumerate(self.owners):
            found.setdefault(owner, []).append(place)
        return sorted(found.values(), key=max)


def by_layers(arrived: Arrived, options: Any) -> Groups:
    """What `group` and `launch_order` make of one type on one device.

    Args:
        options: as for `group`.
    """
    alone = options.fusion == "none"
    units = by_count(len(arrived.sizes), 1) if alone else arrived.by_layer()
    units.reverse()  # as the next forward pass needs them
    sizes = [sum(arrived.sizes[i] for i in unit) for unit in units]
    waits = [min(arrived.end_s - arrived.arrivals_s[i] for i in unit) for unit in units]
    joined = _joined(sizes, waits, options)
    return [sorted(i for unit in members for i in units[unit]) for members in reversed(joined)]


def ends(
    groups: Groups, sizes: Sequence[float], arrivals: Sequence[float], cost: Cost
) -> list[float]:
    """When the message of each group ends: one after another, each when its last gradient is there.

    Args:
        sizes, arrivals, cost: as for `greedy`.
    """
    found: list[float] = []
    for group in groups:
        start = max(found[-1] if found else 0.0, arrivals[group[-1]])
        found.append(start + cost(sum(sizes[index] for index in group)))
    return found


# --- groups of a model's parameters ---------------------------------------------------------------


def layers(
    model: torch.nn.Module, trained: Sequence[torch.nn.Parameter]
) -> list[list[torch.nn.Parameter]]:
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


def fuse(
    units: Sequence[Sequence[torch.nn.Parameter]], threshold: float
) -> list[list[torch.nn.Parameter]]:
    """Joins neighbouring units below `threshold` bytes; dtypes and devices are never mixed."""
    alike = (same for unit in units for same in _split(unit).values())
    groups = []
    for _, neighbours in groupby(alike, key=lambda same: _kind(same[0])):
        run = list(neighbours)
        sizes = [sum(param.nbytes for param in unit) for unit in run]
        for members in by_threshold(sizes, threshold):
            groups.append([param for index in members for param in run[index]])
    return groups


@dataclass(frozen=True, kw_only=True)
class RunOrder:
    """What one rank saw; parameters by their place in the list of trained ones."""

    reads: list[int]
    """As forward passes first read them; those that were not seen are missing."""
    arrivals: list[int]
    """As their gradients arrive; those without are missing."""
    waits_s: list[float]
    """In that order: seconds from the arrival to the end of the pass."""


def agree(mine: RunOrder, communicator: Communicator) -> RunOrder:
    """The order of the first rank that saw a backward pass, on all ranks; a collective call."""
    seen = communicator.gather_objects(mine)
    return next((order for order in seen if order.arrivals), seen[0])


def group(
    model: torch.nn.Module, params: Sequence[torch.nn.Parameter], order: RunOrder, options: Any
) -> list[list[torch.nn.Parameter]]:
    """Groups of `params` in the order in which the next forward pass needs them.

    Neighbours are layers whose gradients arrive one after another. Devices and dtypes are never
    mixed, nor parameters with and without a gradient: these would hold up the others.

    Args:
        options: of `dear`; those that say which layers travel together.
    """
    place = {param: i for i, param in enumerate(params)}
    arrival = {params[index]: i for i, index in enumerate(order.arrivals)}
    waits = dict(zip((params[index] for index in order.arrivals), order.waits_s, strict=True))
    units = [[param] for param in params] if options.fusion == "none" else layers(model, params)
    kinds: dict[tuple, list[list[torch.nn.Parameter]]] = {}
    for unit in units:
        for kind, alike in _split(unit, lambda param: (*_kind(param), param in arrival)).items():
            kinds.setdefault(kind, []).append(alike)
    groups = []
    for (*_, arrived), same in kinds.items():
        if arrived:
            same.sort(key=lambda unit: max(arrival[param] for param in unit), reverse=True)
        sizes = [sum(param.nbytes for param in unit) for unit in same]
        wait = [min(waits[param] for param in unit) if arrived else 0.0 for unit in same]
        for members in _joined(sizes, wait, options):
            groups.append([param for index in members for param in same[index]])
    last = len(params)
    read = {params[index]: i for i, index in enumerate(order.reads)}

    def needed(group: list[torch.nn.Parameter]) -> tuple[bool, int, int]:
        unused = group[0] not in arrival
        return unused, min(read.get(p, last) for p in group), min(place[p] for p in group)

    return sorted(groups, key=needed)


def launch_order(
    groups: Sequence[Sequence[torch.nn.Parameter]],
    params: Sequence[torch.nn.Parameter],
    order: RunOrder,
) -> list[int]:
    """Groups as they are complete in a backward pass; those without gradients come last."""
    arrival = {params[index]: i for i, index in enumerate(order.arrivals)}
    complete = [max(arrival.get(param, len(params)) for param in members) for members in groups]
    return sorted(range(len(groups)), key=lambda index: (complete[index], -index))


def _joined(sizes: list[float], waits_s: list[float], options: Any) -> Groups:
    if options.fusion == "none":
        return by_count(len(sizes), 1)
    if options.fusion == "nearby_layers":
        return by_count(len(sizes), options.nearby_layers)
    if options.fusion == "wait_time":
        return by_wait(waits_s, options.cycle_time_ms / 1000)
    threshold = options.threshold_mb * MIB
    return by_ramp(sizes, threshold, options.first_mb * MIB)


def ready_groups(
    params: Sequence[torch.nn.Parameter],
    dense: Sequence[torch.nn.Parameter],
    order: RunOrder,
    *,
    buffer_bytes: float,
    cycle_s: float | None,
) -> list[list[torch.nn.Parameter]]:
    """Groups of the `dense` ones among `params`, in the order in which they are complete.

    Types and devices are never mixed, nor parameters with and without a gradient in the pass that
    `order` has seen: these would hold up the others.

    Args:
        buffer_bytes: no group is larger, but for a single gradient that is.
        cycle_s: only what arrives in the same cycle is joined, cycles counted from the end of the
            pass; None: whatever comes next.
    """
    waits = {params[i]: wait for i, wait in zip(order.arrivals, order.waits_s, strict=True)}
    wanted = set(dense)
    arrived = [params[i] for i in order.arrivals if params[i] in wanted]
    never = [param for param in dense if param not in waits]
    groups = []
    for same in [*_split(arrived).values(), *_split(never).values()]:
        for cycle in _cycles(same, [waits.get(param, 0.0) for param in same], cycle_s):
            sizes = [param.nbytes for param in cycle]
            groups += [[cycle[i] for i in group] for group in by_buffer(sizes, buffer_bytes)]
    return [groups[i] for i in launch_order(groups, params, order)]


def _cycles(
    params: list[torch.nn.Parameter], waits_s: list[float], cycle_s: float | None
) -> list[list[torch.nn.Parameter]]:
    if cycle_s is None:
        return [params]
    # `by_wait` counts from the end of the pass backwards.
    last = len(params) - 1
    cycles = by_wait(waits_s[::-1], cycle_s)
    return [[params[last - i] for i in reversed(cycle)] for cycle in reversed(cycles)]


def _kind(param: torch.nn.Parameter) -> tuple:
    return param.dtype, param.device


def _split(
    params: Sequence[torch.nn.Parameter], kind: Callable[[torch.nn.Parameter], tuple] = _kind
) -> dict[tuple, list[torch.nn.Parameter]]:
    kinds: dict[tuple, list[torch.nn.Parameter]] = {}
    for param in params:
        kinds.setdefault(kind(param), []).append(param)
    return kinds
