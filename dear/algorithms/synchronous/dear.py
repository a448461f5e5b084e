"""DeAR: all-reduces in two halves, which overlap the backward and the next forward pass."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

from dear.algorithms.planning import best_groups, measured_pass, passes_of
from dear.buckets.compressors import HalfOptions
from dear.buckets.flat import Bucket, adopt, flatten
from dear.buckets.grouping import (
    KIB,
    MIB,
    Arrived,
    Cost,
    Groups,
    RunOrder,
    agree,
    by_layers,
    group,
    launch_order,
)
from dear.buckets.halves import (
    AllReduced,
    Decoupled,
    Gathered,
    ReduceBroadcast,
    ScatterGather,
    Usage,
)
from dear.buckets.updates import Replicated, Sharded, element_wise, has_hooks
from dear.comm.communicator import Communicator
from dear.cost.collectives import start_up_bytes
from dear.cost.event_model.link import Scaled
from dear.cost.event_model.planning import Legs, exposed_s
from dear.cost.overlap import Overlap, Transfer
from dear.errors import UserError
from dear.lazy import torch
from dear.options import at_least, only_with, option_of
from dear.training.algorithm import Algorithm, Capabilities
from dear.training.engine import Replica, Update, held, refuse_lbfgs
from dear.training.gradients import DeferredEngine
from dear.training.tuning import (
    RAMPS,
    BackwardProfile,
    FusionOptions,
    FusionT,
    LayerTimes,
    Planned,
    cost_of_gradients,
    regrouping,
)

if TYPE_CHECKING:
    from torch.optim.optimizer import StateDict


class Dear(Algorithm["Dear.Options"]):
    """DeAR (Zhang et al., ICDCS 2023, arXiv 2302.12445).

    An all-reduce is split into a reduce-scatter and an all-gather. For each group of layers, the
    first half runs in the backward pass, the second in the next forward pass before the layers.
    Update: `x <- x - lr * mean over ranks(gradient at x)`; each rank updates what it owns.
    Invariant: a forward pass or a state dict reads the parameters after the last `step()`. Between
    `backward()` and `step()`, `p.grad` is this rank's own gradient.
    Bytes move: reduce-scatter in the backward pass, all-gather from `step()` into the next forward.
    Cost per step and rank: one reduce-scatter and one all-gather per group, together 2 (P-1)/P of
    the model's bytes, as many as an all-reduce. Groups of a few KB use an all-reduce instead. The
    last group's message also has a mark per parameter (used or not). These marks need their own
    all-reduce of a byte per parameter in two cases: if the group is larger than `COPIED_BYTES`
    (`dear.buckets.halves`) and travels in its own dtype, or if it is reduced to one rank.

    Two things differ from the paper. Groups follow the order in which gradients arrive and layers
    run, as observed in the first step. Between the halves each rank updates only the part that it
    owns, so the second half carries parameters (`update=sharded`). With `exclude_parts` the result
    is wrong on purpose, but the same on all ranks. Without `reducescatter`, an owner takes its own
    gradient as the mean; without `allgather`, nothing is updated.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(FusionOptions):
        """Groups of tensors, compression, and distribution of the updates.

        fp16 and bf16 apply to gradients in transfer; parameters are always sent in their own dtype.
        With other compressions, the first half gathers the compressed gradients of all ranks. Then
        the second half sends nothing, and every rank updates everything.
        """

        small_kb: float = 8.0
        """Largest group that uses one all-reduce in place of two halves, in KB of 2^10 bytes: the
        start-up of such a message takes at least about as long as its bytes. 0: every group has two
        halves, as by default with reduce_broadcast and exclude_parts."""
        update: Literal["auto", "sharded", "replicated"] = "auto"
        """`sharded`: each rank updates the part that it owns and sends the new parameters; it holds
        1/P of the optimizer's state. Needs an optimizer that works element by element.
        `replicated`: every rank updates everything. `auto`: `sharded` if the optimizer allows it.
        """
        decouple: Literal["reduce_scatter_all_gather", "reduce_broadcast"] = (
            "reduce_scatter_all_gather"
        )
        """Collectives of the two halves. With reduce_broadcast, the owners of the groups rotate."""
        exclude_parts: tuple[Literal["reducescatter", "allgather"], ...] = ()
        """Collectives to leave out, to measure their cost; training is then wrong."""

        def __post_init__(self) -> None:
            super().__post_init__()
            at_least(option_of(self, "small_kb"), self.small_kb, 0)
            if self.small_kb:
                only_with(self, "small_kb", "decouple", ["reduce_scatter_all_gather"])
                only_with(self, "small_kb", "exclude_parts", [()])
            if self.fusion == "planned" and self.decouple == "reduce_broadcast":
                raise UserError(
                    "dear option fusion=planned needs decouple=reduce_scatter_all_gather, got "
                    "decouple=reduce_broadcast, whose reductions to one rank are not measured"
                )
            if self.gathers:
                self._refuse_halves()

        def _refuse_halves(self) -> None:
            for field, usual in (
                ("update", ("auto", "replicated")),
                ("decouple", ("reduce_scatter_all_gather",)),
                ("exclude_parts", ((),)),
                ("small_kb", (0, type(self).small_kb)),
            ):
                value = getattr(self, field)
                if value not in usual:
                    shown = ", ".join(value) if isinstance(value, tuple) else value
                    raise UserError(
                        f"dear option {field}={shown} cannot be used with "
                        f"compression={self.compression!r}, which needs one all-gather of whole "
                        "gradients; use compression='none', 'fp16' or 'bf16'"
                    )

    capabilities = Capabilities(consistency="synchronous")
    bound = "dear"
    candidates = (
        {"fusion": "planned"},
        {"threshold_mb": 5.0},
        {"threshold_mb": 10.0},
        {"threshold_mb": 50.0},
        {"threshold_mb": 100.0},
    )
    unfused: ClassVar[Mapping[str, object]] = {"fusion": "none"}

    @classmethod
    def overlap_of(cls, options: Options) -> Overlap:
        """Returns the order of transfers for optimizers that work element by element.

        With torch's other optimizers, `update=auto` has the order of `replicated`. With any other
        optimizer, `step()` waits for the second halves and updates everything.
        """
        at_once = Transfer(
            kind="average",
            starts="gradient",
            awaited="step",
            buckets="instead",
            up_to_bytes=options.small_kb * KIB,
        )
        if options.gathers:
            whole = dataclasses.replace(at_once, buckets="all", up_to_bytes=None)
            return Overlap(transfers=(whole,), updates="layer")
        replicated = options.update == "replicated"
        first = Transfer(kind="reduce", starts="gradient", awaited="step")
        second = Transfer(
            kind="gather",
            carries=("gradients",) if replicated else ("parameters",),
            starts="step",
            awaited="layer",
            steps_later=1,
            urgent=True,
        )
        parts = {"reducescatter": first, "allgather": second}
        halves = [part for name, part in parts.items() if name not in options.exclude_parts]
        small = bool(options.small_kb) and options.decouple == "reduce_scatter_all_gather"
        return Overlap(
            transfers=(*halves, *[at_once] * (small and not options.exclude_parts)),
            updates="layer" if replicated else "step",
        )

    @classmethod
    def grouping(cls, options: Options, arrived: Arrived, cost: Cost) -> Groups | None:
        """Returns the groups; with `tuned`, the groups of the first trial.

        Each half of an all-reduce counts as half of its cost.
        """
        if options.fusion != "planned":
            return by_layers(arrived, with_first(options, lambda: cost))
        if not arrived.reads_s:
            return None
        half = Scaled(cost=cost, factor=0.5)
        legs = _legs(options, cost, half, None if options.gathers else half)
        usual = by_layers(arrived, with_first(FusionOptions(), lambda: cost))
        return best_groups(arrived, legs, cost, [usual])

    def refuse(self, replica: Replica[Options]) -> None:
        refuse_lbfgs(replica.optimizer, "dear")
        if replica.options.update == "sharded" and not element_wise(replica.optimizer):
            raise UserError(
                "dear option update=sharded needs an optimizer that works element by element; "
                f"{type(replica.optimizer).__name__} does not declare that it does; use "
                "update='replicated', or declare `element_wise = True` in its class"
            )
        regrouping(replica.options, replica.communicator)

    def alone(self, options: Options) -> bool:
        # A world of one omits the same parts.
        return bool(options.exclude_parts) or super().alone(options)

    def engine(self, replica: Replica[Options]) -> DearEngine:
        return DearEngine(replica)


def with_first(options: FusionT, cost: Callable[[], Cost]) -> FusionT:
    """Returns the options; a missing `first_mb` is calculated from the cost of messages."""
    if options.first_mb is not None or options.fusion not in RAMPS:
        return options
    return dataclasses.replace(options, first_mb=start_up_bytes(cost()) / MIB)


class DearEngine(DeferredEngine[Dear.Options]):
    """Engine of DeAR. Buckets are numbered in the order in which forward passes need them.

    The first pass only observes. The first step lays out buckets in the observed order. From then
    on, first halves start in backward passes (`ready`). `step()` waits for them, updates (or leaves
    updates to the next forward pass) and starts second halves (`apply`). A module that is about to
    run waits for the second halves of the parameters that it reads (`finish`).
    """

    def __init__(self, replica: Replica[Dear.Options]) -> None:
        super().__init__(replica, [[param] for param in replica.params])
        options = self.options
        self.sharded = (
            not options.gathers and options.update != "replicated" and element_wise(self.optimizer)
        )
        """True if each rank updates only its own part, and has optimizer state only for it."""
        self._rule = regrouping(options, self.communicator)
        """Rule by which layers form groups."""
        if options.fusion == "planned":
            times = LayerTimes(self.model, self.params, self.communicator, self.readers)
            self._rule = Planned(options, times, partial(_search, self))
        self._plain = type(self.optimizer)
        self._usage = Usage(self.params, self.communicator)
        self._watching = True
        """True while arrival times of gradients are recorded."""
        self._arrivals: dict[torch.nn.Parameter, float] = {}
        self._order = RunOrder(reads=[], arrivals=[], waits_s=[])
        self._views: dict[torch.nn.Parameter, torch.Tensor] = {}
        """View of each gradient in its bucket."""
        self._parts: list[Decoupled] = []
        """Halves of each bucket; empty before the first step."""
        self._launched: list[int] = []
        """Buckets in the order in which backward passes complete them."""
        self._update: Sharded | Replicated | None = None
        self._hooked: set[torch.nn.Module] = set()

    # --- backward pass ----------------------------------------------------------------------------

    def arrived(self, param: torch.nn.Parameter) -> None:
        if self._parts:
            adopt(param, self._views[param])
        if self._watching:
            self._arrivals.pop(param, None)
            self._arrivals[param] = self.communicator.clock()

    def ready(self, unit: int) -> None:
        if not self._parts:
            return
        self.averaged = False
        part = self._parts[unit]
        if unit == self._launched[-1] and not self.options.gathers:
            self._usage.start(part)
        part.bucket.note()
        part.start_reduce()

    def passed(self) -> None:
        if not self._parts:
            self.buckets[0].note()

    # --- step -------------------------------------------------------------------------------------

    def complete_pass(self) -> None:
        if self._parts and not self.schedule.passed:  # the script may have set gradients itself
            for param in self.params:
                adopt(param, self._views[param])
        super().complete_pass()
        if not self._parts:
            self.refuse_touched()
            self._lay_out(learn=True)
            for index in self._launched:
                self.ready(index)
        elif not self._reclaimed():
            raise UserError(
                "parameters were moved to another device or type between the backward pass and "
                "step(); move the model before the forward pass"
            )

    def apply(self, update: Update) -> object:
        if self.sharded and has_hooks(self.optimizer):  # hooks expect the means in `p.grad`
            self.refuse_touched()
            self.arrive()
            return self.step_averaged(update)
        assert self._update is not None, "the pass has laid buckets out"
        self.pending = self._update.step(update, self._launched)
        self.finish_unread()
        return None

    def arrive(self) -> None:
        for index in self._launched:
            part = self._parts[index]
            part.finish_reduce()
            part.start_gather_mean(part.bucket.gradients)
        unused = self._unused()
        for part in self._parts:
            part.finish_gather()
            for param, view in zip(part.bucket.params, part.bucket.gradient_views, strict=True):
                param.grad = None if param in unused else view

    def _unused(
        self, params: Iterable[torch.nn.Parameter] | None = None
    ) -> set[torch.nn.Parameter]:
        """Returns the parameters without a gradient on any rank; first halves must have ended."""
        if self.options.gathers:
            return {param for part in _gathered(self._parts) for param in part.unused()}
        return self._usage.unused(params)

    def apply_averaged(self, update: Update) -> object:
        assert self._update is not None, "the pass has laid buckets out"
        return self._update.step_averaged(update)

    def clip_grad_norm(
        self, params: Sequence[torch.nn.Parameter], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        whole = self.averaged and not self.schedule.unsent
        if whole or not self.sharded or norm_type <= 0:
            return super().clip_grad_norm(params, max_norm, norm_type)
        self.settle()
        self.complete_pass()
        self.refuse_touched()
        assert isinstance(self._update, Sharded), "the pass has laid buckets out"
        return self._update.clip(max_norm, norm_type)

    def stepped(self) -> None:
        if self._rule.after_step():
            self._lay_out(learn=self._watching)

    def findings(self) -> dict[str, object]:
        first_mb = self._rule.options.first_mb
        measured, rule = (
            self.options.first_mb is None and first_mb is not None,
            self._rule.findings(),
        )
        return {"first_mb": first_mb} | rule if measured else rule

    # --- forward pass -----------------------------------------------------------------------------

    def before_model(self, module: torch.nn.Module) -> None:
        """Lays buckets out again if the model was moved; a hook that runs before all others."""
        if self._rule.watches:
            self.settle()  # the times of layers should include no waits
        if not self._reclaimed():
            self._lay_out(learn=False)

    def finish(self, index: int) -> None:
        assert self._update is not None, "only laid out buckets are pending"
        self._update.finish(index)

    # --- memory -----------------------------------------------------------------------------------

    def _lay_out(self, learn: bool) -> None:
        """Lays buckets out for the parameters' current memory, and moves the state; collective.

        Args:
            learn: True uses the order observed since the last layout; False keeps the old order.
        """
        options = self.options
        self.settle()
        for part in self._parts:
            part.finish_reduce()  # the script may not have made a step after the pass
        if learn:
            self._learn()
            self._rule.options = with_first(self._rule.options, lambda: _message_cost(self))
        members = group(self.model, self.params, self._order, self._rule.options, self._rule.plan)
        self._launched = launch_order(members, self.params, self._order)
        before = self._parts
        for bucket in self.buckets:
            bucket.forget()  # the record refers to gradients that are replaced below
        self.buckets = flatten(members, self.communicator, values=self.sharded)
        self._parts = [
            _halves(
                bucket,
                self.communicator,
                options,
                owner=index % self.communicator.size,
                # The last message of a pass also says which rank has which gradient.
                marks=len(self.params) if index == self._launched[-1] else 0,
            )
            for index, bucket in enumerate(self.buckets)
        ]
        kept = {param: rest for part in _gathered(before) for param, rest in part.kept().items()}
        for part in _gathered(self._parts):
            part.keep(kept)
        former = self._update
        self._update = (Sharded if self.sharded else Replicated)(
            self.optimizer,
            self._plain,
            self._parts,
            self.communicator,
            unused=self._unused,
            frozen="allgather" in options.exclude_parts,
        )
        if isinstance(self._update, Sharded):
            self._update.take_state(former if isinstance(former, Sharded) else None)
        self._views = {
            param: view
            for bucket in self.buckets
            for param, view in zip(bucket.params, bucket.gradient_views, strict=True)
        }
        self.readers.set_groups(members)
        self.schedule.regroup(members, self._launched)
        # Modules wait only if a bucket has work left after `step()`.
        at_once = self.sharded and all(isinstance(part, AllReduced) for part in self._parts)
        modules = [self.model] if at_once else self.readers.modules()
        new = [module for module in modules if module not in self._hooked]
        self._hooked.update(new)
        self.hooks.before_forward(new, self.before_forward, self.readers)
        if not before:
            self.hooks.before_forward([self.model], self.before_model)

    def _learn(self) -> None:
        place = {param: i for i, param in enumerate(self.params)}
        end = max(self._arrivals.values(), default=0.0)
        seen = RunOrder(
            reads=[place[param] for param in self.readers.order()],
            arrivals=[place[param] for param in self._arrivals],
            waits_s=[end - at for at in self._arrivals.values()],
        )
        self._order = agree(seen, self.communicator)
        self._watching = self._rule.watches

    def _reclaimed(self) -> bool:
        """Makes moved parameters views of their buckets again; False: a new layout is needed."""
        # This reads addresses only, which pending updates do not change, so nothing settles.
        with torch._C.DisableTorchFunctionSubclass():
            return all(bucket.reclaim() for bucket in self.buckets)

    # --- state ------------------------------------------------------------------------------------

    def resume(self, state: StateDict) -> None:
        if isinstance(self._update, Sharded):
            self._update.take_state()

    def close(self) -> None:
        super().close()
        self._rule.close()
        whole = self.whole_state()
        if isinstance(self._update, Sharded):
            self._update.forget_state()
            self.optimizer.state = defaultdict(dict, {**self.optimizer.state, **whole})
        for part in self._parts:
            part.finish_reduce()  # the script may not have made a step after the pass
            part.bucket.release()

    def whole_state(self) -> Mapping[torch.Tensor, dict[str, object]]:
        if not isinstance(self._update, Sharded):
            return super().whole_state()
        # Parameters that are not trained may have state, which is not sharded.
        known = set(held(self.optimizer))
        others = {p: state for p, state in self.optimizer.state.items() if p in known}
        try:
            return {**others, **dict(self._update.whole_state())}
        except RuntimeError as error:
            raise RuntimeError(
                f"{error} (each rank holds a part of the optimizer's state: call state_dict() and "
                "close() of the optimizer on every rank, not only on the one that saves; or use "
                "update='replicated')"
            ) from error


def _halves(
    bucket: Bucket, communicator: Communicator, options: Dear.Options, *, owner: int, marks: int
) -> Decoupled:
    """Returns the two halves of a bucket's all-reduce.

    Args:
        owner: rank that reduces and broadcasts, with `decouple=reduce_broadcast`.
        marks: number of marks that the first half carries; each says if a parameter has a gradient.
    """
    if options.gathers:
        return Gathered(bucket, communicator, options)
    skip = "reducescatter" in options.exclude_parts
    if options.decouple == "reduce_broadcast":
        return ReduceBroadcast(bucket, communicator, owner=owner, wire=options.wire, skip=skip)
    small = 0 < bucket.gradients.nbytes <= options.small_kb * KIB and not options.exclude_parts
    kind = AllReduced if small else ScatterGather
    return kind(bucket, communicator, marks=marks, wire=options.wire, skip=skip)


def _legs(options: Dear.Options, average: Cost, first: Cost | None, second: Cost | None) -> Legs:
    """Returns the costs of a group's messages; `average` is that of groups with one message."""
    if options.gathers:
        return Legs(first=average)
    small = options.decouple == "reduce_scatter_all_gather" and not options.exclude_parts
    excluded = options.exclude_parts
    return Legs(
        first=None if "reducescatter" in excluded else first,
        second=None if "allgather" in excluded else second,
        at_once=average if small else None,
        small_bytes=options.small_kb * KIB,
    )


def _measured_legs(engine: DearEngine) -> tuple[Cost, Legs]:
    """Returns the cost of averaging a group's gradients, and of its messages; collective."""
    options, like = engine.options, engine.params[0]
    cost = partial(cost_of_gradients, engine.communicator, like=like, queues=True)
    average = cost(options=options)
    if options.gathers:
        return average, Legs(first=average)
    # Second halves of sharded updates carry parameters, which are never compressed.
    back = HalfOptions() if engine.sharded else options
    first = cost(options=options, operation="reduce_scatter")
    second = cost(options=back, operation="all_gather")
    return average, _legs(options, average, first, second)


def _search(engine: DearEngine, profile: BackwardProfile) -> tuple[Groups, dict[str, object]]:
    """Returns the parameters of each group, and what to expect of the groups; a collective call."""
    engine.settle()  # nothing else may use the network during the measurement
    average, legs = _measured_legs(engine)
    communicator, params = engine.communicator, engine.params
    began_s = communicator.clock()
    arrived = measured_pass(engine.model, params, engine.readers, profile)
    kinds = [(params[i].dtype, params[i].device) for i in profile.order]
    usual = by_layers(arrived, with_first(FusionOptions(), lambda: average))
    groups = best_groups(arrived, legs, average, [usual], kinds)
    findings: dict[str, object] = {
        "groups": len(groups),
        "exposed_s": exposed_s(groups, passes_of(arrived), legs),
        "threshold_exposed_s": exposed_s(usual, passes_of(arrived), legs),
        "wall_s": communicator.clock() - began_s,
    }
    plan = [[profile.order[i] for i in group] for group in groups]
    return communicator.broadcast_object((plan, findings))


def _gathered(parts: Iterable[Decoupled]) -> list[Gathered]:
    return [part for part in parts if isinstance(part, Gathered)]


def _message_cost(engine: DearEngine) -> Cost:
    """Returns the seconds of a message by its gradients' bytes; the same on all ranks.

    Measures at sizes at which start-up and bytes cost about the same: up to 1 MiB, and beyond that
    only if a start-up takes longer than the bytes of 1 MiB, as between distant sites.
    """
    known = partial(cost_of_gradients, engine.communicator, engine.options, engine.params[0])
    cost = known(largest=MIB)
    return known() if start_up_bytes(cost) > MIB else cost
