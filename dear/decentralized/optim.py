"""Factories of the optimizer and the learning-rate schedule of a bucket of parameters.

`functools.partial(optim_fn_adamw, lr=3e-4)` changes a setting. `AccumAdam` and `AccumAdamW` update
their moments by the mean of several steps' gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from dear.errors import UserError
from dear.options import at_least

Named = Sequence[tuple[str, torch.Tensor]]


def optim_fn_adam(
    params: Named,
    lr: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    weight_decay: float = 1 / 32768,
    eps: float = 1e-8,
) -> Optimizer:
    """Returns Adam; only weights get weight decay."""
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
    """Returns AdamW; only weights get weight decay."""
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
    """Returns `AccumAdam`; only weights get weight decay."""
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
    """Returns `AccumAdamW`; only weights get weight decay."""
    groups = _decay_groups(params, weight_decay)
    return AccumAdamW(groups, lr=lr, betas=(beta1, beta2), eps=eps, accum_iter=accum_iter)


def lr_scheduler_fn_cosine_with_warmup(
    optimizer: Optimizer,
    t_max: int,
    t_warmup: int,
    cosine_eta_min: float = 1e-6,
    warmup_decay: float = 0.01,
) -> LRScheduler:
    """Returns a schedule: a linear warm-up from `warmup_decay * lr`, then a cosine.

    Args:
        t_max: step from which the learning rate is `cosine_eta_min`.
        t_warmup: steps of warm-up, fewer than `t_max`.
        cosine_eta_min: final learning rate.
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
    """Returns two groups: weights, and the rest (biases, and vectors of normalisation layers)."""
    decayed: list[torch.Tensor] = []
    plain: list[torch.Tensor] = []
    for name, param in params:
        is_weight = param.dim() > 1 and "bias" not in name.rpartition(".")[2]
        (decayed if is_weight else plain).append(param)
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]


class AccumAdam(Optimizer):
    """Adam for small batches, from Decent-DP.

    A step with the gradient g uses `b1 m + (1 - b1) g` and `b2 v + (1 - b2) g^2` in place of the
    moments m and v, but does not keep them. Every `accum_iter` steps, m and v are updated by the
    same formulas with the mean gradient of these steps (a folding). The bias correction counts the
    foldings, including the next one. With `accum_iter=1` this is Adam.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        betas: decay b1 and b2 of the two moments, each in [0, 1).
        eps: term added to the root of the second moment.
        weight_decay: factor by which the parameter is added to the gradient.
        accum_iter: steps per folding, at least 1.

    Raises:
        UserError: an argument outside of its range; a sparse gradient.
    """

    decoupled = False
    """True if weight decay scales the parameter (AdamW); False: it changes the gradient."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        accum_iter: int = 4,
    ) -> None:
        numbers = {"lr": lr, "eps": eps, "weight_decay": weight_decay}
        for name, value in numbers.items():
            at_least(name, value, 0)
        if not all(0 <= beta < 1 for beta in betas):
            raise UserError(f"betas must lie in [0, 1), got {betas}")
        at_least("accum_iter", accum_iter, 1)
        super().__init__(params, numbers | {"betas": betas, "accum_iter": accum_iter})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes one update."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, group)
        return loss

    def _update(self, param: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        if gradient.is_sparse:
            raise UserError(f"{type(self).__name__} needs dense gradients, got a sparse one")
        state = self.state[param]
        if not state:
            state["step"] = 0
            kept = ("exp_avg", "exp_avg_sq", "accum_grad")
            for name in kept if group["accum_iter"] > 1 else kept[:2]:
                state[name] = torch.zeros_like(param, memory_format=torch.preserve_format)
        state["step"] += 1
        lr, decay = group["lr"], group["weight_decay"]
        (beta1, beta2), every = group["betas"], group["accum_iter"]
        if decay and self.decoupled:
            param.mul_(1 - lr * decay)
        elif decay:
            gradient = gradient.add(param, alpha=decay)
        foldings = -(-state["step"] // every)
        last = state["step"] % every == 0
        first_moment, second_moment = state["exp_avg"], state["exp_avg_sq"]
        if every > 1:
            state["accum_grad"].add_(gradient, alpha=1 / every)
            used_first = torch.lerp(first_moment, gradient, 1 - beta1)
            used_second = (second_moment * beta2).addcmul_(gradient, gradient, value=1 - beta2)
            if last:
                mean = state["accum_grad"]
                _fold(first_moment, second_moment, mean, beta1, beta2)
                mean.zero_()
        else:
            _fold(first_moment, second_moment, gradient, beta1, beta2)
            used_first, used_second = first_moment, second_moment
        root = (used_second.sqrt() / math.sqrt(1 - beta2**foldings)).add_(group["eps"])
        param.addcdiv_(used_first, root, value=-lr / (1 - beta1**foldings))


class AccumAdamW(AccumAdam):
    """`AccumAdam` with decoupled weight decay, as in AdamW."""

    decoupled = True


def _fold(
    first: torch.Tensor, second: torch.Tensor, gradient: torch.Tensor, beta1: float, beta2: float
) -> None:
    first.lerp_(gradient, 1 - beta1)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
