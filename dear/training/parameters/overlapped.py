"""Engines whose averages take a whole step, while the rank computes its next gradients.

`dear.training.parameters.engine` explains the words share, mix and adapt.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Literal, NoReturn

from dear.buckets.flat import Bucket
from dear.buckets.grouping import MIB, fuse
from dear.buckets.updates import PartialUpdate
from dear.errors import UserError
from dear.lazy import torch
from dear.training.engine import Replica, Update, scaled
from dear.training.gradients import BackwardSchedule
from dear.training.parameters.engine import ParameterEngine, refuse_writers
from dear.training.parameters.exchange import BucketExchange
from dear.training.parameters.options import LocalOptions

UpdateIn = Literal["backward", "step"]
"""Time at which an overlapped engine updates.

- `backward`: in the backward pass, each bucket as soon as its last gradient is ready. A step is
  then one backward pass outside `no_sync()`. Clipping and GradScaler are refused, since they would
  change gradients after the update.
- `step`: in `step()`. Each bucket is sent while the next bucket is updated.
"""


class Updater(ABC):
    """Updates buckets by this rank's own gradients, for an overlapped engine."""

    joint: bool = False
    """True if no bucket is updated before the last gradient of the pass is ready."""
    ends_step: bool = False
    """True if the updates of a backward pass complete the step, without a call of `step()`."""

    def possible(self) -> bool:
        """Returns True if it can update single buckets."""
        return True

    def lay_out(self, buckets: Sequence[Bucket]) -> None:
        """Prepares for new buckets."""
        return

    def begin(self) -> None:
        """Prepares for the updates of a step."""
        return

    def batches(self, buckets: Sequence[Bucket]) -> Iterable[Sequence[Bucket]]:
        """Returns the ready `buckets` in the groups in which `update` takes them."""
        return [[bucket] for bucket in buckets]

    @abstractmethod
    def update(self, buckets: Sequence[Bucket]) -> None:
        """Updates buckets that are mixed already, under `torch.no_grad()`."""


class OptimizerUpdater(Updater):
    """Updates by the user's optimizer, one bucket at a time."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._partial = PartialUpdate(optimizer, type(optimizer))

    def possible(self) -> bool:
        return self._partial.possible()

    def begin(self) -> None:
        self._partial.note()

    def update(self, buckets: Sequence[Bucket]) -> None:
        params = [param for bucket in buckets for param in bucket.params]
        self._partial.run({param: param.grad for param in params})


class Overlapped(ParameterEngine):
    """Base of the engines with `x(t+1) = average(x(t)) - update(gradient at x(t))`.

    A bucket is mixed, adapted and shared again without a break, and then travels for a whole step.
    The first step mixes nothing; it lays out the buckets.
    """

    when_to_write = (
        "the averages take a whole step; use an algorithm whose averages end before parameters "
        "are read ('neighbor', 'exact-diffusion'), or load_state_dict(), which drops the averages"
    )

    def __init__(
        self, replica: Replica[LocalOptions], exchange: BucketExchange, updater: Updater
    ) -> None:
        self.updater = updater
        super().__init__(replica, exchange)

    def prepare(self) -> None:
        refuse_writers(self.model)
        self.hooks.before_load(self.model, self.drop)

    def begin(self) -> None:
        super().begin()
        self.steps += 1
        self.updater.begin()

    def set_up(self, members: Sequence[Sequence[torch.nn.Parameter]]) -> None:
        """Lays out the buckets."""
        self.exchange.lay_out(members, self.steps)
        self.updater.lay_out(self.buckets)

    def in_order(self, params: Iterable[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
        """Returns the members of buckets in rank 0's order of `params`; the others come last."""
        place = {param: i for i, param in enumerate(self.params)}
        complete = dict.fromkeys([*params, *reversed(self.params)])
        order = self.communicator.broadcast_object([place[param] for param in complete])
        return fuse([[self.params[i]] for i in order], self.options.bucket_mb * MIB)

    def ready(self, buckets: Sequence[Bucket]) -> None:
        """Mixes, adapts and shares buckets whose gradients are ready."""
        with torch.no_grad():
            for batch in self.updater.batches(buckets):
                self.mix(batch)
                self.updater.update(batch)
                self.share(batch)

    def mix(self, buckets: Sequence[Bucket]) -> None:
        self.arrived(buckets)
        for bucket in buckets:
            self.exchange.mix(bucket, self.steps)

    def share(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            self.exchange.share(bucket, self.steps)
        self.note_sent(buckets)


class OverlappedInStep(Overlapped):
    """Engine that mixes, adapts and shares in `step()`."""

    def advance(self, update: Update) -> object:
        if not self.buckets:
            self.set_up(self.in_order([]))
        self.begin()
        if self.updater.possible() and not scaled(self.optimizer):
            self.ready(self.buckets)
            return None
        with torch.no_grad():
            self.mix(self.buckets)
        result = self.scaling.step(update)
        with torch.no_grad():
            self.share(self.buckets)
        return result


class OverlappedInBackward(Overlapped):
    """Engine that mixes, adapts and shares each bucket as soon as its last gradient is ready.

    The first step also lays out the buckets, in the order in which rank 0's gradients arrived.
    """

    def prepare(self) -> None:
        self._arrived: dict[torch.nn.Parameter, None] = {}
        self._applied = self._left_out = False
        """`_applied`: backward passes have updated parameters since the last `step()`.
        `_left_out`: `zero_grad()` has followed such a pass without `step()`."""
        self._gradients = Bucket(self.params)
        self._schedule = BackwardSchedule(
            self.hooks,
            [self.params],
            self.communicator,
            launch=self._unit_complete,
            finish=self._pass_over,
            drop=self._refuse_half,
            arrived=self._gradient_arrived,
            learn=False,
        )
        super().prepare()

    def begin(self) -> None:
        if not self.updater.possible():  # hooks were registered later
            self._refuse("step hooks would run once per bucket, in the backward pass")
        super().begin()

    def set_up(self, members: Sequence[Sequence[torch.nn.Parameter]]) -> None:
        super().set_up(members)
        self._arrived.clear()
        buckets = self.buckets
        self._units = [buckets] if self.updater.joint else [[bucket] for bucket in buckets]
        units = [[param for bucket in unit for param in bucket.params] for unit in self._units]
        self._schedule.regroup(units, range(len(units)))

    def advance(self, update: Update) -> object:
        if scaled(self.optimizer):
            for name in ("found_inf", "grad_scale"):  # of the scaler's own call
                delattr(self.optimizer, name)
            self._refuse("a GradScaler cannot be used if the backward pass updates the parameters")
        if self._gradients.changed() is not None:
            self._refuse(
                "a gradient was changed between backward() and step(), after the backward pass had "
                "applied it"
            )
        self._schedule.run_if_missing()
        self._schedule.restart()
        self._applied = False
        self._gradients.forget()
        return None

    def clip_grad_norm(
        self, params: Sequence[torch.nn.Parameter], max_norm: float, norm_type: float
    ) -> NoReturn:
        self._refuse("gradients cannot be clipped if the backward pass updates the parameters")

    def no_sync(self) -> AbstractContextManager[None]:
        return self._schedule.paused()

    def forget(self) -> None:
        self._gradients.forget()
        self._schedule.forget()
        self._left_out, self._applied = self._applied, False

    def _refuse(self, reason: str) -> NoReturn:
        """Raises `UserError`; if the script catches it, the last updates count as a step."""
        self._applied = False
        raise UserError(f"{reason}; use the option update='step'")

    def _refuse_half(self) -> None:
        """Raises `UserError` if a pass that ended with an error has updated parameters."""
        if self._applied:
            self._refuse("the last backward pass ended with an error, but has updated parameters")

    def _gradient_arrived(self, param: torch.nn.Parameter) -> None:
        if torch._C._autograd._get_current_graph_task_keep_graph():
            raise UserError(
                "backward(retain_graph=True) keeps the graph of parameters that this pass updates; "
                "add the losses and call backward() once, or use the option update='step'"
            )
        if not self.buckets:
            self._arrived.setdefault(param)

    def _unit_complete(self, unit: int) -> None:
        if not self.buckets:
            return  # the order is not known before the pass has ended
        if unit == 0:
            if self._left_out:
                self._left_out = False
                self._refuse(
                    "the last backward pass has updated parameters, but no step() has followed it"
                )
            if self._schedule.passed:
                raise UserError(
                    "a second backward pass before step(): put all but the last one under "
                    "optimizer.no_sync(), or use the option update='step'"
                )
            self.begin()
        self._applied = True
        self.ready(self._units[unit])

    def _pass_over(self) -> None:
        if not self.buckets:
            self.set_up(self.in_order(self._arrived))
            self.begin()
            self._applied = True
            self.ready(self.buckets)
        if self.updater.ends_step:
            self._schedule.restart()
            self._applied = False
        else:
            self._gradients.note()


def overlapped(
    replica: Replica[LocalOptions], exchange: BucketExchange, update: UpdateIn
) -> Overlapped:
    """Returns the engine that updates by the replica's optimizer at the time `update` names."""
    updater = OptimizerUpdater(replica.optimizer)
    if update == "step":
        return OverlappedInStep(replica, exchange, updater)
    if not updater.possible():
        raise UserError(
            f"{type(replica.optimizer).__name__} may be unable to update a few parameters at a "
            "time (it is no optimizer of torch, or has step hooks); use the option update='step'"
        )
    return OverlappedInBackward(replica, exchange, updater)
