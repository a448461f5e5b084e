"""Training in which each rank steps its own optimizer and averages parameters with neighbours."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal

from dear.buckets.grouping import MIB
from dear.buckets.unchanged import Unchanged
from dear.buckets.updates import PartialUpdate
from dear.errors import UserError
from dear.lazy import torch
from dear.training.backward import BackwardSchedule
from dear.training.engine import Engine, refuse_lbfgs
from dear.training.grad_scaling import GradScaling
from dear.training.neighborhood import Neighborhood, bucketed

if TYPE_CHECKING:
    from torch.nn import Module, Parameter
    from torch.optim import Optimizer

UpdateIn = Literal["backward", "step"]
"""Where buckets are updated.

- `backward`: in the backward pass, each as soon as its last gradient is there. Then a step is one
  backward pass outside `no_sync()`, and what comes between `backward()` and `step()` comes too
  late: clipping and GradScaler are refused.
- `step`: in `step()`, each bucket sent on while the next is updated.
"""

STEPS_KEY = "neighborhood_steps"
"""In the optimizer's first parameter group, and so in its state dict: where the schedule stands."""


class LocalUpdateEngine(Engine):
    """Steps the user's optimizer bucket by bucket between `mix` and `share` of `neighborhood`.

    Buckets are laid out in the first step, in the order in which rank 0's gradients came.

    Args:
        params: trained parameters.
        bucket_mb: buckets stay below so many MB of 2^20 bytes.

    Raises:
        UserError: the optimizer cannot be stepped where `update` says.
    """

    def __init__(
        self,
        model: Module,
        optimizer: Optimizer,
        params: Sequence[Parameter],
        neighborhood: Neighborhood,
        *,
        bucket_mb: float,
        update: UpdateIn,
    ) -> None:
        super().__init__(model, neighborhood.communicator)
        self._update = PartialUpdate(optimizer, type(optimizer))
        _refuse_optimizer(optimizer, self._update, update)
        self._optimizer = optimizer
        self._params = list(params)
        self._bucket_bytes = bucket_mb * MIB
        self.neighborhood = neighborhood
        self._arrived: dict[Parameter, None] = {}
        self._scaling = GradScaling(optimizer)
        self._schedule: BackwardSchedule | None = None
        self._noted = Unchanged(())
        if update == "backward":
            self._schedule = BackwardSchedule(
                self.hooks,
                [self._params],
                self.communicator,
                launch=self._launch,
                finish=self._end_pass,
                arrived=self._arrive,
                learn=False,
            )
        neighborhood.resume(optimizer.param_groups[0].get(STEPS_KEY, 0))
        self.hooks.before_load(model, neighborhood.forget)

    def step(self, update: Callable[[], Any]) -> Any:
        if self._schedule is None:
            return self._step_now(update)
        if hasattr(self._optimizer, "found_inf"):
            del self._optimizer.found_inf, self._optimizer.grad_scale  # of the scaler's own call
            raise UserError(
                "a GradScaler cannot step an optimizer whose updates are made in the backward "
                "pass; use the option update='step'"
            )
        if self._noted.changed() is not None:
            raise UserError(
                "a gradient was changed between backward() and step(), but the backward pass has "
                "applied it already; use the option update='step'"
            )
        self._schedule.run_if_missing()
        self._schedule.restart()
        self._noted = Unchanged(())
        return None

    step_closure = Engine.step_after_closure

    def clip_grad_norm(self, params: Sequence[Parameter], max_norm: float, norm_type: float) -> Any:
        """Clips this rank's own gradients; returns their norm before."""
        if self._schedule is not None:
            raise UserError(
                "gradients cannot be clipped where updates are made in the backward pass; use the "
                "option update='step'"
            )
        return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type)

    def synchronize(self) -> None:
        """Waits for what is under way; gradients and parameters are this rank's own always."""
        self.neighborhood.wait()

    def no_sync(self) -> AbstractContextManager[None]:
        if self._schedule is None:
            return contextlib.nullcontext()
        return self._schedule.paused()

    def forget(self) -> None:
        self._noted = Unchanged(())
        if self._schedule is not None:
            self._schedule.forget()

    def statistics(self) -> dict[str, Any]:
        return self.neighborhood.statistics()

    def load_state_dict(self, plain: Callable[[], None]) -> None:
        plain()
        self.neighborhood.resume(self._optimizer.param_groups[0].get(STEPS_KEY, 0))

    def close(self) -> None:
        super().close()
        self.neighborhood.close()
        self._scaling.close()
        self._optimizer.param_groups[0].pop(STEPS_KEY, None)

    def _arrive(self, param: Parameter) -> None:
        if not self.neighborhood.laid_out:
            self._arrived.setdefault(param)

    def _launch(self, index: int) -> None:
        if not self.neighborhood.laid_out:
            return  # the order is not known before the pass has ended
        if index == self._schedule.order[0]:
            self._begin()
        self._update_bucket(index)

    def _begin(self) -> None:
        if self._schedule.passed:
            raise UserError(
                "a second backward pass before step(): put all but the last one under "
                "optimizer.no_sync(), or use the option update='step'"
            )
        self.neighborhood.begin_step()
        self._update.note()

    def _end_pass(self) -> None:
        if not self.neighborhood.laid_out:
            self._lay_out()
            self.neighborhood.begin_step()
            self._update.note()
            for index in range(len(self.neighborhood.buckets)):
                self._update_bucket(index)
            units = [bucket.params for bucket in self.neighborhood.buckets]
            self._schedule.regroup(units, range(len(units)))
        self._noted = Unchanged(self._params)
        self._noted.note()
        self._end_step()

    def _step_now(self, update: Callable[[], Any]) -> Any:
        if not self.neighborhood.laid_out:
            self._lay_out()
        self.neighborhood.begin_step()
        buckets = range(len(self.neighborhood.buckets))
        if self._update.possible() and not hasattr(self._optimizer, "found_inf"):
            self._update.note()
            for index in buckets:
                self._update_bucket(index)
            result = None
        else:
            with torch.no_grad():
                for index in buckets:
                    self.neighborhood.mix(index)
            result = self._scaling.step(update)
            with torch.no_grad():
                for index in buckets:
                    self.neighborhood.share(index)
        self._end_step()
        return result

    def _lay_out(self) -> None:
        self.neighborhood.lay_out(
            bucketed(self._params, list(self._arrived), self._bucket_bytes, self.communicator)
        )
        self._arrived.clear()

    def _update_bucket(self, index: int) -> None:
        with torch.no_grad():
            self.neighborhood.mix(index)
            bucket = self.neighborhood.buckets[index]
            self._update.run({param: param.grad for param in bucket.params})
            self.neighborhood.share(index)

    def _end_step(self) -> None:
        self._optimizer.param_groups[0][STEPS_KEY] = self.neighborhood.steps


def _refuse_optimizer(optimizer: Any, update: PartialUpdate, where: UpdateIn) -> None:
    refuse_lbfgs(optimizer, "averaging parameters step by step")
    if where == "backward" and not update.possible():
        raise UserError(
            f"{type(optimizer).__name__} is not known to be steppable for a few parameters at a "
            "time (it is no optimizer of torch, or has step hooks); use the option update='step'"
        )
