"""Adam and AdamW whose moments take in the mean of several gradients at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from dear.errors import UserError
from dear.options import at_least


class AccumAdam(Optimizer):
    """Adam for small batches, from Decent-DP.

    Every step uses `b1 m + (1 - b1) g` and `b2 v + (1 - b2) g^2` for its update without keeping
    them; every `accum_iter` steps the mean of the gradients since is folded into m and v in the
    same way. Bias is corrected by the number of foldings, the one to come included. With
    `accum_iter=1` it is Adam.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        betas: decay of the two moments, each in 0 .. 1.
        eps: added to the root of the second moment.
        weight_decay: added to the gradient, times the parameter.
        accum_iter: steps per folding, at least 1.

    Raises:
        UserError: an argument outside of its range; a sparse gradient.
    """

    decoupled = False
    """Weight decay shrinks the parameter itself (AdamW) instead of entering the gradient."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        accum_iter: int = 4,
    ) -> None:
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            at_least(name, value, 0)
        if not all(0 <= beta < 1 for beta in betas):
            raise UserError(f"betas must be in 0 .. 1, got {betas}")
        at_least("accum_iter", accum_iter, 1)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "accum_iter": accum_iter,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)
        return loss

    def _update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        if param.grad.is_sparse:
            raise UserError(f"{type(self).__name__} takes dense gradients only")
        state = self.state[param]
        if not state:
            state["step"] = 0
            kept = ("exp_avg", "exp_avg_sq", "accum_grad")
            for name in kept if group["accum_iter"] > 1 else kept[:2]:
                state[name] = torch.zeros_like(param, memory_format=torch.preserve_format)
        state["step"] += 1
        lr, decay = group["lr"], group["weight_decay"]
        (beta1, beta2), every = group["betas"], group["accum_iter"]
        gradient = param.grad
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
    """`AccumAdam` with decoupled weight decay, as AdamW has it."""

    decoupled = True


def _fold(
    first: torch.Tensor, second: torch.Tensor, gradient: torch.Tensor, beta1: float, beta2: float
) -> None:
    first.lerp_(gradient, 1 - beta1)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
