"""Merged-gradient wait-free back-propagation, and the engine of algorithms that merge gradients."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import ClassVar, Literal, TypeVar

from dear.buckets.carriers import Payloads, make_carrier
from dear.buckets.compressors import CompressedOptions, HalfOptions
from dear.buckets.flat import packed_bucket
from dear.buckets.grouping import MIB, Arrived, Cost, Groups, by_total, ends, fuse, greedy, optimal
from dear.comm.communicator import Communicator, mark
from dear.comm.work import Work
from dear.cost.collectives import table_costs
from dear.cost.overlap import Overlap, Transfer
from dear.errors import UserError, unknown
from dear.lazy import torch
from dear.options import Options, at_least, only_with, option_of
from dear.training.algorithm import Algorithm, Capabilities
from dear.training.engine import Replica
from dear.training.gradients import GradientEngine
from dear.training.tuning import BackwardProfile, LayerTimes, cost_of_gradients

PROFILING_MB = 25
FLOAT32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class ProfiledOptions(CompressedOptions):
    """Options of algorithms that first measure steps and then make groups."""

    profile_steps: int = 2
    """Number of steps that are measured before the groups are made. These steps send everything at
    the end of the backward pass, so nothing overlaps."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(option_of(self, "profile_steps"), self.profile_steps, 1)

    def settling_steps(self) -> int:
        return max(super().settling_steps(), self.profile_steps)


ProfiledT_co = TypeVar("ProfiledT_co", bound=ProfiledOptions, covariant=True)


class MgWfbp(Algorithm["MgWfbp.Options"]):
    """MG-WFBP (Shi, Chu and Li, INFOCOM 2019, arXiv 1811.11141): gradients merged by a cost model.

    Neighbouring gradients share an all-reduce if communication then ends earlier. This depends
    on when each gradient arrives, and on the cost of an all-reduce by size. Both are measured: the
    arrivals in the first steps, the cost after them. Rank 0 then decides; the groups stay the same
    from then on.
    Invariant: after `backward()` returns, `p.grad` is the mean over ranks.
    Bytes move: during the backward pass, each group when its last gradient arrives.
    Cost per step and rank: one all-reduce per group, or all-gather of elements or signs.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(ProfiledOptions):
        """Rule of merging, sources of gradient times and costs, and compression of the groups."""

        merge: Literal["greedy", "asc", "optimal", "threshold"] = "greedy"
        """`greedy`: the paper's rule. `asc`: merges a gradient only if the message before it could
        not start yet (ASC-WFBP, INFOCOM 2021). `optimal`: the best groups under the cost model, by
        dynamic programming. `threshold`: closes a group once it has `threshold_mb`."""
        costs: Literal["measured", "10gbe", "56gbib"] = "measured"
        """Costs of an all-reduce: measured on these ranks, or (for comparison) from a published
        table, interpolated by the number of workers."""
        small_elements: int = 0
        """A group with fewer elements always takes the next gradient, too; for merge=greedy or asc
        (DeAR's suite: 8192)."""
        threshold_mb: float | None = None
        """Size of a group for merge=threshold, in MB of 2^20 bytes; 0: one gradient per group."""
        layer_times: dict[str, float] = field(default_factory=dict)
        """Seconds of each parameter in the backward pass, by name, in place of measured times; 0
        for parameters that are not listed."""
        channels: int = 1
        """Number of channels that groups use in turn, each with its own process group; 2 is
        `mgwfbp2` and `asc2` of DeAR's suite. The plan assumes one channel."""

        def __post_init__(self) -> None:
            super().__post_init__()
            at_least("mgwfbp option 'channels'", self.channels, 1)
            at_least("mgwfbp option 'small_elements'", self.small_elements, 0)
            if (self.threshold_mb is None) == (self.merge == "threshold"):
                raise UserError(
                    "mgwfbp option 'threshold_mb' must be given with merge='threshold', "
                    f"and only then, got threshold_mb={self.threshold_mb} and merge={self.merge!r}"
                )
            at_least("mgwfbp option 'threshold_mb'", self.threshold_mb, 0)
            if self.layer_times and self.profile_steps != type(self).profile_steps:
                raise UserError("mgwfbp option 'profile_steps' has no effect with 'layer_times'")
            for name, seconds in self.layer_times.items():
                at_least(f"mgwfbp option 'layer_times': {name}", seconds, 0)
            if self.costs != "measured" and self.merge == "threshold":
                raise UserError(
                    f"mgwfbp option costs={self.costs!r} has no effect with merge='threshold'"
                )
            if self.costs != "measured" and self.gathers:
                raise UserError(
                    f"mgwfbp option costs={self.costs!r} is a table of all-reduces, but "
                    f"compression={self.compression!r} all-gathers; use costs='measured'"
                )
            only_with(self, "small_elements", "merge", ["greedy", "asc"])

    capabilities = Capabilities(consistency="synchronous")
    bound = "wfbp"
    candidates = ({"merge": "asc"}, {"merge": "optimal"})
    unfused: ClassVar[Mapping[str, object]] = {"merge": "threshold", "threshold_mb": 0.0}
    overlap = Overlap(transfers=(Transfer(kind="average", starts="gradient", awaited="pass"),))

    @classmethod
    def grouping(cls, options: Options, arrived: Arrived, cost: Cost) -> Groups:
        """Returns the groups for the given times and costs."""
        return merged(options, arrived.sizes, arrived.arrivals_s, cost, FLOAT32_BYTES)

    def engine(self, replica: Replica[Options]) -> MgWfbpEngine:
        options = replica.options
        return MgWfbpEngine(replica, channels=options.channels, layer_times=options.layer_times)


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """Gradients of a pass, in order of arrival."""

    like: torch.Tensor
    """Parameter of the first gradient."""
    sizes: Sequence[int]
    """Bytes of each gradient."""
    arrivals: Sequence[float]
    """Seconds from the start of the backward pass."""
    kinds: Sequence[Hashable]
    """Dtype and device of each gradient; all gradients of a group have the same."""


class MergedEngine(GradientEngine[ProfiledT_co]):
    """Base of the engines that average groups of gradients and plan the groups in the first steps.

    In the first `profile_steps` steps everything is sent after the backward pass, so that transfers
    do not change the arrival times of gradients. Then every rank calls `plan`, and all ranks use
    rank 0's result from then on. The first steps are not compressed.

    Args:
        channels: number of channels that groups use in turn.
        layer_times: seconds of each parameter by its name. If given, nothing is measured, and one
            step is enough.

    Raises:
        UserError: the model has no parameter of such a name.
    """

    def __init__(
        self,
        replica: Replica[ProfiledT_co],
        *,
        channels: int = 1,
        layer_times: Mapping[str, float] | None = None,
    ) -> None:
        self._given = given_profile(replica, layer_times) if layer_times else None
        replica.communicator.ensure_channels(channels)
        self._channels = channels
        self._steps_left = 1 if self._given else replica.options.profile_steps
        self._findings: dict[str, object] = {}
        self._times: LayerTimes | None = LayerTimes(
            replica.model, replica.params, replica.communicator
        )
        self._exchanges = [
            Exchange(group, replica.communicator, HalfOptions())
            for group in fuse([replica.params], PROFILING_MB * MIB)
        ]
        self._started: list[Exchange] = []
        super().__init__(replica, [replica.params])

    @abstractmethod
    def plan(self, gradients: Gradients) -> Groups:
        """Returns the groups; rank 0's are used. A collective call."""

    def predict(self, groups: Groups, gradients: Gradients, cost: Cost) -> None:
        """Records when each group is expected to end, for `findings`."""
        sizes, arrivals = gradients.sizes, gradients.arrivals
        predicted = {"backward_s": arrivals[-1], "ends_s": ends(groups, sizes, arrivals, cost)}
        self._findings = {"predicted": predicted}

    def findings(self) -> dict[str, object]:
        return self._findings

    def cost(self, like: torch.Tensor) -> Cost:
        """Returns the seconds of a message by its bytes, for gradients like `like`."""
        return cost_of_gradients(self.communicator, self.options, like)

    def ready(self, unit: int) -> None:
        # Before there is a plan, the only unit is the whole model.
        chosen = self._exchanges if self._times is not None else [self._exchanges[unit]]
        for exchange in chosen:
            exchange.start(len(self._started) % self._channels)
            self._started.append(exchange)

    def passed(self) -> None:
        for exchange in self._started:
            exchange.finish()
        self._started.clear()

    def drop(self) -> None:
        while self._started:
            self._started.pop().drop()

    def close(self) -> None:
        super().close()
        if self._times is not None:
            self._times.stop()

    def planned_groups(self) -> list[list[torch.nn.Parameter]] | None:
        """Returns the planned groups in the order in which they are sent; None before the plan."""
        if self._times is not None:
            return None
        return [exchange.bucket.params for exchange in self._exchanges]

    def stepped(self) -> None:
        if self._times is None:
            return
        self._steps_left -= 1
        if self._steps_left > 0:
            return
        measured, self._times = self._times.stop(), None
        profile = self._given or measured
        seen = [self.params[i] for i in profile.order]
        plan = self.plan(
            Gradients(
                like=seen[0],
                sizes=[param.nbytes for param in seen],
                arrivals=profile.arrivals_s,
                kinds=[(param.dtype, param.device) for param in seen],
            )
        )
        order, groups = self.communicator.broadcast_object((profile.order, plan))
        params = [self.params[i] for i in order]
        for param in params:  # gradients are views of buffers that are freed here
            param.grad = None if param.grad is None else param.grad.clone()
        self._exchanges.clear()
        self._exchanges = [
            Exchange([params[i] for i in group], self.communicator, self.options)
            for group in groups
        ]
        units = [exchange.bucket.params for exchange in self._exchanges]
        self.schedule.regroup(units, range(len(units)))


class MgWfbpEngine(MergedEngine[MgWfbp.Options]):
    """Engine of MG-WFBP."""

    def plan(self, gradients: Gradients) -> Groups:
        options, sizes, kinds = self.options, gradients.sizes, gradients.kinds
        if options.threshold_mb is not None:
            return by_total(sizes, options.threshold_mb * MIB, kinds=kinds)
        cost, width = self.cost(gradients.like), gradients.like.element_size()
        groups = merged(options, sizes, gradients.arrivals, cost, width, kinds)
        self.predict(groups, gradients, cost)
        return groups

    def cost(self, like: torch.Tensor) -> Cost:
        options = self.options
        if options.gathers or options.costs == "measured":
            return super().cost(like)
        cost = table_costs(options.costs, self.communicator.size)
        share = options.share(like.itemsize)
        return lambda nbytes: cost(nbytes * share)


def merged(
    options: MgWfbp.Options,
    sizes: Sequence[int],
    arrivals: Sequence[float],
    cost: Cost,
    width: int,
    kinds: Sequence[Hashable] | None = None,
) -> Groups:
    """Returns the groups by the rule of the options.

    Args:
        sizes, arrivals, cost, kinds: as for `greedy`.
        width: bytes of an element.
    """
    if options.threshold_mb is not None:
        return by_total(sizes, options.threshold_mb * MIB, kinds=kinds)
    if options.merge == "optimal":
        return optimal(sizes, arrivals=arrivals, cost=cost, kinds=kinds)
    least, wait = options.small_elements * width, options.merge == "greedy"
    return greedy(sizes, arrivals=arrivals, cost=cost, wait=wait, least=least, kinds=kinds)


def given_profile(replica: Replica[Options], layer_times: Mapping[str, float]) -> BackwardProfile:
    """Returns the profile of a backward pass with these times; the last parameter comes first.

    Raises:
        UserError: the model has no parameter with one of the names.
    """
    names = {param: name for name, param in replica.model.named_parameters()}
    for name in layer_times:
        if name not in names.values():
            raise unknown("parameter of 'layer_times'", name, names.values())
    order = list(range(len(replica.params)))[::-1]
    times = [layer_times.get(names.get(replica.params[i], ""), 0.0) for i in order]
    arrivals_s = list(accumulate(times))
    return BackwardProfile(order=order, arrivals_s=arrivals_s, backward_s=arrivals_s[-1])


class Exchange:
    """Averages the gradients of one group.

    Sends one all-reduce of the bucket with its marks, in its own dtype or in half precision; or one
    all-gather of the compressed gradients with one mark per parameter.
    """

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        communicator: Communicator,
        options: HalfOptions,
    ) -> None:
        self.bucket = bucket = packed_bucket(params, communicator.size)
        self._sent = bucket.gradients[: bucket.numel] if options.gathers else bucket.gradients
        sizes = [param.numel() for param in params]
        self._carrier = make_carrier(options, communicator, self._sent, sizes)
        self._work: Work | None = None

    def start(self, channel: int = 0) -> None:
        """Sends the current gradients."""
        self.bucket.pack()
        present = [param.grad is not None for param in self.bucket.params]
        self._work = self._carrier.send(self._sent, present, channel=channel)

    def drop(self) -> None:
        """Waits for the pending transfer, if any, and forgets it."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    def finish(self) -> None:
        """Sets each `p.grad` to the mean (a view of the bucket), or to None if no rank has one."""
        self.drop()
        self._carrier.receive(self._sent)
        if isinstance(self._carrier, Payloads):
            mark(self.bucket.marks, self._carrier.used)
        for param, gradient in self.bucket.means().items():
            param.grad = gradient
