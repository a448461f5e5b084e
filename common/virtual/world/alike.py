"""Network of a rank that stands for all ranks, which do the same at the same time."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch

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
    shape_of,
)
from dear.cost.event_model.events import Events
from dear.cost.event_model.link import CHUNK_BYTES, Link, Shared


class Alike(Network):
    """Network of rank 0 of a cluster whose ranks all do the same at the same time.

    It has the links of rank 0 only. What rank 0 sends, others send to it.

    Args:
        costs: cost of each operation in a group of some hosts and ranks per host.
    """

    def __init__(
        self,
        shape: Shape,
        costs: CostsOf,
        *,
        engine: str,
        priorities: bool,
        chunk_bytes: float = CHUNK_BYTES,
    ) -> None:
        known = Costs(costs, engine)
        super().__init__(0, shape, Events(), costs=known, engine=engine, priorities=priorities)
        self.links: dict[Place, Link] = {
            "inside": Link(self.events, chunk_bytes),
            "between": Link(self.events, chunk_bytes),
        }
        self._shapes: dict[Group, tuple[Shape, int]] = {}
        self._windows: list[Any] = []

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
        if group not in self._shapes:
            local = self.shape.ranks_per_host
            shape = shape_of(group.ranks, local)
            # The other ranks of the host are in groups alike, which use its link, too.
            groups = local // shape.ranks_per_host if shape.hosts > 1 else 1
            self._shapes[group] = shape, groups
        parts = Parts([given], len(group.ranks))
        shape, groups = self._shapes[group]
        return self._start(
            operation,
            nbytes,
            [shape],
            lambda: effect(parts),
            group.name,
            priority=priority,
            ranks=group.ranks,
            groups=groups,
        )

    def swap(
        self,
        queue: Hashable,
        nbytes: int,
        given: Mapping[int, torch.Tensor],
        sources: Iterable[int],
        effect: Callable[[Mapping[int, torch.Tensor]], Any],
    ) -> Transfer:
        values = next(iter(given.values()), torch.zeros(1, 0))
        legs = [self._pair(target) for target in given]
        received = dict.fromkeys(sources, values)
        return self._start("exchange", nbytes, legs, lambda: effect(received), queue)

    def reach(
        self, source: int, target: int, nbytes: int, values: Values, effect: Effect
    ) -> Transfer:
        legs = [self._pair(target if source == self.rank else source)]
        return self._start("exchange", nbytes, legs, lambda: effect(values()), "windows")

    def agree(self, group: Group, value: Any, call: str) -> list[Any]:
        return [value] * len(group.ranks)

    def windows(self, group: Group, window: Any) -> Mapping[int, Sequence[Any]]:
        # What this rank writes to a neighbour, a neighbour writes to this rank. A window of two
        # ranks has no slot here if this rank only sends; then the windows for other pairs get it.
        self._windows.append(window)
        alike = [window] if window.slots else self._windows
        return dict.fromkeys(range(len(group.ranks)), alike)

    def _start(
        self,
        operation: str,
        nbytes: int,
        legs: Sequence[Shape],
        effect: Callable[[], Any],
        queue: Hashable,
        priority: int = 0,
        ranks: Sequence[int] | None = None,
        groups: int = 1,
    ) -> Transfer:
        """Starts a message of `nbytes` for each leg: the hosts and ranks that take part in it.

        Args:
            ranks: group of a collective; None: messages between single ranks.
            groups: groups that send such messages over the same link.
        """
        legs = [leg for leg in legs if leg.ranks > 1]
        transfer = self.transfer(operation, nbytes * len(legs))
        if self.recorder is not None and legs:
            self.recorder.sent(transfer, ranks, queue, priority)
        left = len(legs)

        def ended() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                transfer.end(effect)

        for leg in legs:
            link = self.links["between" if leg.hosts > 1 else "inside"]
            cost = self.costs.of(operation, leg)
            if groups > 1:
                cost = Shared(cost=cost, messages=groups)
            sending = link.send(cost, nbytes, channel=queue, priority=priority, then=ended)
            transfer.sending = transfer.sending or sending
        if not legs:
            transfer.end(effect)
        return transfer

    def _pair(self, peer: int) -> Shape:
        """Returns the hosts and ranks that exchange with a peer like this rank with rank `peer`.

        All ranks exchange at the same time, so those of a host share its link.
        """
        if peer == self.rank:
            return Shape(hosts=1)
        if peer < self.shape.ranks_per_host:
            return Shape(hosts=1, ranks_per_host=self.shape.ranks_per_host)
        return self.shape
