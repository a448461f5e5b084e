"""Decentralized algorithms on CUDA tensors equal their equations; the same on CPU tensors."""

from __future__ import annotations

import copy

import pytest
import torch

import dear
from tests.contract.decentral import Serial, error, mixed, on_rank, run, weights
from tests.gpu.cuda_worlds import EVERYWHERE, Pools, World, keep_busy, named

AWC = [
    ("neighbor", {"combine": "awc"}),
    ("neighbor", {"combine": "awc", "hierarchical": True, "local_size": 1}),
    ("win-put", {"barrier": True}),
    ("pull-get", {"barrier": True}),
]
ATC = [("neighbor", {"combine": "atc"}), ("push-sum", {"barrier": True})]
DTYPE = torch.float64


@pytest.fixture(scope="module")
def pools():
    pools = Pools()
    yield pools
    pools.close()


def _state(device, algorithm, options):
    keep_busy(device)
    state = on_rank(algorithm, options, "sgd", place=(device, DTYPE))
    return {name: value.cpu() for name, value in copy.copy(state).items()}


def _half(device):
    """A parameter in bfloat16 that only averages."""
    model = torch.nn.Linear(3, 1, bias=False).to(device, torch.bfloat16)
    torch.nn.init.constant_(model.weight, float(dear.rank()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    dear.DistributedOptimizer(optimizer, model, algorithm="neighbor", topology="complete")
    model(torch.ones(1, 3, device=device, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    optimizer.close()
    return model.weight[0, 0].item()


@pytest.mark.parametrize("world", EVERYWHERE, ids=named)
@pytest.mark.parametrize(("algorithm", "options"), AWC + ATC)
def test_equals_its_equation(pools, world: World, algorithm, options):
    states = pools.run(world, _state, algorithm, options)
    serial, w = Serial(world.size, "sgd", DTYPE), weights("exp2", world.size)

    def step(number):
        if (algorithm, options) in ATC:
            serial.update()
        serial.set_params(mixed(w, serial.params()))
        if (algorithm, options) not in ATC:
            serial.update()

    assert error(states, run(serial, step)) < 1e-7


@pytest.mark.parametrize("world", EVERYWHERE, ids=named)
def test_gradient_tracking_equals_its_equation(pools, world: World):
    states = pools.run(world, _state, "gradient-tracking", {})
    serial, w = Serial(world.size, "sgd", DTYPE), weights("exp2", world.size)
    kept = {"y": [torch.zeros_like(p) for p in serial.params()]}
    kept["g"] = kept["y"]

    def step(number):
        gradients = [g.clone() for g in serial.gradients()]
        terms = zip(mixed(w, kept["y"]), gradients, kept["g"], strict=True)
        kept["y"], kept["g"] = [average + new - old for average, new, old in terms], gradients
        serial.set_params(mixed(w, serial.params()))
        serial.set_gradients(kept["y"])
        serial.update()

    assert error(states, run(serial, step)) < 1e-7


@pytest.mark.parametrize("world", EVERYWHERE, ids=named)
@pytest.mark.parametrize("algorithm", ["exact-diffusion", "push-diging"])
def test_replicas_of_the_other_corrections_are_finite_and_alike(pools, world: World, algorithm):
    states = pools.run(world, _state, algorithm, {"topology": "complete"})
    assert all(value.isfinite().all() for state in states for value in state.values())
    if world.size == 1:
        wanted = run(serial := Serial(1, "sgd", DTYPE), lambda number: serial.update())
        assert error(states, wanted) < 1e-7
    else:
        assert error(states[1:], states[:1] * (world.size - 1)) < 0.5


@pytest.mark.parametrize("world", EVERYWHERE, ids=named)
def test_bfloat16_averages(pools, world: World):
    assert pools.run(world, _half) == [(world.size - 1) / 2] * world.size
