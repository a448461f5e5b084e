"""What algorithms share whose ranks step by themselves and average parameters with a few others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from dear.buckets.flat import Bucket, value_bucket
from dear.buckets.grouping import MIB, fuse, layers
from dear.buckets.updates import PartialUpdate
from dear.comm.communicator import Communicator
from dear.comm.neighbors import Exchange, Round
from dear.cost.bounds import Traffic
from dear.cost.overlap import Content, Transfer
from dear.errors import UserError, unknown
from dear.lazy import torch
from dear.options import Options, at_least, option_of, positive
from dear.topology import TOPOLOGIES, Name, check_graph, graph, nx
from dear.training.algorithm import Algorithm
from dear.training.engine import Engine, GradScaling, Replica, grouped, refuse_lbfgs
from dear.training.gradients import BackwardSchedule
from dear.training.hooks import ReaderMap

BUCKET_MB = 25.0

STREAMS = 2
"""Exchanges at the same time: while one is added up, the other uses the wire."""

Rounds = Callable[[int], Round]
"""Number of a round -> this rank's part in it."""

STATE_KEY = "replica"
"""In the first parameter group of an optimizer's state dict: what is needed besides to go on."""
OLD_STEPS_KEY = "neighborhood_steps"
"""There in earlier versions, for engines that overlap; others had `STATE_KEY` beside the groups."""

Order = Literal["combine-then-adapt", "adapt-then-combine", "overlapped"]

UpdateIn = Literal["backward", "step"]
"""Where buckets are updated that are averaged overlapped.

- `backward`: in the backward pass, each as soon as its last gradient is there. Then a step is one
  backward pass outside `no_sync()`, and what comes between `backward()` and `step()` comes too
  late: clipping and GradScaler are refused.
- `step`: in `step()`, each bucket sent on while the next is updated.
"""


class ParameterEngine(Engine):
    """Local updates and rounds of averaging over flat buckets of parameters, in one of three ways.

    A bucket is *shared*: it starts to travel; *mixed*: what has come from others is averaged into
    it; and *adapted*: updated with this rank's own gradients.

    - `combine-then-adapt`, x <- average(x) - update(gradient at x): shared when the model is about
      to run in training, mixed and adapted in `step()`; both passes hide the transfer.
    - `adapt-then-combine`, x <- average(x - update(gradient at x)): adapted and shared in `step()`.
      A module that is about to run waits for the buckets that it reads; everything else that reads
      parameters waits for all.
    - `overlapped`, x(t+1) = average(x(t)) - update(gradient at x(t)): each bucket is mixed, adapted
      and shared again as soon as its last gradient is there, and so travels for a whole step. The
      first step mixes nothing and ends with the buckets being laid out, in the order in which
      rank 0's gradients came.

    An algorithm overrides moments; as they stand here, parameters are averaged over a graph:

        lay_out(members)   buckets are made: make what goes with them; a collective call
        begin()            a step is about to mix or share
        share(bucket)      starts to send it as it is; under `no_grad`, as the next two
        shared()           all buckets are being sent (not where averages are overlapped)
        mix(bucket)        waits for what was sent to this rank, and averages it in
        combine()          mixes all that is shared (not where averages are overlapped)
        adapt(update)      runs `update`, the optimizer's own step
        ready(buckets)     overlapped: their gradients are there; mixes, adapts and shares them
        passed()           overlapped: a backward pass has updated everything
        wait()             returns when nothing of the buckets is being read any more
        drop()             the parameters were replaced: what was sent before is not mixed in
        saved(), restore() what a checkpoint holds besides; ranks differ, so each saves its own
        release()          lets go of what communicates

    Args:
        replica: without an optimizer the owner updates, in `ready`. The options are `LocalOptions`.
        rounds: number of a round -> this rank's part in it; for those that average over a graph.
        exchange: what starts these rounds, as `Exchange` does; None: an `Exchange`.

    Raises:
        UserError: the optimizer cannot be stepped like this.
    """

    order: Order = "combine-then-adapt"

    takes_scaler: ClassVar[bool] = True
    """False where sums of gradients are kept, which single ranks that skip steps would break."""
    sends_in_place: ClassVar[bool] = True
    """True if neighbours read the parameters themselves from `share` until `mix`."""

    def __init__(
        self,
        replica: Replica,
        rounds: Rounds | None = None,
        exchange: Any = None,
        order: Order | None = None,
    ) -> None:
        super().__init__(replica)
        refuse_lbfgs(self.optimizer, "averaging parameters step by step")
        self.order = order or self.order
        self.rounds = rounds
        if rounds is not None and exchange is None:
            exchange = Exchange(self.communicator, STREAMS)
        self.exchange = exchange
        self.steps = 0
        """Steps so far, where averages are overlapped with the present one; schedules go by it."""
        self.buckets: list[Bucket] = []
        self.pending: dict[Any, Any] = {}
        """What is under way, by bucket."""
        self.unmixed: set[int] = set()
        """Buckets that are shared and not mixed yet, where averages are not overlapped."""
        self._schedule: BackwardSchedule | None = None
        if self.order == "overlapped":
            self._overlap()
        else:
            members = fuse(layers(self.model, self.params), self.options.bucket_mb * MIB)
            self.lay_out(members)
            if self.order == "combine-then-adapt":
                self.hooks.before_forward([self.model], self._before_model)
            else:
                self._readers = ReaderMap(self.model, self.params)
                self._readers.set_groups(members)
                self.hooks.before_forward(self.model.modules(), self._before_module)
                self.hooks.before_state_dict(self.model, self.settle)
        if self.optimizer is not None:
            self.scaling = GradScaling(self.optimizer)
            self.resume({})
        else:
            self.restore(None)

    # Moments.

    def lay_out(self, members: Sequence[Sequence[torch.nn.Parameter]]) -> None:
        self.buckets = [value_bucket(params, self.communicator) for params in members]

    def begin(self) -> None:
        if not all(bucket.reclaim() for bucket in self.buckets):
            raise UserError(
                "the model was moved or converted after it was distributed; close() the optimizer "
                "first, and wrap it again afterwards"
            )
        if self.order == "overlapped":
            self.steps += 1
            if self.optimizer is not None:
                self._partial.note()

    def share(self, bucket: Bucket) -> None:
        part = self.rounds(self.steps // self.options.every)
        self.pending[bucket] = self.exchange.start(bucket.values, part)

    def shared(self) -> None:
        return

    def mix(self, bucket: Bucket) -> None:
        self.pending.pop(bucket).finish(bucket.values)
        bucket.touched()

    def combine(self) -> None:
        for index in sorted(self.unmixed):
            self._mix(index)

    def adapt(self, update: Callable[[], Any]) -> Any:
        return self.scaling.step(update)

    def ready(self, buckets: Sequence[Bucket]) -> None:
        with torch.no_grad():
            for bucket in buckets:
                self.mix(bucket)
                self._partial.run({param: param.grad for param in bucket.params})
                self.share(bucket)

    def passed(self) -> None:
        self._gradients.note()

    def wait(self) -> None:
        for transfer in self.pending.values():
            transfer.wait()

    def drop(self) -> None:
        self.wait()
        self.pending.clear()

    def saved(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def restore(self, saved: dict[str, Any] | None) -> None:
        """Goes on from what `saved` returned; None: from the parameters alone."""
        self.steps = 0 if saved is None else saved["steps"]

    def release(self) -> None:
        if self.exchange is not None:
            self.exchange.close()

    # What the training loop does.

    def step(self, update: Callable[[], Any]) -> Any:
        if not self.takes_scaler and hasattr(self.optimizer, "found_inf"):
            raise UserError(
                "this algorithm keeps sums of gradients, which a GradScaler that skips steps of "
                "single ranks would break; train in bfloat16 or float32 without a scaler"
            )
        if self.order == "combine-then-adapt":
            return self._combine_then_adapt(update)
        if self.order == "adapt-then-combine":
            return self._adapt_then_combine(update)
        return self._step_overlapped(update)

    step_closure = Engine.step_after_closure

    def clip_grad_norm(
        self, params: Sequence[torch.nn.Parameter], max_norm: float, norm_type: float
    ) -> Any:
        """Clips this rank's own gradients; returns their norm before."""
        if self._schedule is not None:
            raise UserError(
                "gradients cannot be clipped where updates are made in the backward pass; use the "
                "option update='step'"
            )
        return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type)

    def settle(self) -> None:
        if self.order == "adapt-then-combine":
            self.combine()

    def synchronize(self) -> None:
        self.settle()
        self.wait()

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        if self._schedule is None:
            return contextlib.nullcontext()  # backward passes communicate nothing anyway
        return self._schedule.paused()

    def forget(self) -> None:
        if self._schedule is not None:
            self._gradients.forget()
            self._schedule.forget()

    def state_dict(self, plain: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        self.settle()
        state = plain()
        state["param_groups"][0][STATE_KEY] = self.saved()
        return state

    def load_state_dict(self, plain: Callable[[], None]) -> None:
        self.synchronize()
        plain()

    def resume(self, state: dict[str, Any]) -> None:
        # The plain optimizer keeps what it finds in a parameter group, also before it is wrapped.
        group = self.optimizer.param_groups[0]
        steps = group.pop(OLD_STEPS_KEY, None)
        saved = group.pop(STATE_KEY, None) or state.get(STATE_KEY)
        self.restore(saved if steps is None else {"steps": steps})

    def close(self) -> None:
        super().close()
        if self.order == "adapt-then-combine":
            self._readers.freeze()
        if self.optimizer is not None:
            self.scaling.close()
        self.take_down()
        self.release()

    def take_down(self) -> None:
        """Ends what is under way and gives the parameters memory of their own."""
        self.drop()
        for bucket in self.buckets:
            bucket.release()
        self.buckets = []

    def groups(self) -> list[tuple[int, Sequence[torch.nn.Parameter]]]:
        return grouped(bucket.params for bucket in self.buckets)

    def due(self) -> bool:
        """True in steps that average."""
        return self.steps % self.options.every == self.options.every - 1

    def _share_all(self) -> None:
        with torch.no_grad():
            for bucket in self.buckets:
                self.share(bucket)
        self.unmixed = set(range(len(self.buckets)))
        self.shared()

    def _mix(self, index: int) -> None:
        self.unmixed.discard(index)
        # State must outlive an evaluation that settles.
        with torch.inference_mode(False), torch.no_grad():
            self.mix(self.buckets[index])

    # Combine, then adapt.

    def _combine_then_adapt(self, update: Callable[[], Any]) -> Any:
        self._share_if_due()
        if self.unmixed:
            if self.sends_in_place and self._versions() != self._noted_versions:
                raise UserError(
                    "parameters were changed between a training forward and step(), while they "
                    "were being sent to the neighbours; load or change them after step()"
                )
            self.combine()
        self.steps += 1
        return self.adapt(update)

    def _before_model(self, module: torch.nn.Module) -> None:
        if module.training and torch.is_grad_enabled():
            self._share_if_due()

    def _share_if_due(self) -> None:
        if self.unmixed or not self.due():
            return
        self.begin()
        self._noted_versions = self._versions()
        self._share_all()

    def _versions(self) -> list[int]:
        """Of all parameters; in-place changes raise them."""
        return [param._version for bucket in self.buckets for param in bucket.params]

    # Adapt, then combine.

    def _adapt_then_combine(self, update: Callable[[], Any]) -> Any:
        self.settle()
        self._readers.freeze()
        self.begin()
        result = self.adapt(update)
        if self.due():
            self._share_all()
            for index in self._readers.unread() & self.unmixed:
                self._mix(index)
        self.steps += 1
        return result

    def _before_module(self, module: torch.nn.Module) -> None:
        if self.unmixed:
            for index in self._readers.due(module, self.unmixed):
                self._mix(index)

    # Overlapped.

    joint = False
    """True if no bucket is ready before the last gradient is there."""

    def _overlap(self) -> None:
        update = self.options.update
        self._arrived: dict[torch.nn.Parameter, None] = {}
        self._gradients = Bucket(self.params)
        if self.optimizer is not None:
            self._partial = PartialUpdate(self.optimizer, type(self.optimizer))
            if update == "backward" and not self._partial.possible():
                raise UserError(
                    f"{type(self.optimizer).__name__} is not known to be steppable for a few "
                    "parameters at a time (it is no optimizer of torch, or has step hooks); use "
                    "the option update='step'"
                )
        if update == "backward":
            self._schedule = BackwardSchedule(
                self.hooks,
                [self.params],
                self.communicator,
                launch=self._unit_complete,
                finish=self._pass_over,
                arrived=self._gradient_arrived,
                learn=False,
            )
        self.hooks.before_load(self.model, self.drop)

    def set_up(self, members: Sequence[Sequence[torch.nn.Parameter]]) -> None:
        """Lays buckets out, and lets their gradients be waited for one by one, or `joint`."""
        self.lay_out(members)
        self._arrived.clear()
        self._units = [self.buckets] if self.joint else [[bucket] for bucket in self.buckets]
        if self._schedule is not None:
            units = [[param for bucket in unit for param in bucket.params] for unit in self._units]
            self._schedule.regroup(units, range(len(units)))

    def _in_order_of_arrival(self) -> list[list[torch.nn.Parameter]]:
        """Rank 0's order holds on all ranks. Parameters without a gradient come last."""
        place = {param: i for i, param in enumerate(self.params)}
        seen = dict.fromkeys([*self._arrived, *reversed(self.params)])
        order = self.communicator.broadcast_object([place[param] for param in seen])
        return fuse([[self.params[i]] for i in order], self.options.bucket_mb * MIB)

    def _gradient_arrived(self, param: torch.nn.Parameter) -> None:
        if not self.buckets:
            self._arrived.setdefault(param)

    def _unit_complete(self, unit: int) -> None:
        if not self.buckets:
            return  # the order is not known before the pass has ended
        if unit == 0:
            if self._schedule.passed:
                raise UserError(
                    "a second backward pass before step(): put all but the last one under "
                    "optimizer.no_sync(), or use the option update='step'"
                )
            self.begin()
        self.ready(self._units[unit])

    def _pass_over(self) -> None:
        if not self.buckets:
            self.set_up(self._in_order_of_arrival())
            self.begin()
            self.ready(self.buckets)
        self.passed()

    def _step_overlapped(self, update: Callable[[], Any]) -> Any:
        scaled = hasattr(self.optimizer, "found_inf")
        if self._schedule is None:
            return self._update_in_step(update, scaled)
        if scaled:
            del self.optimizer.found_inf, self.optimizer.grad_scale  # of the scaler's own call
            raise UserError(
                "a GradScaler cannot step an optimizer whose updates are made in the backward "
                "pass; use the option update='step'"
            )
        if self._gradients.changed() is not None:
            raise UserError(
                "a gradient was changed between backward() and step(), but the backward pass has "
                "applied it already; use the option update='step'"
            )
        self._schedule.run_if_missing()
        self._schedule.restart()
        self._gradients.forget()
        return None

    def _update_in_step(self, update: Callable[[], Any], scaled: bool) -> Any:
        if not self.buckets:
            self.set_up(self._in_order_of_arrival())
        self.begin()
        if self._partial.possible() and not scaled:
            self.ready(self.buckets)
            return None
        with torch.no_grad():
            for bucket in self.buckets:
                self.mix(bucket)
        result = self.adapt(update)
        with torch.no_grad():
            for bucket in self.buckets:
                self.share(bucket)
        return result


@dataclass(frozen=True, kw_only=True)
class LocalOptions(Options):
    """Who averages with whom, in what portions, and when."""

    every: ClassVar[int] = 1
    """Averages in each so many steps only, the last of them; the others are local. This and the
    next are options where a subclass makes fields of them."""
    update: ClassVar[str] = "backward"

    topology: str = "complete"
    bucket_mb: float = BUCKET_MB
    """Parameters travel in buckets of about so many MB of 2^20 bytes; where averages are
    overlapped, below so many."""

    def __post_init__(self) -> None:
        positive(option_of(self, "bucket_mb"), self.bucket_mb)
        at_least(option_of(self, "every"), self.every, 1)


@dataclass(frozen=True, kw_only=True)
class GraphOptions(LocalOptions):
    """The graph that ranks average over."""

    topology: Name = "exp2"
    """Static graph of the ranks, a name from `dear.topology`. `complete`: everybody with everybody.
    `ring`: both neighbours on a circle (`ring-left`, `ring-right`: one direction only). `star`:
    rank 0 with all. `mesh`: a 2-D grid. `exp2`: rank r sends to r + 1, 2, 4, ...; `symmetric-exp`:
    r exchanges with r +- 1, 4, 16, ..."""

    def __post_init__(self) -> None:
        if self.topology not in TOPOLOGIES:
            raise unknown(option_of(self, "topology"), self.topology, TOPOLOGIES)
        super().__post_init__()

    def graph(self, communicator: Communicator, **needs: Any) -> nx.DiGraph:
        """The static graph of all ranks, checked; `needs` as in `topology.check_graph`."""
        made = graph(self.topology, communicator.size)
        check_graph(made, communicator.size, **needs)
        return made


class GraphAlgorithm(Algorithm):
    """Base: averages over the static graph of `GraphOptions`, as often as these say."""

    copies: ClassVar[int] = 1
    """How often the size of the parameters goes along each edge."""

    @classmethod
    def traffic(cls, options: GraphOptions, world_size: int, local_size: int) -> Traffic:
        whole = Traffic.along(graph(options.topology, world_size))
        return whole.times(cls.copies).every(options.every)

    def alone(self, options: GraphOptions) -> bool:
        return True  # averages with itself


def combine_then_adapt(*carries: Content) -> Transfer:
    """What the order of that name states."""
    return Transfer(kind="exchange", carries=carries, starts="model", awaited="step")


def adapt_then_combine(*carries: Content) -> Transfer:
    """What the order of that name states."""
    return Transfer(kind="exchange", carries=carries, starts="step", awaited="layer", steps_later=1)


def always(part: Round) -> Rounds:
    """The same part in every round."""
    return lambda turn: part
