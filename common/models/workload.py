"""What a trial trains: a model, one synthetic batch, and the loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dear.lazy import torch


@dataclass(kw_only=True)
class Workload:
    """A model with a batch that fits it; `loss()` is one forward pass."""

    model: torch.nn.Module
    inputs: dict[str, torch.Tensor] | tuple[torch.Tensor, ...]
    """Keyword or positional arguments of the model; floating-point ones are cast by `to`."""
    targets: tuple[torch.Tensor, ...]
    criterion: Callable[..., torch.Tensor]
    """`criterion(output, *targets)` is the scalar loss."""

    def to(self, device: torch.device, dtype: torch.dtype) -> Workload:
        """The same workload on `device` with floating-point weights and inputs of `dtype`."""

        def move(value: torch.Tensor) -> torch.Tensor:
            return value.to(device, dtype if value.is_floating_point() else value.dtype)

        if isinstance(self.inputs, dict):
            inputs: Any = {key: move(value) for key, value in self.inputs.items()}
        else:
            inputs = tuple(move(value) for value in self.inputs)
        return Workload(
            model=self.model.to(device, dtype),
            inputs=inputs,
            targets=tuple(target.to(device) for target in self.targets),
            criterion=self.criterion,
        )

    def loss(self) -> torch.Tensor:
        """One forward pass through the model and the criterion; a scalar."""
        if isinstance(self.inputs, dict):
            output = self.model(**self.inputs)
        else:
            output = self.model(*self.inputs)
        return self.criterion(output, *self.targets)
