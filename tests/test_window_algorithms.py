"""win-put, pull-get, push-sum: equations where everybody waits, invariants where nobody does."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import dear
from dear.topology import from_matrix, matrix, splitting
from tests.decentral import Serial, error, mixed, on_rank, run, weights

CASES = [
    (1, "exp2", "sgd"),
    (2, "ring-left", "adamw"),
    (3, "star", "sgd"),
    (3, "ring-right", "adamw"),
    (4, "exp2", "sgd"),
]
LIMIT = 2e-5


@pytest.mark.parametrize("algorithm", ["win-put", "pull-get"])
@pytest.mark.parametrize(("world_size", "topology", "kind"), CASES)
def test_with_a_barrier_they_are_awc(world, world_size, algorithm, topology, kind):
    options = {"barrier": True, "topology": topology, "bucket_mb": 0.001}
    states = world(world_size).run(on_rank, algorithm, options, kind)
    serial, w = Serial(world_size, kind), weights(topology, world_size)

    def step(number):
        serial.set_params(mixed(w, serial.params()))
        serial.update()

    assert error(states, run(serial, step)) < LIMIT


@pytest.mark.parametrize("algorithm", ["win-put", "pull-get", "push-sum"])
def test_every_second_step_exchanges(world, algorithm):
    options = {"barrier": True, "every": 2, "topology": "ring"}
    states = world(3).run(on_rank, algorithm, options, "sgd")
    serial = Serial(3, "sgd")
    full = weights("ring", 3)

    def step(number):
        if algorithm == "push-sum":
            serial.update()
        if number % 2:
            serial.set_params(mixed(full, serial.params()))
        if algorithm != "push-sum":
            serial.update()

    assert error(states, run(serial, step)) < LIMIT


@pytest.mark.parametrize(("world_size", "topology", "kind"), [*CASES, (4, "star", "sgd")])
def test_with_a_barrier_push_sum_equals_its_equation(world, world_size, topology, kind):
    options = {"barrier": True, "topology": topology, "bucket_mb": 0.001}
    states = world(world_size).run(on_rank, "push-sum", options, kind)
    serial = Serial(world_size, kind)
    c = matrix(splitting(from_matrix(weights(topology, world_size))))
    u, p = serial.params(), torch.ones(world_size)

    def step(number):
        nonlocal u, p
        before = serial.params()
        serial.update()
        terms = zip(u, serial.params(), before, strict=True)
        u, (p,) = mixed(c, [a + n - b for a, n, b in terms]), mixed(c, [p])
        serial.set_params([a / p.view(-1, *[1] * (a.dim() - 1)) for a in u])

    assert error(states, run(serial, step)) < LIMIT


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


def _slow_peer(algorithm):
    """Seconds for 20 steps while rank 0 takes its time, and how far the mean is from the best."""
    model, optimizer = _linear(algorithm, 0.1, 0.0)
    dear.allreduce(torch.zeros(1))
    slow = dear.rank() == 0
    began = time.monotonic()
    _steps(model, optimizer, 20, 0.05 if slow else 0.0)
    elapsed = time.monotonic() - began
    staleness = optimizer.statistics()["staleness"]
    dear.allreduce(torch.zeros(1))
    _steps(model, optimizer, 40)
    dear.allreduce(torch.zeros(1))
    mean = dear.allreduce(model.weight.detach()).mean().item()
    optimizer.close()
    return elapsed, mean, staleness


@pytest.mark.parametrize("algorithm", ["win-put", "pull-get", "push-sum"])
def test_nobody_waits_for_a_slow_rank(world, algorithm):
    results = world(3).run(_slow_peer, algorithm)
    slow = results[0][0]
    assert slow > 1.0
    for rank, (elapsed, mean, staleness) in enumerate(results):
        assert rank == 0 or elapsed < slow / 2
        assert mean == pytest.approx(1.0, abs=0.5)
        assert set(staleness) == {"0", "1", "2"} - {str(rank)}
    assert results[1][2]["0"]["max"] > 5  # rank 1 has made steps that rank 0 has not


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
