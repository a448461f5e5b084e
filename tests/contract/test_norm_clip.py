"""`norm_clip`: a rank scales each gradient down before it travels, as in MG-WFBP."""

from __future__ import annotations

import math

import pytest
import torch

import dear
from dear.errors import UserError
from tests.contract.loops import difference, everybody, loss_of, make_model, make_sgd, mine
from tests.contract.loops import steps as train
from tests.ranks import on_ranks

NORM_CLIP = 0.2


def _serial(model: torch.nn.Module, which: range) -> int:
    """Plain training on the mean of the clipped gradients; how many of them were clipped."""
    optimizer, size, clipped = make_sgd(model), dear.size(), 0
    for step in which:
        means = [torch.zeros_like(param) for param in model.parameters()]
        for rank in everybody():
            model.zero_grad()
            loss_of(model, rank, step).backward()
            for mean, param in zip(means, model.parameters(), strict=True):
                norm = param.grad.norm().item()
                scale = min(1.0, NORM_CLIP / math.sqrt(size) / (norm + 1e-6))
                clipped += scale < 1
                mean += param.grad * scale / size
        for mean, param in zip(means, model.parameters(), strict=True):
            param.grad = mean
        optimizer.step()
    return clipped


@pytest.mark.parametrize(
    "algorithm",
    [
        *("dear", "ddp", "fsdp"),
        *(pytest.param(n, marks=pytest.mark.full) for n in ("wfbp", "mgwfbp", "bytescheduler")),
    ],
)
@on_ranks(3)
def test_each_gradient_is_clipped_before_it_travels(algorithm: str) -> None:
    model, wanted = make_model(), make_model()
    optimizer = dear.DistributedOptimizer(
        make_sgd(model), model, algorithm=algorithm, norm_clip=NORM_CLIP
    )
    train(model, optimizer, mine(), range(4))
    optimizer.synchronize()
    assert _serial(wanted, range(4)) > 10, "or nothing is seen"
    assert difference(model, wanted) < 1e-5
    # Taken out with the algorithm.
    optimizer.close()
    model.zero_grad()
    (100 * loss_of(model, 0, 0)).backward()
    assert max(param.grad.norm().item() for param in model.parameters()) > NORM_CLIP


@on_ranks(1)
def test_a_norm_that_is_none_is_refused_and_leaves_the_model_as_it_was() -> None:
    model = make_model()
    with pytest.raises(UserError, match="norm_clip must be greater than 0"):
        dear.DistributedOptimizer(make_sgd(model), model, norm_clip=0.0)
    with pytest.raises(UserError, match="unknown dear option"):
        dear.DistributedOptimizer(make_sgd(model), model, norm_clip=1.0, trheshold=1)
    assert all(not param._post_accumulate_grad_hooks for param in model.parameters())
