"""Merged-gradient wait-free back-propagation, and the engine of all that merge as they measure."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal

from dear.buckets.carriers import Payloads, make_carrier
from dear.buckets.compressors import CompressedOptions, HalfOptions
from dear.buckets.flat import packed_bucket
from dear.buckets.grouping import MIB, Arrived, Cost, Groups, by_total, ends, fuse, greedy, optimal
from dear.comm.communicator import Communicator, Work
from dear.cost.collectives import table_costs
from dear.cost.overlap import Overlap, Transfer
from dear.errors import UserError, unknown
from dear.lazy import torch
from dear.options import LATER, at_least, only_with
from dear.training.algorithm import Algorithm, Capabilities
from dear.training.engine import Replica
from dear.training.gradients import GradientEngine
from dear.training.tuning import BackwardProfile, LayerTimes, cost_of_gradients

PROFILING_MB = 25
FLOAT32_BYTES = 4


class MgWfbp(Algorithm):
    """MG-WFBP (Shi, Chu and Li, INFOCOM 2019, arXiv 1811.11141): gradients merged by a cost model.

    Neighbouring gradients share an all-reduce where that ends the communication earlier, given when
    each gradient arrives and what an all-reduce costs by size. Both are measured, in the first
    steps and after them; rank 0 decides, then the groups stay.
    Invariant: after `backward()` returns, `p.grad` is the mean over ranks.
    Bytes move: during the backward pass, each group as soon as its last gradient is there.
    Cost per step and rank: one all-reduce per group, or all-gather of elements or signs.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(CompressedOptions):
        """Which rule merges, where its numbers come from, and how each group is compressed."""

        merge: Literal["greedy", "asc", "optimal", "threshold"] = "greedy"
        """`greedy`: the paper's rule; `asc`: only what could not start yet is merged (ASC-WFBP,
        INFOCOM 2021); `optimal`: the best groups under the cost model, by dynamic programming;
        `threshold`: a group is closed once it has `threshold_mb`."""
        costs: Literal["measured", "10gbe", "56gbib"] = "measured"
        """What an all-reduce costs: measured on these ranks, or a published table (for comparison;
        between its numbers of workers it is interpolated)."""
        small_elements: int = 0
        """Greedy and asc: groups with fewer elements always take in the next gradient (DeAR's
        programs: 8192)."""
        threshold_mb: float | None = None
        """Size for merge=threshold, in MB of 2^20 bytes; 0: every gradient alone."""
        profile_steps: int = 2
        """Steps that are measured before the groups are made; they do not overlap anything."""
        layer_times: dict[str, float] = field(default_factory=dict, metadata=LATER)
        """Seconds of the backward pass that each parameter takes, by its name: used in place of
        times that are measured. Those not named take none."""
        channels: int = 1
        """Groups take turns on so many channels, each a process group of its own; 2 is `mgwfbp2`
        and `asc2` of DeAR's programs. The plan takes them for one."""

        def __post_init__(self) -> None:
            super().__post_init__()
            at_least("option of mgwfbp 'channels'", self.channels, 1)
            at_least("option of mgwfbp 'small_elements'", self.small_elements, 0)
            at_least("option of mgwfbp 'profile_steps'", self.profile_steps, 1)
            if (self.threshold_mb is None) == (self.merge == "threshold"):
                raise UserError(
                    "option of mgwfbp 'threshold_mb' goes with merge='threshold' and only with it, "
                    f"got threshold_mb={self.threshold_mb} and merge={self.merge!r}"
                )
            at_least("option of mgwfbp 'threshold_mb'", self.threshold_mb, 0)
            if self.costs != "measured" and self.merge == "threshold":
                raise UserError(
                    f"option of mgwfbp 'costs'={self.costs!r} has no use with merge='threshold'"
                )
            if self.costs != "measured" and self.gathers:
                raise UserError(
                    f"option of mgwfbp 'costs'={self.costs!r} is a table of all-reduces, which "
                    f"compression={self.compression!r} does not use; use costs='measured'"
                )
            only_with(self, "small_elements", "merge", ["greedy", "asc"])

        def settling_steps(self) -> int:
            return max(super().settling_steps(), self.profile_steps)

    capabilities = Capabilities(consistency="synchronous")
    bound = "wfbp"
    overlap = Overlap(transfers=(Transfer(kind="average", starts="gradient", awaited="pass"),))

    @classmethod
    def grouping(cls, options: Options, arrived: Arrived, cost: Cost) -> Groups:
        """With times and costs as they are given, instead of measured ones."""
        return merged(options, arrived.sizes, arrived.arrivals_s, cost, FLOAT32_BYTES)

    def engine(self, replica: Replica) -> MergedEngine:
        options = replica.options
        return MergedEngine(replica, channels=options.channels, layer_times=options.layer_times)


class MergedEngine(GradientEngine):
    """Averages groups of gradients as they arrive; the groups are found while the first steps run.

    In the first `profile_steps` steps everything is sent when the backward pass has ended, so that
    nothing disturbs the times at which gradients arrive. Then `plan` is called on every rank,
    rank 0's result holds everywhere, and the groups stay. The options (a `CompressedOptions` with
    `profile_steps`) hold from then on.

    Args:
        channels: groups take turns on so many channels.
        layer_times: of each parameter by its name, in seconds; then one step is enough, and nothing
            is measured.

    Raises:
        UserError: the model has no parameter of such a name.
    """

    def __init__(
        self,
        replica: Replica,
        *,
        channels: int = 1,
        layer_times: Mapping[str, float] | None = None,
    ) -> None:
        self._given = given_profile(replica, layer_times) if layer_times else None
        replica.communicator.ensure_channels(channels)
        self._channels = channels
        self._steps_left = 1 if self._given else replica.options.profile_steps
        self._found: dict[str, Any] = {}
        self._times: LayerTimes | None = LayerTimes(
            replica.model, replica.params, replica.communicator
        )
        self._exchanges = [
            Exchange(group, replica.communicator, HalfOptions())
            for group in fuse([replica.params], PROFILING_MB * MIB)
        ]
        self._started: list[Exchange] = []
        super().__init__(replica, [replica.params])

    def plan(self, sizes: list[int], like: torch.Tensor, **given: Any) -> Groups:
        """Groups of the gradients in the order of their arrival; only rank 0's count.

        It may call collectives, so every rank calls it.

        Args:
            sizes: in bytes.
            like: the first of them.
            given: `arrivals` and `kinds`, as for `greedy`.
        """
        options = self.options
        if options.threshold_mb is not None:
            return by_total(sizes, options.threshold_mb * MIB, kinds=given["kinds"])
        cost, width = self.cost(like), like.element_size()
        groups = merged(options, sizes, given["arrivals"], cost, width, given["kinds"])
        return self.foreseen(groups, sizes, cost, **given)

    def foreseen(
        self, groups: Groups, sizes: list[int], cost: Cost, arrivals: list[float], **_: Any
    ) -> Groups:
        """The groups; when each should end is kept for `findings`."""
        predicted = {"backward_s": arrivals[-1], "ends_s": ends(groups, sizes, arrivals, cost)}
        self._found = {"predicted": predicted}
        return groups

    def findings(self) -> dict[str, Any]:
        return self._found

    def cost(self, like: torch.Tensor) -> Cost:
        """Seconds of a message by bytes of gradients like `like`: measured, or of a table."""
        options, communicator = self.options, self.communicator
        if options.gathers or options.costs == "measured":
            return cost_of_gradients(communicator, options, like)
        cost, share = table_costs(options.costs, communicator.size), options.share(like.itemsize)
        return lambda nbytes: cost(nbytes * share)

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
        """The planned groups in the order in which they are sent; None before there is a plan."""
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
            [param.nbytes for param in seen],
            seen[0],
            arrivals=profile.arrivals_s,
            kinds=[(param.dtype, param.device) for param in seen],
        )
        order, groups = self.communicator.broadcast_object((profile.order, plan))
        params = [self.params[i] for i in order]
        for param in params:  # they are views of the buffers that go now
            param.grad = None if param.grad is None else param.grad.clone()
        self._exchanges.clear()
        self._exchanges = [
            Exchange([params[i] for i in group], self.communicator, self.options)
            for group in groups
        ]
        units = [exchange.bucket.params for exchange in self._exchanges]
        self.schedule.regroup(units, range(len(units)))


def merged(
    options: MgWfbp.Options,
    sizes: Sequence[int],
    arrivals: Sequence[float],
    cost: Cost,
    width: int,
    kinds: Sequence[Hashable] | None = None,
) -> Groups:
    """Groups by the rule of the options.

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


def given_profile(replica: Replica, layer_times: Mapping[str, float]) -> BackwardProfile:
    """The backward pass by given times: from the last parameter to the first, each when all up to
    it have taken theirs.

    Raises:
        UserError: the model has no parameter of such a name.
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
    """Averages the gradients of one group; made anew when the groups change.

    One all-reduce of the bucket with its marks, in its own type or in half precision; or one
    all-gather of what a compressor makes of the gradients, and of a mark per parameter.
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
        """Takes the gradients there are and sends them."""
        self.bucket.pack()
        present = [param.grad is not None for param in self.bucket.params]
        self._work = self._carrier.send(self._sent, present, channel=channel)

    def drop(self) -> None:
        """Waits for what is under way and forgets it."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    def finish(self) -> None:
        """Lets each `p.grad` be the mean, a view of the bucket; None where no rank has one."""
        self.drop()
        self._carrier.receive(self._sent)
        if isinstance(self._carrier, Payloads):
            used = torch.tensor(self._carrier.used, dtype=self.bucket.marks.dtype)
            self.bucket.marks.copy_(used)
        for param, gradient in self.bucket.means().items():
            param.grad = gradient
