"""Promises of decentralized algorithms alone."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dear
from dear.algorithms.decentralized import neighbor
from dear.comm import runtime
from dear.comm.neighbors import GlobalAverage
from dear.topology.schedules import Edge, Topology, TopologyReg
from tests.contract.loops import (
    difference,
    loss_of,
    make_model,
    make_sgd,
    message,
    mine,
    steps,
    wrap,
)
from tests.contract.training import OnRank, Script, far, on_rank
from tests.ranks import on_ranks

TINY = 0.0002  # MB: many buckets


@TopologyReg.register("uneven")
class Uneven(Topology):
    """Weights that are not the mean, pairs and larger groups, ranks alone."""

    def _get_topo_edges(self):
        n = self._world_size
        pairs = [Edge([i, i + 1], 0.7) for i in range(0, n - 1, 2)]
        alone = [Edge([n - 1], 1.0)] if n % 2 else []
        later = [Edge([0], 1.0), Edge(range(1, n), 0.4 if n > 2 else 1.0)]
        return [[Edge(range(n), 0.1)], pairs + alone, later]


class OnRankHere(OnRank):
    """Script on ranks that know the topology above."""


def _far(pool, size, algorithm, **options):
    return far(pool, size, algorithm, options, Script(), OnRankHere)


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (2, {"bucket_mb": TINY}),
        (3, {"adaptive_factor": 0.3}),
        (4, {"bucket_mb": TINY, "update": "step"}),
    ],
)
def test_a_registered_topology_equals_its_reference(world, size, options):
    assert _far(world(size), size, "decentralized", topology="uneven", **options) < 1e-5


@pytest.mark.full
@pytest.mark.parametrize("dynamic", ["inner-outer-ring", "inner-outer-exp2"])
def test_inner_outer_topologies_equal_their_reference(own_pool, dynamic):
    assert _far(own_pool(6), 6, "neighbor", dynamic=dynamic, local_size=3) < 2e-5


def test_between_machines_nothing_is_lost_when_they_do_not_divide_the_parameters(world):
    options = {"combine": "atc", "hierarchical": True, "local_size": 3, "bucket_mb": 0.0001}
    assert _far(world(3), 3, "neighbor", **options) < 2e-5


def test_replicas_of_one_machine_stay_the_same(world):
    options = {"combine": "atc", "hierarchical": True, "local_size": 2}
    states = [result["end"] for result in world(4).run(on_rank, "neighbor", options, Script())]
    for rank, other in ((0, 1), (2, 3)):
        assert all((states[rank][n] == states[other][n]).all() for n in states[rank])


@on_ranks(2)
def test_any_optimizer_can_be_stepped_as_a_whole() -> None:
    """One that is not torch's, with hooks: only whole steps are possible."""

    class Mine(torch.optim.SGD):
        pass

    Mine.__module__ = "elsewhere"
    model, plain = make_model(), make_model()
    optimizer = Mine(model.parameters(), lr=0.1)
    line = message(lambda: wrap(optimizer, model, "decentralized"))
    wrap(optimizer, model, "decentralized", update="step")
    other = wrap(torch.optim.SGD(plain.parameters(), lr=0.1), plain, "decentralized")
    for replica, by in ((model, optimizer), (plain, other)):
        steps(replica, by, mine())
        by.close()
    assert "update='step'" in line and difference(model, plain) < 1e-5


@on_ranks(2)
def test_what_comes_after_the_update_in_the_backward_pass_is_refused() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(()))
    changes = [
        lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
        lambda _, optimizer: optimizer.clip_grad_norm_(0.1),
        lambda model, _: loss_of(model, dear.rank(), 1).backward(),
        lambda _, optimizer: scaler.step(optimizer),
    ]
    lines = [lines for change in changes for lines in _refusals_of(change)]
    assert all("update='step'" in line and "\n" not in line for line in lines)
    words = ["changed between", "cannot be clipped", "second backward", "GradScaler"]
    assert all(word in lines[2 * i] for i, word in enumerate(words))


def _refusals_of(change: Any) -> list[str]:
    """Returns the refusals in two steps."""
    model, lines = make_model(), []
    optimizer = wrap(make_sgd(model), model, "decentralized")
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(model, dear.rank(), 0).backward()
        lines.append(message(lambda: (change(model, optimizer), optimizer.step())))
        optimizer.zero_grad()
        optimizer.synchronize()
    optimizer.close()
    return lines


@on_ranks(4)
def test_p5_pure_mixing_reaches_the_mean_in_log2_steps() -> None:
    model = nn.Linear(40, 30)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(float(dear.rank()))
    communicator = runtime.communicator()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer = dear.DistributedOptimizer(
        optimizer, model, algorithm="decentralized", topology="one-peer-exp", bucket_mb=TINY
    )
    seen = []
    for _ in range(4):
        model(torch.ones(1, 40)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(model.weight[0, 0].item())
    optimizer.synchronize()
    seen.append(GlobalAverage(communicator, model.parameters()).apply())
    optimizer.close()
    assert seen == [dear.rank(), (1, 2, 1, 2)[dear.rank()], 1.5, 1.5, 0]


@pytest.mark.parametrize("kind", ["", "gloo"])
def test_a_broadcast_in_mid_run_is_not_undone(world, kind):
    world(2, kind).run(_broadcast_in_mid_run)


def _broadcast_in_mid_run() -> None:
    model = make_model()
    optimizer = wrap(make_sgd(model, lr=0.0), model, "decentralized", topology="ring")
    with torch.no_grad():
        model[0].weight.fill_(float(dear.rank()))
    steps(model, optimizer, mine(), range(2))
    with torch.no_grad():
        model[0].weight.fill_(7.0 + dear.rank())
    steps_of = partial(steps, model, optimizer, mine())
    assert "while they were being sent" in message(lambda: steps_of([2]))
    model.load_state_dict(model.state_dict())
    steps_of([3])
    dear.broadcast_parameters(model.state_dict())
    assert "load_state_dict()" in message(lambda: steps_of([4]))
    dear.broadcast_parameters(sorted(model.named_parameters(), reverse=dear.rank() == 1))
    model.load_state_dict(model.state_dict())
    steps_of([5, 6])
    assert model[0].weight.unique().tolist() == [7.0]
    optimizer.close()


@pytest.mark.parametrize("topology", ["complete", "one-peer-exp", "uneven"])
def test_it_runs_on_gloo(world, topology):
    assert _far(world(4, "gloo"), 4, "decentralized", topology=topology, bucket_mb=TINY) < 1e-5


@pytest.mark.parametrize(("combine", "words"), [("awc", "step()"), ("atc", "")])
@on_ranks(2)
def test_parameters_changed_while_they_are_sent_are_refused(combine: str, words: str) -> None:
    model = make_model()
    optimizer = wrap(make_sgd(model), model, "neighbor", combine=combine)
    loss_of(model, dear.rank(), 0).backward()
    model.load_state_dict(make_model().state_dict())
    line = message(optimizer.step)
    optimizer.close()
    assert words in line and bool(words) == bool(line)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("decentralized", {"topology": "ring"}, "even number of ranks"),  # P2
    ("neighbor", {"hierarchical": True, "local_size": 2}, "cannot be split into machines"),
    ("neighbor", {"dynamic": "inner-outer-ring", "local_size": 2}, "at least 3 ranks per machine"),
    ("neighbor", {"dynamic": "inner-outer-exp2", "local_size": 3}, "at least 2 machines"),
]


@pytest.mark.parametrize(("algorithm", "options", "words"), REFUSED)
@on_ranks(3)
def test_worlds_that_do_not_fit_are_refused(algorithm: str, options: Any, words: str) -> None:
    model = make_model()
    line = message(partial(wrap, make_sgd(model), model, algorithm, **options))
    assert words in line and "\n" not in line


@pytest.mark.parametrize("every", [1, 2, 3])
def test_rounds_of_a_schedule_are_those_in_which_something_is_sent(every):
    options = neighbor.Neighbor.Options(dynamic="one-peer-exp", every=every)
    rounds = neighbor._rounds(options, SimpleNamespace(size=16, rank=0))
    parts = [rounds(steps) for steps in range(every - 1, 4 * every, every)]
    assert [list(part.destinations) for part in parts] == [[1], [2], [4], [8]]


@on_ranks(4)
def test_groups_are_gone_when_the_optimizer_is_closed() -> None:
    counted = []
    for _ in range(3):
        model = make_model()
        optimizer = wrap(make_sgd(model), model, "decentralized", topology="uneven", bucket_mb=TINY)
        counted.append(len(dist.distributed_c10d._world.pg_map))
        optimizer.close()
        counted.append(len(dist.distributed_c10d._world.pg_map))
    assert len(set(counted[1::2])) == 1 and counted[1] < counted[0]


@on_ranks(3)
def test_machines_with_different_numbers_of_ranks_matter_only_where_nodes_do() -> None:
    mine_here = 1 if dear.rank() == 2 else 2
    with mock.patch.multiple(runtime, _alike=False, local_size=lambda: mine_here):
        model = make_model()
        optimizer = wrap(make_sgd(model), model, "decentralized", topology="complete")
        steps(model, optimizer, mine())
        optimizer.close()
        by_nodes = {"topology": "alternating-exp-ring"}
        line = message(lambda: wrap(make_sgd(model), model, "decentralized", **by_nodes))
    assert "machines run different numbers of ranks (1, 2)" in line
    assert "give ranks_per_node" in line
