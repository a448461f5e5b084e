"""GradScaler and gradients that are averaged late: noticed, and refused where it would go wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dear.errors import UserError

if TYPE_CHECKING:
    from torch.optim import Optimizer


class GradScaling:
    """Lets an engine see that `scaler.step(optimizer)` is calling, and with what.

    A GradScaler unscales gradients in place (without a trace in their version counters) and judges
    on each rank whether they are finite. Both must happen to averaged gradients, or ranks would
    skip different steps. An optimizer that says it can take a scale is called in any case and told
    the scale and the judgement, in its attributes `grad_scale` and `found_inf`.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer: Any = optimizer
        self._takes_scale = getattr(optimizer, "_step_supports_amp_scaling", False)
        optimizer._step_supports_amp_scaling = True

    def refuse(self) -> None:
        """Raises `UserError` if a scaler is calling; for gradients that are not averaged yet."""
        if hasattr(self._optimizer, "found_inf"):
            self.refuse_early_unscaling()

    def refuse_early_unscaling(self) -> None:
        """Raises `UserError`: this rank's own gradients were unscaled instead of the averages."""
        raise UserError(
            "call optimizer.synchronize() before scaler.unscale_(optimizer) or "
            "scaler.step(optimizer): all ranks must judge the same averaged gradient"
        )

    def step(self, update: Callable[[], Any]) -> Any:
        """Does what the scaler asks for with averaged gradients: unscale, then update or skip."""
        optimizer = self._optimizer
        if not hasattr(optimizer, "found_inf") or self._takes_scale:
            return update()
        if optimizer.found_inf.item():
            return None
        asked = optimizer.found_inf, optimizer.grad_scale
        if optimizer.grad_scale is not None:
            for group in optimizer.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        param.grad.div_(optimizer.grad_scale)
        optimizer.found_inf = optimizer.grad_scale = None  # done; the optimizer cannot take them
        try:
            return update()
        finally:
            optimizer.found_inf, optimizer.grad_scale = asked

    def close(self) -> None:
        """Lets the optimizer say again what it said."""
        self._optimizer._step_supports_amp_scaling = self._takes_scale
