"""win-put, pull-get, push-sum: equations where everybody waits, invariants where nobody does."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import dear


def _linear(algorithm, lr, start, **options):
    model = nn.Linear(3, 1, bias=False)
    nn.init.constant_(model.weight, start)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    dear.DistributedOptimizer(optimizer, model, algorithm=algorithm, **options)
    return model, optimizer


def _steps(model, optimizer, count, pause_s=0.0):
    target = torch.full((1,), float(dear.rank()))
    for _ in range(count):
        optimizer.zero_grad()
        (model(torch.eye(3)) - target).square().sum().div(2).backward()
        optimizer.step()
        time.sleep(pause_s)


def _equal_start(algorithm, steps):
    """Nothing is to learn and all start equal; ranks run at different speeds."""
    model, optimizer = _linear(algorithm, 0.0, 2.5)
    _steps(model, optimizer, steps, 0.002 * dear.rank())
    moved = (model.weight - 2.5).abs().max().item()
    optimizer.close()
    return moved


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("algorithm", ["win-put", "pull-get", "push-sum"])
def test_equal_replicas_that_learn_nothing_stay_as_they_are(world, world_size, algorithm):
    assert max(world(world_size).run(_equal_start, algorithm, 10)) < 1e-5


def _halted_peer(algorithm):
    """Rank 0 makes no step until the others have made 20, which they cannot if they wait for it."""
    model, optimizer = _linear(algorithm, 0.1, 0.0)
    _steps(model, optimizer, 1)  # in which windows may be made
    dear.allreduce(torch.zeros(1))
    _steps(model, optimizer, 20 * (dear.rank() > 0))
    ages = optimizer.statistics()["staleness"]
    dear.allreduce(torch.zeros(1))
    _steps(model, optimizer, 40, 0.002)
    dear.allreduce(torch.zeros(1))
    mean = dear.allreduce(model.weight.detach()).mean().item()
    optimizer.close()
    return mean, ages


@pytest.mark.parametrize("algorithm", ["win-put", "pull-get", "push-sum"])
def test_nobody_waits_for_a_halted_rank(world, algorithm):
    results = world(3).run(_halted_peer, algorithm)
    for rank, (mean, ages) in enumerate(results):
        assert mean == pytest.approx(1.0, abs=0.5)
        assert set(ages) == {"0", "1", "2"} - {str(rank)}
    assert results[1][1]["0"]["max"] > 5  # rank 1 has made steps that rank 0 has not


def _in_step(algorithm):
    model, optimizer = _linear(algorithm, 0.1, 0.0, barrier=True, every=2)
    _steps(model, optimizer, 6)
    counted = optimizer.statistics()
    optimizer.close()
    return counted


@pytest.mark.parametrize("algorithm", ["win-put", "pull-get", "push-sum"])
def test_ranks_in_step_are_level(world, algorithm):
    level = {"uses": 3, "mean": 0, "max": 0, "last": 0}
    for rank, counted in enumerate(world(2).run(_in_step, algorithm)):
        other = str(1 - rank)
        assert counted["staleness"] == {other: level}
        assert counted["sent"] == {other: 0 if algorithm == "pull-get" else 3}
        assert counted["skipped"] == {other: 0} and counted["lost"] == []
