"""A small model with all that data-parallel algorithms trip over, and its serial training."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional

BATCH = 4
STEPS = 5


class Awkward(nn.Module):
    """Convolution, frozen batch norm, a shared weight, an unused and a frozen layer, modules that
    run out of registration order, and weights that other modules' code reads."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((3,), 1.1))  # owned by the root itself
        self.late = nn.Linear(7, 5)  # registered first, runs last
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.unused = nn.Linear(6, 11)
        self.middle = nn.Linear(9, 9)
        self.frozen = nn.Linear(4, 9)
        self.tied = nn.Linear(9, 9, bias=False)
        self.tied.weight = self.middle.weight
        self.attention = nn.MultiheadAttention(9, 3, bias=False, batch_first=True)
        self.borrowed = nn.Linear(9, 7)  # its weight is read before it runs
        self.never_called = nn.ModuleDict({"inner": nn.Linear(9, 9)})
        self.frozen.requires_grad_(False)
        self.norm.requires_grad_(False)
        self.norm.running_mean.uniform_(-0.5, 0.5)
        self.norm.running_var.uniform_(0.5, 1.5)
        self.norm.eval()

    def train(self, mode: bool = True) -> Awkward:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.conv(x * self.scale.view(1, 3, 1, 1))))
        x = torch.tanh(self.frozen(x.mean(dim=(2, 3))))
        x = torch.tanh(functional.linear(x, self.never_called["inner"].weight))
        x = x + functional.linear(x, self.borrowed.weight) @ self.borrowed.weight
        x = self.tied(torch.tanh(self.middle(x)))
        tokens = torch.stack([x, x.flip(1), -x], dim=1)
        x = self.attention(tokens, tokens, tokens, need_weights=False)[0].mean(dim=1)
        return self.late(torch.tanh(self.borrowed(x)))


def make_model() -> Awkward:
    torch.manual_seed(11)
    return Awkward()


def data(step: int, micro: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The joined batch of one micro-step; rank r takes rows r*BATCH .. (r+1)*BATCH."""
    generator = torch.Generator().manual_seed(1000 * step + micro)
    rows = BATCH * world_size
    x = torch.randn(rows, 3, 5, 5, generator=generator)
    y = torch.randint(5, (rows,), generator=generator)
    return x, y


def make_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    """`kind` names the optimizer; always two groups with different learning rates."""
    params = list(model.parameters())
    groups = [{"params": params[::2], "lr": 0.1}, {"params": params[1::2], "lr": 0.02}]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=1e-2, nesterov=True)
    if kind == "adamw":
        groups[0]["lr"], groups[1]["lr"] = 0.01, 0.002
        return torch.optim.AdamW(groups, weight_decay=0.05)
    raise ValueError(kind)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: int,
    world_size: int,
    micro_steps: int = 1,
    evaluate: str = "none",
    no_sync: bool = False,
    read_every_step: bool = False,
) -> list[dict[str, torch.Tensor]]:
    """The ordinary loop; returns the state dict right after the last step, or after every step.

    Args:
        read_every_step: reading brings a deferred update forward, so the default reads once.
        evaluate: an evaluation forward between steps: `none`, `grad` or `no_grad`.
        no_sync: put all micro-steps but the last under `optimizer.no_sync()`.
    """
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)
    rows = slice(rank * BATCH, (rank + 1) * BATCH)
    states = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(micro_steps):
            x, y = data(step, micro, world_size)

            def backward(x: Any = x, y: Any = y) -> None:
                loss = functional.cross_entropy(model(x[rows]), y[rows]) / micro_steps
                loss.backward()

            if no_sync and micro < micro_steps - 1:
                with optimizer.no_sync():
                    backward()
            else:
                backward()
        optimizer.step()
        scheduler.step()
        if evaluate != "none":
            model.eval()
            with torch.set_grad_enabled(evaluate == "grad"):
                for _ in range(2):
                    model(torch.ones(2, 3, 5, 5))
            model.train()
        if read_every_step or step == STEPS - 1:
            states.append(copy.deepcopy(model.state_dict()))
    return states


def serial(kind: str, world_size: int, micro_steps: int) -> list[dict[str, torch.Tensor]]:
    """What every synchronous algorithm must reproduce: one process, the joined batch."""
    model = make_model()
    optimizer = make_optimizer(kind, model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)
    states = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(micro_steps):
            x, y = data(step, micro, world_size)
            (functional.cross_entropy(model(x), y) / micro_steps).backward()
        optimizer.step()
        scheduler.step()
        states.append(copy.deepcopy(model.state_dict()))
    return states


def error(states: list[dict[str, torch.Tensor]], wanted: list[dict[str, torch.Tensor]]) -> float:
    """The largest difference of any tensor, relative to its norm; `states` may be the last only."""
    wanted = wanted[-len(states) :]
    return max(
        ((got[name] - want[name]).norm() / want[name].norm().clamp_min(1e-3)).item()
        for got, want in zip(states, wanted, strict=True)
        for name in want
        if want[name].is_floating_point()
    )
