"""Priority scheduling of partitioned gradients."""

from __future__ import annotations

import heapq
import math
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from dear.buckets.carriers import Carrier, make_carrier
from dear.buckets.compressors import HalfOptions
from dear.buckets.flat import packed_bucket, with_gradients
from dear.buckets.grouping import MIB, Arrived, Cost, Groups, fuse, layers
from dear.buckets.updates import PartialUpdate
from dear.comm.communicator import Work
from dear.cost.collectives import measured_costs
from dear.cost.overlap import Overlap, Transfer
from dear.errors import UserError
from dear.lazy import torch
from dear.options import at_least, positive
from dear.training.algorithm import Algorithm, Capabilities
from dear.training.engine import Replica, refuse_lbfgs
from dear.training.gradients import DeferredEngine
from dear.training.tuning import BackwardProfile, LayerTimes

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
            positive("option of bytescheduler 'credit_mb'", self.credit_mb)
            at_least("option of bytescheduler 'levels'", self.levels, 1)
            if self.levels is not None and self.credit_mb is not None:
                raise UserError(
                    "options of bytescheduler 'levels' and 'credit_mb' exclude each other: with a "
                    "credit there is one queue"
                )

        def settling_steps(self) -> int:
            return self.profile_steps

    capabilities = Capabilities(consistency="synchronous")
    bound = "cross_iteration"

    @classmethod
    def overlap_of(cls, options: Options) -> Overlap:
        sent = Transfer(
            kind="average",
            starts="gradient",
            awaited="layer",
            steps_later=1,
            urgent=True,
            part_bytes=options.partition_mb * MIB,
        )
        return Overlap(transfers=(sent,), updates="layer")

    @classmethod
    def grouping(cls, options: Options, arrived: Arrived, cost: Cost) -> Groups:
        return arrived.by_layer()

    def refuse(self, replica: Replica) -> None:
        refuse_lbfgs(replica.optimizer, "bytescheduler")
        levels, communicator = replica.options.levels, replica.communicator
        if levels is not None and not communicator.native:
            raise UserError(
                f"option of bytescheduler 'levels'={levels}: backend {communicator.backend} has no "
                "priorities; use credit_mb"
            )

    def engine(self, replica: Replica) -> PartitionedEngine:
        return PartitionedEngine(replica)


@dataclass(frozen=True, kw_only=True)
class Partition:
    """A piece of a group's buffer."""

    group: int
    piece: torch.Tensor
    carrier: Carrier
    nbytes: float
    """As they travel."""


class PartitionedEngine(DeferredEngine):
    """All-reduces the partitions of each layer; those of layers that run first are urgent.

    In the first `profile_steps` steps everything is sent at the end of the backward pass. Then
    every rank gets the order that rank 0 has found by playing the scheduler through with its times.

    Partitions wait for the wire in one queue, with a credit of bytes under way; or in several of
    different priority, of which the backend lets one overtake another in mid-flight.
    """

    def __init__(self, replica: Replica) -> None:
        communicator, options = replica.communicator, replica.options
        groups = fuse(layers(replica.model, replica.params), threshold=0)
        self._members = [param for params in groups for param in params]
        # Before everything else that watches gradients, so that its times are of the pass alone.
        self._times: LayerTimes | None = LayerTimes(replica.model, self._members, communicator)
        super().__init__(replica, [self._members])
        self.buckets = [packed_bucket(params, communicator.size) for params in groups]
        self._units = [list(reversed(range(len(groups))))]
        """Buckets that are sent together."""
        self._in_pass = False
        self._update = PartialUpdate(self.optimizer, type(self.optimizer))
        self.readers.set_groups(groups)
        self.hooks.before_forward(self.model.modules(), self.before_forward)
        one_queue = options.credit_mb is not None or not communicator.native
        self._levels = 1 if one_queue else options.levels or LEVELS
        self._credit = (options.credit_mb or CREDIT_MB) * MIB if one_queue else math.inf
        """Bytes."""
        self._steps_left = options.profile_steps
        self._partitions: list[Partition] = []
        self._tasks_of: list[list[int]] = []
        """The partitions of each group."""
        for index, bucket in enumerate(self.buckets):
            data = bucket.gradients
            width = data.element_size() * options.share(data.element_size())
            limit = max(1, int(options.partition_mb * MIB // width))
            first = len(self._partitions)
            for piece in data.split(lengths(data.numel(), limit)):
                carrier = make_carrier(options, communicator, piece)
                nbytes = float(int(piece.numel() * width))
                self._partitions.append(
                    Partition(group=index, piece=piece, carrier=carrier, nbytes=nbytes)
                )
            self._tasks_of.append(list(range(first, len(self._partitions))))
        self._works: dict[int, Work] = {}
        """Started and not yet waited for."""
        self._queued = [False] * len(self.buckets)
        """Handed to an issuer, which may not have started it yet."""
        self._issuers: list[OrderedIssuer[int]] = []
        self._orders: list[list[int]] = []
        """For each issuer its tasks, in the order in which they start."""
        self._level_of: list[int] = []
        """For each group its queue; 0 is the most urgent."""
        self._sizes = {task: part.nbytes for task, part in enumerate(self._partitions)}
        # Queue 0 of the communicator is left to everything else.
        communicator.ensure_channels(self._levels + 1)

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

    def findings(self) -> dict[str, Any]:
        credit_mb = None if math.isinf(self._credit) else self._credit / MIB
        return {
            "partitions": len(self._partitions),
            "queues": self._levels,
            "credit_mb": credit_mb,
            "order": [self._partitions[task].group for order in self._orders for task in order],
        }

    def close(self) -> None:
        super().close()
        for index in range(len(self.buckets)):  # a pass without a step may be under way
            self._await(index)
        if self._times is not None:
            self._times.stop()

    def _make_plan(self, profile: BackwardProfile) -> None:
        communicator = self.communicator
        # The measurement must have the wire for itself.
        for index in range(len(self.buckets)):
            self._await(index)
        cost = measured_costs(communicator, "all_reduce", self.buckets[0].gradients.device)
        bucket_of = {param: i for i, bucket in enumerate(self.buckets) for param in bucket.params}
        # Buckets as the first forward passes read them; those never seen come last.
        read = [bucket_of[param] for param in self.readers.order()]
        uses = list(dict.fromkeys([*read, *range(len(self.buckets))]))
        arrivals = [0.0] * len(self.buckets)
        for index, seconds in zip(profile.order, profile.arrivals_s, strict=True):
            group = bucket_of[self._members[index]]
            arrivals[group] = max(arrivals[group], seconds)
        priorities = [0.0] * len(self._partitions)
        for place, group in enumerate(uses):
            tasks = self._tasks_of[group]
            for piece, task in enumerate(tasks):
                priorities[task] = place + piece / len(tasks)
        order = planned_order(
            [arrivals[part.group] for part in self._partitions],
            priorities,
            list(self._sizes.values()),
            credit=min(self._credit, max(self._sizes.values())),
            cost=cost,
        )
        launched = sorted(range(len(self.buckets)), key=lambda group: (arrivals[group], -group))
        uses, order, launched = communicator.broadcast_object((uses, order, launched))
        self._level_of = self._shared_out(uses)
        for level in range(self._levels):
            self._orders.append(
                [task for task in order if self._level_of[self._partitions[task].group] == level]
            )
            self._issuers.append(OrderedIssuer(self._issue, self._credit))
        # From the next pass on, buckets are sent one by one as they are complete.
        self._units = [[index] for index in range(len(self.buckets))]
        self.schedule.regroup([bucket.params for bucket in self.buckets], launched)

    def _shared_out(self, uses: Sequence[int]) -> list[int]:
        """The level of each group: neighbours in use share one; all have about equal bytes."""
        total = sum(self._sizes.values())
        levels = [0] * len(uses)
        before = 0.0
        for group in uses:
            size = sum(self._sizes[task] for task in self._tasks_of[group])
            level = int((before + size / 2) / total * self._levels)
            levels[group] = min(level, self._levels - 1)
            before += size
        return levels

    def _send(self, index: int) -> None:
        if not self._issuers:
            for task in self._tasks_of[index]:
                part = self._partitions[task]
                self._works[task] = part.carrier.send(part.piece, channel=0, priority=0)
            return
        self._queued[index] = True
        for task in self._tasks_of[index]:
            self._issuers[self._level_of[index]].ready(task)

    def _issue(self, task: int) -> None:
        part = self._partitions[task]
        level = self._level_of[part.group]
        queue = {"channel": level + 1, "priority": self._levels - 1 - level}
        work = self._works[task] = part.carrier.send(part.piece, **queue)
        if self._credit < math.inf:
            issuer = self._issuers[level]
            work.on_complete(lambda: issuer.finished(part.nbytes))

    def _await(self, index: int) -> None:
        for task in self._tasks_of[index]:
            if self._queued[index]:
                began = self.communicator.clock()
                self._issuers[self._level_of[index]].wait_started(task)
                self.communicator.held_up(began)
            work = self._works.pop(task, None)
            if work is not None:
                work.wait()
                part = self._partitions[task]
                part.carrier.receive(part.piece)
        self._queued[index] = False

    def _mean(self, index: int) -> dict[torch.nn.Parameter, torch.Tensor | None]:
        with torch.inference_mode(False):
            self._await(index)
            return self.buckets[index].means()

    def _means(self) -> dict[torch.nn.Parameter, torch.Tensor | None]:
        means: dict[torch.nn.Parameter, torch.Tensor | None] = {}
        for index in range(len(self.buckets)):
            means |= self._mean(index)
        return means


Task = TypeVar("Task")


def lengths(numel: int, limit: int) -> list[int]:
    """Of the fewest parts of at most `limit` elements; they differ by one, the longer ones last."""
    count = max(1, -(-numel // limit))
    short, longer = divmod(numel, count)
    return [short] * (count - longer) + [short + 1] * longer


def planned_order(
    arrivals: Sequence[float],
    priorities: Sequence[float],
    sizes: Sequence[float],
    *,
    credit: float,
    cost: Cost,
) -> list[int]:
    """The order in which ByteScheduler's rule (SOSP 2019) starts tasks on a link that is a queue.

    The rule: the most urgent task that is ready, while credit lasts. A task starts if any credit is
    left, which may so fall below 0; its size is taken then and given back at its end. Small numbers
    are urgent; among equals the first that was ready goes first.

    The rule's choices depend on when tasks are ready and when others end, which no two ranks see
    alike; but collectives must start in one order everywhere. So the rule is played through once,
    on measured times, and every rank keeps to the order that comes out.

    Args:
        arrivals: when each task is ready, in seconds.
        cost: seconds of a task by its size.
    """
    coming = deque(sorted(range(len(arrivals)), key=lambda task: arrivals[task]))
    ready: list[tuple[float, int, int]] = []  # priority, order of arrival, task
    order: list[int] = []
    ends: deque[tuple[float, int]] = deque()  # of started tasks, ascending: the link is a queue
    free = 0.0
    while coming or ends:
        now = min(arrivals[coming[0]] if coming else math.inf, ends[0][0] if ends else math.inf)
        while ends and ends[0][0] <= now:
            credit += sizes[ends.popleft()[1]]
        while coming and arrivals[coming[0]] <= now:
            task = coming.popleft()
            heapq.heappush(ready, (priorities[task], -len(coming), task))
        while ready and credit > 0:
            *_, task = heapq.heappop(ready)
            credit -= sizes[task]
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
