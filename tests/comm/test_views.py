"""Tensors that share memory, or whose memory does not hold their values in order."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.comm.operations import me
from tests.comm.worlds import pool
from tests.ranks import RankPool


@pytest.fixture(scope="module", params=["shm3", "tcp3"])
def ranks(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    with pool(request.param) as world:
        yield world


def _overlapping(offset: int) -> dict[str, tuple[list[float], list[float]]]:
    """Returns the result and the wanted result of calls whose inputs and outputs overlap."""
    rank, n = me()
    results = {}

    def rows() -> torch.Tensor:
        return torch.arange(2.0 * n).view(n, 2) + 10 * rank

    def wanted(source: int, row: int) -> list[float]:
        return [2.0 * row + i + 10 * source for i in range(2)]

    part, x = (rank + offset) % n, rows()
    dist.reduce_scatter_tensor(x[part], x)
    total = [n * (2.0 * rank + i) + 10 * sum(range(n)) for i in range(2)]
    results["reduce_scatter_tensor"] = x[part].tolist(), total
    x = rows()
    dist.all_gather_into_tensor(x, x[part])
    results["all_gather_into_tensor"] = (
        x.flatten().tolist(),
        [v for r in range(n) for v in wanted(r, (r + offset) % n)],
    )
    x = rows()
    dist.gather(x[part], list(x) if rank == 1 else None, dst=1)
    results["gather"] = (
        (x.flatten().tolist(), [v for r in range(n) for v in wanted(r, (r + offset) % n)])
        if rank == 1
        else ([], [])
    )
    x = rows()
    dist.scatter(x[part], list(x) if rank == 1 else None, src=1)
    results["scatter"] = x[part].tolist(), wanted(1, rank)
    x = rows()
    dist.all_to_all_single(x, x)
    results["all_to_all_single"] = (
        x.flatten().tolist(),
        [v for r in range(n) for v in wanted(r, rank)],
    )
    return results


@pytest.mark.parametrize("offset", [0, 1, 2])
def test_an_input_may_overlap_outputs(ranks, offset):
    for rank, results in enumerate(ranks.run(_overlapping, offset)):
        for call, (result, wanted) in results.items():
            assert result == wanted, (rank, call)


def _views() -> dict[str, tuple[object, object]]:
    """Conjugate and negative views in lists, where torch does not resolve them."""
    rank, n = me()
    complex_view = torch.tensor([1 + 2j]).conj()
    negative = torch._neg_view(torch.tensor([1.0]))
    assert complex_view.is_conj() and negative.is_neg()
    results = {}
    output = torch.zeros(1, dtype=torch.complex64)
    dist.reduce_scatter(output, [complex_view] * n)
    results["reduce_scatter of conjugates"] = output.item(), n * (1 - 2j)
    output = torch.zeros(1)
    dist.reduce_scatter(output, [negative] * n)
    results["reduce_scatter of negatives"] = output.item(), -1.0 * n
    into = [torch._neg_view(torch.zeros(1)) for _ in range(n)]
    dist.all_gather(into, torch.tensor([1.0 + rank]))
    results["all_gather into negatives"] = [t.item() for t in into], [1.0 + r for r in range(n)]
    return results


def test_conjugate_and_negative_views_have_their_values(ranks):
    for results in ranks.run(_views):
        for call, (result, wanted) in results.items():
            assert result == wanted, call
