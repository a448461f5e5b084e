"""How far and how fast: consensus by the spectral gap, exact optima, agreement with one process."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import dear
from dear.topology import graph, rounds_to

NUMEL = 5


def _model(start):
    model = nn.Linear(NUMEL, 1, bias=False).double()
    nn.init.constant_(model.weight, start)
    return model


def _consensus(algorithm, options, steps):
    """Distance to the mean of all at the start and after so many steps without learning."""
    model = _model(float(dear.rank()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    dear.DistributedOptimizer(optimizer, model, algorithm=algorithm, **options)
    mean = (dear.size() - 1) / 2
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(1, NUMEL, dtype=torch.float64)).sum().backward()
        optimizer.step()
    optimizer.synchronize()
    squared = (model.weight.detach() - mean).square().sum()
    values = model.weight.detach().clone()
    optimizer.close()
    return squared.item(), values.mean().item()


_PLAIN = [
    ("neighbor", {"combine": "awc"}),
    ("neighbor", {"combine": "atc"}),
    ("gradient-tracking", {}),
    ("win-put", {"barrier": True}),
    ("pull-get", {"barrier": True}),
    ("push-sum", {"barrier": True}),
    ("push-diging", {}),
]


@pytest.mark.parametrize("topology", ["exp2", "ring", "mesh"])
@pytest.mark.parametrize(("algorithm", "options"), _PLAIN)
def test_consensus_comes_within_the_rounds_of_the_spectral_gap(world, algorithm, options, topology):
    rounds = math.ceil(2 * rounds_to(1e-3, graph(topology, 4)))
    results = world(4).run(_consensus, algorithm, {"topology": topology, **options}, rounds)
    start = sum((rank - 1.5) ** 2 * NUMEL for rank in range(4))
    assert math.sqrt(sum(squared for squared, _ in results) / start) < 1e-3
    assert np.mean([value for _, value in results]) == pytest.approx(1.5, abs=1e-6)


def test_average_consensus_is_exact_with_a_matching_one_peer_graph(world):
    results = world(4).run(_consensus, "neighbor", {"dynamic": "one-peer-exp"}, 2)
    assert max(squared for squared, _ in results) < 1e-12


def test_exact_diffusion_reaches_consensus_too(world):
    lazy = 2 * rounds_to(1e-3, graph("symmetric-exp", 4))  # (W + 1) / 2 mixes half as fast
    results = world(4).run(_consensus, "exact-diffusion", {}, math.ceil(4 * lazy))
    assert max(squared for squared, _ in results) < 1e-4


def _regression(rank):
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(12, NUMEL, generator=generator, dtype=torch.float64)
    return x, torch.randn(12, 1, generator=generator, dtype=torch.float64) + rank


def _least_squares(world_size):
    """The minimum of the sum of all ranks' losses."""
    data = [_regression(rank) for rank in range(world_size)]
    x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
    return torch.linalg.lstsq(x, y).solution.flatten()


def _errors(algorithm, options, steps):
    """Distance to the optimum after each tenth of the steps."""
    model = _model(0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dear.DistributedOptimizer(optimizer, model, algorithm=algorithm, **options)
    x, y = _regression(dear.rank())
    wanted, errors = _least_squares(dear.size()), []
    for step in range(steps):
        optimizer.zero_grad()
        (model(x) - y).square().mean().div(2).backward()
        optimizer.step()
        if step % (steps // 10) == 0:
            optimizer.synchronize()
            errors.append((model.weight.detach().flatten() - wanted).norm().item())
    optimizer.close()
    return errors


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("gradient-tracking", {"topology": "ring"}),
        ("exact-diffusion", {"topology": "ring"}),
        ("push-diging", {"topology": "exp2"}),
        ("push-diging", {"topology": "star"}),
    ],
)
@pytest.mark.parametrize("world_size", [3, 4, pytest.param(8, marks=pytest.mark.full)])
def test_bias_corrected_methods_reach_the_exact_optimum_linearly(
    world, world_size, algorithm, options
):
    for errors in world(world_size).run(_errors, algorithm, options, 600):
        assert errors[-1] < 1e-8 * errors[0]
        assert errors[3] < 1e-2 * errors[0] and errors[6] < 1e-2 * errors[3]


def test_plain_averaging_stops_near_the_optimum(world):
    for errors in world(4).run(_errors, "neighbor", {"topology": "ring"}, 600):
        assert errors[-1] == pytest.approx(errors[-2], rel=1e-6)  # it does not move any more
        assert errors[-1] > 1e-3
