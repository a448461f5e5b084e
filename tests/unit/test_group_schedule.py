"""Schedules of groups: Decent-DP's worked facts, and what a schedule of one's own must keep to."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dear.errors import UserError
from dear.topology.schedules import Edge, Topology, TopologyError, TopologyReg


def make(name, world_size, local=1, rank=0):
    return TopologyReg.make(name, world_size=world_size, rank=rank, local_world_size=local)


def groups(topology, step):
    return sorted((tuple(edge.ranks), edge.weight) for edge in topology.edges_at(step))


def pairs(text):
    return [((int(pair[0]), int(pair[1])), 0.5) for pair in text.split()]


def mixed(topology, step, values):
    """What the groups of a step make of one number per rank."""
    result = list(values)
    for edge in topology.edges_at(step):
        for rank in edge.ranks:
            others = sum(values[other] for other in edge.ranks if other != rank)
            share = (1 - edge.weight) / max(1, len(edge.ranks) - 1)
            result[rank] = edge.weight * values[rank] + share * others
    return result


def test_p1_one_peer_exp_of_eight():
    topology = make("one-peer-exp", 8, rank=5)
    assert topology.period == 3
    assert groups(topology, 0) == pairs("01 23 45 67")
    assert groups(topology, 1) == pairs("02 13 46 57")
    assert groups(topology, 2) == pairs("04 15 26 37")
    assert [topology.get_edge(step).ranks for step in range(4)] == [[4, 5], [5, 7], [1, 5], [4, 5]]


def test_p2_ring_of_eight_and_of_two():
    assert groups(make("ring", 8), 0) == pairs("01 23 45 67")
    assert groups(make("ring", 8), 1) == pairs("07 12 34 56")
    assert groups(make("ring", 2), 0) == groups(make("ring", 2), 1) == pairs("01")


def test_p3_alternating_exp_ring():
    four = make("alternating-exp-ring", 8, local=2)
    half, quarter = 0.5, 0.25
    assert groups(four, 0) == [((0, 1), half), ((2, 3), half), ((4, 5, 6, 7), quarter)]
    assert groups(four, 1) == [((0, 1, 2, 3), quarter), ((4, 5), half), ((6, 7), half)]
    assert groups(four, 2) == [((0, 1), half), ((2, 3, 6, 7), quarter), ((4, 5), half)]
    assert groups(four, 3) == [((0, 1, 4, 5), quarter), ((2, 3), half), ((6, 7), half)]
    two = make("alternating-exp-ring", 8, local=4)
    assert groups(two, 0) == [((0, 1, 2, 3), quarter), ((4, 5, 6, 7), quarter)]
    assert groups(two, 1) == [(tuple(range(8)), 0.125)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_p4_complete_in_any_world(world_size):
    topology = make("complete", world_size)
    assert topology.period == 1
    assert groups(topology, 5) == [(tuple(range(world_size)), 1 / world_size)]


@pytest.mark.parametrize("name", sorted(TopologyReg.registry))
def test_p4_alone_every_topology_does_nothing(name):
    assert groups(make(name, 1), 0) == [((0,), 1.0)]


def test_p5_mixing_with_one_peer_exp_reaches_the_mean():
    topology = make("one-peer-exp", 8)
    values = mixed(topology, 1, list(range(8)))
    assert values == [1, 2, 1, 2, 5, 6, 5, 6]
    values = mixed(topology, 2, values)
    assert values == [3, 4, 3, 4, 3, 4, 3, 4]
    assert mixed(topology, 0, values) == [3.5] * 8


@pytest.mark.parametrize(
    ("name", "world_size", "local", "said"),
    [
        ("ring", 3, 1, "even number of ranks, not 3"),
        ("one-peer-exp", 6, 1, "2^k ranks (2, 4, 8, 16, ...), not 6"),
        ("alternating-exp-ring", 6, 2, "2^k nodes (2, 4, 8, 16, ...), not 3"),
        ("alternating-exp-ring", 4, 4, "not 1"),
        ("complete", 4, 3, "4 ranks do not make nodes of 3"),
        ("rign", 4, 1, "did you mean 'ring'"),
    ],
)
def test_worlds_that_a_topology_cannot_have(name, world_size, local, said):
    with pytest.raises(UserError) as caught:
        make(name, world_size, local)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def own(edges):
    """A topology of one's own with these edges, of two steps with an edge between all in one."""

    class Mine(Topology):
        def _get_topo_edges(self):
            return edges

    return Mine


ALL = [Edge([0, 1, 2, 3], 0.25)]


@pytest.mark.parametrize(
    ("edges", "said"),
    [
        ([ALL, [Edge([0, 1], 0.5), Edge([1, 2, 3], 0.4)]], "step 1: rank 1 is there twice"),
        ([[Edge([0, 1, 1, 2, 3], 0.2)]], "rank 1 is there twice"),
        ([ALL, [Edge([0, 1], 0.5)]], "step 1: rank 2, 3 is in no edge"),
        ([[Edge([0, 1, 2, 4], 0.25)]], "rank 4 is none of the 4"),
        ([[Edge([0, 1, 2, 3], 1.5)]], "weight 1.5"),
        ([[Edge([0, 1, 2, 3], float("nan"))]], "weight nan"),
        ([ALL, [Edge([0, 1, 2], 0.3), Edge([3], 0.5)]], "rank 3 is alone"),
        ([[Edge([0, 1], 0.5), Edge([2, 3], 0.5)]], "between rank 0 and rank 2"),
        ([[Edge([0, 1, 2, 3], 1.0)]], "train apart"),
        ([[Edge([], 0.5), *ALL]], "without ranks"),
        ([], "no steps"),
    ],
)
def test_p6_what_is_wrong_with_a_topology_of_ones_own_is_said(edges, said):
    with pytest.raises(ValueError, match=said) as caught:
        own(edges)(1, world_size=4, rank=0)
    assert isinstance(caught.value, UserError)


def test_a_registered_topology_is_known_by_its_name_once():
    name = "pairs-then-all"
    try:
        TopologyReg.register(name)(own([[Edge([3, 0], 0.3), Edge([2, 1], 0.6)], ALL]))
        topology = make(name, 4, rank=3)
        assert topology.get_edge(0) == Edge([0, 3], 0.3)
        with pytest.raises(TopologyError, match="registered already"):
            TopologyReg.register(name)(own([ALL]))
    finally:
        del TopologyReg.registry[name]
    with pytest.raises(TopologyError, match="subclass of Topology"):
        TopologyReg.register("none")(dict)


def test_schedules_need_no_torch():
    code = "import sys, dear.topology.schedules; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
