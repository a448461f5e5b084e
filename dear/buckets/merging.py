"""Which gradients are merged into one message: rules over a cost model.

Gradients are numbered in the order in which they arrive in the backward pass. A plan is a list of
groups of neighbours in that order. Messages go one after another, each when its last gradient has
arrived. Pure functions: sizes and times in any units that the cost function agrees with.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

Cost = Callable[[float], float]
"""Seconds of one message by its size."""
Plan = list[list[int]]


def finish_time(plan: Plan, sizes: Sequence[float], arrivals: Sequence[float], cost: Cost) -> float:
    """When the last message of `plan` has ended, on the clock of `arrivals`."""
    end = 0.0
    for group in plan:
        end = max(end, max(arrivals[i] for i in group)) + cost(sum(sizes[i] for i in group))
    return end


def by_total(
    sizes: Sequence[float], threshold: float, kinds: Sequence[Hashable] | None = None
) -> Plan:
    """Closes a group once it has reached `threshold`; 0 leaves every gradient alone.

    Gradients of different `kinds` (dtypes, devices) are never merged.
    """
    plan: Plan = []
    total = 0.0
    for index, size in enumerate(sizes):
        alike = index and (kinds is None or kinds[index - 1] == kinds[index])
        if not alike or total >= threshold:
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
) -> Plan:
    """The rule of MG-WFBP (Shi et al., INFOCOM 2019, arXiv 1811.11141).

    A message that the next gradient would find unfinished takes it in, if it could not have started
    by then, or if waiting costs less than the start-up that is saved.

    Args:
        wait: with the second condition; without it this is ASC-WFBP (INFOCOM 2021).
        least: messages below this size always take in the next gradient.
        kinds: as for `by_total`.
    """
    plan: Plan = [[0]] if sizes else []
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
) -> Plan:
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
    plan: Plan = []
    end = len(sizes)
    while end:
        plan.append(list(range(cuts[end], end)))
        end = cuts[end]
    return plan[::-1]
