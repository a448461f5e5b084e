"""Every decentralized algorithm averages as fast as the spectra of its mixing matrices predict.

Without learning (rate 0) what a step does to the replicas is x <- x W. The predicted number of
steps is that of the slowest part of a disagreement; twice as many must be enough, and the end must
be the mean of the beginning, to 1e-6.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch
from torch import nn

import dear
from dear.comm import runtime
from dear.topology import graph, matrix, mixing_rate, splitting
from dear.topology.schedules import TopologyReg, one_peer_machines, schedule

NUMEL = 6
SMALL, EXACT = 1e-3, 1e-6


def _start(rank):
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def _history(algorithm, options, steps, lockstep=False):
    """This rank's parameters before and after each step."""
    model = nn.Linear(NUMEL, 1, bias=False).double()
    model.weight.data.copy_(_start(dear.rank()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    dear.DistributedOptimizer(optimizer, model, algorithm=algorithm, **options)
    history = [model.weight.detach().flatten().clone()]
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(1, NUMEL, dtype=torch.float64)).sum().backward()
        optimizer.step()
        optimizer.synchronize()
        if lockstep:
            runtime.communicator().barrier()
        history.append(model.weight.detach().flatten().clone())
    optimizer.close()
    return torch.stack(history)


def _rounds(reduction, rate):
    return max(1.0, math.log(reduction) / math.log(rate)) if rate > 1e-9 else 1.0


def _static(name, size):
    """(steps of a period, what a period leaves of a disagreement)"""
    return 1, mixing_rate(graph(name, size))


def _shares(name, size):
    return 1, mixing_rate(splitting(graph(name, size)))


def _second_order(name, size):
    """x <- W' (2 x - last x): a part with eigenvalue l of W' shrinks by its root."""
    eigenvalues = np.sort(np.linalg.eigvalsh((matrix(graph(name, size)) + np.eye(size)) / 2))
    return 1, math.sqrt(eigenvalues[-2])


def _product(matrices):
    left = functools.reduce(np.matmul, matrices) - 1 / len(matrices[0])
    return len(matrices), float(np.linalg.norm(left, 2))


def _peers(name, size, local_size):
    """Of a schedule in which everybody weighs what it has equally, over twelve steps."""
    at = [schedule(name, size, rank, local_size) for rank in range(size)]
    return _product([_equal([peers(step)[1] for peers in at]) for step in range(12)])


def _equal(sources):
    weights = np.zeros((len(sources),) * 2)
    for rank, others in enumerate(sources):
        weights[[rank, *others], rank] = 1 / (len(others) + 1)
    return weights


def _machines(size, local_size, name=None):
    inside = np.full((local_size,) * 2, 1 / local_size)
    count = size // local_size
    if name is not None:
        return _product([np.kron(matrix(graph(name, count)), inside)])
    at = [one_peer_machines(count, machine) for machine in range(count)]
    return _product(
        [np.kron(_equal([peers(step)[1] for peers in at]), inside) for step in range(12)]
    )


def _groups(name, size, local_size):
    topology = TopologyReg.make(name, world_size=size, rank=0, local_world_size=local_size)
    matrices = []
    for step in range(topology.period):
        weights = np.zeros((size, size))
        for edge in topology.edges_at(step):
            others = (1 - edge.weight) / max(1, len(edge.ranks) - 1)
            weights[np.ix_(edge.ranks, edge.ranks)] = others
            weights[edge.ranks, edge.ranks] = edge.weight
        matrices.append(weights)
    return _product(matrices)


BARRIER = {"barrier": True}
STATIC = [
    (size, algorithm, {**options, "topology": name}, functools.partial(spectrum, name, size))
    for algorithm, options, spectrum, names in [
        ("neighbor", {"combine": "awc"}, _static, ["complete", "ring-left", "star"]),
        ("neighbor", {"combine": "atc"}, _static, ["ring", "mesh", "exp2"]),
        ("gradient-tracking", {}, _static, ["ring-right", "symmetric-exp"]),
        ("exact-diffusion", {}, _second_order, ["ring", "symmetric-exp"]),
        ("push-diging", {}, _shares, ["star", "exp2"]),
        ("push-sum", BARRIER, _shares, ["mesh", "ring-left"]),
        ("win-put", BARRIER, _static, ["star", "exp2"]),
        ("pull-get", BARRIER, _static, ["ring", "symmetric-exp"]),
    ]
    for name in names
    for size in (3, 8)
]
INNER_RING = {"dynamic": "inner-outer-ring", "local_size": 4}
INNER_EXP2 = {"dynamic": "inner-outer-exp2", "local_size": 4}
ONE_PEER = {"dynamic": "one-peer-exp"}
MACHINES = {"hierarchical": True, "local_size": 2}
DYNAMIC = [
    (8, ONE_PEER, functools.partial(_peers, "one-peer-exp", 8, 1)),
    (3, ONE_PEER | {"combine": "atc"}, functools.partial(_peers, "one-peer-exp", 3, 1)),
    (8, INNER_RING, functools.partial(_peers, "inner-outer-ring", 8, 4)),
    (8, INNER_EXP2, functools.partial(_peers, "inner-outer-exp2", 8, 4)),
    (8, MACHINES | {"topology": "ring"}, functools.partial(_machines, 8, 2, "ring")),
    (8, MACHINES | ONE_PEER, functools.partial(_machines, 8, 2)),
]
GROUPS = [
    (3, "complete", 1),
    (8, "complete", 1),
    (8, "ring", 1),
    (8, "one-peer-exp", 1),
    (8, "alternating-exp-ring", 1),
    (8, "alternating-exp-ring", 2),
]
CASES = [
    *STATIC,
    *((size, "neighbor", options, spectrum) for size, options, spectrum in DYNAMIC),
    *(
        (size, "decentralized", options, functools.partial(_groups, name, size, local))
        for size, name, local in GROUPS
        for options in [{"topology": name, "ranks_per_node": local}]
    ),
]


def _steps(reduction, spectrum):
    """Twice what is predicted; at least one whole period."""
    period, left = spectrum
    return 2 * period * math.ceil(_rounds(reduction, left))


def _distances(histories, center):
    """Of all ranks together, before and after each step."""
    stacked = torch.stack(histories)
    return (stacked - center).square().sum(dim=(0, 2)).sqrt()


@pytest.mark.parametrize(
    ("size", "algorithm", "options", "spectrum"),
    CASES,
    ids=[f"{case[1]}-{'-'.join(map(str, case[2].values()))}-{case[0]}" for case in CASES],
)
def test_consensus_in_the_steps_of_the_spectrum(world, size, algorithm, options, spectrum):
    _, left = spectrum()
    assert left < 1 - 1e-6  # a topology that agrees at all
    steps = _steps(EXACT, spectrum())
    # Rounds of `decentralized` are under way between steps: the first step has none to take in.
    histories = world(size).run(_history, algorithm, options, steps + 1)
    mean = torch.stack([_start(rank) for rank in range(size)]).mean(dim=0)
    distances = _distances(histories, mean)
    assert distances[_steps(SMALL, spectrum()) + 1] < SMALL * distances[0]
    for history in histories:
        torch.testing.assert_close(history[-1], mean, rtol=0, atol=EXACT)


@pytest.mark.parametrize("name", ["ring", "mesh", "star", "exp2"])
def test_no_step_leaves_more_than_the_mixing_rate(world, name):
    """Where weights are the same in both directions, or for all ranks (a normal matrix)."""
    histories = world(8).run(_history, "neighbor", {"topology": name}, 40)
    mean = torch.stack([_start(rank) for rank in range(8)]).mean(dim=0)
    distances, rate = _distances(histories, mean), mixing_rate(graph(name, 8))
    assert (distances[1:] <= rate * distances[:-1] * (1 + 1e-9) + 1e-14).all()
    measured = (distances[40] / distances[20]).item() ** (1 / 20)
    assert measured == pytest.approx(rate, rel=0.02)


@pytest.mark.parametrize("name", ["ring", "exp2", "star"])
def test_asyncddp_agrees_when_all_keep_step(world, name):
    """On a value between the starts: without order among the steps no mean is kept."""
    steps = _steps(SMALL, _static(name, 8)) + 2  # windows are made in the first
    histories = world(8).run(_history, "asyncddp", {"topology": name}, steps, True)
    final = torch.stack([history[-1] for history in histories])
    starts = torch.stack([_start(rank) for rank in range(8)])
    assert (final - final.mean(0)).norm() < SMALL * (starts - starts.mean(0)).norm()
    assert (final >= starts.min(0).values).all() and (final <= starts.max(0).values).all()
