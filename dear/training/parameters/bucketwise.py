"""Updates during the backward pass: each bucket has its own optimizer and schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dear.buckets.flat import Bucket
from dear.errors import UserError
from dear.options import at_least
from dear.training.engine import Closure
from dear.training.parameters.overlapped import Updater

if TYPE_CHECKING:
    from torch.optim.optimizer import StateDict

OptimFn = Callable[[list[tuple[str, torch.Tensor]]], Optimizer]
SchedulerFn = Callable[[Optimizer], LRScheduler]


class BucketOptimizers(Updater):
    """Updates each bucket by its own optimizer.

    A step is one backward pass outside `no_sync()`; it leaves no gradients behind.

    Args:
        optim_fn: makes the optimizer of one bucket from its (name, parameter) pairs.
        lr_scheduler_fn: makes the schedule of an optimizer, which advances once per step; None: no
            schedule.
        scaler: GradScaler; `unscale_`, `step` and `update` are called at the end of the pass.
        clip_norm: largest norm of all gradients of this rank; 0.0: no limit. With a limit, updates
            wait for the end of the pass.
    """

    ends_step = True

    def __init__(
        self,
        model: torch.nn.Module,
        optim_fn: OptimFn,
        lr_scheduler_fn: SchedulerFn | None,
        scaler: torch.amp.GradScaler | None,
        clip_norm: float,
    ) -> None:
        at_least("grad_clip_norm", clip_norm, 0)
        self._names = {param: name for name, param in model.named_parameters()}
        self._optim_fn = optim_fn
        self._lr_scheduler_fn = lr_scheduler_fn
        self._scaler = scaler
        self._clip_norm = clip_norm
        self.joint = scaler is not None or clip_norm > 0
        self.optimizers: dict[Bucket, Optimizer] = {}
        self.schedulers: dict[Bucket, LRScheduler] = {}

    def lay_out(self, buckets: Sequence[Bucket]) -> None:
        self.optimizers, self.schedulers = {}, {}
        for bucket in buckets:
            optimizer = self._optim_fn([(self._names[param], param) for param in bucket.params])
            if not isinstance(optimizer, Optimizer):
                kind = type(optimizer).__name__
                raise UserError(f"optim_fn must return an optimizer, got {kind}")
            held = {param for group in optimizer.param_groups for param in group["params"]}
            left_out = [self._names[param] for param in bucket.params if param not in held]
            if left_out:
                raise UserError(
                    f"optim_fn left out {left_out[0]!r}; it must take all parameters that it gets"
                )
            self.optimizers[bucket] = optimizer
            if self._lr_scheduler_fn is not None:
                self.schedulers[bucket] = self._lr_scheduler_fn(optimizer)
        if self.joint:
            self._whole = _Whole(list(self.optimizers.values()))

    def batches(self, buckets: Sequence[Bucket]) -> Iterable[Sequence[Bucket]]:
        if self._scaler is not None:
            self._scaler.unscale_(self._whole)
        if self._clip_norm > 0:
            params = self._whole.param_groups[0]["params"]
            torch.nn.utils.clip_grad_norm_(params, self._clip_norm)
        # A scaler checks all buckets together, and updates all or none.
        return [[bucket] for bucket in buckets] if self._scaler is None else [buckets]

    def update(self, buckets: Sequence[Bucket]) -> None:
        if self._scaler is not None:
            self._scaler.step(self._whole)
            self._scaler.update()
        for bucket in buckets:
            if self._scaler is None:
                self.optimizers[bucket].step()
            self.optimizers[bucket].zero_grad()
            if self.schedulers:
                self.schedulers[bucket].step()

    def learning_rate(self) -> float:
        """Returns the learning rate of the first bucket; 0.0 before the first step."""
        optimizer = next(iter(self.optimizers.values()), None)
        return 0.0 if optimizer is None else float(optimizer.param_groups[0]["lr"])

    def state_dict(self) -> StateDict:
        """Returns the state of the optimizers, the schedules and the scaler."""
        return {
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers.values()],
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers.values()],
            "scaler": None if self._scaler is None else self._scaler.state_dict(),
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Loads a result of `state_dict` for the same buckets.

        Raises:
            UserError: the numbers of optimizers or schedules differ, or only one side has a scaler.
        """
        parts: dict[str, list[Optimizer | LRScheduler]] = {
            "optimizers": [*self.optimizers.values()],
            "schedulers": [*self.schedulers.values()],
        }
        for name, here in parts.items():
            if len(state[name]) != len(here):
                raise UserError(
                    f"the checkpoint has the state of {len(state[name])} {name}, but the model has "
                    f"{len(here)}; make the model with the same arguments as for the checkpoint"
                )
        if (state["scaler"] is None) != (self._scaler is None):
            raise UserError(
                "either the checkpoint or this model has a scaler, but not both; make the model "
                "with the same arguments as for the checkpoint"
            )
        for name, here in parts.items():
            for part, saved in zip(here, state[name], strict=True):
                part.load_state_dict(saved)
        if self._scaler is not None:
            self._scaler.load_state_dict(state["scaler"])


class _Whole(Optimizer):
    """All buckets as one optimizer, so that a GradScaler checks and skips them together."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._parts = optimizers
        held = [p for part in optimizers for group in part.param_groups for p in group["params"]]
        super().__init__(held, {})

    def step(self, closure: Closure | None = None) -> None:  # type: ignore[override]  # no overloads
        for part in self._parts:
            part.step()
