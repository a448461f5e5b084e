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

T = bf.topology_util


def _windows():
    bf.set_topology(T.ExponentialTwoGraph(4))
    seen = {}
    tensor = x()
    assert bf.win_create(tensor, "w") is True
    seen["kept"] = bf.set_topology(T.RingGraph(4)), bf.load_topology().number_of_edges()
    seen["start"] = bf.win_update("w", clone=True)[0].item()
    seen["created"] = bf.get_win_version("w")
    bf.barrier()
    bf.win_put(x(), "w")
    bf.barrier()
    seen["put"] = bf.get_win_version("w")
    seen["average"] = bf.win_update("w", clone=True)[0].item()
    seen["updated"] = bf.get_win_version("w")
    bf.barrier()
    bf.win_free("w")
    bf.win_create(tensor, "w")
    bf.win_accumulate(x(), "w")
    bf.barrier()
    seen["sum"] = bf.win_update("w")[0].item()
    seen["in place"] = tensor[0].item()
    seen["names"] = bf.get_current_created_window_names()
    bf.barrier()
    bf.win_free()
    return seen


def test_windows_b18_to_b21_and_b24(bluefog_pool):
    graph = exponential(4)
    wanted = expected(graph)
    for rank, seen in enumerate(bluefog_pool.run(_windows)):
        sources = sorted([(rank - 1) % 4, (rank - 2) % 4])
        assert seen["kept"] == (False, 12)  # with its edges to itself
        assert seen["start"] == pytest.approx(rank)
        assert seen["created"] == seen["updated"] == dict.fromkeys(sources, 0)
        assert seen["put"] == dict.fromkeys(sources, 1)
        assert seen["average"] == pytest.approx(wanted[rank])
        accumulated = rank + sum(sources) / 3
        assert seen["sum"] == seen["in place"] == pytest.approx(accumulated)
        assert seen["names"] == ["w"]


def _zero():
    bf.set_topology(T.RingGraph(4))
    bf.win_create(x() + 1, "z", zero_init=True)
    weights = dict.fromkeys(bf.in_neighbor_ranks(), 0.25)
    value = bf.win_update("z", 0.5, weights, clone=True)[0].item()
    bf.barrier()
    bf.win_get("z")
    got = bf.win_update("z", 0.5, weights, clone=True)[0].item()
    bf.barrier()
    read = [bf.win_read_neighbor("z", rank)[0].item() for rank in bf.in_neighbor_ranks()]
    assert read == [rank + 1 for rank in bf.in_neighbor_ranks()]
    with pytest.raises(UserError, match="sends to this rank"):
        bf.win_read_neighbor("z", bf.rank())
    bf.barrier()
    bf.win_accumulate(x() + 1, "z", dst_weights={(bf.rank() + 1) % 4: 2.0}, require_mutex=True)
    bf.barrier()
    collected = bf.win_update_then_collect("z")[0].item()
    again = bf.win_update_then_collect("z")[0].item()
    bf.barrier()
    bf.win_free("z")
    return value, got, collected, again


def test_zero_init_get_and_collect_b18_b23(bluefog_pool):
    for rank, (value, got, collected, again) in enumerate(bluefog_pool.run(_zero)):
        left, right = (rank - 1) % 4 + 1, (rank + 1) % 4 + 1
        assert value == 0.5 * (rank + 1)
        assert got == 0.5 * (rank + 1) + 0.25 * (left + right)
        assert collected == again == rank + 1 + left + right + 2 * left


def _associated_p(sender):
    bf.set_topology(T.RingGraph(4))
    bf.turn_on_win_ops_with_associated_p()
    bf.win_create(x(), "p", zero_init=True)
    if bf.rank() == sender:
        neighbours = dict.fromkeys(bf.out_neighbor_ranks(), 0.5)
        bf.win_accumulate(x(), "p", self_weight=0.5, dst_weights=neighbours)
    bf.barrier()
    bf.win_update_then_collect("p")
    p = bf.win_associated_p("p")
    bf.barrier()
    bf.win_free("p")
    bf.turn_off_win_ops_with_associated_p()
    return p


def test_associated_p_b22(bluefog_pool):
    assert bluefog_pool.run(_associated_p, 1) == [1.5, 0.5, 1.5, 1.0]


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


def _mutex():
    bf.set_topology(T.FullyConnectedGraph(4))
    bf.win_create(torch.zeros(1), "m", zero_init=True)
    held = torch.zeros(1)
    for _ in range(5):
        with bf.win_mutex("m", ranks=[0]):
            bf.win_accumulate(torch.ones(1), "m", dst_weights=[0]) if bf.rank() else None
    bf.barrier()
    if bf.rank() == 0:
        with bf.win_mutex("m", for_self=True, ranks=[]):
            held = bf.win_update_then_collect("m", require_mutex=False).clone()
    bf.barrier()
    bf.win_free("m")
    return held.item()


def test_mutexes_and_collecting(bluefog_pool):
    assert bluefog_pool.run(_mutex)[0] == 15.0


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
