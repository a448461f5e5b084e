"""Written-out training with delayed gradients: what `dadt` must reproduce."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests import awkward

KINDS = ("sgd", "adamw", "rmsprop", "adagrad")


def make_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    """Two groups with different learning rates."""
    if kind in ("sgd", "adamw"):
        return awkward.make_optimizer(kind, model)
    params = list(model.parameters())
    groups = [{"params": params[::2], "lr": 0.01}, {"params": params[1::2], "lr": 0.002}]
    made = {"rmsprop": torch.optim.RMSprop, "adagrad": torch.optim.Adagrad}[kind]
    return made(groups, weight_decay=0.01)


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


def awkward_states(
    kind: str, world_size: int, delay: int, micro_steps: int = 1
) -> list[dict[str, torch.Tensor]]:
    """The awkward model after every step, and after a flush."""
    model = awkward.make_model()
    optimizer = make_optimizer(kind, model)
    serial = Serial(model, optimizer, delay)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)
    states = []
    for step in range(awkward.STEPS):
        optimizer.zero_grad()
        for micro in range(micro_steps):
            x, y = awkward.data(step, micro, world_size)
            (functional.cross_entropy(model(x), y) / micro_steps).backward()
        serial.step([param.grad for param in serial.params])
        scheduler.step()
        states.append(serial.state())
    serial.flush()
    return [*states, serial.state()]
