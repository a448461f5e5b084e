"""Averages and gathers over directed graphs are what is written out, or the lists are refused."""

from __future__ import annotations

import random

import torch
import torch.distributed as dist

from tests.comm.operations import same, total, values
from tests.comm.seed import Communicator, error, streams
from tests.comm.worlds import on_ranks

Graph = list[list[int]]  # rank -> the ranks that it sends to


def sources_of(graph: Graph, rank: int) -> list[int]:
    return [r for r, sends in enumerate(graph) if rank in sends]


def ring(size: int) -> Graph:
    return [sorted({(r - 1) % size, (r + 1) % size} - {r}) for r in range(size)]


def star(size: int) -> Graph:
    return [list(range(1, size)), *([0] for _ in range(size - 1))]


def complete(size: int) -> Graph:
    return [[other for other in range(size) if other != r] for r in range(size)]


def random_digraph(size: int, seed: int) -> Graph:
    chooser = random.Random(seed)
    density = chooser.choice([0.2, 0.5, 0.9])
    return [
        [other for other in range(size) if other != r and chooser.random() < density]
        for r in range(size)
    ]


def _neighbors(comm: Communicator, graph: Graph, seed: int) -> None:
    size, rank = comm.size, comm.rank
    sources, destinations = sources_of(graph, rank), graph[rank]
    comm.check_neighbors(sources, destinations)
    for numel in (0, 1, 1003):
        mine, out = values(rank, numel), torch.zeros(numel)
        handle = comm.neighbor_all_reduce(mine, sources, destinations, out=out)
        comm.syncStream(handle)
        terms = [values(r, numel) for r in [rank, *sources]]
        torch.testing.assert_close(out, sum(terms) / len(terms))
        same(mine, values(rank, numel))  # F11: an input that is no output is not scaled

        chooser = random.Random(seed)
        weight = {(a, b): chooser.random() for a in range(size) for b in range(size)}
        factor = {(a, b): chooser.choice([1, 2, 0.5]) for a in range(size) for b in range(size)}
        handle = comm.neighbor_all_reduce(
            mine,
            {r: weight[r, rank] for r in reversed(sources)},
            {r: factor[rank, r] for r in destinations},
            self_weight=weight[rank, rank],
            check=False,
        )
        wanted = weight[rank, rank] * values(rank, numel)
        for r in sources:
            wanted = wanted + weight[r, rank] * factor[r, rank] * values(r, numel)
        comm.syncStream(handle)
        torch.testing.assert_close(mine, wanted)

        order = sources[::-1] if seed % 2 else sources
        rows = [numel + r for r in order]  # B-27: ranks may differ in size
        outputs = list(torch.zeros(sum(rows), 2).split(rows))
        tensor = values(rank, 2 * (numel + rank)).view(-1, 2)
        comm.syncStream(comm.neighbor_all_gather(tensor, outputs, order, destinations))
        for r, output in zip(order, outputs, strict=True):
            same(output, values(r, 2 * (numel + r)).view(-1, 2))


@on_ranks(streams)
def test_neighbor_collectives_on_graphs(comm: Communicator) -> None:
    for graph in (ring(comm.size), star(comm.size), [[] for _ in range(comm.size)]):
        _neighbors(comm, graph, 1)
    for seed in range(12 if comm.size > 1 else 0):
        _neighbors(comm, random_digraph(comm.size, seed), seed)


@on_ranks(streams, of=[1, 2, 3])
def test_neighbor_and_other_collectives_in_flight_together(comm: Communicator) -> None:
    graph, sent = ring(comm.size), []
    sources, destinations = sources_of(graph, comm.rank), graph[comm.rank]
    for i in range(30):
        tensor = values(comm.rank, 500, salt=i)
        comm.neighbor_all_reduce(tensor, sources, destinations, check=False)
        summed = values(comm.rank, 7, salt=i)
        comm.allReduce(summed)
        sent.append((tensor, summed))
    comm.synchronize()
    for i, (tensor, summed) in enumerate(sent):
        terms = [values(r, 500, salt=i) for r in sorted([comm.rank, *sources])]
        torch.testing.assert_close(tensor, sum(terms) / len(terms))
        same(summed, total(comm.size, 7, i))


@on_ranks(streams, 4)
def test_terms_are_added_in_the_order_of_the_ranks(comm: Communicator) -> None:
    others = complete(comm.size)[comm.rank]
    generator = torch.Generator().manual_seed(comm.rank)
    mine, sums = torch.randn(257, generator=generator) * 10.0**comm.rank, set()
    for _ in range(20):
        out = torch.empty(257)
        comm.syncStream(comm.neighbor_all_reduce(mine, others, others, out=out, check=False))
        sums.add(tuple(out.tolist()))
    everywhere = [set()] * comm.size
    dist.all_gather_object(everywhere, sums)
    assert len(sums) == 1 and everywhere == [sums] * comm.size  # the same bits on every rank


@on_ranks(streams)
def test_neighbor_all_reduce_of_half_precision_scalars_and_strides(comm: Communicator) -> None:
    others = complete(comm.size)[comm.rank]
    for dtype in (torch.float16, torch.bfloat16):
        tensor = torch.full((3,), 1.0 + comm.rank, dtype=dtype)
        wanted = torch.full((3,), sum(range(1, comm.size + 1)) / comm.size).to(dtype)
        comm.syncStream(comm.neighbor_all_reduce(tensor, others, others))
        same(tensor, wanted)
    scalar = torch.tensor(float(comm.rank))  # F9: tensors without dimensions
    comm.syncStream(comm.neighbor_all_reduce(scalar, others, others))
    torch.testing.assert_close(scalar.item(), (comm.size - 1) / 2)
    strided = torch.zeros(5, 2)
    strided[:, 0] = comm.rank
    comm.syncStream(comm.neighbor_all_reduce(strided[:, 0], others, others))
    torch.testing.assert_close(strided[:, 0], torch.full((5,), (comm.size - 1) / 2))
    assert not strided[:, 1].any()


@on_ranks(streams, 3)
def test_checked_lists_may_change_on_some_ranks_only(comm: Communicator) -> None:
    # Rank 0's lists stay while the others' change: a per-rank cache of checked lists would hang.
    for graph in ([[1], [0], []], [[1], [0, 2], [1]], [[1], [0], []], [[1], [0, 2], []]):
        tensor = torch.full((3,), float(comm.rank))
        sources = sources_of(graph, comm.rank)
        comm.syncStream(comm.neighbor_all_reduce(tensor, sources, graph[comm.rank]))
        terms = [comm.rank, *sources]
        torch.testing.assert_close(tensor, torch.full((3,), sum(terms) / len(terms)))


@on_ranks(streams, 3)
def test_contradicting_neighbors_are_an_error_on_every_rank(comm: Communicator) -> None:
    rank, x = comm.rank, torch.ones(4)
    right = {0: ([1], [1]), 1: ([0], [0]), 2: ([], [])}

    def expect(part: str, lists: dict[int, tuple[list[int], list[int]]], tensor=x) -> None:
        sources, destinations = lists[rank]
        text = error(ValueError, comm.neighbor_all_reduce, tensor, sources, destinations)
        assert part in text, text

    expect("rank 0 sends to rank 1, which does not name rank 0", {**right, 1: ([], [0])})
    expect("rank 1 expects a message of rank 0, which does not", {**right, 0: ([1], [])})
    expect("rank 1 sends to rank 2, which does not", {**right, 1: ([0], [0, 2])})
    expect("rank 0 sends 4 elements to rank 1, which expects 5", right, torch.ones(4 + rank))
    expect("another dtype", right, x.double() if rank == 1 else x)
    lists = {**right, 2: ([1], [])}[rank]
    assert "rank 2 expects" in error(ValueError, comm.check_neighbors, *lists)
    outputs = [torch.zeros(4 + rank) for _ in right[rank][0]]
    text = error(ValueError, comm.neighbor_all_gather, x, outputs, *right[rank])
    assert "rank 0 sends 4 elements to rank 1, which expects 5" in text
    comm.syncStream(comm.neighbor_all_reduce(x, *right[rank]))  # and nothing is left behind
    same(x, torch.ones(4))


@on_ranks(streams, 2, of=[1])
def test_neighbor_mistakes_are_one_clear_sentence(comm: Communicator) -> None:
    x, other = torch.ones(4), 1 - comm.rank
    call = comm.neighbor_all_reduce
    assert "itself" in error(ValueError, call, x, [comm.rank], [])
    assert "itself" in error(ValueError, call, x, [], [comm.rank])
    assert "no rank" in error(ValueError, call, x, [2], [])
    assert "int" in error(TypeError, call, x, ["1"], [])
    assert "twice" in error(ValueError, call, x, [other, other], [])
    assert "torch.int64" in error(TypeError, call, x.long(), [other], [other])
    assert "out is (5,)" in error(ValueError, call, x, [], [], out=torch.ones(5))
    assert "one dtype" in error(TypeError, call, x, [], [], out=x.double())
    gather = comm.neighbor_all_gather
    assert "1 sources but 0 outputs" in error(ValueError, gather, x, [], [other], [])
    assert "one dtype" in error(TypeError, gather, x, [x.int()], [other], [])
    for sources, weight in (([other], 0.5), ({other: 0.5}, None)):  # B-17
        assert "or neither" in error(ValueError, call, x, sources, [other], self_weight=weight)
