"""Functions that make the optimizer and the learning-rate schedule of a bucket of parameters.

`functools.partial(optim_fn_adamw, lr=3e-4)` changes a setting.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from dear.decentralized.accumulating_adam import AccumAdam, AccumAdamW
from dear.errors import UserError

Named = Sequence[tuple[str, torch.Tensor]]


def optim_fn_adam(
    params: Named,
    lr: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    weight_decay: float = 1 / 32768,
    eps: float = 1e-8,
) -> Optimizer:
    """Adam; weight decay for weights only."""
    return torch.optim.Adam(
        _decay_groups(params, weight_decay), lr=lr, betas=(beta1, beta2), eps=eps
    )


def optim_fn_adamw(
    params: Named,
    lr: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    weight_decay: float = 0.1,
    eps: float = 1e-8,
) -> Optimizer:
    """AdamW; weight decay for weights only."""
    return torch.optim.AdamW(
        _decay_groups(params, weight_decay), lr=lr, betas=(beta1, beta2), eps=eps
    )


def optim_fn_accum_adam(
    params: Named,
    lr: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1 / 32768,
    accum_iter: int = 4,
) -> Optimizer:
    """`AccumAdam`; weight decay for weights only."""
    groups = _decay_groups(params, weight_decay)
    return AccumAdam(groups, lr=lr, betas=(beta1, beta2), eps=eps, accum_iter=accum_iter)


def optim_fn_accum_adamw(
    params: Named,
    lr: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    accum_iter: int = 4,
) -> Optimizer:
    """`AccumAdamW`; weight decay for weights only."""
    groups = _decay_groups(params, weight_decay)
    return AccumAdamW(groups, lr=lr, betas=(beta1, beta2), eps=eps, accum_iter=accum_iter)


def lr_scheduler_fn_cosine_with_warmup(
    optimizer: Optimizer,
    t_max: int,
    t_warmup: int,
    cosine_eta_min: float = 1e-6,
    warmup_decay: float = 0.01,
) -> LRScheduler:
    """From `warmup_decay * lr` linearly to `lr` in `t_warmup` steps, then a cosine to the end.

    Args:
        t_max: step in which `cosine_eta_min` is reached, and kept.
        t_warmup: steps of warm-up, fewer than `t_max`.
        cosine_eta_min: the last learning rate.
    """
    if not 0 <= t_warmup < t_max:
        raise UserError(f"t_warmup must be in 0 .. t_max - 1 = {t_max - 1}, got {t_warmup}")

    def factor(base: float) -> Any:
        least = cosine_eta_min / base if base else 0.0

        def at(step: int) -> float:
            if step < t_warmup:
                return warmup_decay + (1 - warmup_decay) * step / t_warmup
            done = min(1.0, (step - t_warmup) / (t_max - t_warmup))
            return least + (1 - least) * (1 + math.cos(math.pi * done)) / 2

        return at

    return LambdaLR(optimizer, [factor(group["lr"]) for group in optimizer.param_groups])


def _decay_groups(params: Named, weight_decay: float) -> list[dict[str, Any]]:
    """Weights, and the rest: biases, and the factors of normalisation layers, which are vectors."""
    decayed, plain = [], []
    for name, param in params:
        is_weight = param.dim() > 1 and "bias" not in name.rpartition(".")[2]
        (decayed if is_weight else plain).append(param)
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
