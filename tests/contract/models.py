"""Small models with all that data-parallel training trips over, and their data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint


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


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def channels_last() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(4, 4))
    return model.to(memory_format=torch.channels_last)


class Branches(nn.Module):
    """One branch is run by one rank at a time, and by none every third step; another never."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.sometimes, self.never = (nn.Linear(6, 4) for _ in range(3))

    def forward(self, x: torch.Tensor, both: bool = False) -> torch.Tensor:
        return self.first(x) + (self.sometimes(x) if both else 0.0)


class Odd(nn.Module):
    """Parameters of unusual shapes and layouts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.scalar = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.randn(0))
        self.transposed = nn.Parameter(torch.randn(4, 6).t())
        self.gaps = nn.Parameter(torch.randn(6, 8)[:, ::2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x) + x @ self.transposed + x @ self.gaps
        return x * (1 + self.scalar) + self.empty.sum()


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.turn = nn.Parameter(torch.randn(6, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear((x * self.turn).abs())


class Types(nn.Module):
    """Parameters of two types."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5).bfloat16()
        self.full = nn.Linear(5, 5)
        self.norm = nn.LayerNorm(5).bfloat16()
        self.last = nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x.bfloat16()))
        return self.last(self.norm(self.full(x.float()).bfloat16()).float())


class Recurrent(nn.Module):
    """Layers that keep the weights they read somewhere else, or make them anew in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 5, num_layers=2, batch_first=True)
        self.attention = nn.MultiheadAttention(5, 1, batch_first=True)
        self.normed = parametrizations.weight_norm(nn.Linear(5, 5))
        self.head = nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, _ = self.lstm(x.view(-1, 2, 3))
        return self.head(self.normed(self.attention(x, x, x)[0].mean(dim=1)))


class Checkpointed(nn.Module):
    """Runs the middle again in the backward pass."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.layers = plain()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[:2](x.requires_grad_() if torch.is_grad_enabled() else x)
        x = checkpoint(self.layers[2:4], x, use_reentrant=self.reentrant)
        return self.layers[4](x)


class Reader(nn.Module):
    """Evaluation reads a layer's weight without running the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            return self.last(torch.tanh(self.first(x)))
        return functional.linear(x, self.last.weight)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "awkward": Awkward,  # shared, unused and frozen parameters, modules out of order
    "awkward64": lambda: Awkward().double(),
    "plain": plain,
    "branches": Branches,
    "idle": plain,  # some ranks have no backward pass in some steps
    "freezing": plain,  # a layer is frozen after the second step
    "odd": Odd,
    "channels_last": channels_last,
    "float64": lambda: plain().double(),
    "bfloat16": lambda: plain().bfloat16(),
    "complex": Complex,
    "types": Types,
    "recurrent": Recurrent,
    "recomputed": partial(Checkpointed, False),
    "reentrant": partial(Checkpointed, True),
    "reader": Reader,
}
_TYPES = {"float64": torch.float64, "awkward64": torch.float64, "bfloat16": torch.bfloat16}
_IDLE = {0: lambda rank: rank != 0, 2: lambda rank: rank == 0, 3: lambda rank: False}


def make_model(kind: str) -> nn.Module:
    """The same on every rank."""
    torch.manual_seed(11)
    return MODELS[kind]()


def batch(kind: str, rank: int, step: int, micro: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and classes of one rank."""
    generator = torch.Generator().manual_seed(10_000 * rank + 100 * step + micro)
    shape = (4, 3, 5, 5) if kind in ("awkward", "awkward64", "channels_last") else (4, 6)
    x = torch.randn(shape, generator=generator)
    if kind == "channels_last":
        x = x.to(memory_format=torch.channels_last)
    x = x.to(_TYPES.get(kind, torch.float32))
    return x, torch.randint(4, (4,), generator=generator)


def loss_of(
    kind: str, model: nn.Module, rank: int, step: int, micro: int = 0
) -> torch.Tensor | None:
    """The loss of one rank; None where it has none."""
    if kind == "idle" and step in _IDLE and not _IDLE[step](rank):
        return None
    x, y = (value.to(next(model.parameters()).device) for value in batch(kind, rank, step, micro))
    out = model(x, rank == step % 3) if kind == "branches" else model(x)
    return functional.cross_entropy(out if out.dtype == torch.float64 else out.float(), y)


class Decaying(torch.optim.Optimizer):
    """An optimizer that torch does not have; it counts its steps in its parameter group."""

    def __init__(self, params: Iterable[Any], rate: float) -> None:
        super().__init__(params, {"lr": rate, "count": 0})

    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["count"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    param.data.sub_(group["lr"] / group["count"] * param.grad.sign())
        return loss


def make_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    """`kind`: `own` for the one above, or a name of torch's; two groups with different rates."""
    params = list(model.parameters())
    rates = {"SGD": 0.1, "fused": 0.1, "AdamW": 0.01}.get(kind, 0.01)
    groups = [{"params": params[::2]}, {"params": params[1::2], "lr": rates / 5}]
    if kind == "own":
        return Decaying(groups, rates)
    if kind in ("SGD", "fused"):
        options = {"momentum": 0.9, "weight_decay": 1e-2, "nesterov": True}
        return torch.optim.SGD(groups, lr=rates, fused=kind == "fused" or None, **options)
    options = {"AdamW": {"weight_decay": 0.05}, "Adagrad": {"lr_decay": 0.1}}.get(kind, {})
    return getattr(torch.optim, kind)(groups, lr=rates, **options)
