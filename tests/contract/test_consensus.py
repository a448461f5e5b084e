"""The references of decentralized algorithms agree, and learn, as fast as theory says.

Without learning (rate 0) what a step does to the replicas is x <- x W. That ranks do what the
references say is `test_reference`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, pairwise
from typing import Any

import pytest
import torch

from dear.topology import graph, mixing_rate
from tests.contract.algorithms import algorithm_options, reference_of

NUMEL = 6


class Rows:
    """All ranks' parameters, without models: `update` is plain SGD."""

    def __init__(self, x: torch.Tensor, rate: float = 0.0) -> None:
        self.x, self.g, self.rate = x, torch.zeros_like(x), rate

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


BY_TOPOLOGY: list[tuple[str, dict[str, Any], list[str]]] = [
    ("neighbor", {"combine": "awc"}, ["complete", "ring-left", "star"]),
    ("neighbor", {"combine": "atc"}, ["ring", "mesh", "exp2"]),
    ("neighbor", {"hierarchical": True, "local_size": 2}, ["ring"]),
    ("gradient-tracking", {}, ["ring-right", "symmetric-exp"]),
    ("exact-diffusion", {}, ["ring", "symmetric-exp"]),
    ("push-diging", {}, ["star", "exp2"]),
    ("push-sum", {}, ["mesh", "ring-left"]),
    ("win-put", {}, ["star", "exp2"]),
    ("pull-get", {}, ["ring", "symmetric-exp"]),
    ("decentralized", {}, ["complete", "ring", "one-peer-exp", "alternating-exp-ring"]),
    ("decentralized", {"ranks_per_node": 2}, ["alternating-exp-ring"]),
]
CASES = [
    *((name, {**how, "topology": one}) for name, how, several in BY_TOPOLOGY for one in several),
    ("neighbor", {"dynamic": "one-peer-exp"}),
    ("neighbor", {"dynamic": "one-peer-exp", "hierarchical": True, "local_size": 2}),
    ("neighbor", {"dynamic": "inner-outer-ring", "local_size": 4}),
    ("neighbor", {"dynamic": "inner-outer-exp2", "local_size": 4}),
]


@pytest.mark.parametrize(("algorithm", "options"), CASES)
def test_all_agree_on_the_mean_of_what_they_started_with(algorithm, options):
    start, *_, end = islice(_history(algorithm, options, 8), 400)
    torch.testing.assert_close(end, start.mean(dim=0).expand(8, -1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["ring", "mesh", "star", "exp2"])
def test_no_step_leaves_more_than_the_mixing_rate(name):
    """Where weights are the same in both directions, or for all ranks (a normal matrix)."""
    steps = _history("neighbor", {"topology": name}, 8)
    distances = [(x - x.mean(dim=0)).norm().item() for x in islice(steps, 41)]
    rate = mixing_rate(graph(name, 8))
    for before, after in pairwise(distances):
        assert after <= rate * before * (1 + 1e-9) + 1e-14
    assert (distances[40] / distances[20]) ** (1 / 20) == pytest.approx(rate, rel=0.02)


@pytest.mark.parametrize("name", ["ring", "exp2", "star"])
def test_asyncddp_agrees_when_all_keep_step(name):
    """On a value between the starts: without order among the steps no mean is kept."""
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
