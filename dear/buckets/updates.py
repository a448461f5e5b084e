"""An optimizer's update of some of its parameters, with gradients that are not in `p.grad`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from dear.buckets.sharding import has_hooks
from dear.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter
    from torch.optim import Optimizer


class PartialUpdate:
    """Lets `optimizer` update group by group, later than its `step()` was called.

    Args:
        plain: the optimizer's own class.
    """

    def __init__(self, optimizer: Optimizer, plain: type[Optimizer]) -> None:
        self._optimizer: Any = optimizer
        self._plain = plain
        self._hyperparameters: list[dict[str, Any]] = []

    def possible(self) -> bool:
        """True if updating group by group equals updating all parameters at once.

        So it is for torch's own optimizers (but for LBFGS). Of others that is not known, and step
        hooks expect the whole step.
        """
        of_torch = f"{self._plain.__module__}.".startswith("torch.optim.")
        return of_torch and not has_hooks(self._optimizer)

    def note(self) -> None:
        """Keeps the hyper-parameters: schedulers change them later, some in place."""
        self._hyperparameters = [
            {
                key: value.clone() if torch.is_tensor(value) else value
                for key, value in group.items()
                if key != "params"
            }
            for group in self._optimizer.param_groups
        ]

    def run(self, gradients: Mapping[Parameter, Tensor | None]) -> None:
        """Updates the parameters in `gradients`, with the hyper-parameters of the last `note`."""
        groups = self._optimizer.param_groups
        self._optimizer.param_groups = [
            {**hyper, "params": [param for param in group["params"] if param in gradients]}
            for hyper, group in zip(self._hyperparameters, groups, strict=True)
        ]
        device = next(iter(gradients)).device.type
        try:
            # State made by the first step must outlive an evaluation, and the update is no part of
            # a forward pass that runs in lower precision.
            with torch.inference_mode(False), torch.autocast(device, enabled=False):
                with_gradients(gradients, lambda: self._plain.step(self._optimizer))
        finally:
            self._optimizer.param_groups = groups


def with_gradients(gradients: Mapping[Parameter, Tensor | None], update: Callable[[], Any]) -> Any:
    """`update()` while each `p.grad` is what `gradients` says."""
    kept = {param: param.grad for param in gradients}
    try:
        for param, gradient in gradients.items():
            param.grad = gradient
        return update()
    finally:
        for param, gradient in kept.items():
            param.grad = gradient
