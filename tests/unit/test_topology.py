"""Topologies and schedules by the references' worked facts (x = rank number), and their checks."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import networkx as nx
import numpy as np
import pytest

from dear import bluefog, topology
from dear.errors import UserError
from dear.topology import (
    check_connected,
    check_graph,
    is_equivalent,
    is_regular,
    mixing_rate,
    rounds_to,
    spectral_gap,
)
from dear.topology.schedules import (
    DYNAMIC,
    Edge,
    Topology,
    TopologyError,
    TopologyReg,
    forever,
    inner_outer_exp2,
    inner_outer_ring,
    one_peer,
    one_peer_machines,
    schedule,
)


def averaged(graph):
    return topology.matrix(graph).T @ np.arange(graph.number_of_nodes())


@pytest.mark.parametrize(
    ("fact", "graph", "wanted"),
    [
        ("B-1", topology.ring(8), [2.6667, 1, 2, 3, 4, 5, 6, 4.3333]),
        ("B-2", topology.ring(8, "left"), [0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 3.5]),
        ("B-3", topology.ring(8, "right"), [3.5, 0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5]),
        ("B-4", topology.exponential(8), [4.25, 3.25, 2.25, 3.25, 2.25, 3.25, 4.25, 5.25]),
        ("B-5", topology.symmetric_exponential(8), [3, 2, 3, 4, 3, 4, 5, 4]),
        ("B-6", topology.mesh(8), [1.5833, 2, 3, 4.0833, 2.9167, 4, 5, 5.4167]),
        ("B-6", topology.uniform(topology.mesh(8)), [1.6667, 2, 3, 4, 3, 4, 5, 5.3333]),
        ("B-7", topology.star(8), [3.5, 0.875, 1.75, 2.625, 3.5, 4.375, 5.25, 6.125]),
        ("B-7", topology.uniform(topology.star(8)), [3.5, 0.5, 1, 1.5, 2, 2.5, 3, 3.5]),
        ("B-8", topology.complete(8), [3.5] * 8),
    ],
)
def test_one_round_of_averaging_gives_the_worked_values(fact, graph, wanted):
    assert averaged(graph) == pytest.approx(wanted, abs=1e-4), fact


def test_neighbours_and_weights_of_facts_b4_to_b7():
    exp2, symmetric = topology.exponential(8), topology.symmetric_exponential(8)
    assert topology.out_neighbors(exp2, 0) == [1, 2, 4]
    assert topology.in_neighbors(exp2, 0) == [4, 6, 7]
    assert topology.recv_weights(exp2, 0) == (0.25, {4: 0.25, 6: 0.25, 7: 0.25})
    assert topology.send_weights(exp2, 0) == (0.25, {1: 0.25, 2: 0.25, 4: 0.25})
    assert topology.out_neighbors(symmetric, 0) == [1, 4, 7]
    ours, _ = topology.recv_weights(topology.mesh(8), 0)
    assert ours == pytest.approx(0.41667, abs=1e-5)
    assert np.diag(topology.matrix(topology.star(4))) == pytest.approx([0.25, 0.75, 0.75, 0.75])


def test_powers_are_exact_b26():
    assert 243 in topology.out_neighbors(topology.exponential(300, base=3), 0)
    assert 1000 in topology.out_neighbors(topology.exponential(1001, base=10), 0)


@pytest.mark.parametrize("world_size", [*range(1, 10), 12, 16])
@pytest.mark.parametrize("name", topology.TOPOLOGIES)
def test_every_named_topology_averages_in_every_world(name, world_size):
    graph = topology.graph(name, world_size)
    check_graph(graph, world_size, doubly_stochastic=True)
    after = np.arange(world_size, dtype=float)
    for _ in range(int(2 * rounds_to(1e-3, graph)) + 1):
        after = topology.matrix(graph).T @ after
    start = np.arange(world_size) - (world_size - 1) / 2
    assert np.linalg.norm(after - after.mean()) <= 1e-3 * max(np.linalg.norm(start), 1)
    assert after.mean() == pytest.approx((world_size - 1) / 2)


def test_dynamic_schedules_of_facts_b9_b11_b12_b13():
    def first(schedule):
        return [(send[0], receive[0]) for send, receive in itertools.islice(forever(schedule), 4)]

    exp2 = topology.exponential(8)
    assert first(one_peer(exp2, 0)) == [(1, 7), (2, 6), (4, 4), (1, 7)]
    assert first(one_peer(exp2, 5))[:3] == [(6, 4), (7, 3), (1, 1)]
    assert first(one_peer_machines(4, 0)) == [(1, 3), (2, 2), (1, 3), (2, 2)]
    assert first(inner_outer_ring(6, 3, 0)) == [(3, 3), (2, 2), (1, 1), (3, 3)]
    assert first(inner_outer_exp2(16, 4, 1)) == [(2, 3), (9, 9), (3, 0), (0, 2)]
    assert first(inner_outer_exp2(8, 4, 0)) == [(4, 4), (3, 2), (1, 3), (2, 1)]


@pytest.mark.parametrize(
    ("name", "world_size", "local_size"),
    [(name, *shape) for name in DYNAMIC for shape in ((6, 3), (8, 4), (15, 5), (24, 8))]
    + [("one-peer-exp", n, 1) for n in (1, 2, 3, 5, 7)],
)
def test_what_one_sends_another_expects_b14(name, world_size, local_size):
    schedules = [schedule(name, world_size, rank, local_size) for rank in range(world_size)]
    for step in range(3 * world_size):
        peers = [at(step) for at in schedules]
        sent = {(rank, to) for rank, (send, _) in enumerate(peers) for to in send}
        wanted = {(source, rank) for rank, (_, receive) in enumerate(peers) for source in receive}
        assert sent == wanted
        assert all(source != to for source, to in sent)


@pytest.mark.parametrize("graph", [topology.star(5), topology.mesh(6)])
def test_one_peer_of_an_irregular_graph_pairs_up_too_b14(graph):
    world_size = graph.number_of_nodes()
    for step in range(12):
        peers = [one_peer(graph, rank)(step) for rank in range(world_size)]
        sent = {(rank, to) for rank, (send, _) in enumerate(peers) for to in send}
        assert sent == {(s, rank) for rank, (_, receive) in enumerate(peers) for s in receive}


def test_regular_equivalent_and_gap():
    assert is_regular(topology.exponential(8)) and not is_regular(topology.star(8))
    assert is_equivalent(topology.ring(2), topology.complete(2))
    weighted, plain = topology.mesh(8), topology.uniform(topology.mesh(8))
    assert not is_equivalent(weighted, plain)
    assert not is_equivalent(weighted, None) and is_equivalent(None, None)
    assert spectral_gap(topology.complete(8)) == pytest.approx(1)
    assert mixing_rate(topology.ring(4)) == pytest.approx(1 / 3)
    assert rounds_to(1e-3, topology.ring(4)) == pytest.approx(np.log(1e-3) / np.log(1 / 3))
    assert rounds_to(0.5, topology.ring(4)) == 1.0


def test_splitting_keeps_the_sum_of_a_directed_irregular_graph():
    graph = topology.splitting(nx.DiGraph([(0, 1), (1, 2), (2, 0), (0, 2), (2, 3), (3, 0)]))
    assert topology.matrix(graph).sum(axis=1) == pytest.approx(1)
    assert topology.send_weights(graph, 0) == (pytest.approx(1 / 3), {1: 1 / 3, 2: 1 / 3})


def make(name, world_size, local=1, rank=0):
    return TopologyReg.make(name, world_size=world_size, rank=rank, local_world_size=local)


def _without(rank_pair):
    graph = topology.ring(4)
    graph.remove_edge(*rank_pair)
    return graph


@pytest.mark.parametrize(
    ("refused", "said"),
    [
        (lambda: topology.graph("rng", 4), "did you mean 'ring'"),
        (lambda: topology.ring(4, "up"), "unknown ring style"),
        (lambda: topology.ring(0), "at least 1"),
        (lambda: topology.star(4, 4), "center 4 is not in a world of 4"),
        (lambda: topology.mesh(7, (2, 3)), "does not hold 7"),
        (lambda: topology.exponential(4, 1), "at least 2"),
        (lambda: topology.metropolis([(0, 9)], 4), "rank 9"),
        (lambda: topology.from_matrix(np.ones((2, 3))), "square"),
        (lambda: check_graph(topology.ring(3), 4), "ranks 0 to 3"),
        (lambda: check_graph("ring", 4), "networkx.DiGraph"),
        (lambda: check_graph(_without((0, 1)), 4), "rank 1 sum to 0.666667"),
        (lambda: check_graph(topology.from_matrix([[1.5, 0], [-0.5, 1]]), 2), "not negative"),
        (lambda: check_graph(topology.from_matrix(np.eye(2)), 2), "ever reaches rank 1"),
        (lambda: check_connected(nx.DiGraph([(0, 1)])), "no value of rank 1 ever reaches rank 0"),
        (
            lambda: check_graph(topology.uniform(topology.star(4)), 4, doubly_stochastic=True),
            "send weights of rank 0 sum to",
        ),
        (lambda: check_graph(topology.ring(4, "left"), 4, symmetric=True), "must be symmetric"),
        (lambda: rounds_to(2.0, topology.ring(4)), "between 0 and 1"),
        (lambda: inner_outer_ring(8, 2, 0), "at least 3 ranks per machine"),
        (lambda: inner_outer_exp2(9, 4, 0), "2 machines of 4"),
        (lambda: inner_outer_exp2(4, 4, 0), "at least 2 machines"),
        (lambda: one_peer_machines(1, 0), "at least 2"),
        (lambda: schedule("one-peer", 4, 0, 1), "did you mean 'one-peer-exp'"),
        (lambda: make("ring", 3), "even number of ranks, not 3"),
        (lambda: make("one-peer-exp", 6), "2^k ranks (2, 4, 8, 16, ...), not 6"),
        (lambda: make("alternating-exp-ring", 6, 2), "2^k nodes (2, 4, 8, 16, ...), not 3"),
        (lambda: make("alternating-exp-ring", 4, 4), "not 1"),
        (lambda: make("complete", 4, 3), "4 ranks cannot be split into nodes of 3"),
        (lambda: make("rign", 4), "did you mean 'ring'"),
    ],
)
def test_bad_input_is_refused_in_one_line(refused, said):
    with pytest.raises(UserError) as caught:
        refused()
    assert said in str(caught.value) and "\n" not in str(caught.value)


def groups(topology, step):
    return sorted((tuple(edge.ranks), edge.weight) for edge in topology.edges_at(step))


def pairs(text):
    return [((int(pair[0]), int(pair[1])), 0.5) for pair in text.split()]


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
        ([ALL, [Edge([0, 1], 0.5), Edge([1, 2, 3], 0.4)]], "step 1: rank 1 appears twice"),
        ([[Edge([0, 1, 1, 2, 3], 0.2)]], "rank 1 appears twice"),
        ([ALL, [Edge([0, 1], 0.5)]], "step 1: rank 2, 3 is in no edge"),
        ([[Edge([0, 1, 2, 4], 0.25)]], "rank 4 is not in a world of 4"),
        ([[Edge([0, 1, 2, 3], 1.5)]], "weight 1.5"),
        ([[Edge([0, 1, 2, 3], float("nan"))]], "weight nan"),
        ([ALL, [Edge([0, 1, 2], 0.3), Edge([3], 0.5)]], "rank 3 is alone"),
        ([[Edge([0, 1], 0.5), Edge([2, 3], 0.5)]], "connects rank 0 and rank 2"),
        ([[Edge([0, 1, 2, 3], 1.0)]], "never agree"),
        ([[Edge([], 0.5), *ALL]], "has no ranks"),
        ([], "at least one step"),
        *(
            (edges, r"^topology topology: _get_topo_edges\(\) must return a list of steps.*, got ")
            for edges in (None, ALL, [[([0, 1, 2, 3], 0.25)]], [[Edge(4, 0.25)]], [None])
        ),
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
        with pytest.raises(TopologyError, match="exists already"):
            TopologyReg.register(name)(own([ALL]))
    finally:
        del TopologyReg.registry[name]
    with pytest.raises(TopologyError, match="subclass of Topology"):
        TopologyReg.register("none")(dict)


def test_the_table_of_topologies_in_the_documents_has_the_gaps_of_today():
    text = (Path(__file__).parents[2] / "docs" / "decentralized.md").read_text()
    lines = re.findall(r"^\| `([\w-]+)` \| .* \| ([\d., ]+) \|$", text, re.MULTILINE)
    names = ["complete", "exp2", "mesh", "ring", "star", "symmetric-exp"]
    assert sorted(name for name, _ in lines) == names
    for name, gaps in lines:
        today = [f"{spectral_gap(topology.graph(name, size)):.3f}" for size in (8, 16, 32)]
        assert gaps.split(", ") == today, name


@pytest.mark.parametrize("size", [8, 16])
def test_one_peer_of_a_power_of_two_reaches_the_mean_after_log2_n_rounds_b10(size):
    at, values = [schedule("one-peer-exp", size, rank, 1) for rank in range(size)], np.eye(size)
    for step in range(size.bit_length() - 1):
        sources = [at[rank](step)[1] for rank in range(size)]
        assert all(len(item) == 1 for item in sources)
        values = np.array([(values[r] + values[sources[r][0]]) / 2 for r in range(size)])
    assert values == pytest.approx(np.full((size, size), 1 / size))


def test_machines_meet_at_distances_of_powers_of_two():
    peers = bluefog.GetExp2DynamicSendRecvMachineRanks(8, 2, self_rank=2, local_rank=0)
    assert [next(peers) for _ in range(3)] == [([2], [0]), ([3], [3]), ([2], [0])]
