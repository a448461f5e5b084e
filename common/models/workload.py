"""Workload of a trial: a model, one batch, and the loss."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from dear.lazy import torch


@dataclass(kw_only=True)
class Workload:
    """Model with a batch for it; `loss()` is one forward pass."""

    model: torch.nn.Module
    inputs: dict[str, torch.Tensor] | tuple[torch.Tensor, ...]
    """Keyword or positional arguments of the model; floating-point ones are cast by `to`."""
    targets: tuple[torch.Tensor, ...]
    """Further arguments of the criterion, which are cast as well."""
    criterion: Callable[..., torch.Tensor]
    """Function of the model's output and the targets that returns the scalar loss."""
    autocast: torch.dtype | None = None
    """Dtype in which torch.autocast computes (mixed precision); None: no autocast."""
    scaler: torch.amp.GradScaler | None = None
    """Scaler of the loss, if gradients may leave the range of the dtype `autocast`."""

    def to(
        self, device: torch.device, dtype: torch.dtype, autocast: torch.dtype | None = None
    ) -> Workload:
        """Returns the workload on `device`; weights, and inputs and targets of
        floating-point numbers, become `dtype`."""

        def move(value: torch.Tensor) -> torch.Tensor:
            return value.to(device, dtype if value.is_floating_point() else value.dtype)

        if isinstance(self.inputs, dict):
            inputs: Any = {key: move(value) for key, value in self.inputs.items()}
        else:
            inputs = tuple(move(value) for value in self.inputs)
        half = autocast == torch.float16
        return replace(
            self,
            model=self.model.to(device, dtype),
            inputs=inputs,
            targets=tuple(map(move, self.targets)),
            autocast=autocast,
            scaler=torch.amp.GradScaler(device.type) if half else None,
        )

    def feed(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Replaces the batch of a workload with one input tensor and one target tensor."""
        (before,) = self.inputs
        kind = before.dtype if inputs.is_floating_point() else inputs.dtype
        self.inputs = (inputs.to(before.device, kind),)
        self.targets = (targets.to(before.device),)

    def loss(self) -> torch.Tensor:
        """Runs model and criterion once, and returns the scalar loss."""
        with self._precision():
            if isinstance(self.inputs, dict):
                output = self.model(**self.inputs)
            else:
                output = self.model(*self.inputs)
            return self.criterion(output, *self.targets)

    def backward(self, loss: torch.Tensor) -> None:
        """Runs the backward pass; with a scaler, of the scaled loss."""
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Runs the optimizer's step; a scaler skips it if a gradient is not finite."""
        if self.scaler is None:
            optimizer.step()
        else:
            self.scaler.step(optimizer)
            self.scaler.update()

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(next(self.model.parameters()).device.type, self.autocast)
