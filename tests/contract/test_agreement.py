"""Ranks whose models differ are refused before they train, and broadcasts go by name."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import dear
import dear.bluefog as bf
from dear.buckets.agreement import described
from tests.contract.algorithms import Meaning
from tests.contract.loops import make_model, message
from tests.contract.test_promises import every
from tests.ranks import on_ranks

WAYS = ("order", "layout", "frozen", "shape", "fewer", "nothing")


def net(way: str, odd: bool) -> nn.Module:
    """A model that differs in one way on the odd rank."""
    torch.manual_seed(1)
    layers = {"left": nn.Linear(6, 6), "right": nn.Linear(6, 6), "conv": nn.Conv2d(3, 4, 3)}
    if way == "frozen":
        layers["right" if odd else "left"].weight.requires_grad_(False)
    if not odd:
        return nn.ModuleDict(layers)
    if way == "layout":
        layers["conv"].to(memory_format=torch.channels_last)
    if way == "shape":
        layers["left"] = nn.Linear(6, 7)
    if way == "fewer":
        del layers["conv"]
    names = reversed(layers) if way == "order" else layers
    model = nn.ModuleDict({name: layers[name] for name in names})
    return model.requires_grad_(way != "nothing")


def _refusals(name: str, odd: int) -> list[str]:
    lines = []
    for way in WAYS:
        model = net(way, dear.rank() == odd)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        chosen = Meaning.of(name).options[0]
        wrap = functools.partial(dear.DistributedOptimizer, optimizer, model, algorithm=name)
        lines.append(message(functools.partial(wrap, **chosen)))
    return lines


def _check(lines: list[str]) -> None:
    words = dict.fromkeys(WAYS, "parameter ") | {"nothing": "no parameter of the optimizer"}
    for way, line in zip(WAYS, lines, strict=True):
        assert words[way] in line, (way, line)


@every
@on_ranks(2)
def test_ranks_that_train_different_parameters_are_refused(name: str) -> None:
    _check(_refusals(name, odd=1))


@pytest.mark.parametrize("name", ["dear", "dadt", "bytescheduler"])
@on_ranks(2)
def test_all_ranks_refuse_what_the_algorithm_refuses_on_one(name: str) -> None:
    model = make_model()
    kind = torch.optim.LBFGS if dear.rank() == 1 else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=0.1)
    wrap = functools.partial(dear.DistributedOptimizer, optimizer, model, algorithm=name)
    line = message(wrap)
    assert "LBFGS" in line and line.startswith("rank 1 cannot train: ") == (dear.rank() == 0), line


@on_ranks(3, "wfbp")
def test_the_rank_that_differs_is_named() -> None:
    lines = _refusals("wfbp", odd=2)
    _check(lines)
    assert "'left.weight' (shape (6, 6), strides (6, 1), torch.float32) on rank 0" in lines[3]
    assert "(shape (7, 6), strides (6, 1), torch.float32) on rank 2" in lines[3]


def test_dimensions_of_size_one_have_any_stride() -> None:
    base = torch.zeros(4, 1, 2, 2)
    other = base.as_strided(base.shape, (4, 99, 2, 1))
    assert described([("w", base)]) == described([("w", other)])
    assert described([("w", base)]) != described([("w", torch.zeros(4, 1, 2, 2).mT)])


@pytest.mark.parametrize("where", ["dear", "bluefog"])
@on_ranks(2, "wfbp")
def test_a_broadcast_goes_by_name(where: str) -> None:
    broadcast: Any = {"dear": dear, "bluefog": bf}[where].broadcast_parameters
    for way in ("order", "layout"):
        model = net(way, dear.rank() == 1)
        with torch.no_grad():
            for param in model.parameters():
                param.add_(dear.rank())
        broadcast(model.state_dict(), 0)
        wanted = net(way, odd=False).state_dict()
        assert all(torch.equal(v, wanted[k]) for k, v in model.state_dict().items()), way
    other = net("shape", dear.rank() == 1).state_dict()
    line = message(functools.partial(broadcast, other, 0))
    assert "'left.bias'" in line and "rank 1" in line, line
