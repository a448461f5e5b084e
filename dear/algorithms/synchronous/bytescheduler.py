"""Priority scheduling of partitioned gradients."""

from __future__ import annotations

import heapq
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from dear.buckets.carriers import Carrier, make_carrier
from dear.buckets.compressors import HalfOptions, refuse_types, share_of
from dear.buckets.flat import packed_bucket
from dear.buckets.grouping import MIB, Cost, fuse, layers
from dear.buckets.updates import PartialUpdate, with_gradients
from dear.cost.collectives import measured_costs
from dear.errors import UserError
from dear.lazy import torch
from dear.options import at_least, positive
from dear.training.algorithm import Algorithm, Capabilities
from dear.training.engine import distribute, refuse_lbfgs, trained_parameters
from dear.training.gradients import DeferredEngine
from dear.training.tuning import BackwardProfile, LayerTimes

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.nn import Module, Parameter
    from torch.optim import Optimizer

    from dear.comm.communicator import Communicator, Work

CREDIT_MB = 16.0
LEVELS = 4


class ByteScheduler(Algorithm):
    """ByteScheduler (Peng et al., SOSP 2019): partitions, sent in the order in which layers run.

    The gradients of each layer are cut into partitions. Those of layers that run first in a forward
    pass overtake the others: in mid-flight where the backend has priorities; elsewhere a credit
    limits what is under way. The next forward pass starts at once, and each of its layers waits
    only for its own tensors, which are updated just before it runs.
    Horovod is neither needed nor patched. Where the original's rank 0 negotiates every start, here
    it plays its scheduler through once, with measured times, and all ranks keep to that order.
    Invariant: whoever reads parameters by a forward or a state dict sees those after the last
    `step()`; between `backward()` and `step()` `p.grad` is still this rank's own gradient.
    Bytes move: from the backward pass, as layers are complete, into the next forward pass.
    Cost per step and rank: one all-reduce per partition.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(HalfOptions):
        """How gradients are cut, in which type they travel, and how many bytes are under way."""

        partition_mb: float = 4.0
        """Largest partition, in MB of 2^20 bytes as they travel."""
        credit_mb: float | None = None
        """Bytes under way at which no further partition starts, in MB of 2^20 bytes. None: no limit
        where the backend has priorities, else 16. (NCCL does not tell when a collective ends: there
        the order holds, but not the limit.)"""
        levels: int | None = None
        """Priority levels, each a channel of its own, where the backend has priorities and there is
        no `credit_mb`; None: 4."""
        profile_steps: int = 2
        """Steps that are measured before the order is made; they do not overlap anything."""

        def __post_init__(self) -> None:
            positive("option of bytescheduler 'partition_mb'", self.partition_mb)
            at_least("option of bytescheduler 'profile_steps'", self.profile_steps, 1)
            if self.credit_mb is not None:
                positive("option of bytescheduler 'credit_mb'", self.credit_mb)
            if self.levels is not None:
                at_least("option of bytescheduler 'levels'", self.levels, 1)
                if self.credit_mb is not None:
                    raise UserError(
                        "options of bytescheduler 'levels' and 'credit_mb' exclude each other: "
                        "with a credit there is one queue"
                    )

        def settling_steps(self) -> int:
            return self.profile_steps

    capabilities = Capabilities(consistency="synchronous")
    bound = "cross_iteration"

    def wrap(
        self, model: Module, optimizer: Optimizer, communicator: Communicator, options: Options
    ) -> tuple[Module, Optimizer]:
        refuse_lbfgs(optimizer, "bytescheduler")
        params = trained_parameters(model, optimizer)
        refuse_types(params, options)
        queues = _queues(options, communicator)

        def engine() -> PartitionedEngine:
            groups = fuse(layers(model, params), threshold=0)
            return PartitionedEngine(model, optimizer, communicator, groups, queues, options)

        return model, distribute(optimizer, engine, communicator)


def _queues(options: ByteScheduler.Options, communicator: Communicator) -> Queues:
    if options.credit_mb is not None:
        return Queues(credit=options.credit_mb * MIB)
    if communicator.native:
        return Queues(levels=options.levels or LEVELS)
    if options.levels is not None:
        raise UserError(
            f"option of bytescheduler 'levels'={options.levels}: backend {communicator.backend} "
            "has no priorities; use credit_mb"
        )
    return Queues(credit=CREDIT_MB * MIB)


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
        queues: Queues,
        options: ByteScheduler.Options,
    ) -> None:
        members = [param for params in groups for param in params]
        # Before everything else that watches gradients, so that its times are of the pass alone.
        self._times: LayerTimes | None = LayerTimes(model, members, communicator)
        super().__init__(model, optimizer, communicator, members, [members])
        self.buckets = [packed_bucket(params, communicator.size) for params in groups]
        self._units = [list(reversed(range(len(groups))))]
        """Buckets that are sent together."""
        self._in_pass = False
        self._update = PartialUpdate(optimizer, type(optimizer))
        self.readers.set_groups(groups)
        self.hooks.before_forward(model.modules(), self.before_forward)
        self._queues = queues
        self._steps_left = options.profile_steps
        self._partitions: list[Partition] = []
        self._tasks_of: list[list[int]] = []
        """The partitions of each group."""
        for index, bucket in enumerate(self.buckets):
            data = bucket.gradients
            width = data.element_size() * share_of(options, data.element_size())
            limit = max(1, int(options.partition_mb * MIB // width))
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
        self._queued = [False] * len(self.buckets)
        """Handed to an issuer, which may not have started it yet."""
        self._issuers: list[OrderedIssuer[int]] = []
        self._orders: list[list[int]] = []
        """For each issuer its tasks, in the order in which they start."""
        self._level_of: list[int] = []
        """For each group its queue; 0 is the most urgent."""
        self._sizes = {task: float(part.nbytes) for task, part in enumerate(self._partitions)}
        # Queue 0 of the communicator is left to everything else.
        communicator.ensure_channels(queues.levels + 1)

    def ready(self, unit: int) -> None:
        if not self._in_pass:
            self._in_pass = True
            self.averaged = False
            # Layers that did not run since the last step; and a pass that this one supersedes.
            self.settle()
            for index in range(len(self.buckets)):
                self._await(index)
            for issuer, order in zip(self._issuers, self._orders, strict=True):
                issuer.begin(order, self._sizes)
        for index in self._units[unit]:
            self.buckets[index].pack()
            self.buckets[index].note()
            self._send(index)

    def passed(self) -> None:
        self._in_pass = False

    def drop(self) -> None:
        if not self._in_pass:
            return
        self._in_pass = False
        for issuer in self._issuers:
            issuer.drop()
        self._queued = [False] * len(self.buckets)
        while self._works:
            self._works.popitem()[1].wait()

    def arrive(self) -> None:
        for param, gradient in self._means().items():
            param.grad = None if gradient is None else gradient.clone()

    def apply(self, update: Callable[[], Any]) -> Any:
        if not self._update.possible():
            return with_gradients(self._means(), update)
        self._update.note()
        self.pending = set(range(len(self.buckets)))
        self.finish_unread()
        return None

    def finish(self, index: int) -> None:
        self._update.run(self._mean(index))

    def stepped(self) -> None:
        if self._times is not None:
            self._steps_left -= 1
            if self._steps_left == 0:
                self._make_plan(self._times.stop())
                self._times = None

    def close(self) -> None:
        super().close()
        for index in range(len(self.buckets)):  # a pass without a step may be under way
            self._await(index)
        if self._times is not None:
            self._times.stop()

    def _make_plan(self, profile: BackwardProfile | None) -> None:
        communicator = self.communicator
        # The measurement must have the wire for itself.
        for index in range(len(self.buckets)):
            self._await(index)
        cost = measured_costs(communicator, "all_reduce", self.buckets[0].gradients.device)
        uses = self._first_uses()
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
        launched = sorted(range(len(self.buckets)), key=lambda group: (arrivals[group], -group))
        uses, order, launched = communicator.broadcast_object((uses, order, launched))
        self._level_of = self._levels(uses)
        for level in range(self._queues.levels):
            self._orders.append(
                [task for task in order if self._level_of[self._partitions[task].group] == level]
            )
            self._issuers.append(OrderedIssuer(self._issue, self._queues.credit))
        # From the next pass on, buckets are sent one by one as they are complete.
        self._units = [[index] for index in range(len(self.buckets))]
        self.schedule.regroup([bucket.params for bucket in self.buckets], launched)

    def _first_uses(self) -> list[int]:
        """Buckets as the first forward passes read them; those never seen come last."""
        bucket_of = {param: i for i, bucket in enumerate(self.buckets) for param in bucket.params}
        order = dict.fromkeys(bucket_of[param] for param in self.readers.order())
        order.update(dict.fromkeys(range(len(self.buckets))))
        return list(order)

    def _group_arrivals(self, profile: BackwardProfile | None) -> list[float]:
        if profile is None:  # this rank has not run a backward pass
            return [0.0] * len(self.buckets)
        arrival = {
            self.params[index]: seconds
            for index, seconds in zip(profile.order, profile.arrivals_s, strict=True)
        }
        return [max(arrival[param] for param in bucket.params) for bucket in self.buckets]

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
        return self.buckets[part.group].gradients.narrow(0, part.offset, part.length)

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

    def _mean(self, index: int) -> dict[Parameter, torch.Tensor | None]:
        with torch.inference_mode(False):
            self._await(index)
            return self.buckets[index].means()

    def _means(self) -> dict[Parameter, torch.Tensor | None]:
        means: dict[Parameter, torch.Tensor | None] = {}
        for index in range(len(self.buckets)):
            means |= self._mean(index)
        return means


Task = TypeVar("Task")


def slices(numel: int, limit: int) -> list[tuple[int, int]]:
    """Cuts `numel` elements into the fewest parts of at most `limit`: (offset, length) of each.

    Lengths differ by one at most, the longer ones last.
    """
    count = max(1, -(-numel // limit))
    short, longer = divmod(numel, count)
    parts = []
    offset = 0
    for index in range(count):
        length = short + (index >= count - longer)
        parts.append((offset, length))
        offset += length
    return parts


class CreditScheduler(Generic[Task]):
    """ByteScheduler's rule (SOSP 2019): the most urgent task that is ready, while credit lasts.

    A task starts if any credit is left, which may so fall below 0; its size is taken then and given
    back at its end. Small numbers are urgent; among equals the first that was ready goes first.
    """

    def __init__(self, credit: float) -> None:
        self.credit = credit
        self._ready: list[tuple[float, int, float, Task]] = []
        self._count = 0

    def ready(self, task: Task, priority: float, size: float) -> None:
        """`task` may start from now on."""
        heapq.heappush(self._ready, (priority, self._count, size, task))
        self._count += 1

    def start(self) -> list[Task]:
        """Takes the tasks that start now, in order."""
        started = []
        while self._ready and self.credit > 0:
            _, _, size, task = heapq.heappop(self._ready)
            self.credit -= size
            started.append(task)
        return started

    def finished(self, size: float) -> None:
        """A started task of this size has ended."""
        self.credit += size


def planned_order(
    arrivals: Sequence[float],
    priorities: Sequence[float],
    sizes: Sequence[float],
    *,
    credit: float,
    cost: Cost,
) -> list[int]:
    """The order in which `CreditScheduler` would start tasks on a link that serves one at a time.

    The rule's choices depend on when tasks are ready and when others end, which no two ranks see
    alike; but collectives must start in one order everywhere. So the rule is played through once,
    on measured times, and every rank keeps to the order that comes out.

    Args:
        arrivals: when each task is ready, in seconds.
        cost: seconds of a task by its size.
    """
    scheduler: CreditScheduler[int] = CreditScheduler(credit)
    coming = sorted(range(len(arrivals)), key=lambda task: arrivals[task])
    order: list[int] = []
    ends: list[tuple[float, int]] = []  # of started tasks, ascending: the link is a queue
    free = now = 0.0
    next_end = next_task = 0
    while next_task < len(coming) or next_end < len(ends):
        times = []
        if next_task < len(coming):
            times.append(arrivals[coming[next_task]])
        if next_end < len(ends):
            times.append(ends[next_end][0])
        now = min(times)
        while next_end < len(ends) and ends[next_end][0] <= now:
            scheduler.finished(sizes[ends[next_end][1]])
            next_end += 1
        while next_task < len(coming) and arrivals[coming[next_task]] <= now:
            task = coming[next_task]
            scheduler.ready(task, priorities[task], sizes[task])
            next_task += 1
        for task in scheduler.start():
            free = max(free, now) + cost(sizes[task])
            ends.append((free, task))
            order.append(task)
    return order


class OrderedIssuer(Generic[Task]):
    """Starts tasks in a fixed order, each once it is ready and credit is left.

    Any thread may report: the training thread that tasks are ready, a backend's that one has ended.

    Args:
        issue: starts a task; called by one thread at a time, in the fixed order.
        credit: infinite if only the order matters; else see to it that `finished` is called.
    """

    def __init__(self, issue: Callable[[Task], None], credit: float = math.inf) -> None:
        self._issue = issue
        self._credit = credit
        self._order: Sequence[Task] = ()
        self._sizes: Mapping[Task, float] = {}
        self._next = 0
        self._ready: set[Task] = set()
        self._started: set[Task] = set()
        self._issuing = False
        self._error: BaseException | None = None
        # Reentrant: what `issue` starts may end, and report, before it returns.
        self._changed = threading.Condition(threading.RLock())

    def begin(self, order: Sequence[Task], sizes: Mapping[Task, float]) -> None:
        """The tasks of the next pass; those of the last have been started, or dropped."""
        with self._changed:
            if self._next < len(self._order):
                raise RuntimeError(f"{len(self._order) - self._next} tasks were never started")
            self._order, self._sizes, self._next = order, sizes, 0
            self._ready.clear()
            self._started.clear()

    def ready(self, task: Task) -> None:
        """`task` may start from now on."""
        with self._changed:
            self._ready.add(task)
            self._start()
            self._raise()

    def finished(self, size: float) -> None:
        """A task of this size has ended; errors of what starts now go to who waits for it."""
        with self._changed:
            self._credit += size
            self._start()

    def wait_started(self, task: Task) -> None:
        """Blocks until `task` has been started; raises what went wrong with starting."""
        with self._changed:
            self._changed.wait_for(lambda: task in self._started or self._error is not None)
            if task not in self._started:
                self._raise()

    def drop(self) -> None:
        """Forgets the tasks that have not been started."""
        with self._changed:
            self._order = self._order[: self._next]

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _start(self) -> None:
        if self._issuing or self._error is not None:
            return
        self._issuing = True
        try:
            while (
                self._next < len(self._order)
                and self._credit > 0
                and self._order[self._next] in self._ready
            ):
                task = self._order[self._next]
                self._next += 1
                self._credit -= self._sizes[task]
                self._issue(task)
                self._started.add(task)
        except Exception as error:
            self._error = error
        finally:
            self._issuing = False
            self._changed.notify_all()
