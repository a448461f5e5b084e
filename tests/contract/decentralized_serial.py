"""Decentralized training written out in one process: every rank's model, mixed by a schedule."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.nn import functional

from dear.topology.schedules import TopologyReg
from tests.contract import awkward


def backward(model: torch.nn.Module, rank: int, world_size: int, step: int, micros: int) -> None:
    """The gradients of one step of `awkward`, micro-batches added up."""
    rows = slice(rank * awkward.BATCH, (rank + 1) * awkward.BATCH)
    for micro in range(micros):
        x, y = awkward.data(step, micro, world_size)
        (functional.cross_entropy(model(x[rows]), y[rows]) / micros).backward()


@torch.no_grad()
def mix(models: list[torch.nn.Module], edges: Any, factor: float) -> None:
    """x <- (1 - factor) x + factor (weight x + the others' shares), in every group."""
    for edge in edges:
        if len(edge.ranks) == 1:
            continue
        share = (1 - edge.weight) / (len(edge.ranks) - 1)
        for params in zip(*(models[rank].parameters() for rank in edge.ranks), strict=True):
            if not params[0].requires_grad:
                continue
            own = [param.clone() for param in params]
            for param, before in zip(params, own, strict=True):
                average = edge.weight * before + share * (sum(own) - before)
                param.copy_((1 - factor) * before + factor * average)


def serial(
    kind: str,
    world_size: int,
    topology: str,
    *,
    local: int = 1,
    micros: int = 1,
    factor: float = 1.0,
    steps: int = awkward.STEPS,
) -> list[dict[str, torch.Tensor]]:
    """Every rank's state after `steps` steps of x <- W x - update(g(x)); no mixing in the first."""
    models = [awkward.make_model() for _ in range(world_size)]
    optimizers = [awkward.make_optimizer(kind, model) for model in models]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, gamma=0.8) for o in optimizers]
    made = TopologyReg.make(topology, world_size=world_size, rank=0, local_world_size=local)
    for step in range(steps):
        for rank, model in enumerate(models):
            model.zero_grad()
            backward(model, rank, world_size, step, micros)
        if step > 0:
            mix(models, made.edges_at(step), factor)
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
    return [copy.deepcopy(model.state_dict()) for model in models]
