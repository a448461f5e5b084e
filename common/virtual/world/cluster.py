"""Cluster whose ranks may differ: their shared links, and the network as each rank sees it."""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch

from common.virtual.costs.faults import Disturbance
from common.virtual.costs.parts import CostsOf, Shape
from common.virtual.world.marks import Parts
from common.virtual.world.network import (
    Costs,
    Effect,
    Group,
    Network,
    Place,
    Transfer,
    Values,
    apply,
    shape_of,
)
from dear.cost.event_model.events import Events
from dear.cost.event_model.link import CHUNK_BYTES, Link

Leg = tuple[Place, int, Literal["up", "down"]]
"""Link in one direction: of a rank if it is inside a host, else of a host."""


@dataclass(eq=False)
class _Meeting:
    """Collective, or agreement, for which ranks of a group wait."""

    given: dict[int, Any] = field(default_factory=dict)
    """Values of each rank."""
    came: list[Callable[[Any], None]] = field(default_factory=list)
    """Calls for when the meeting is over."""


@dataclass(eq=False)
class _End:
    """Sender or receiver of a message that the other one has not called for yet."""

    sends: bool
    values: torch.Tensor | None
    over: Callable[[torch.Tensor], None]


class Cluster:
    """Links of all hosts and ranks, and what happens on them.

    The ranks of a host share its link, which carries one message at a time in each direction. A
    message of two ranks occupies the sender's link up and the receiver's link down. A collective
    occupies both of each host until the last link has served it.

    Args:
        costs: cost of each operation in a group of some hosts and ranks per host.
    """

    def __init__(
        self,
        shape: Shape,
        costs: CostsOf,
        disturbances: Sequence[Disturbance] = (),
        *,
        engine: str,
        priorities: bool,
        chunk_bytes: float = CHUNK_BYTES,
    ) -> None:
        self.shape, self.engine, self.priorities = shape, engine, priorities
        self.events = Events()
        self.began_s = 0.0
        """Time from which those of disturbances count."""
        self.windows: dict[tuple[Group, int], dict[int, list[Any]]] = {}
        self.costs = Costs(costs, engine)
        self._changes: dict[int, list[tuple[Disturbance, Costs | None]]] = {}
        for each in disturbances:
            changed = None if each.costs is None else Costs(each.costs, engine)
            self._changes.setdefault(each.host, []).append((each, changed))
        self._chunk_bytes = chunk_bytes
        self._links: dict[Leg, Link] = {}
        self._legs: dict[Group, tuple[Shape, list[Leg]]] = {}
        self._meetings: dict[tuple[Group, int], _Meeting] = {}
        self._ends: dict[Hashable, deque[_End]] = {}

    def slowdown(self, host: int, now_s: float) -> float:
        """Returns the factor by which compute of a host takes longer at a time."""
        if host not in self._changes:
            return 1.0
        return math.prod(each.compute for each, _ in self._active(host, now_s))

    def _active(self, host: int, now_s: float) -> list[tuple[Disturbance, Costs | None]]:
        at_s = now_s - self.began_s
        changes = self._changes.get(host, ())
        return [change for change in changes if change[0].from_s <= at_s < change[0].until_s]

    def _costs_at(self, host: int) -> Costs:
        """Returns the costs of messages of a host that start now."""
        active = self._active(host, self.events.now_s) if host in self._changes else ()
        changed = [costs for _, costs in active if costs is not None]
        return changed[-1] if changed else self.costs

    def meet(self, group: Group, number: int, rank: int, given: Any) -> _Meeting | None:
        """Lets a rank come to meeting `number` of a group; returns it if all have come now."""
        meeting = self._meetings.setdefault((group, number), _Meeting())
        meeting.given[rank] = given
        if len(meeting.given) < len(group.ranks):
            return None
        return self._meetings.pop((group, number))

    def meeting(self, group: Group, number: int) -> _Meeting:
        """Returns a meeting that is not complete yet."""
        return self._meetings[group, number]

    def end(self, key: Hashable, new: _End) -> _End | None:
        """Adds an end of the messages `key`; returns the oldest one that fits it, if any waits."""
        waiting = self._ends.setdefault(key, deque())
        if waiting and waiting[0].sends != new.sends:
            return waiting.popleft()
        waiting.append(new)
        return None

    def legs(self, group: Group) -> tuple[Shape, list[Leg]]:
        """Returns the shape of a group, and the links that its collectives occupy."""
        if group not in self._legs:
            shape = shape_of(group.ranks, self.shape.ranks_per_host)
            legs: list[Leg] = []
            for place in dict.fromkeys(map(self.host, group.ranks)) if shape.hosts > 1 else ():
                legs += [("between", place, "up"), ("between", place, "down")]
            for place in group.ranks if shape.hosts == 1 and shape.ranks > 1 else ():
                legs += [("inside", place, "up"), ("inside", place, "down")]
            self._legs[group] = shape, legs
        return self._legs[group]

    def pair(self, source: int, target: int) -> tuple[Shape, list[Leg]]:
        """Returns the shape of a message between two ranks, and the links that it occupies."""
        if source == target:
            return Shape(hosts=1), []
        hosts = self.host(source), self.host(target)
        if hosts[0] == hosts[1]:
            shape = Shape(hosts=1, ranks_per_host=self.shape.ranks_per_host)
            return shape, [("inside", source, "up"), ("inside", target, "down")]
        shape = Shape(hosts=self.shape.hosts)
        return shape, [("between", hosts[0], "up"), ("between", hosts[1], "down")]

    def host(self, rank: int) -> int:
        """Returns the host of a rank."""
        return rank // self.shape.ranks_per_host

    def carry(
        self,
        operation: str,
        way: tuple[Shape, Sequence[Leg]],
        nbytes: int,
        transfers: Iterable[Transfer],
        then: Callable[[], None],
        *,
        channel: Hashable,
        priority: int = 0,
    ) -> None:
        """Sends a message over all links of its way; it ends when the last one has served it."""
        shape, legs = way
        if not legs:
            then()
            return
        left = len(legs)

        def ended() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                then()

        sendings = []
        for leg in legs:
            if leg not in self._links:
                self._links[leg] = Link(self.events, self._chunk_bytes)
            host = leg[1] if leg[0] == "between" else self.host(leg[1])
            cost = self._costs_at(host).of(operation, shape)
            link = self._links[leg]
            sendings.append(link.send(cost, nbytes, channel=channel, priority=priority, then=ended))
        for transfer in transfers:
            transfer.sending = transfer.sending or sendings[0]


class Rank(Network):
    """Network as one of the ranks of a cluster sees it."""

    def __init__(self, cluster: Cluster, rank: int) -> None:
        super().__init__(
            rank,
            cluster.shape,
            cluster.events,
            costs=cluster.costs,
            engine=cluster.engine,
            priorities=cluster.priorities,
        )
        self._cluster, self._host = cluster, cluster.host(rank)
        self._numbers: dict[Hashable, int] = {}

    def slowdown(self, now_s: float) -> float:
        return self._cluster.slowdown(self._host, now_s)

    def meet(
        self,
        operation: str,
        group: Group,
        nbytes: int,
        given: torch.Tensor,
        effect: Callable[[Parts], Any],
        *,
        priority: int = 0,
    ) -> Transfer:
        transfer = self.transfer(operation, nbytes)
        number = self._number(group)
        meeting = self._cluster.meet(group, number, self.rank, (given, transfer, effect))
        if meeting is not None:
            entries = [meeting.given[rank] for rank in group.ranks]
            parts = Parts([values for values, _, _ in entries])
            transfers = [each for _, each, _ in entries]

            def ended() -> None:
                for _, _, effect in entries:
                    apply(partial(effect, parts))
                for each in transfers:
                    each.end()

            self._cluster.carry(
                operation,
                self._cluster.legs(group),
                nbytes,
                transfers,
                ended,
                channel=group,
                priority=priority,
            )
        return transfer

    def swap(
        self,
        queue: Hashable,
        nbytes: int,
        given: Mapping[int, torch.Tensor],
        sources: Iterable[int],
        effect: Callable[[Mapping[int, torch.Tensor]], Any],
    ) -> Transfer:
        sources = list(sources)
        transfer = self.transfer("exchange", nbytes * len(given))
        received: dict[int, torch.Tensor] = {}
        left = len(given) + len(sources)

        def over(source: int | None, values: torch.Tensor) -> None:
            nonlocal left
            left -= 1
            if source is not None:
                received[source] = values
            if left == 0:
                transfer.end(lambda: effect(received))

        for target, values in given.items():
            end = _End(True, values, partial(over, None))
            self._message(queue, self.rank, target, nbytes, end, transfer)
        for source in sources:
            end = _End(False, None, partial(over, source))
            self._message(queue, source, self.rank, nbytes, end, transfer)
        if not left:
            transfer.end(lambda: effect(received))
        return transfer

    def _message(
        self, queue: Hashable, source: int, target: int, nbytes: int, end: _End, transfer: Transfer
    ) -> None:
        """Adds an end of a message, which starts when both ends are there."""
        other = self._cluster.end((queue, source, target), end)
        if other is None:
            return
        values = end.values if end.values is not None else other.values
        assert values is not None, "one of the two sends"

        def ended() -> None:
            copy = values.clone()  # the sender may change them now, before the receiver looks
            end.over(copy)
            other.over(copy)

        way = self._cluster.pair(source, target)
        channel = (queue, source)
        self._cluster.carry("exchange", way, nbytes, [transfer], ended, channel=channel)

    def reach(
        self, source: int, target: int, nbytes: int, values: Values, effect: Effect
    ) -> Transfer:
        transfer = self.transfer("exchange", nbytes if source != target else 0)
        self._cluster.carry(
            "exchange",
            self._cluster.pair(source, target),
            nbytes,
            [transfer],
            lambda: transfer.end(lambda: effect(values())),
            channel=("windows", self.rank),
        )
        return transfer

    def agree(self, group: Group, value: Any, call: str) -> list[Any]:
        self.catch_up()
        number = self._number(group)
        meeting = self._cluster.meet(group, number, self.rank, value)
        result: list[Any] = []
        if meeting is None:
            self._cluster.meeting(group, number).came.append(result.extend)
            self.events.run_until(lambda: bool(result), f"a {call} of other ranks")
            return result
        # Each rank gets its own copy, as if it had come over a wire.
        values = [meeting.given[rank] for rank in group.ranks]
        for call in meeting.came:
            call(copy.deepcopy(values))
        return values

    def windows(self, group: Group, window: Any) -> Mapping[int, Sequence[Any]]:
        self.catch_up()
        key = group, self._number(("window", group))
        there = self._cluster.windows.setdefault(key, {})
        there[group.ranks.index(self.rank)] = [window]
        return there

    def _number(self, what: Hashable) -> int:
        """Returns how many calls of a kind this rank has made before."""
        self._numbers[what] = self._numbers.get(what, -1) + 1
        return self._numbers[what]
