"""Training of replicas, on ranks and written out in one process, for decentralized algorithms."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

import dear
from dear.topology import graph, matrix
from tests.contract import awkward

Replica = tuple[torch.nn.Module, torch.optim.Optimizer]


def loss(model: torch.nn.Module, step: int, rank: int, world_size: int) -> torch.Tensor:
    """Of the rows of rank `rank`."""
    x, y = awkward.data(step, 0, world_size)
    rows = slice(rank * awkward.BATCH, (rank + 1) * awkward.BATCH)
    like = next(model.parameters())
    return functional.cross_entropy(model(x[rows].to(like)), y[rows].to(like.device))


def on_rank(
    algorithm: str,
    options: dict[str, Any],
    kind: str,
    steps: int = awkward.STEPS,
    place: Any = None,
) -> dict[str, torch.Tensor]:
    """This rank's state after so many steps of the ordinary loop.

    Args:
        place: arguments of `model.to`.
    """
    model = awkward.make_model()
    if place is not None:
        model.to(*place)
    optimizer = awkward.make_optimizer(kind, model)
    dear.DistributedOptimizer(optimizer, model, algorithm=algorithm, **options)
    for step in range(steps):
        optimizer.zero_grad()
        loss(model, step, dear.rank(), dear.size()).backward()
        optimizer.step()
    state = copy.deepcopy(model.state_dict())
    optimizer.close()
    return state


class Serial:
    """All replicas in this process; what a step does is written out by the tests."""

    def __init__(self, world_size: int, kind: str, dtype: torch.dtype = torch.float32) -> None:
        self.size = world_size
        models = [awkward.make_model().to(dtype) for _ in range(world_size)]
        self.replicas: list[Replica] = [(m, awkward.make_optimizer(kind, m)) for m in models]
        self.steps = 0

    def backward(self) -> None:
        """Every replica's gradient."""
        for rank, (model, optimizer) in enumerate(self.replicas):
            optimizer.zero_grad()
            loss(model, self.steps, rank, self.size).backward()
        self.steps += 1

    def update(self) -> None:
        """Every optimizer's step."""
        for _, optimizer in self.replicas:
            optimizer.step()

    def params(self) -> list[torch.Tensor]:
        """Every trainable parameter of all replicas, stacked: `[replicas, ...]`."""
        trained = [[p for p in m.parameters() if p.requires_grad] for m, _ in self.replicas]
        return [torch.stack([p.detach() for p in same]) for same in zip(*trained, strict=True)]

    def gradients(self) -> list[torch.Tensor]:
        """The same of the gradients, zeros where there is none."""
        trained = [[p for p in m.parameters() if p.requires_grad] for m, _ in self.replicas]
        return [
            torch.stack([torch.zeros_like(p) if p.grad is None else p.grad for p in same])
            for same in zip(*trained, strict=True)
        ]

    def set_params(self, values: list[torch.Tensor]) -> None:
        for rank, (model, _) in enumerate(self.replicas):
            trained = [p for p in model.parameters() if p.requires_grad]
            for param, value in zip(trained, values, strict=True):
                param.data.copy_(value[rank])

    def set_gradients(self, values: list[torch.Tensor]) -> None:
        """Zeros mean that there is none."""
        for rank, (model, _) in enumerate(self.replicas):
            trained = [p for p in model.parameters() if p.requires_grad]
            for param, value in zip(trained, values, strict=True):
                param.grad = value[rank].clone() if value[rank].any() else None

    def states(self) -> list[dict[str, torch.Tensor]]:
        return [model.state_dict() for model, _ in self.replicas]


def mixed(weights: Any, stacked: list[torch.Tensor]) -> list[torch.Tensor]:
    """`x_j <- sum_i W[i, j] x_i` for each of the stacked tensors."""
    w = torch.as_tensor(weights)
    return [torch.einsum("ij,i...->j...", w.to(value), value) for value in stacked]


def weights(name: str, world_size: int) -> Any:
    return matrix(graph(name, world_size))


def error(states: list[dict], wanted: list[dict]) -> float:
    """The largest relative difference of any rank's state."""
    return max(awkward.error([a], [b]) for a, b in zip(states, wanted, strict=True))


def run(
    serial: Serial, step: Callable[[int], None], steps: int = awkward.STEPS
) -> list[dict[str, torch.Tensor]]:
    for number in range(steps):
        serial.backward()
        step(number)
    return serial.states()
