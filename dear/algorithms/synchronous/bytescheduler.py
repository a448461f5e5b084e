"""Priority scheduling of partitioned gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from dear.buckets.carriers import Carrier, Dense, make_carrier
from dear.buckets.compressors import HalfOptions
from dear.buckets.flat import packed_bucket, with_gradients
from dear.buckets.grouping import MIB, Arrived, Cost, Groups, fuse, layers
from dear.buckets.parts import OrderedIssuer, lengths, planned_order
from dear.buckets.updates import PartialUpdate
from dear.comm.communicator import Batch, Communicator, apart
from dear.comm.work import Work
from dear.cost.collectives import measured_costs
from dear.cost.overlap import Overlap, Transfer, shared_out
from dear.errors import UserError
from dear.lazy import torch
from dear.options import LATER, at_least, positive
from dear.training.algorithm import Algorithm, Capabilities
from dear.training.engine import Replica, Update, refuse_lbfgs
from dear.training.gradients import DeferredEngine
from dear.training.tuning import (
    TRIALS,
    BackwardProfile,
    LayerTimes,
    Regrouping,
    Tuned,
    Tuner,
    need_tuner,
    tuning_steps,
)

CREDIT_MB = 16.0
LEVELS = 4
TUNED_MB = {"credit_mb": (4.0, 64.0), "partition_mb": (2.0, 32.0)}
"""Bounds of the tuner."""
SAMPLES = 8
"""Number of groups that are searched for changes by a GradScaler, which scales all gradients."""


class ByteScheduler(Algorithm["ByteScheduler.Options"]):
    """ByteScheduler (Peng et al., SOSP 2019): partitions, sent in the order in which layers run.

    The gradients of each layer are cut into partitions. Partitions of layers that run first in a
    forward pass go first. If the backend has priorities, partitions wait in several queues, and
    those of a more urgent queue overtake others in mid-flight. Otherwise there is one queue, and a
    credit limits the bytes under way (except with NCCL, which starts them in a fixed order). The
    next forward pass starts at once, and each of its layers waits only for its own tensors, which
    are updated just before it runs. Horovod is neither needed nor patched. In the original, rank 0
    negotiates every start. Here rank 0 simulates the scheduler once, with measured times, and all
    ranks keep the resulting order.
    Invariant: a forward pass or a state dict reads the parameters after the last `step()`. Between
    `backward()` and `step()`, `p.grad` is still this rank's own gradient.
    Bytes move: from the backward pass, as layers are complete, into the next forward pass.
    Cost per step and rank: one all-reduce per partition.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(HalfOptions):
        """Partition size, dtype in which gradients are sent, and limit of the bytes in flight."""

        partition_mb: float = 4.0
        """Largest partition, in MB of 2^20 bytes on the wire."""
        credit_mb: float | None = None
        """Limit of the bytes in flight, above which no partition starts, in MB of 2^20 bytes. None:
        no limit with NCCL or if the backend has priorities, otherwise 16. An error with NCCL,
        which does not report when a collective ends."""
        levels: int | None = None
        """Number of queues, each with its own priority and channel, if the backend has priorities
        and `credit_mb` is not given; None: 4."""
        profile_steps: int = 2
        """Number of steps that are measured to plan the order; they overlap no communication."""
        tune: Literal["none", "credit", "partition", "both"] = field(default="none", metadata=LATER)
        """Sizes that rank 0 chooses by its step times in the 52 steps after the profile (Bayesian
        optimisation, 10 trials): the credit (4 to 64 MB; one queue on every backend), the
        partitions (2 to 32 MB), or both. The search starts at `credit_mb` and `partition_mb`."""

        def __post_init__(self) -> None:
            positive("bytescheduler option 'partition_mb'", self.partition_mb)
            at_least("bytescheduler option 'profile_steps'", self.profile_steps, 1)
            positive("bytescheduler option 'credit_mb'", self.credit_mb)
            at_least("bytescheduler option 'levels'", self.levels, 1)
            if self.levels is not None and (self.credit_mb is not None or self.tunes_credit):
                raise UserError(
                    "bytescheduler option 'levels' cannot be used with a credit ('credit_mb', "
                    "tune=credit or tune=both), because a credit allows only one queue"
                )

        def settling_steps(self) -> int:
            return self.profile_steps + (tuning_steps(TRIALS) if self.tuned() else 0)

        @property
        def tunes_credit(self) -> bool:
            return self.tune in ("credit", "both")

        def tuned(self) -> dict[str, tuple[float, float]]:
            """Returns the bounds in MB of the options that are tuned."""
            names = {"none": (), "both": tuple(TUNED_MB)}.get(self.tune, (f"{self.tune}_mb",))
            return {name: TUNED_MB[name] for name in names}

    capabilities = Capabilities(consistency="synchronous")
    bound = "cross_iteration"
    candidates = ({"partition_mb": 16.0}, {"partition_mb": 64.0})

    @classmethod
    def overlap_of(cls, options: Options) -> Overlap:
        # With a credit, urgent partitions go first in their queue, as if each layer had its own.
        credit = options.credit_mb is not None or options.tunes_credit
        sent = Transfer(
            kind="average",
            starts="gradient",
            awaited="layer",
            steps_later=1,
            urgent=True,
            levels=None if credit else options.levels or LEVELS,
            part_bytes=options.partition_mb * MIB,
        )
        return Overlap(transfers=(sent,), updates="layer")

    @classmethod
    def grouping(cls, options: Options, arrived: Arrived, cost: Cost) -> Groups:
        return arrived.by_layer()

    def refuse(self, replica: Replica[Options]) -> None:
        refuse_lbfgs(replica.optimizer, "bytescheduler")
        options, communicator = replica.options, replica.communicator
        levels, kind = options.levels, replica.params[0].device.type
        if options.tuned():
            need_tuner(f"bytescheduler option tune={options.tune}")
        credit_mb = options.credit_mb
        if (credit_mb is not None or options.tunes_credit) and kind in communicator.streamed:
            given = f"tune={options.tune}" if credit_mb is None else f"credit_mb={credit_mb:g}"
            raise UserError(
                f"bytescheduler option {given}: NCCL does not report when a collective ends, so "
                "the bytes in flight cannot be limited; leave the option out (partitions keep "
                "their order), or use comm_core or gloo"
            )
        if levels is not None and kind not in communicator.native:
            raise UserError(
                f"bytescheduler option levels={levels} needs priorities, which backend "
                f"{communicator.backend} does not have; use credit_mb"
            )

    def engine(self, replica: Replica[Options]) -> PartitionedEngine:
        return PartitionedEngine(replica)


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Piece of a group's buffer."""

    group: int
    piece: torch.Tensor
    carrier: Carrier
    nbytes: float
    """Bytes on the wire."""


class PartitionedEngine(DeferredEngine[ByteScheduler.Options]):
    """All-reduces the partitions of each layer; those of layers that run first are urgent.

    In the first `profile_steps` steps everything is sent at the end of the backward pass. Then rank
    0 simulates the scheduler with its measured times, and every rank gets the resulting order.

    Partitions wait in one queue, with a credit of bytes under way; or in several queues of
    different priority, and the backend lets urgent partitions overtake others in mid-flight.
    """

    def __init__(self, replica: Replica[ByteScheduler.Options]) -> None:
        communicator, options = replica.communicator, replica.options
        groups = fuse(layers(replica.model, replica.params), threshold=0)
        self._members = [param for params in groups for param in params]
        # Registered before all other gradient hooks, so that its times contain the pass alone.
        self._times: LayerTimes | None = LayerTimes(replica.model, self._members, communicator)
        super().__init__(replica, [self._members])
        self.buckets = [packed_bucket(params, communicator.size) for params in groups]
        self._units = [list(reversed(range(len(groups))))]
        """Buckets that are sent together, per unit."""
        self._in_pass = False
        self._update = PartialUpdate(self.optimizer, type(self.optimizer))
        self.readers.set_groups(groups)
        self.hooks.before_forward(self.model.modules(), self.before_forward, self.readers)
        kind = self._members[0].device.type
        one_queue = (
            options.credit_mb is not None or options.tunes_credit or kind not in communicator.native
        )
        self._levels = 1 if one_queue else options.levels or LEVELS
        self._limited = one_queue and kind not in communicator.streamed
        self._sender: Communicator = communicator
        if self._limited:
            # Parts start whenever others end, so in no fixed order with what else is sent.
            self._sender = apart(communicator)
        else:
            # Channel 0 of the communicator is left to all other communication.
            communicator.ensure_channels(self._levels + 1)
        self._rule = tuning(options, communicator)
        self._steps_left = options.profile_steps
        self._cut(self._rule.options)
        self._uses: Sequence[int] = range(len(self.buckets))
        """Groups in the order in which forward passes read them."""
        self._place = {group: group for group in self._uses}
        """Place of each group in that order."""
        self._sampled = max(1, len(self.buckets) // SAMPLES)
        self._works: dict[int, Work | Batch] = {}
        """Transfers that have started and were not awaited yet, by partition."""
        self._queued = [False] * len(self.buckets)
        """True for groups handed to an issuer, which may not have started them yet."""
        self._issuers: list[OrderedIssuer[int]] = []
        self._orders: list[list[int]] = []
        """Tasks (partitions) of each issuer, in the order in which they start."""
        self._level_of: list[int] = []
        """Queue of each group; 0 is the most urgent."""

    def _cut(self, options: ByteScheduler.Options) -> None:
        """Makes the partitions, of which none may be under way, and sets the credit."""
        limited = (options.credit_mb or CREDIT_MB) * MIB
        self._credit = limited if self._limited else math.inf
        """Bytes."""
        self._partitions: list[Partition] = []
        self._tasks_of: list[list[int]] = []
        """Indices of each group's partitions."""
        for index, bucket in enumerate(self.buckets):
            data = bucket.gradients
            width = data.element_size() * options.share(data.element_size())
            limit = max(1, int(options.partition_mb * MIB // width))
            first = len(self._partitions)
            for piece in data.split(lengths(data.numel(), limit)):
                carrier = make_carrier(options, self._sender, piece)
                nbytes = float(int(piece.numel() * width))
                self._partitions.append(
                    Partition(group=index, piece=piece, carrier=carrier, nbytes=nbytes)
                )
            self._tasks_of.append(list(range(first, len(self._partitions))))
        self._sizes = {task: part.nbytes for task, part in enumerate(self._partitions)}

    def ready(self, unit: int) -> None:
        if not self._in_pass:
            self._in_pass = True
            self.averaged = False
            # Finishes layers that did not run since the last step, and a pass that this replaces.
            self.settle()
            self._await_all()
            for issuer, order in zip(self._issuers, self._orders, strict=True):
                issuer.begin(order, self._sizes)
        for index in self._units[unit]:
            bucket = self.buckets[index]
            bucket.pack()
            bucket.note(sampled=index % self._sampled == 0)
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

    def apply(self, update: Update) -> object:
        if not self._update.possible():
            return with_gradients(self._means(), update)
        self._update.note()
        self.pending = set(range(len(self.buckets)))
        self.finish_unread()
        return None

    def finish(self, index: int) -> None:
        """Updates a group, together with groups that are read next and have arrived."""
        place = self._place[index]
        due = [index]
        for other in self._uses[place + 1 :]:
            if other not in self.pending or not self._arrived(other):
                break
            due.append(other)
            self.in_flight.land(self.buckets[other].params)
        self.pending.difference_update(due)
        self._update.run(self._means(due))

    def stepped(self) -> None:
        if self._times is not None:
            self._steps_left -= 1
            if self._steps_left == 0:
                self._measure(self._times.stop())
                self._times = None
        elif self._rule.after_step():
            self.settle()
            self._await_all()
            self._cut(self._rule.options)
            self._make_plan()

    def findings(self) -> dict[str, object]:
        credit_mb = None if math.isinf(self._credit) else self._credit / MIB
        return {
            "partitions": len(self._partitions),
            "queues": self._levels,
            "credit_mb": credit_mb,
            "order": [self._partitions[task].group for order in self._orders for task in order],
            **self._rule.findings(),
        }

    def close(self) -> None:
        self.drop()  # or what follows would wait for parts that never start
        super().close()
        self._await_all()  # a pass without a step may be under way
        if self._times is not None:
            self._times.stop()
        if self._limited:
            self._sender.close()

    def _await_all(self) -> None:
        for index in range(len(self.buckets)):
            if self._queued[index] or self._works:
                self._await(index)

    def _measure(self, profile: BackwardProfile) -> None:
        # Nothing else may use the network during the measurement.
        self._await_all()
        like = self.buckets[0].gradients.device
        self._cost = measured_costs(self.communicator, "all_reduce", like)
        bucket_of = {param: i for i, bucket in enumerate(self.buckets) for param in bucket.params}
        # Buckets in the order in which the first forward passes read them; unread ones come last.
        read = [bucket_of[param] for param in self.readers.order()]
        self._uses = list(dict.fromkeys([*read, *range(len(self.buckets))]))
        self._arrivals = [0.0] * len(self.buckets)
        for index, seconds in zip(profile.order, profile.arrivals_s, strict=True):
            group = bucket_of[self._members[index]]
            self._arrivals[group] = max(self._arrivals[group], seconds)
        self._make_plan()

    def _make_plan(self) -> None:
        uses, arrivals = self._uses, self._arrivals
        priorities = [0.0] * len(self._partitions)
        for position, group in enumerate(uses):
            tasks = self._tasks_of[group]
            for piece, task in enumerate(tasks):
                priorities[task] = position + piece / len(tasks)
        order = planned_order(
            [arrivals[part.group] for part in self._partitions],
            priorities,
            list(self._sizes.values()),
            credit=min(self._credit, max(self._sizes.values())),
            cost=self._cost,
        )
        launched = sorted(range(len(self.buckets)), key=lambda group: (arrivals[group], -group))
        uses, order, launched = self.communicator.broadcast_object((uses, order, launched))
        self._uses = uses
        self._place = {group: place for place, group in enumerate(uses)}
        self._level_of = self._shared_out(uses)
        # A batch costs the least; but it reports no end, and a credit needs the ends.
        self._batches: list[Batch | None] = [None] * len(self._partitions)
        for task, part in enumerate(self._partitions):
            level = self._level_of[part.group]
            if math.isinf(self._credit) and isinstance(part.carrier, Dense):
                queue = (level + 1, self._levels - 1 - level)
                self._batches[task] = Batch(self.communicator, *queue)
        self._orders, self._issuers = [], []
        for level in range(self._levels):
            self._orders.append(
                [task for task in order if self._level_of[self._partitions[task].group] == level]
            )
            self._issuers.append(OrderedIssuer(self._issue, self._credit))
        # From the next pass on, buckets are sent one by one as they are complete.
        self._units = [[index] for index in range(len(self.buckets))]
        self.schedule.regroup([bucket.params for bucket in self.buckets], launched)

    def _shared_out(self, uses: Sequence[int]) -> list[int]:
        """Returns the queue of each group."""
        sizes = [sum(self._sizes[task] for task in self._tasks_of[group]) for group in uses]
        levels = dict(zip(uses, shared_out(sizes, self._levels), strict=True))
        return [levels[group] for group in range(len(uses))]

    def _send(self, index: int) -> None:
        if not self._issuers:
            for task in self._tasks_of[index]:
                part = self._partitions[task]
                self._works[task] = part.carrier.send(part.piece, channel=0, priority=0)
            return
        self._queued[index] = True
        issuer = self._issuers[self._level_of[index]]
        for task in self._tasks_of[index]:
            issuer.ready(task)

    def _issue(self, task: int) -> None:
        part, batch = self._partitions[task], self._batches[task]
        if batch is not None:
            batch.start(part.piece)
            self._works[task] = batch
            return
        level = self._level_of[part.group]
        priority = self._levels - 1 - level
        channel = 0 if self._limited else level + 1
        work = part.carrier.send(part.piece, channel=channel, priority=priority)
        self._works[task] = work
        if self._credit < math.inf:
            issuer = self._issuers[level]
            work.on_complete(lambda: issuer.finished(part.nbytes))

    def _await(self, index: int) -> None:
        for task in self._tasks_of[index]:
            if self._queued[index] and task not in self._works:
                began = self.communicator.clock()
                self._issuers[self._level_of[index]].wait_started(task)
                self.communicator.held_up(began)
            work = self._works.pop(task, None)
            if work is not None:
                work.wait()
                part = self._partitions[task]
                part.carrier.receive(part.piece)
        self._queued[index] = False

    def _arrived(self, index: int) -> bool:
        """Returns True if `_await` would not block."""
        for task in self._tasks_of[index]:
            work = self._works.get(task)
            if self._queued[index] if work is None else not work.done():
                return False
        return True

    def _means(
        self, groups: Iterable[int] | None = None
    ) -> dict[torch.nn.Parameter, torch.Tensor | None]:
        means: dict[torch.nn.Parameter, torch.Tensor | None] = {}
        with torch.inference_mode(False):
            for index in range(len(self.buckets)) if groups is None else groups:
                self._await(index)
                means.update(self.buckets[index].means())
        return means


def tuning(
    options: ByteScheduler.Options, communicator: Communicator
) -> Regrouping[ByteScheduler.Options]:
    """Returns the rule of credit and partitions that `options.tune` names."""
    bounds = options.tuned()
    if not bounds:
        return Regrouping(options)
    first = {"partition_mb": options.partition_mb, "credit_mb": options.credit_mb or CREDIT_MB}
    return Tuned(options, Tuner(first, bounds), communicator)
