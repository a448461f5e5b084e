"""Rules that group gradients into messages, and the parameter order that the groups follow."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from dear.comm.communicator import Communicator
from dear.lazy import torch

KIB, MIB = 2**10, 2**20
Cost = Callable[[float], float]
"""Seconds that a message takes, as a function of its size."""
Groups = list[list[int]]
"""Groups of neighbours in a list; each item is given by its index in the list."""

# --- rules over sizes and times, in any consistent units ------------------------------------------


def by_threshold(sizes: Sequence[float], threshold: float) -> Groups:
    """Joins neighbours while the group's total stays below `threshold` (same unit as `sizes`).

    A group always takes its first item. DeAR (arXiv 2302.12445) joins layers by this rule, in
    forward order.
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
    """Packs neighbours into buffers of at most `limit` (same unit as `sizes`).

    An item of at least `limit` gets its own group; with a limit of 0 each item does. DADT applies
    this rule to the gradients that are ready in one cycle.
    """
    groups: Groups = []
    room = 0.0
    for index, size in enumerate(sizes):
        if groups and size < limit and size <= room:  # an empty item fits into a full buffer
            groups[-1].append(index)
            room -= size
        else:
            groups.append([index])
            room = limit - size if size < limit else 0.0
    return groups


def by_ramp(sizes: Sequence[float], threshold: float, first: float) -> Groups:
    """Joins neighbours as `by_threshold` does, but into smaller groups at both ends.

    A group stays below `threshold`, the total size of all items before it, and the total size of
    all items after it; it may always reach `first`. At both ends of a pass no computation hides a
    transfer, so small groups shorten the wait.
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
    """Splits `count` neighbours into groups of `nearby`; if `nearby` < 0, makes a single group."""
    if nearby < 0:
        nearby = max(count, 1)
    return [list(range(i, min(i + nearby, count))) for i in range(0, count, nearby)]


def by_wait(waits_s: Sequence[float], cycle_s: float) -> Groups:
    """Joins neighbours whose gradients arrive within the same cycle.

    Args:
        waits_s: seconds from each arrival to the end of the pass, in forward order (ascending).
        cycle_s: length of a cycle in seconds; cycles count backwards from the end of the pass.
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
    """Joins neighbours until their total reaches `threshold`; 0 leaves each gradient alone.

    Gradients of different `kinds` (dtypes, devices) are never merged.

    Args:
        first: threshold of the first group; None means `threshold`.
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
    """Groups gradients by the rule of MG-WFBP (Shi et al., INFOCOM 2019, arXiv 1811.11141).

    Gradients are numbered in the order in which they arrive in the backward pass. Messages travel
    one after another, and each starts once its last gradient has arrived.

    The next gradient joins the current message if it arrives before that message would end, and
    one of two conditions holds. Either the message could not start before the arrival, or the wait
    for the arrival costs less than the start-up that merging saves.

    Args:
        wait: apply the second condition. False gives the rule of ASC-WFBP (INFOCOM 2021).
        least: a message below this size always takes the next gradient.
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
    """Returns the groups whose last message ends earliest, by dynamic programming.

    The result is exact for any cost function, since a message never ends later if its predecessors
    end earlier. Among groups with the same end, the fewest messages win. The run time is quadratic
    in the number of gradients.
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
    """Gradients of a backward pass in the order of arrival, described without a model."""

    sizes: Sequence[int]
    """Size of each gradient in bytes."""
    arrivals_s: Sequence[float]
    """Seconds from the start of the pass to each arrival."""
    owners: Sequence[Hashable]
    """Layer of each gradient."""
    end_s: float
    """Duration of the pass in seconds."""
    reads_s: Sequence[float] = ()
    """Seconds from the start of a forward pass until it reads each gradient's parameter; empty: not
    known."""

    def by_layer(self) -> Groups:
        """Returns the gradients of each layer, in the order in which layers are complete."""
        by_owner: dict[Hashable, list[int]] = {}
        for index, owner in enumerate(self.owners):
            by_owner.setdefault(owner, []).append(index)
        return sorted(by_owner.values(), key=max)


def by_layers(arrived: Arrived, options: Any) -> Groups:
    """Returns the same groups as `group`, sorted as by `launch_order`, without a model.

    Args:
        arrived: gradients of one dtype and device.
        options: as for `group`.
    """
    alone = options.fusion == "none"
    units = by_count(len(arrived.sizes), 1) if alone else arrived.by_layer()
    units.reverse()  # to the order in which the next forward pass needs them
    sizes = [sum(arrived.sizes[i] for i in unit) for unit in units]
    waits = [min(arrived.end_s - arrived.arrivals_s[i] for i in unit) for unit in units]
    joined = _joined(sizes, waits, options)
    return [sorted(i for unit in members for i in units[unit]) for members in reversed(joined)]


def ends(
    groups: Groups, sizes: Sequence[float], arrivals: Sequence[float], cost: Cost
) -> list[float]:
    """Returns the end time of each group's message.

    Messages travel one after another. Each starts once its last gradient has arrived.

    Args:
        sizes, arrivals, cost: as for `greedy`.
    """
    end_times: list[float] = []
    for group in groups:
        start = max(end_times[-1] if end_times else 0.0, arrivals[group[-1]])
        end_times.append(start + cost(sum(sizes[index] for index in group)))
    return end_times


# --- groups of a model's parameters ---------------------------------------------------------------


def layers(
    model: torch.nn.Module, trained: Sequence[torch.nn.Parameter]
) -> list[list[torch.nn.Parameter]]:
    """Returns the `trained` parameters of each module that owns some, in registration order.

    A parameter that several modules share belongs to the first.
    """
    remaining = set(trained)
    result = []
    for module in model.modules():
        owned = [param for param in module.parameters(recurse=False) if param in remaining]
        remaining.difference_update(owned)
        if owned:
            result.append(owned)
    return result


def fuse(
    units: Sequence[Sequence[torch.nn.Parameter]], threshold: float
) -> list[list[torch.nn.Parameter]]:
    """Joins neighbouring units of the same dtype and device into groups below `threshold` bytes."""
    pieces = (piece for unit in units for piece in _split(unit).values())
    groups = []
    for _, neighbours in groupby(pieces, key=lambda piece: _kind(piece[0])):
        run = list(neighbours)
        sizes = [sum(param.nbytes for param in unit) for unit in run]
        for members in by_threshold(sizes, threshold):
            groups.append([param for index in members for param in run[index]])
    return groups


@dataclass(frozen=True, kw_only=True)
class RunOrder:
    """Order of events on one rank; parameters are indices into the list of trained parameters."""

    reads: list[int]
    """Parameters in the order in which forward passes first read them; the others are left out."""
    arrivals: list[int]
    """Parameters in the order in which gradients arrive, without those that have no gradient."""
    waits_s: list[float]
    """Seconds from each arrival to the end of the pass, in the order of `arrivals`."""


def agree(mine: RunOrder, communicator: Communicator) -> RunOrder:
    """Returns, on all ranks, the order of the first rank that saw a backward pass; collective."""
    orders = communicator.gather_objects(mine)
    return next((order for order in orders if order.arrivals), orders[0])


def group(
    model: torch.nn.Module,
    params: Sequence[torch.nn.Parameter],
    order: RunOrder,
    options: Any,
    plan: Groups | None = None,
) -> list[list[torch.nn.Parameter]]:
    """Groups `params`, and sorts the groups by when the next forward pass needs them.

    Neighbours are layers whose gradients arrive one after another. All parameters of a group have
    the same dtype and device. Either all or none of them have a gradient in the pass of `order`,
    since a missing gradient would delay the others.

    Args:
        options: options of `dear` that choose which layers travel together.
        plan: indices of the parameters of each group, with fusion=planned.
    """
    place = {param: i for i, param in enumerate(params)}
    arrival = {params[index]: i for i, index in enumerate(order.arrivals)}
    waits = dict(zip((params[index] for index in order.arrivals), order.waits_s, strict=True))
    units = [[param] for param in params] if options.fusion == "none" else layers(model, params)
    if plan is not None:
        units = [[params[index] for index in members] for members in plan]
    kinds: dict[tuple[object, ...], list[list[torch.nn.Parameter]]] = {}
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
    never = len(params)
    read = {params[index]: i for i, index in enumerate(order.reads)}

    def needed(group: list[torch.nn.Parameter]) -> tuple[bool, int, int]:
        unused = group[0] not in arrival
        return unused, min(read.get(p, never) for p in group), min(place[p] for p in group)

    return sorted(groups, key=needed)


def launch_order(
    groups: Sequence[Sequence[torch.nn.Parameter]],
    params: Sequence[torch.nn.Parameter],
    order: RunOrder,
) -> list[int]:
    """Sorts groups by when a backward pass completes them; groups without gradients come last."""
    arrival = {params[index]: i for i, index in enumerate(order.arrivals)}
    complete = [max(arrival.get(param, len(params)) for param in members) for members in groups]
    return sorted(range(len(groups)), key=lambda index: (complete[index], -index))


def _joined(sizes: Sequence[float], waits_s: Sequence[float], options: Any) -> Groups:
    if options.fusion in ("none", "planned"):  # a unit is a tensor, or a group of the plan
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
    """Groups those of `params` that are in `dense`, and sorts the groups by when they are complete.

    All parameters of a group have the same dtype and device. Either all or none of them have a
    gradient in the pass of `order`, since a missing gradient would delay the others.

    Args:
        buffer_bytes: largest size of a group, except for a single larger gradient.
        cycle_s: length in seconds of a cycle; only gradients of one cycle are joined. Cycles count
            backwards from the end of the pass. None joins any neighbours.
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
    # `by_wait` counts backwards from the end of the pass.
    last = len(params) - 1
    cycles = by_wait(waits_s[::-1], cycle_s)
    return [[params[last - i] for i in reversed(cycle)] for cycle in reversed(cycles)]


def _kind(param: torch.nn.Parameter) -> tuple[object, ...]:
    return param.dtype, param.device


def _split(
    params: Sequence[torch.nn.Parameter],
    kind: Callable[[torch.nn.Parameter], tuple[object, ...]] = _kind,
) -> dict[tuple[object, ...], list[torch.nn.Parameter]]:
    kinds: dict[tuple[object, ...], list[torch.nn.Parameter]] = {}
    for param in params:
        kinds.setdefault(kind(param), []).append(param)
    return kinds
