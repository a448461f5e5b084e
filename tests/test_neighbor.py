"""Decentralized algorithms against their equations, written out for all replicas in one process."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dear.topology import exponential, from_matrix, matrix, splitting
from dear.topology.schedules import schedule
from tests.decentral import Serial, error, mixed, on_rank, run, weights

SIZES = [1, 2, 3, 4]
CASES = list(zip(SIZES, ["sgd", "adamw", "sgd", "adamw"], strict=True))
LIMIT = 2e-5


def round_weights(peers):
    """The matrix of a round in which every rank weighs all it has equally."""
    result = np.zeros((len(peers), len(peers)))
    for rank, (_, sources) in enumerate(peers):
        result[[rank, *sources], rank] = 1 / (len(sources) + 1)
    return result


def awc(serial, at):
    def step(number):
        average = mixed(at(number), serial.params())
        serial.set_params(average)
        serial.update()

    return run(serial, step)


def atc(serial, at):
    def step(number):
        serial.update()
        serial.set_params(mixed(at(number), serial.params()))

    return run(serial, step)


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize(
    ("combine", "topology", "kind"),
    [
        ("awc", "exp2", "sgd"),
        ("awc", "ring-left", "adamw"),
        ("atc", "exp2", "adamw"),
        ("atc", "star", "sgd"),
    ],
)
def test_neighbor_equals_its_equation(world, world_size, combine, topology, kind):
    options = {"combine": combine, "topology": topology, "bucket_mb": 0.001}
    states = world(world_size).run(on_rank, "neighbor", options, kind)
    order = {"awc": awc, "atc": atc}[combine]
    wanted = order(Serial(world_size, kind), lambda step: weights(topology, world_size))
    assert error(states, wanted) < LIMIT


@pytest.mark.parametrize(
    ("world_size", "combine"), [(1, "awc"), (2, "atc"), (3, "awc"), (4, "atc"), (4, "awc")]
)
def test_one_peer_exponential_equals_its_equation(world, world_size, combine):
    options = {"combine": combine, "dynamic": "one-peer-exp"}
    states = world(world_size).run(on_rank, "neighbor", options, "sgd")

    def at(step):
        peers = [schedule("one-peer-exp", world_size, r, 1)(step) for r in range(world_size)]
        return round_weights(peers)

    order = {"awc": awc, "atc": atc}[combine]
    assert error(states, order(Serial(world_size, "sgd"), at)) < LIMIT


@pytest.mark.parametrize("dynamic", ["inner-outer-ring", "inner-outer-exp2"])
def test_inner_outer_topologies_equal_their_equation(world, dynamic):
    states = world(6).run(on_rank, "neighbor", {"dynamic": dynamic, "local_size": 3}, "sgd")

    def at(step):
        return round_weights([schedule(dynamic, 6, rank, 3)(step) for rank in range(6)])

    assert error(states, awc(Serial(6, "sgd"), at)) < LIMIT


@pytest.mark.parametrize("dynamic", ["none", "one-peer-exp"])
@pytest.mark.parametrize("combine", ["awc", "atc"])
def test_hierarchical_averages_machines_exactly_b29(world, combine, dynamic):
    options = {"combine": combine, "hierarchical": True, "local_size": 2, "dynamic": dynamic}
    states = world(4).run(on_rank, "neighbor", options, "sgd")
    inside = np.kron(np.eye(2), np.full((2, 2), 0.5))
    between = np.kron(matrix(exponential(2)), np.full((2, 2), 0.5))
    order = {"awc": awc, "atc": atc}[combine]
    wanted = order(Serial(4, "sgd"), lambda step: inside @ between)
    assert error(states, wanted) < LIMIT
    if combine == "atc":
        for one, other in ((0, 1), (2, 3)):
            assert all(torch.equal(states[one][n], states[other][n]) for n in states[one])


def test_between_machines_nothing_is_lost_when_they_do_not_divide_the_parameters(world):
    options = {"combine": "atc", "hierarchical": True, "local_size": 3, "bucket_mb": 0.0001}
    states = world(3).run(on_rank, "neighbor", options, "sgd")
    wanted = atc(Serial(3, "sgd"), lambda step: np.full((3, 3), 1 / 3))
    assert error(states, wanted) < LIMIT


@pytest.mark.parametrize("combine", ["awc", "atc"])
def test_every_second_step_averages(world, combine):
    states = world(3).run(on_rank, "neighbor", {"combine": combine, "every": 2}, "sgd")

    def at(step):
        return weights("exp2", 3) if step % 2 else np.eye(3)

    order = {"awc": awc, "atc": atc}[combine]
    assert error(states, order(Serial(3, "sgd"), at)) < LIMIT


def test_fully_connected_atc_keeps_replicas_equal(world):
    states = world(4).run(on_rank, "neighbor", {"combine": "atc", "topology": "complete"}, "sgd")
    assert error(states[1:], [states[0]] * 3) < 1e-6


@pytest.mark.parametrize(("world_size", "kind"), CASES)
def test_gradient_tracking_equals_its_equation(world, world_size, kind):
    states = world(world_size).run(on_rank, "gradient-tracking", {"bucket_mb": 0.001}, kind)
    serial, w = Serial(world_size, kind), weights("exp2", world_size)
    kept: dict[str, list] = {}

    def step(number):
        gradients = serial.gradients()
        y = gradients
        if kept:
            pairs = zip(mixed(w, kept["y"]), gradients, kept["g"], strict=True)
            y = [average + now - last for average, now, last in pairs]
        kept["y"], kept["g"] = y, [g.clone() for g in gradients]
        serial.set_params(mixed(w, serial.params()))
        serial.set_gradients(y)
        serial.update()

    assert error(states, run(serial, step)) < LIMIT


@pytest.mark.parametrize(("world_size", "kind"), CASES)
def test_exact_diffusion_equals_its_equation(world, world_size, kind):
    states = world(world_size).run(on_rank, "exact-diffusion", {"bucket_mb": 0.001}, kind)
    serial = Serial(world_size, kind)
    w = (weights("symmetric-exp", world_size) + np.eye(world_size)) / 2
    kept = {"psi": serial.params()}

    def step(number):
        before = serial.params()
        serial.update()
        psi = serial.params()
        terms = zip(psi, before, kept["psi"], strict=True)
        kept["psi"] = psi
        serial.set_params(mixed(w, [new + x - last for new, x, last in terms]))

    assert error(states, run(serial, step)) < LIMIT


@pytest.mark.parametrize(
    ("world_size", "topology"), [(1, "star"), (2, "exp2"), (3, "star"), (4, "exp2"), (4, "star")]
)
def test_push_diging_equals_its_equation(world, world_size, topology):
    options = {"bucket_mb": 0.001, "topology": topology}
    states = world(world_size).run(on_rank, "push-diging", options, "sgd")
    serial = Serial(world_size, "sgd")
    c = matrix(splitting(from_matrix(weights(topology, world_size))))
    u, v = serial.params(), torch.ones(world_size)
    y = last = [torch.zeros_like(p) for p in u]

    def step(number):
        nonlocal u, v, y, last
        gradients = [g.clone() for g in serial.gradients()]
        y = [a + b - d for a, b, d in zip(y, gradients, last, strict=True)]
        last, before = gradients, serial.params()
        serial.set_gradients(y)
        serial.update()
        after = serial.params()
        u = mixed(c, [a + n - b for a, n, b in zip(u, after, before, strict=True)])
        y, (v,) = mixed(c, y), mixed(c, [v])
        serial.set_params([a / v.view(-1, *[1] * (a.dim() - 1)) for a in u])

    assert error(states, run(serial, step)) < LIMIT
