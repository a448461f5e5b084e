"""Written-out training with delayed gradients: what `dadt` must reproduce."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Serial:
    """One process that updates with the gradients of `delay` steps before."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, delay: int) -> None:
        self.model, self.optimizer, self.delay = model, optimizer, delay
        self.params = list(model.parameters())
        self.held: deque[list[torch.Tensor | None]] = deque()

    def step(
        self, gradients: list[torch.Tensor | None], change: Callable[[], Any] = lambda: None
    ) -> None:
        """`gradients` are the averages of this step; `change` may clip those that are applied."""
        self.held.append(gradients)
        if len(self.held) > self.delay:
            self._apply(change)

    def flush(self) -> None:
        while self.held:
            self._apply(lambda: None)

    def _apply(self, change: Callable[[], Any]) -> None:
        for param, gradient in zip(self.params, self.held.popleft(), strict=True):
            param.grad = gradient
        change()
        self.optimizer.step()

    def state(self) -> dict[str, torch.Tensor]:
        return copy.deepcopy(self.model.state_dict())

    def gradients_of(self, loss: torch.Tensor) -> list[torch.Tensor | None]:
        return list(torch.autograd.grad(loss, self.params, allow_unused=True))
