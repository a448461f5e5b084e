"""Windows of dear.bluefog by their worked facts: x is the rank number, on four ranks."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import networkx as nx
import pytest
import torch

import dear.bluefog as bf
from dear.bluefog import windows
from dear.errors import UserError
from dear.topology import exponential
from tests.contract.test_bluefog import expected, x
from tests.ranks import on_ranks

T = bf.topology_util


@on_ranks(4, "bluefog")
def test_windows_b18_to_b21_and_b24():
    bf.set_topology(T.ExponentialTwoGraph(4))
    rank, tensor = bf.rank(), x()
    sources = sorted([(rank - 1) % 4, (rank - 2) % 4])
    assert bf.win_create(tensor, "w") is True
    kept = bf.set_topology(T.RingGraph(4)), bf.load_topology().number_of_edges()
    assert kept == (False, 12)  # with its edges to itself
    assert bf.win_update("w", clone=True)[0].item() == pytest.approx(rank)
    assert bf.get_win_version("w") == dict.fromkeys(sources, 0)
    bf.barrier()
    bf.win_put(x(), "w")
    bf.barrier()
    assert bf.get_win_version("w") == dict.fromkeys(sources, 1)
    assert bf.win_update("w", clone=True)[0].item() == pytest.approx(expected(exponential(4))[rank])
    assert bf.get_win_version("w") == dict.fromkeys(sources, 0)
    bf.barrier()
    bf.win_free("w")
    bf.win_create(tensor, "w")
    bf.win_accumulate(x(), "w")
    bf.barrier()
    assert bf.win_update("w")[0].item() == tensor[0].item()
    assert tensor[0].item() == pytest.approx(rank + sum(sources) / 3)
    assert bf.get_current_created_window_names() == ["w"]
    bf.barrier()
    bf.win_free()


@on_ranks(4, "bluefog")
def test_zero_init_get_and_collect_b18_b23():
    bf.set_topology(T.RingGraph(4))
    bf.win_create(x() + 1, "z", zero_init=True)
    weights = dict.fromkeys(bf.in_neighbor_ranks(), 0.25)
    rank, left, right = bf.rank(), (bf.rank() - 1) % 4 + 1, (bf.rank() + 1) % 4 + 1
    half = 0.5 * (rank + 1)
    assert bf.win_update("z", 0.5, weights, clone=True)[0].item() == half
    bf.barrier()
    bf.win_get("z")
    assert bf.win_update("z", 0.5, weights, clone=True)[0].item() == half + 0.25 * (left + right)
    bf.barrier()
    read = [bf.win_read_neighbor("z", rank)[0].item() for rank in bf.in_neighbor_ranks()]
    assert read == [rank + 1 for rank in bf.in_neighbor_ranks()]
    with pytest.raises(UserError, match="sends to this rank"):
        bf.win_read_neighbor("z", bf.rank())
    bf.barrier()
    bf.win_accumulate(x() + 1, "z", dst_weights={(rank + 1) % 4: 2.0}, require_mutex=True)
    bf.barrier()
    collected = [bf.win_update_then_collect("z")[0].item() for _ in range(2)]
    assert collected == [rank + 1 + left + right + 2 * left] * 2
    bf.barrier()
    bf.win_free("z")


@on_ranks(4, "bluefog")
def test_associated_p_b22():
    bf.set_topology(T.RingGraph(4))
    bf.turn_on_win_ops_with_associated_p()
    bf.win_create(x(), "p", zero_init=True)
    if bf.rank() == 1:
        neighbours = dict.fromkeys(bf.out_neighbor_ranks(), 0.5)
        bf.win_accumulate(x(), "p", self_weight=0.5, dst_weights=neighbours)
    bf.barrier()
    bf.win_update_then_collect("p")
    assert bf.win_associated_p("p") == (1.5, 0.5, 1.5, 1.0)[bf.rank()]
    bf.barrier()
    bf.win_free("p")
    bf.turn_off_win_ops_with_associated_p()


@on_ranks(4, "bluefog")
def test_to_read_a_neighbour_changes_no_p():
    bf.set_topology(T.RingGraph(4))
    bf.turn_on_win_ops_with_associated_p()
    bf.win_create(x(), "p", zero_init=True)
    bf.win_accumulate(x() + 1, "p", self_weight=0.5, dst_weights={(bf.rank() + 1) % 4: 0.5})
    bf.barrier()
    left, right = (bf.rank() - 1) % 4, (bf.rank() + 1) % 4
    before = bf.get_win_version("p")
    read = {rank: bf.win_read_neighbor("p", rank, require_mutex=True) for rank in (left, right)}
    assert read[left].tolist() == [(left + 1) / 2] * 3 and not read[right].any()
    assert before[left] == 1 and not any(bf.get_win_version("p").values())
    assert bf.win_associated_p("p") == 0.5
    bf.win_update_then_collect("p")
    assert bf.win_associated_p("p") == 1.0
    bf.barrier()
    bf.win_free("p")
    bf.turn_off_win_ops_with_associated_p()


def _push_sum():
    graph = nx.DiGraph([(0, 1), (1, 2), (2, 3), (3, 0), (0, 2)])
    bf.set_topology(graph)
    bf.turn_on_win_ops_with_associated_p()
    value = torch.full((4,), float(bf.rank()), dtype=torch.float64)
    bf.win_create(value, "s", zero_init=True)
    share = 1 / (len(bf.out_neighbor_ranks()) + 1)
    targets = dict.fromkeys(bf.out_neighbor_ranks(), share)
    for turn in range(60):
        bf.win_accumulate(value, "s", self_weight=share, dst_weights=targets)
        bf.win_update_then_collect("s")
        if turn % 2:
            bf.barrier()  # on a busy machine a rank might be done before another has begun
    bf.barrier()
    bf.win_update_then_collect("s")
    p = bf.win_associated_p("s")
    bf.barrier()
    mean = (value / p)[0].item()
    bf.win_free("s")
    bf.turn_off_win_ops_with_associated_p()
    return mean, p


def test_push_sum_reaches_the_mean_over_a_directed_irregular_graph_b25(bluefog_pool):
    results = bluefog_pool.run(_push_sum)
    assert sum(p for _, p in results) == pytest.approx(4)
    assert [mean for mean, _ in results] == pytest.approx([1.5] * 4, abs=1e-3)


@on_ranks(4, "bluefog")
def test_mutexes_and_collecting():
    bf.set_topology(T.FullyConnectedGraph(4))
    bf.win_create(torch.zeros(1), "m", zero_init=True)
    for _ in range(5):
        with bf.win_mutex("m", ranks=[0]):
            bf.win_accumulate(torch.ones(1), "m", dst_weights=[0]) if bf.rank() else None
    bf.barrier()
    if bf.rank() == 0:
        with bf.win_mutex("m", for_self=True, ranks=[]):
            assert bf.win_update_then_collect("m", require_mutex=False).item() == 15.0
    bf.barrier()
    bf.win_free("m")


def test_mutexes_are_those_of_the_out_neighbours_unless_said(monkeypatch):
    held = []

    @contextlib.contextmanager
    def mutex(ranks):
        held.append(ranks)
        yield

    slots = SimpleNamespace(mutex=mutex)
    window = SimpleNamespace(targets={3: None, 1: None}, rank=0, slots=slots)
    monkeypatch.setattr(windows, "named", lambda name: SimpleNamespace(window=window))
    for how in ({}, {"for_self": True}, {"ranks": [2]}, {"ranks": [], "for_self": True}):
        with bf.win_mutex("w", **how):
            pass
    assert held == [[3, 1], [3, 1, 0], [2], [0]]
