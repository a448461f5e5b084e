"""Gradients cut into partitions that overtake each other: the engine of `bytescheduler`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dear.algorithms.synchronous._scheduler import OrderedIssuer, planned_order, slices
from dear.buckets.carriers import Carrier, make_carrier
from dear.buckets.compression import HalfOptions, share_of
from dear.cost.collectives import measured_costs
from dear.training.backward_times import BackwardProfile, LayerTimes
from dear.training.deferred import DeferredEngine

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch.nn import Module, Parameter
    from torch.optim import Optimizer

    from dear.comm.communicator import Communicator, Work


@dataclass(frozen=True, kw_only=True)
class Partition:
    """A piece of a group's buffer."""

    group: int
    offset: int
    length: int
    """Both in elements."""
    nbytes: int
    """As they travel."""


@dataclass(frozen=True, kw_only=True)
class Queues:
    """How partitions wait for the wire.

    Either one queue, with a credit of bytes under way; or several of different priority, of which
    the backend lets one overtake another in mid-flight.
    """

    levels: int = 1
    credit: float = math.inf
    """Bytes."""


class PartitionedEngine(DeferredEngine):
    """All-reduces the partitions of each layer; those of layers that run first are urgent.

    In the first `profile_steps` steps everything is sent at the end of the backward pass. Then
    every rank gets the order that rank 0 has found by playing the scheduler through with its times.
    """

    def __init__(
        self,
        model: Module,
        optimizer: Optimizer,
        communicator: Communicator,
        groups: Sequence[Sequence[Parameter]],
        *,
        partition_bytes: float,
        queues: Queues,
        options: HalfOptions,
        profile_steps: int,
    ) -> None:
        self._members = [param for params in groups for param in params]
        # Before everything else that watches gradients, so that its times are of the pass alone.
        self._times: LayerTimes | None = LayerTimes(model, self._members, communicator)
        last_first = list(reversed(range(len(groups))))
        super().__init__(model, optimizer, communicator, groups, [last_first])
        self._queues = queues
        self._steps_left = profile_steps
        self._partitions: list[Partition] = []
        self._tasks_of: list[list[int]] = []
        """The partitions of each group."""
        for index, group in enumerate(self.groups):
            data = group.buffer.data
            width = data.element_size() * share_of(options, data.element_size())
            limit = max(1, int(partition_bytes // width))
            cut = [
                Partition(group=index, offset=o, length=n, nbytes=int(n * width))
                for o, n in slices(data.numel(), limit)
            ]
            first = len(self._partitions)
            self._tasks_of.append(list(range(first, first + len(cut))))
            self._partitions += cut
        self._carriers: list[Carrier] = [
            make_carrier(options, communicator, self._piece(part)) for part in self._partitions
        ]
        self._works: dict[int, Work] = {}
        """Started and not yet waited for."""
        self._queued = [False] * len(self.groups)
        """Handed to an issuer, which may not have started it yet."""
        self._issuers: list[OrderedIssuer[int]] = []
        self._orders: list[list[int]] = []
        """For each issuer its tasks, in the order in which they start."""
        self._level_of: list[int] = []
        """For each group its queue; 0 is the most urgent."""
        self._sizes = {task: float(part.nbytes) for task, part in enumerate(self._partitions)}
        # Queue 0 of the communicator is left to everything else.
        communicator.ensure_channels(queues.levels + 1)

    def step(self, update: Callable[[], Any]) -> Any:
        result = super().step(update)
        if self._times is not None:
            self._steps_left -= 1
            if self._steps_left == 0:
                self._make_plan(self._times.stop())
                self._times = None
        return result

    def close(self) -> None:
        super().close()
        if self._times is not None:
            self._times.stop()

    def _make_plan(self, profile: BackwardProfile | None) -> None:
        communicator = self.communicator
        # The measurement must have the wire for itself.
        for index in range(len(self.groups)):
            self._await(index)
        cost = measured_costs(communicator, "all_reduce", self.groups[0].buffer.data.device)
        uses = self.first_uses()
        arrivals = self._group_arrivals(profile)
        priorities = [0.0] * len(self._partitions)
        for place, group in enumerate(uses):
            tasks = self._tasks_of[group]
            for piece, task in enumerate(tasks):
                priorities[task] = place + piece / len(tasks)
        order = planned_order(
            [arrivals[part.group] for part in self._partitions],
            priorities,
            list(self._sizes.values()),
            credit=min(self._queues.credit, max(self._sizes.values())),
            cost=cost,
        )
        launched = sorted(range(len(self.groups)), key=lambda group: (arrivals[group], -group))
        uses, order, launched = communicator.broadcast_object((uses, order, launched))
        self._level_of = self._levels(uses)
        for level in range(self._queues.levels):
            self._orders.append(
                [task for task in order if self._level_of[self._partitions[task].group] == level]
            )
            self._issuers.append(OrderedIssuer(self._issue, self._queues.credit))
        self.send_early(launched)

    def _group_arrivals(self, profile: BackwardProfile | None) -> list[float]:
        if profile is None:  # this rank has not run a backward pass
            return [0.0] * len(self.groups)
        arrival = {
            self._members[index]: seconds
            for index, seconds in zip(profile.order, profile.arrivals_s, strict=True)
        }
        return [max(arrival[param] for param in group.buffer.params) for group in self.groups]

    def _levels(self, uses: Sequence[int]) -> list[int]:
        """Neighbours in the order of use share a level; levels have about equal bytes."""
        total = sum(self._sizes.values())
        levels = [0] * len(uses)
        before = 0.0
        for group in uses:
            size = sum(self._sizes[task] for task in self._tasks_of[group])
            levels[group] = min(
                int((before + size / 2) / total * self._queues.levels), self._queues.levels - 1
            )
            before += size
        return levels

    def _begin_pass(self) -> None:
        for issuer, order in zip(self._issuers, self._orders, strict=True):
            issuer.begin(order, self._sizes)

    def _send(self, index: int) -> None:
        if not self._issuers:
            for task in self._tasks_of[index]:
                self._works[task] = self._all_reduce(task, channel=0, priority=0)
            return
        self._queued[index] = True
        for task in self._tasks_of[index]:
            self._issuers[self._level_of[index]].ready(task)

    def _issue(self, task: int) -> None:
        part = self._partitions[task]
        level = self._level_of[part.group]
        work = self._all_reduce(task, channel=level + 1, priority=self._queues.levels - 1 - level)
        self._works[task] = work
        if self._queues.credit < math.inf:
            issuer = self._issuers[level]
            work.on_complete(lambda: issuer.finished(part.nbytes))

    def _all_reduce(self, task: int, *, channel: int, priority: int) -> Work:
        piece = self._piece(self._partitions[task])
        return self._carriers[task].send(piece, channel=channel, priority=priority)

    def _piece(self, part: Partition) -> torch.Tensor:
        return self.groups[part.group].buffer.data.narrow(0, part.offset, part.length)

    def _await(self, index: int) -> None:
        for task in self._tasks_of[index]:
            if self._queued[index]:
                began = self.communicator.clock()
                self._issuers[self._level_of[index]].wait_started(task)
                self.communicator.blocked_s += self.communicator.clock() - began
            work = self._works.pop(task, None)
            if work is not None:
                work.wait()
                self._carriers[task].receive(self._piece(self._partitions[task]))
        self._queued[index] = False

    def _drop(self) -> None:
        for issuer in self._issuers:
            issuer.drop()
        self._queued = [False] * len(self.groups)
        while self._works:
            self._works.popitem()[1].wait()
