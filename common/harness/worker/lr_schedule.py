"""Learning rate by step, from torch's schedulers."""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim import lr_scheduler as schedulers

from common.harness.settings import ScheduleConfig

_COLD = 0.1
"""First learning rate of a warm-up without `scale`, relative to the full one."""


def make_schedule(
    optimizer: Optimizer,
    config: ScheduleConfig,
    *,
    steps_per_epoch: int,
    epochs: int,
    world_size: int,
) -> schedulers.LRScheduler:
    """Sets the learning rate of `optimizer` for the first step, and returns the scheduler.

    Call the scheduler's `step()` after each step of the optimizer.
    """
    factor = {"none": 1.0, "linear": float(world_size), "sqrt": math.sqrt(world_size)}
    scale = factor[config.scale]
    for group in optimizer.param_groups:
        group["lr"] *= scale
    warmup = round(config.warmup_epochs * steps_per_epoch)
    later = _later(optimizer, config, steps_per_epoch, epochs * steps_per_epoch - warmup, warmup)
    if not warmup:
        return later
    start = 1 / scale if scale > 1 else _COLD
    rising = schedulers.LinearLR(optimizer, start_factor=start, total_iters=warmup)
    return schedulers.SequentialLR(optimizer, [rising, later], milestones=[warmup])


def _later(
    optimizer: Optimizer, config: ScheduleConfig, steps_per_epoch: int, steps: int, warmup: int
) -> schedulers.LRScheduler:
    """Returns the scheduler for the steps after the warm-up; milestones include the warm-up."""
    if config.kind == "cosine":
        return schedulers.CosineAnnealingLR(optimizer, T_max=steps)
    if config.kind == "exponential":
        return schedulers.ExponentialLR(optimizer, config.gamma ** (1 / steps_per_epoch))
    at = [epoch * steps_per_epoch - warmup for epoch in config.milestones]
    return schedulers.MultiStepLR(optimizer, [step for step in at if step > 0], config.gamma)
