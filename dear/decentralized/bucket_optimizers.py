"""An optimizer and a learning-rate schedule for each bucket of parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dear.errors import UserError
from dear.options import at_least

OptimFn = Callable[[list[tuple[str, torch.Tensor]]], Optimizer]
SchedulerFn = Callable[[Optimizer], LRScheduler]


class _Whole(Optimizer):
    """All buckets as one optimizer, for a GradScaler: it judges and skips them together."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._parts = list(optimizers)
        held = [p for part in optimizers for group in part.param_groups for p in group["params"]]
        super().__init__(held, {})

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for part in self._parts:
            part.step()


class BucketOptimizers:
    """Makes, steps, saves and loads them.

    Args:
        optim_fn: the optimizer of the (name, parameter) pairs of a bucket.
        lr_scheduler_fn: its schedule, which advances with each update; None: there is none.
        scaler: its scale is in the gradients; a step with gradients that are not finite is left out
            on this rank, as a whole.
        clip_norm: largest norm that all gradients of this rank may have together; 0: any.
    """

    def __init__(
        self,
        optim_fn: OptimFn,
        lr_scheduler_fn: SchedulerFn | None,
        scaler: torch.amp.GradScaler | None,
        clip_norm: float,
    ) -> None:
        at_least("grad_clip_norm", clip_norm, 0)
        self._optim_fn = optim_fn
        self._lr_scheduler_fn = lr_scheduler_fn
        self._scaler = scaler
        self._clip_norm = clip_norm
        self._whole: _Whole | None = None
        self.optimizers: list[Optimizer] = []
        self.schedulers: list[LRScheduler] = []

    @property
    def needs_all_gradients(self) -> bool:
        """True if no bucket may be updated before the last gradient is there."""
        return self._scaler is not None or self._clip_norm > 0

    def make(self, buckets: Sequence[Sequence[tuple[str, torch.Tensor]]]) -> None:
        """New ones for `buckets`."""
        self.optimizers = [self._optim_fn(list(bucket)) for bucket in buckets]
        for bucket, optimizer in zip(buckets, self.optimizers, strict=True):
            _check(bucket, optimizer)
        self.schedulers = []
        if self._lr_scheduler_fn is not None:
            self.schedulers = [self._lr_scheduler_fn(optimizer) for optimizer in self.optimizers]
        self._whole = _Whole(self.optimizers) if self.needs_all_gradients else None

    def prepare(self) -> None:
        """All gradients are there: unscales and clips them, where asked for."""
        if self._scaler is not None:
            self._scaler.unscale_(self._whole)
        if self._clip_norm > 0:
            params = self._whole.param_groups[0]["params"]
            torch.nn.utils.clip_grad_norm_(params, self._clip_norm)

    @property
    def scaled(self) -> bool:
        """True if buckets are to be stepped together, by `step_all`."""
        return self._scaler is not None

    def step_all(self) -> None:
        """Updates all buckets, or none if the scaler found gradients that are not finite."""
        self._scaler.step(self._whole)
        self._scaler.update()

    def step(self, index: int) -> None:
        """Updates one bucket."""
        self.optimizers[index].step()

    def end(self, index: int) -> None:
        """After the update of a bucket: drops its gradients and advances its schedule."""
        self.optimizers[index].zero_grad()
        if self.schedulers:
            self.schedulers[index].step()

    def lr(self) -> float:
        """The learning rate of the first group; 0.0 before there is one."""
        return float(self.optimizers[0].param_groups[0]["lr"]) if self.optimizers else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Of all optimizers, schedules and the scaler."""
        return {
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
            "scaler": None if self._scaler is None else self._scaler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Into optimizers that were made for the same buckets.

        Raises:
            UserError: it was saved with a schedule or a scaler, and there is none here, or the
                other way round.
        """
        for name, here in (("schedulers", self.schedulers), ("optimizers", self.optimizers)):
            if len(state[name]) != len(here):
                raise UserError(
                    f"the checkpoint has the state of {len(state[name])} {name}, here are "
                    f"{len(here)}; make the model with the same arguments as then"
                )
        if (state["scaler"] is None) != (self._scaler is None):
            raise UserError("the checkpoint was made with a scaler and this model without, or vice "
                            "versa")  # fmt: skip
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        for scheduler, saved in zip(self.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(saved)
        if self._scaler is not None:
            self._scaler.load_state_dict(state["scaler"])


def _check(bucket: Sequence[tuple[str, torch.Tensor]], optimizer: Any) -> None:
    if not isinstance(optimizer, Optimizer):
        raise UserError(f"optim_fn must return an optimizer, got {type(optimizer).__name__}")
    held = {param for group in optimizer.param_groups for param in group["params"]}
    left_out = [name for name, param in bucket if param not in held]
    if left_out:
        raise UserError(f"optim_fn left {left_out[0]!r} out; it must take all parameters it gets")
