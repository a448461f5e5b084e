"""Training in backward passes: each bucket has an optimizer and a schedule of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dear.buckets.flat import Bucket
from dear.errors import UserError
from dear.options import at_least
from dear.training.engine import Replica

OptimFn = Callable[[list[tuple[str, torch.Tensor]]], Optimizer]
SchedulerFn = Callable[[Optimizer], LRScheduler]


class BucketOptimizers:
    """Mixed into an engine that averages overlapped, and which has no optimizer of its own.

    A step is one backward pass outside `no_sync()`; gradients are gone after it.

    Args:
        optim_fn: makes the optimizer of one bucket from its (name, parameter) pairs.
        lr_scheduler_fn: makes its schedule, which advances once per step; None: none.
        scaler: unscales, steps and updates; all buckets wait for the end of the pass then.
        clip_norm: largest norm of this rank's whole gradient, which waits for the end, too; 0.0:
            any.
    """

    def __init__(
        self,
        replica: Replica,
        *args: Any,
        optim_fn: OptimFn,
        lr_scheduler_fn: SchedulerFn | None,
        scaler: torch.amp.GradScaler | None,
        clip_norm: float,
        **more: Any,
    ) -> None:
        at_least("grad_clip_norm", clip_norm, 0)
        self.names = {param: name for name, param in replica.model.named_parameters()}
        self._optim_fn = optim_fn
        self._lr_scheduler_fn = lr_scheduler_fn
        self.scaler = scaler
        self._clip_norm = clip_norm
        self.joint = scaler is not None or clip_norm > 0
        self.optimizers: dict[Bucket, Optimizer] = {}
        self.schedulers: dict[Bucket, LRScheduler] = {}
        super().__init__(replica, *args, **more)

    def lay_out(self, members: Sequence[Sequence[Parameter]]) -> None:
        super().lay_out(members)
        self.optimizers, self.schedulers = {}, {}
        for bucket in self.buckets:
            optimizer = self._optim_fn([(self.names[param], param) for param in bucket.params])
            if not isinstance(optimizer, Optimizer):
                kind = type(optimizer).__name__
                raise UserError(f"optim_fn must return an optimizer, got {kind}")
            held = {param for group in optimizer.param_groups for param in group["params"]}
            left_out = [self.names[param] for param in bucket.params if param not in held]
            if left_out:
                raise UserError(
                    f"optim_fn left {left_out[0]!r} out; it must take all parameters it gets"
                )
            self.optimizers[bucket] = optimizer
            if self._lr_scheduler_fn is not None:
                self.schedulers[bucket] = self._lr_scheduler_fn(optimizer)
        if self.joint:
            self._whole = _Whole(list(self.optimizers.values()))

    @torch.no_grad()
    def ready(self, buckets: Sequence[Bucket]) -> None:
        if self.scaler is not None:
            self.scaler.unscale_(self._whole)
        if self._clip_norm > 0:
            params = self._whole.param_groups[0]["params"]
            torch.nn.utils.clip_grad_norm_(params, self._clip_norm)
        if self.scaler is not None:
            for bucket in buckets:
                self.mix(bucket)
            self.scaler.step(self._whole)
            self.scaler.update()
        for bucket in buckets:
            if self.scaler is None:
                self.mix(bucket)
                self.optimizers[bucket].step()
            self.optimizers[bucket].zero_grad()
            if self.schedulers:
                self.schedulers[bucket].step()
            self.share(bucket)

    def passed(self) -> None:
        self._schedule.restart()  # a pass is a step


class _Whole(Optimizer):
    """All buckets as one optimizer, for a GradScaler: it judges and skips them together."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._parts = optimizers
        held = [p for part in optimizers for group in part.param_groups for p in group["params"]]
        super().__init__(held, {})

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for part in self._parts:
            part.step()
