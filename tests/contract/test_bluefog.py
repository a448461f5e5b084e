"""dear.bluefog by its worked facts: x is the rank number, on four ranks."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import networkx as nx
import pytest
import torch

import dear.bluefog as bf
from common.launch.ranks import Ranks
from dear.bluefog import collectives
from dear.bluefog.job import job
from dear.comm.neighbors import Round
from dear.errors import UserError
from dear.topology import matrix, uniform
from tests.contract.loops import message
from tests.ranks import RankPool, on_ranks

T = bf.topology_util


def x(numel=3):
    return torch.full((numel,), float(bf.rank()))


def first(values):
    return [value.flatten()[0].item() for value in values]


def expected(graph):
    return list(matrix(graph).T @ range(4))


@pytest.mark.parametrize(
    ("graph", "weighted"),
    [
        (T.RingGraph(4), False),
        (T.RingGraph(4, 1), False),
        (T.RingGraph(4, 2), True),
        (T.ExponentialTwoGraph(4), True),
        (T.SymmetricExponentialGraph(4), False),
        (T.MeshGrid2DGraph(4), True),
        (T.StarGraph(4), True),
        (T.StarGraph(4), False),
        (T.FullyConnectedGraph(4), False),
    ],
)
@on_ranks(4, "bluefog")
def test_neighbor_allreduce_averages_over_the_topology_b1_to_b8(graph, weighted):
    assert bf.set_topology(graph, is_weighted=weighted)
    kept = x()
    wanted = expected(graph if weighted else uniform(graph))[bf.rank()]
    assert first([bf.neighbor_allreduce(kept)]) == pytest.approx([wanted])
    assert torch.equal(kept, x())


@on_ranks(4, "bluefog")
def test_is_weighted_takes_effect_with_an_equal_graph_b26():
    graph = T.StarGraph(4)
    bf.set_topology(graph, is_weighted=True)
    before = bf.neighbor_allreduce(x())
    bf.set_topology(graph, is_weighted=False)
    wanted = [expected(graph)[bf.rank()], expected(uniform(graph))[bf.rank()]]
    assert first([before, bf.neighbor_allreduce(x())]) == pytest.approx(wanted)


@on_ranks(4, "bluefog")
def test_weights_and_edges_of_a_call_b10_b15_b16():
    bf.set_topology(T.ExponentialTwoGraph(4))
    value, peers = x(), T.GetDynamicOnePeerSendRecvRanks(bf.load_topology(), bf.rank())
    for _ in range(2):
        send, receive = next(peers)
        value = bf.neighbor_allreduce(
            value, self_weight=0.5, src_weights=dict.fromkeys(receive, 0.5), dst_weights=send
        )
    before, after = (bf.rank() - 1) % 4, (bf.rank() + 1) % 4
    alone = {"self_weight": 0.0}
    moved = bf.neighbor_allreduce(x(), **alone, src_weights={before: 1.0}, dst_weights=[after])
    with pytest.raises(ValueError, match="give both or neither"):
        bf.neighbor_allreduce(x(), self_weight=0.5)
    with pytest.raises(UserError, match="neighbor_weights is the older name of src_weights"):
        bf.neighbor_allreduce(x(), src_weights={}, neighbor_weights={})
    older = {"neighbor_weights": {before: 1.0}, "send_neighbors": [after]}
    with pytest.raises(UserError, match="rank"):  # nobody receives what ranks send
        wrong = {"neighbor_weights": {before: 1.0}, "send_neighbors": [before]}
        bf.neighbor_allreduce(x(), **alone, **wrong)
    older = bf.neighbor_allreduce(x(), **alone, **older)
    assert torch.equal(older, moved)
    assert bf.broadcast_object({"rank": bf.rank()}, root_rank=2) == {"rank": 2}
    others = [rank for rank in range(4) if rank != bf.rank()]
    more = {"src_weights": dict.fromkeys(others, 0.5), "dst_weights": dict.fromkeys(others, 2.0)}
    product = bf.neighbor_allreduce(x(), **alone, **more)
    partial = bf.neighbor_allreduce(x(), self_weight=0.25, src_weights={before: 0.75})
    wanted = [1.5, before, 6 - bf.rank(), 0.25 * bf.rank() + 0.75 * before]
    assert first([value, moved, product, partial]) == wanted


@on_ranks(4, "bluefog")
def test_any_shape_and_half_precision():
    bf.set_topology(T.FullyConnectedGraph(4))
    scalar = bf.neighbor_allreduce(torch.tensor(float(bf.rank())))
    image = torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last)
    same = bf.neighbor_allreduce(image)
    half = bf.neighbor_allreduce(torch.full((5,), float(bf.rank()), dtype=torch.bfloat16))
    assert scalar.dim() == 0 and scalar.item() == 1.5
    assert torch.equal(same, image) and half[0].item() == 1.5


@on_ranks(4, "bluefog")
def test_collectives_of_all_ranks_and_of_a_machine():
    rank = bf.rank()
    handle = bf.allreduce_nonblocking(x())
    mean = bf.synchronize(handle)
    in_place = x()
    bf.allreduce_(in_place, average=False)
    local = bf.allreduce(x(), is_hierarchical_local=True)
    rows = bf.allgather(torch.full((rank + 1, 2), float(rank)))
    copied = bf.broadcast(x(), 2)
    done = bf.allreduce_nonblocking(x())
    bf.barrier()
    until = time.monotonic() + 10
    while not bf.poll(done):
        assert time.monotonic() < until
    bf.wait(done)
    wanted = [1.5, 6.0, (0.5, 0.5, 2.5, 2.5)[rank], 2.0]
    assert first([mean, in_place, local, copied]) == wanted
    assert rows[:, 1].tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 2.0, 3.0, 3.0, 3.0, 3.0]


@on_ranks(4, "bluefog")
def test_neighbor_allgather_in_order_b27():
    bf.set_topology(T.ExponentialTwoGraph(4))
    rank = bf.rank()
    rows = bf.neighbor_allgather(torch.full((rank + 1,), float(rank)))
    peers = [(rank + 1) % 4, (rank - 1) % 4]
    own = torch.full((1, 2), float(rank))
    chosen = bf.neighbor_allgather(own, src_ranks=peers, dst_ranks=peers)
    sources = sorted([(rank - 1) % 4, (rank - 2) % 4])
    assert rows.tolist() == [float(s) for s in sources for _ in range(s + 1)]
    assert chosen[:, 0].tolist() == peers


@on_ranks(4, "bluefog")
def test_hierarchical_average_b29():
    bf.set_machine_topology(T.RingGraph(2))
    rank, facts = bf.rank(), (bf.local_size(), bf.local_rank(), bf.machine_size())
    assert (*facts, bf.machine_rank()) == (2, rank % 2, 2, rank // 2)
    value = bf.hierarchical_neighbor_allreduce(x(5))
    weighted = bf.hierarchical_neighbor_allreduce(
        x(5),
        self_weight=0.75,
        src_machine_weights={1 - bf.machine_rank(): 0.25},
        dst_machine_weights=[1 - bf.machine_rank()],
        enable_topo_check=True,
    )
    assert bf.in_neighbor_machine_ranks() == [1 - rank // 2]
    assert first([value, weighted]) == [1.5, (1.0, 2.0)[rank // 2]]


@on_ranks(4, "bluefog")
def test_pair_gossip_takes_two():
    if bf.rank() in (1, 2):
        mean = bf.pair_gossip(x(), 3 - bf.rank())
        weighted = bf.pair_gossip(x(), 3 - bf.rank(), self_weight=0.75, pair_weight=0.25)
        assert first([mean, weighted]) == [1.5, {1: 1.25, 2: 1.75}[bf.rank()]]


@on_ranks(4, "bluefog")
def test_peers_are_inferred_with_weights_of_irregular_graphs():
    rank = bf.rank()
    targets = [1, 2] if rank == 0 else [0]
    sources, weights = bf.InferSourceFromDestinationRanks(targets, True)
    assert sources == [[1, 2, 3], [0], [0], []][rank]
    assert bf.InferDestinationFromSourceRanks(sources) == targets
    assert weights.sum(axis=0).tolist() == pytest.approx([1.0] * 4)
    assert weights[0].tolist() == pytest.approx([0.25, 0.5, 0.5, 0.0])


def _next(steps=1):
    return (bf.rank() + steps) % 4


def _lone():
    graph = nx.DiGraph()
    graph.add_nodes_from(range(4))
    return graph


def _uneven():
    graph = T.RingGraph(4)
    graph.remove_edge(0, 1)
    return graph


INTEGERS = torch.ones(2, dtype=torch.int64)
REFUSED = [
    (lambda: bf.neighbor_allreduce(x(), self_weight=0.5), "self_weight is given without src_"),
    (lambda: bf.neighbor_allreduce(x(), src_weights={0: 0.5}), "src_weights is given without self"),
    (lambda: bf.neighbor_allreduce(x(), dst_weights=[0]), "dst_weights are given without"),
    (
        lambda: bf.neighbor_allreduce(x(), self_weight=0.5, src_weights={_next(2): 0.5}),
        "does not send to this rank",
    ),
    (
        lambda: bf.neighbor_allreduce(x(), self_weight=0.5, src_weights={}, dst_weights=[_next()]),
        "contradict each other",
    ),
    (lambda: bf.neighbor_allreduce(INTEGERS), "floating-point"),
    (lambda: bf.neighbor_allgather(x(), src_ranks=[0]), "together"),
    (lambda: bf.pair_gossip(x(), bf.rank()), "is this rank; give another"),
    (lambda: bf.win_create(x(), "once"), "already"),
    (lambda: bf.win_put(x(), "onec"), "did you mean 'once'"),
    (lambda: bf.win_put(torch.ones(7), "once"), "values of shape (3,)"),
    (lambda: bf.win_put(x(), "once", dst_weights=[_next(2)]), "cannot send to rank"),
    (lambda: bf.win_update("once", self_weight=0.5), "without"),
    (lambda: bf.win_create(INTEGERS, "ints"), "floating-point"),
    (lambda: bf.synchronize(10**9), "no operation"),
    (lambda: bf.win_free("once"), ""),  # a topology changes without windows only
    (lambda: bf.set_topology(_lone()), "ever reaches"),
    (lambda: bf.set_topology(T.RingGraph(3)), "ranks 0 to 3"),
    (lambda: bf.set_topology(_uneven(), is_weighted=True), "sum to"),
    (
        lambda: bf.set_topology(T.RingGraph(4) if bf.rank() else T.StarGraph(4)),
        "all ranks must set the same",
    ),
]


@on_ranks(4, "bluefog")
def test_bad_calls_are_refused_in_one_line_b17():
    bf.set_topology(T.RingGraph(4))
    bf.win_create(x(), "once")
    for call, words in REFUSED:
        line = message(call)
        assert words in line and bool(words) == bool(line) and "\n" not in line


@on_ranks(4, "bluefog")
def test_everything_goes_on_while_suspended():
    bf.suspend()
    bf.suspend()
    handle = bf.allreduce_nonblocking(x())
    assert first([bf.allreduce(x()), bf.synchronize(handle)]) == [1.5, 1.5]
    bf.resume()
    bf.resume()
    assert first([bf.allreduce(x())]) == [1.5]


def test_lists_that_contradict_each_other_are_a_user_error():
    def refuse(sources, destinations):
        raise ValueError(f"rank 2 expects {sources}, sends to {destinations}")

    exchange = SimpleNamespace(core=SimpleNamespace(check_neighbors=refuse))
    part = Round(self_weight=0.5, sources={1: 0.5}, destinations={2: 1.0})
    with pytest.raises(UserError, match=r"rank 2 expects \[1\], sends to \[2\]"):
        collectives.check_neighbors(exchange, part)


def test_importing_it_imports_no_torch():
    code = (
        "import dear.bluefog as bf, sys; from dear.bluefog.topology_util import RingGraph;"
        "assert bf.topology_util.RingGraph is RingGraph; assert 'torch' not in sys.modules; dir(bf)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_name_is_there():
    for name in bf.__all__:
        assert getattr(bf, name) is not None
    with pytest.raises(AttributeError):
        bf.no_such_name  # noqa: B018


def test_nothing_works_before_init():
    with pytest.raises(UserError, match=r"bf\.init"):
        bf.rank()


def _timeline(prefix):
    os.environ["BLUEFOG_TIMELINE"] = prefix
    with bf.timeline_context("layer", "COMPUTE"):
        bf.allreduce(x(), name="mine")
    bf.shutdown()
    with open(f"{prefix}{os.environ['RANK']}.json") as file:
        events = json.load(file)["traceEvents"]
    return [_span(event) for event in events if event["ph"] == "X"]


def _span(event):
    """Name, begin and end of an event, in microseconds."""
    return event["name"], event["ts"], event["ts"] + event["dur"]


def test_shutdown_writes_the_timeline_and_may_be_followed_by_init(tmp_path):
    pool = RankPool(2, backend="comm_core")
    pool.run(bf.init)
    for spans in pool.run(_timeline, f"{tmp_path}/t"):
        times = {name: (began, ended) for name, began, ended in spans}
        (began, ended), (waits, waited) = times["COMPUTE"], times["wait allreduce"]
        assert began < waits < waited < ended, "the call is in the context"
    pool.close()


def _timeline_of_an_optimizer(prefix, factory):
    os.environ["BLUEFOG_TIMELINE"] = prefix
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    getattr(bf, factory)(optimizer, model)
    for switch in (lambda: None, optimizer.turn_off_timeline, optimizer.turn_on_timeline):
        switch()
        optimizer.zero_grad()
        model(torch.ones(3, 2)).sum().backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():  # every one of BlueFog's optimizers has it
            optimizer.step()
    os.environ.pop("BLUEFOG_TIMELINE")
    without = optimizer.turn_on_timeline()
    spans = [_span(event) for _, event in job().timeline._events]
    optimizer.close()
    bf.shutdown()
    return without, spans


@pytest.mark.parametrize(
    "factory", ["DistributedAdaptWithCombineOptimizer", "DistributedGradientAllreduceOptimizer"]
)
def test_an_optimizer_turns_the_spans_of_its_parameters_on_and_off(tmp_path, factory):
    pool = RankPool(2, backend="comm_core")
    pool.run(bf.init)
    for without, spans in pool.run(_timeline_of_an_optimizer, f"{tmp_path}/t", factory):
        assert without is False and all(began < ended for _, began, ended in spans)
        forward, backward = (
            [span for span in spans if span[0] == name] for name in ("FORWARD", "GRADIENT COMPT.")
        )
        # Two of three steps, three parameters.
        assert len(forward) == len(backward) == 6
        for step in (slice(0, 3), slice(3, 6)):
            last = max(ended for _, _, ended in forward[step])
            assert last < min(began for _, began, _ in backward[step]), "from the forward's end on"
    pool.close()


def _logged() -> int:
    bf.init()
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bf.DistributedAdaptWithCombineOptimizer(optimizer, model)
    logging.getLogger("dear").debug(len(optimizer._engine.buckets))
    return 0


def _lines_of(path: Path, variables: dict[str, str]) -> list[str]:
    """Lines that a process of its own prints with these variables of BlueFog."""
    env = {f"BLUEFOG_{name}": value for name, value in variables.items()}
    with Ranks() as ranks:
        ranks.function(_logged, env=env, log=path)
        assert ranks.wait(60.0)
    return path.read_text().splitlines()


@pytest.mark.parametrize(
    ("hide", "form", "fusion", "buckets"),
    [("0", r"\d{4}-\S+ \S+ ", "8000000", 1), ("1", "", "0", 2)],
)
def test_variables_of_bluefog_have_an_effect_or_are_named(hide, form, fusion, buckets, tmp_path):
    given = {
        "LOG_LEVEL": "trace",
        "LOG_HIDE_TIME": hide,
        "FUSION_THRESHOLD": fusion,
        "CYCLE_TIME": "1",
        "WIN_TIMEOUT_S": "9",
    }
    given |= {"ALLREDUCE_BY_MPI": "1", "NODES_PER_MACHINE": "1"}
    lines = _lines_of(tmp_path / "log", given)
    named = [line.split("=")[0].split("BLUEFOG_")[1] for line in lines if "no effect" in line]
    assert named == ["ALLREDUCE_BY_MPI", "CYCLE_TIME", "WIN_TIMEOUT_S"]
    assert re.fullmatch(f"{form}DEBUG: {buckets}", lines[-1]), lines
    lines = _lines_of(tmp_path / "loud", {**given, "LOG_LEVEL": "loud"})
    assert "unknown BLUEFOG_LOG_LEVEL 'loud'" in lines[-1]


@pytest.mark.parametrize("given", [(7, 2, 2, 0), (8, 2, 3, 0), (7, 2, 3, 0)])
def test_ranks_that_do_not_fit_their_machines_are_refused(given):
    with pytest.raises(UserError, match=f"rank {given[2]} .* does not fit machines of 2 ranks"):
        bf.GetExp2DynamicSendRecvMachineRanks(*given)


@pytest.mark.parametrize(
    ("chosen", "enable", "skip", "wanted"),
    [
        ({"src_ranks": [0], "dst_ranks": [0]}, True, False, True),
        ({"src_ranks": [0], "dst_ranks": [0]}, False, False, False),
        ({"src_ranks": [0], "dst_ranks": [0]}, True, True, False),
        ({}, True, False, False),  # the topology's own lists agree
    ],
)
def test_lists_are_compared_where_they_are_given_and_nobody_skips_it(
    monkeypatch, chosen, enable, skip, wanted
):
    part = SimpleNamespace(sources={1: 0.5}, destinations={2: 1.0})
    monkeypatch.setattr(
        collectives, "job", lambda: SimpleNamespace(part=lambda: part, skip_checks=skip)
    )
    asked = []
    monkeypatch.setattr(collectives, "_gathered", lambda *given, **how: asked.append((given, how)))
    start = bf.neighbor_allgather_nonblocking
    start(torch.ones(1), **chosen, enable_topo_check=enable)
    ((_, sources, targets), how) = asked[0]
    assert how["check"] is wanted and not how["with_own"]
    assert (sources, targets) == (([0], [0]) if chosen else ([1], [2]))
