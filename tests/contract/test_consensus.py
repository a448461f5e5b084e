"""The references of decentralized algorithms agree, and learn, as fast as theory says.

Without learning (rate 0) what a step does to the replicas is x <- x W. The predicted number of
steps is that of the slowest part of a disagreement; twice as many must be enough. That ranks
do what the references say is `test_reference`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from functools import partial
from itertools import islice, pairwise
from typing import Any

import numpy as np
import pytest
import torch

from dear.topology import graph, matrix, mixing_rate, splitting
from dear.topology.schedules import TopologyReg, one_peer_machines, schedule
from tests.contract.algorithms import algorithm_options, reference_of

NUMEL = 6
SMALL, EXACT = 1e-3, 1e-6


class Rows:
    """All ranks' parameters, without models: `update` is plain SGD."""

    def __init__(self, x: torch.Tensor, rate: float = 0.0) -> None:
        self.x, self.g, self.rate, self.local_size = x, torch.zeros_like(x), rate, 1

    def update(self, rank: int | None = None) -> None:
        change = torch.zeros_like(self.x)
        rows = slice(None) if rank is None else rank
        change[rows] = self.rate * self.g[rows]
        self.x = self.x - change


def _start(size: int) -> torch.Tensor:
    return torch.randn(size, NUMEL, generator=torch.Generator().manual_seed(1)).double()


def _history(name: str, options: dict[str, Any], size: int) -> Iterator[torch.Tensor]:
    """All rows before the first step and after each."""
    ranks = Rows(_start(size))
    steps = reference_of(name, options)(ranks, algorithm_options(name, options))
    while True:
        yield ranks.x.clone()
        next(steps)


def _rounds(reduction: float, rate: float) -> float:
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
    """Factor of a schedule of equal weights, over twelve steps."""
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


STATIC = [
    (size, algorithm, {**options, "topology": name}, partial(spectrum, name, size))
    for algorithm, options, spectrum, names in [
        ("neighbor", {"combine": "awc"}, _static, ["complete", "ring-left", "star"]),
        ("neighbor", {"combine": "atc"}, _static, ["ring", "mesh", "exp2"]),
        ("gradient-tracking", {}, _static, ["ring-right", "symmetric-exp"]),
        ("exact-diffusion", {}, _second_order, ["ring", "symmetric-exp"]),
        ("push-diging", {}, _shares, ["star", "exp2"]),
        ("push-sum", {}, _shares, ["mesh", "ring-left"]),
        ("win-put", {}, _static, ["star", "exp2"]),
        ("pull-get", {}, _static, ["ring", "symmetric-exp"]),
    ]
    for name in names
    for size in (3, 8)
]
ONE_PEER = {"dynamic": "one-peer-exp"}
MACHINES = {"hierarchical": True, "local_size": 2}
DYNAMIC = [
    (8, ONE_PEER, partial(_peers, "one-peer-exp", 8, 1)),
    (3, ONE_PEER | {"combine": "atc"}, partial(_peers, "one-peer-exp", 3, 1)),
    *(
        (8, {"dynamic": name, "local_size": 4}, partial(_peers, name, 8, 4))
        for name in ("inner-outer-ring", "inner-outer-exp2")
    ),
    (8, MACHINES | {"topology": "ring"}, partial(_machines, 8, 2, "ring")),
    (8, MACHINES | ONE_PEER, partial(_machines, 8, 2)),
]
GROUPS = [
    (size, {"topology": name, "ranks_per_node": local}, partial(_groups, name, size, local))
    for size, name, local in [
        (3, "complete", 1),
        (8, "complete", 1),
        (8, "ring", 1),
        (8, "one-peer-exp", 1),
        (8, "alternating-exp-ring", 1),
        (8, "alternating-exp-ring", 2),
    ]
]
CASES = [
    *STATIC,
    *((size, "neighbor", options, spectrum) for size, options, spectrum in DYNAMIC),
    *((size, "decentralized", options, spectrum) for size, options, spectrum in GROUPS),
]


def _steps(reduction: float, spectrum: tuple[int, float]) -> int:
    """Twice what is predicted; at least one whole period."""
    period, left = spectrum
    return 2 * period * math.ceil(_rounds(reduction, left))


@pytest.mark.parametrize(
    ("size", "algorithm", "options", "spectrum"),
    CASES,
    ids=[f"{case[1]}-{'-'.join(map(str, case[2].values()))}-{case[0]}" for case in CASES],
)
def test_consensus_in_the_steps_of_the_spectrum(size, algorithm, options, spectrum):
    predicted = spectrum()
    assert predicted[1] < 1 - 1e-6  # a topology that agrees at all
    steps = _steps(EXACT, predicted)
    # Rounds of `decentralized` are under way between steps: the first step has none to take in.
    states = list(islice(_history(algorithm, options, size), steps + 2))
    mean = states[0].mean(dim=0)
    distances = [(x - mean).norm() for x in states]
    assert distances[_steps(SMALL, predicted) + 1] < SMALL * distances[0]
    torch.testing.assert_close(states[-1], mean.expand(size, -1), rtol=0, atol=EXACT)


@pytest.mark.parametrize("name", ["ring", "mesh", "star", "exp2"])
def test_no_step_leaves_more_than_the_mixing_rate(name):
    """Weights are the same in both directions, or for all ranks (a normal matrix)."""
    steps = _history("neighbor", {"topology": name}, 8)
    distances = [(x - x.mean(dim=0)).norm().item() for x in islice(steps, 41)]
    rate = mixing_rate(graph(name, 8))
    for before, after in pairwise(distances):
        assert after <= rate * before * (1 + 1e-9) + 1e-14
    assert (distances[40] / distances[20]) ** (1 / 20) == pytest.approx(rate, rel=0.02)


@pytest.mark.parametrize("name", ["ring", "exp2", "star"])
def test_asyncddp_agrees_when_all_keep_step(name):
    """A value between the starts: without order among the steps no mean is kept."""
    start, *_, end = islice(_history("asyncddp", {"topology": name}, 8), 200)
    assert (end - end.mean(0)).norm() < 1e-3 * (start - start.mean(0)).norm()
    assert (end >= start.min(0).values).all() and (end <= start.max(0).values).all()


def _errors(name: str, options: dict[str, Any], size: int) -> list[float]:
    """Distance of the farthest rank to the optimum of all least squares, every 60 of 600 steps."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(size, 12, NUMEL, generator=generator).double()
    y = torch.randn(size, 12, 1, generator=generator).double()
    y += torch.arange(size).view(-1, 1, 1)
    wanted = torch.linalg.lstsq(x.flatten(0, 1), y.flatten(0, 1)).solution.flatten()
    ranks, errors = Rows(torch.zeros(size, NUMEL).double(), rate=0.1), []
    steps = reference_of(name, options)(ranks, algorithm_options(name, options))
    for step in range(600):
        ranks.g = (x.mT @ (x @ ranks.x.unsqueeze(2) - y)).squeeze(2) / 12
        next(steps)
        if step % 60 == 0:
            errors.append((ranks.x - wanted).norm(dim=1).max().item())
    return errors


@pytest.mark.parametrize(
    ("algorithm", "topology"),
    [
        ("gradient-tracking", "ring"),
        ("exact-diffusion", "ring"),
        ("push-diging", "exp2"),
        ("push-diging", "star"),
    ],
)
@pytest.mark.parametrize("size", [3, 4, 8])
def test_bias_corrected_methods_reach_the_exact_optimum_linearly(size, algorithm, topology):
    errors = _errors(algorithm, {"topology": topology}, size)
    assert errors[-1] < 1e-8 * errors[0]
    assert errors[3] < 1e-2 * errors[0] and errors[6] < 1e-2 * errors[3]


def test_plain_averaging_stops_near_the_optimum():
    errors = _errors("neighbor", {"topology": "ring"}, 4)
    assert errors[-1] == pytest.approx(errors[-2], rel=1e-6)  # it does not move any more
    assert errors[-1] > 1e-3
