"""Clipping by global norm without gathering gradients."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.test_optimizer import difference, everybody, make_model, make_sgd, mine, steps, wrap
from tests.test_optimizer_cases import Branches, _branch_loss


def _clip(norms: list[float], max_norm: float, kind: float, optimizer: Any, model: Any) -> None:
    if hasattr(optimizer, "clip_grad_norm_"):
        norm = optimizer.clip_grad_norm_(max_norm, kind)
    else:
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm, kind)
    norms.append(norm.item())


def _clipped(
    algorithm: str, max_norm: float, kind: float, branches: bool, options: dict[str, Any]
) -> tuple[float, float]:
    make = Branches if branches else make_model
    loop = {"which": range(4), "loss_of": _branch_loss} if branches else {"which": range(4)}
    model, wanted = make(), make()
    optimizer = wrap(make_sgd(model), model, algorithm, **options)
    got: list[float] = []
    serial: list[float] = []
    steps(model, optimizer, mine(), before_step=partial(_clip, got, max_norm, kind), **loop)
    steps(
        wanted,
        make_sgd(wanted),
        everybody(),
        before_step=partial(_clip, serial, max_norm, kind),
        **loop,
    )
    far = difference(model, wanted)
    optimizer.close()
    return far, max(abs(a - b) for a, b in zip(got, serial, strict=True))


@pytest.mark.parametrize("branches", [False, True], ids=["all used", "some unused"])
@pytest.mark.parametrize("kind", [1.0, 2.0, 3.5, math.inf])
@pytest.mark.parametrize(("world_size", "small_kb"), [(1, 0), (3, 0), (3, 0.1), (3, 8)])
def test_clipping_equals_serial_and_returns_the_norm(world, world_size, small_kb, kind, branches):
    options = {"threshold_mb": 0.0002, "small_kb": small_kb}
    for far, off in world(world_size).run(_clipped, "dear", 0.05, kind, branches, options):
        assert far < 1e-5
        assert off < 1e-5


@pytest.mark.parametrize(
    ("algorithm", "options"), [("allreduce", {}), ("dear", {"update": "replicated"})]
)
def test_other_algorithms_clip_too(world, algorithm, options):
    for far, off in world(2).run(_clipped, algorithm, 0.05, 2.0, False, options):
        assert far < 1e-5
        assert off < 1e-5


def test_a_norm_below_the_limit_changes_nothing(world):
    for far, off in world(2).run(_clipped, "dear", 1e6, 2.0, False, {}):
        assert far < 1e-5
        assert off < 1e-5


def _same_norm() -> float:
    model = make_model()
    optimizer = wrap(make_sgd(model), model, "dear")
    norms: list[float] = []
    steps(model, optimizer, mine(), before_step=partial(_clip, norms, 0.1, 2.0))
    optimizer.close()
    return torch.tensor(norms).double().sum().item()


def test_every_rank_gets_the_same_norm(world):
    assert len(set(world(3).run(_same_norm))) == 1
