"""Search for the groups of gradients with the shortest step, by the costs of their messages."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dear.cost.event_model.link import Scaled
from dear.cost.event_model.passes import Passes
from dear.cost.fit import Cost, occupancy_s
from dear.lazy import np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

Groups = list[list[int]]
"""Groups of gradients; each is given by its index in `Passes.gradients`."""
MOST_STATES = 48
"""Number of partial plans that the search keeps for each gradient; if more of them could still be
the best, an even choice of them."""
DEARER = 1.1
"""Factor of the costs up to which a plan should not get worse by fewer messages."""
POINTS = 4096
"""Largest number of sizes in a table of times."""
NOTHING = 1e-6
"""Share of the backward pass that counts as no time."""


@dataclass(frozen=True, kw_only=True)
class Legs:
    """Costs of a group's messages, by the bytes of its gradients."""

    first: Cost | None
    """Message that starts when the group is complete and ends before the update; None: there is
    none."""
    second: Cost | None = None
    """Message from `step()` into the next forward pass, which waits for it; None: there is none."""
    at_once: Cost | None = None
    """Message in place of both for groups of up to `small_bytes`, which ends before the update."""
    small_bytes: float = 0.0

    def times(self, nbytes: float) -> tuple[float, float, float, float]:
        """Returns seconds of a group's messages: occupancy of the link and remaining start-up, of
        the message in the backward pass and of the message in the next forward pass."""
        if self.at_once is not None and nbytes <= self.small_bytes:
            return (*_parts(self.at_once, nbytes), 0.0, 0.0)
        return (*_parts(self.first, nbytes), *_parts(self.second, nbytes))

    def times_as_dear(self, factor: float) -> Legs:
        """Returns these messages at `factor` times their costs."""
        first, second, at_once = (
            None if cost is None else Scaled(cost=cost, factor=factor)
            for cost in (self.first, self.second, self.at_once)
        )
        return dataclasses.replace(self, first=first, second=second, at_once=at_once)


def _parts(cost: Cost | None, nbytes: float) -> tuple[float, float]:
    if cost is None or not nbytes:
        return 0.0, 0.0
    busy_s = occupancy_s(cost, nbytes)
    return busy_s, max(0.0, cost(nbytes) - busy_s)


def exposed_s(groups: Groups, passes: Passes, legs: Legs) -> float:
    """Returns by how many seconds messages make a step longer than its passes and update.

    Messages occupy the link one after another. Those of the backward pass start when their last
    gradient is ready; the others start in `step()`, in the order in which layers need them.
    """
    gradients, reads_s = passes.gradients, passes.reads_s()
    times = [legs.times(sum(gradients[i].nbytes for i in group)) for group in groups]
    free_s = end_s = 0.0
    for group, (busy_s, start_up_s, _, _) in zip(groups, times, strict=True):
        if busy_s + start_up_s:
            free_s = max(free_s, gradients[max(group)].ready_s) + busy_s
            end_s = max(end_s, free_s + start_up_s)
    read_s = [min(reads_s[i] for i in group) for group in groups]
    sent_s = wait_s = 0.0
    for place in sorted(range(len(groups)), key=lambda place: (read_s[place], -place)):
        _, _, busy_s, start_up_s = times[place]
        sent_s += busy_s
        if busy_s + start_up_s:
            wait_s = max(wait_s, sent_s + start_up_s - read_s[place])
    return max(0.0, end_s - passes.backward_s) + wait_s


def planned(
    passes: Passes,
    legs: Legs,
    candidates: Iterable[Groups] = (),
    kinds: Sequence[Hashable] | None = None,
) -> Groups:
    """Returns groups of neighbours with the least `exposed_s`.

    No candidate is better than the result. The search is exact if layers run in the reverse order
    of their gradients and few partial plans compete (`MOST_STATES`).

    Args:
        candidates: groups in the order in which they are complete, without mixed kinds.
        kinds: dtype and device of each gradient; a group has one kind.
    """
    count = len(passes.gradients)
    kinds = kinds or [None] * count
    known = [*candidates, [[i] for i in range(count)]]
    limit_s = min(exposed_s(groups, passes, legs) for groups in known)
    known += _search(passes, legs, kinds, limit_s)
    best = min(known, key=lambda groups: exposed_s(groups, passes, legs))
    return _merged(best, passes, legs, kinds)


def _merged(groups: Groups, passes: Passes, legs: Legs, kinds: Sequence[Hashable]) -> Groups:
    """Joins neighbours where this costs no time, since each message also costs a host some.

    Large messages leave less room for longer transfers than measured, so neighbours are joined only
    if this would cost nothing at `DEARER` times the costs either.
    """
    dearer = legs.times_as_dear(DEARER)

    def costs_s(plan: Groups) -> tuple[float, float]:
        return exposed_s(plan, passes, legs), exposed_s(plan, passes, dearer)

    least_s = costs_s(groups)
    slack_s = NOTHING * passes.backward_s
    place = 0
    while place + 1 < len(groups):
        joined = [*groups[:place], groups[place] + groups[place + 1], *groups[place + 2 :]]
        alike = kinds[groups[place][-1]] == kinds[groups[place + 1][0]]
        pairs = zip(costs_s(joined), least_s, strict=True) if alike else ()
        if alike and all(after_s <= before_s + slack_s for after_s, before_s in pairs):
            groups = joined
        else:
            place += 1
    return groups


@dataclass(frozen=True)
class _States:
    """Partial plans of the first gradients, as parallel arrays."""

    count: Ints
    """Number of gradients in the plan."""
    free_s: Floats
    """Time at which the link has sent their first messages."""
    late_s: Floats
    """Seconds by which their second messages would delay the next forward pass if they began it;
    negative: so much time is left for messages before them."""
    messages: Ints
    before: Ints
    """Index of the plan without the last group, among all plans."""

    def chosen(self, index: Ints) -> _States:
        """Returns the plans of these indices."""
        return _States(*(getattr(self, field.name)[index] for field in dataclasses.fields(self)))

    def joined(self, other: _States) -> _States:
        """Returns the plans of both."""
        return _States(
            *(
                np.concatenate([getattr(self, field.name), getattr(other, field.name)])
                for field in dataclasses.fields(self)
            )
        )

    def best(self) -> _States:
        """Returns the plans to which no other is equal or better in every respect but count."""
        ordered = self.chosen(np.lexsort((self.messages, self.late_s, self.free_s)))
        least = np.minimum.accumulate(ordered.late_s)
        better = np.concatenate([[True], ordered.late_s[1:] < least[:-1]])
        front = ordered.chosen(np.flatnonzero(better))
        if len(front.count) <= MOST_STATES:
            return front
        even = np.linspace(0, len(front.count) - 1, MOST_STATES)
        return front.chosen(even.round().astype(np.int64))


def _search(passes: Passes, legs: Legs, kinds: Sequence[Hashable], limit_s: float) -> list[Groups]:
    """Returns the plan that ends the search, or nothing if none is below `limit_s`.

    Each gradient ends a group, in turn: every kept plan of the gradients before that group is
    extended by it. A plan is dropped once another one is at least as good, or if it cannot stay
    below `limit_s` even with all other gradients in one message.
    """
    gradients, reads_s = passes.gradients, passes.reads_s()
    ends = [0, *itertools.accumulate(gradient.nbytes for gradient in gradients)]
    zero = np.zeros(1, np.int64)
    everything = _States(zero, np.zeros(1), np.full(1, -math.inf), zero, zero)
    times, sums, reads = _Times(ends, legs), np.array(ends, np.float64), np.array(reads_s)
    first = 0
    for last, gradient in enumerate(gradients):
        if last and kinds[last] != kinds[last - 1]:
            first = last
        before = np.flatnonzero(everything.count >= first)
        plans = everything.chosen(before)
        busy_s, _, second_s, start_up_s = times(sums[last + 1] - sums[plans.count])
        earliest_s = np.minimum.accumulate(reads[first : last + 1][::-1])[::-1]
        read_s = earliest_s[plans.count - first]
        sends = second_s + start_up_s > 0
        extended = _States(
            np.full(len(before), last + 1),
            np.where(busy_s > 0, np.maximum(plans.free_s, gradient.ready_s) + busy_s, plans.free_s),
            np.where(
                sends,
                np.maximum(second_s + start_up_s - read_s, plans.late_s + second_s),
                plans.late_s,
            ),
            plans.messages + 1,
            before,
        )
        left_s, _, later_s, _ = legs.times(ends[-1] - ends[last + 1])
        delay_s = np.maximum(0.0, extended.free_s + left_s - passes.backward_s)
        delay_s = delay_s + np.maximum(0.0, extended.late_s + later_s)
        hopeful = np.flatnonzero(delay_s <= limit_s)
        if len(hopeful):
            everything = everything.joined(extended.chosen(hopeful).best())
    complete = np.flatnonzero(everything.count == len(gradients))
    return [_groups_of(everything, int(index)) for index in complete]


class _Times:
    """Table of `Legs.times` by the bytes of a group.

    It has the sizes of all groups if there are few; otherwise `POINTS` sizes, between which it
    interpolates.

    Args:
        ends: bytes of the first gradients, from none to all.
    """

    def __init__(self, ends: Sequence[int], legs: Legs) -> None:
        sizes = {0.0, float(ends[-1])}
        if len(ends) * len(ends) < POINTS:
            sizes.update(float(end - start) for start, end in itertools.combinations(ends, 2))
        else:
            least = min(end - start for start, end in itertools.pairwise(ends) if end > start)
            sizes.update(np.geomspace(least, ends[-1], POINTS).tolist())
            sizes.update((legs.small_bytes, math.nextafter(legs.small_bytes, math.inf)))
        self._sizes = np.array(sorted(sizes))
        self._columns = np.array([legs.times(nbytes) for nbytes in self._sizes.tolist()]).T

    def __call__(self, nbytes: Floats) -> list[Floats]:
        return [np.interp(nbytes, self._sizes, column) for column in self._columns]


def _groups_of(plans: _States, index: int) -> Groups:
    groups = []
    while index:
        before = int(plans.before[index])
        groups.append(list(range(int(plans.count[before]), int(plans.count[index]))))
        index = before
    return groups[::-1]
