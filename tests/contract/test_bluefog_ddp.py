"""Asyncddp's wrapper, as its scripts call it: graphs of their own, in step and at each pace."""

from __future__ import annotations

import copy
from functools import partial

import networkx as nx
import pytest
import torch
from torch.optim.lr_scheduler import ExponentialLR

import dear.bluefog as bf
from dear.bluefog.ddp import DecentralizedDataParallel, LocalStepRandomBatchSampler
from dear.comm import runtime
from dear.topology import matrix, uniform
from tests.contract.loops import leftovers, message
from tests.ranks import on_ranks

LR, GAMMA, STEPS = 0.1, 0.5, 5
T = bf.topology_util
UNLIKE = nx.DiGraph([(0, 1), (1, 2), (2, 3), (3, 0), (0, 2)])
"""Graph without weights, and with a rank that two send to."""


def optim_fn(params):
    return torch.optim.SGD([param for _, param in params], lr=LR)


def lr_scheduler_fn(optimizer):
    return ExponentialLR(optimizer, GAMMA)


def wrapped(graph, **more):
    torch.manual_seed(3 + bf.rank())  # rank 0's parameters count
    inner = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    model = DecentralizedDataParallel(inner, optim_fn, lr_scheduler_fn, **more)
    if graph is not None:
        model.set_topology({"topology": graph, "name": "mine"})
    return model, inner


def batch(rank, step):
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(100 * rank + step))


def flat(model):
    return torch.cat([param.detach().flatten() for param in model.parameters()]).double()


def _trained(graph, sync):
    """Trains; where nobody waits ranks step one after the other, so that the order is known."""
    bf.set_topology()  # exponential, where no other is chosen
    model, inner = wrapped(graph, sync=sync)
    start, values, gradients = flat(inner), [], []
    for step in range(STEPS):
        noted = {}
        handles = [
            param.register_hook(lambda gradient, i=i, noted=noted: noted.update({i: gradient * 1}))
            for i, param in enumerate(inner.parameters())
        ]
        turns = 1 if sync or step == 0 else bf.size()  # all make their windows together
        for turn in range(turns):
            if turns == 1 or turn == bf.rank():
                model(batch(bf.rank(), step)).square().mean().backward()
                model._engine.exchange.wait()
            runtime.communicator().barrier()
        for handle in handles:
            handle.remove()
        gradients.append(torch.cat([noted[i].flatten() for i in sorted(noted)]).double())
        values.append(flat(inner))
        assert all(param.grad is None for param in inner.parameters())
    rate = model.get_lr()
    model.close()
    return start, values, gradients, rate


@pytest.mark.parametrize("sync", [True, False], ids=["sync", "async"])
@pytest.mark.parametrize(
    "graph",
    [T.RingGraph(4), T.StarGraph(4), T.ExponentialTwoGraph(4), UNLIKE, None],
    ids=["ring", "star", "exp2", "own", "default"],
)
def test_parameters_are_averaged_over_the_graph_and_updated_by_own_gradients(
    bluefog_pool, graph, sync
):
    results = bluefog_pool.run(_trained, graph, sync)
    weighted = graph if graph is not UNLIKE else uniform(graph)
    weights = torch.from_numpy(matrix(T.ExponentialTwoGraph(4) if graph is None else weighted))
    x = torch.stack([start for start, *_ in results])
    assert all(torch.equal(row, x[0]) for row in x), "all begin with rank 0's"
    for step in range(STEPS):
        applied = [gradients[step] for _, _, gradients, _ in results]
        mixed = x if step == 0 else weights.T @ x
        here = torch.stack([values[step] for _, values, _, _ in results])
        if sync:
            x = mixed - LR * GAMMA**step * torch.stack(applied)
        elif step == 0:
            x = here.clone()  # somebody's first values may have come already
        else:
            for rank in range(4):  # each finds what those before it have just sent
                x[rank] = weights.T[rank] @ x - LR * GAMMA**step * applied[rank]
        torch.testing.assert_close(here, x, rtol=1e-4, atol=1e-6)
    assert [rate for *_, rate in results] == pytest.approx([LR * GAMMA**STEPS] * 4)


def _uneven():
    model, inner = wrapped(T.RingGraph(4), sync=False, sync_buffer_in_global_avg=True)
    for step in range(2 + bf.rank()):
        model(batch(bf.rank(), step)).square().mean().backward()
    model.global_avg()
    mean = flat(inner)
    model(batch(bf.rank(), 9)).square().mean().backward()  # training goes on
    moved, stale = not torch.equal(flat(inner), mean), model.statistics()
    model.close()
    return mean, moved, sorted(stale["staleness"])


def test_ranks_at_their_own_pace_end_at_one_mean(bluefog_pool):
    results = bluefog_pool.run(_uneven)
    assert all(torch.equal(mean, results[0][0]) and moved for mean, moved, _ in results)
    assert results[0][2] == ["1", "3"], "who is how far behind is told by neighbour"


def _averaged():
    model, inner = wrapped(T.RingGraph(4))
    model.global_avg()  # no training has begun
    for step in range(2):
        model(batch(bf.rank(), step)).square().mean().backward()
    model.global_avg()
    before = flat(inner)
    model(batch(0, 2)).square().mean().backward()
    after = flat(inner)
    model.close()
    return before, after


def test_a_step_from_the_mean_uses_no_older_values(bluefog_pool):
    (before, after), *others = bluefog_pool.run(_averaged)
    assert not torch.equal(before, after)
    for pair in others:
        assert torch.equal(pair[0], before)
        torch.testing.assert_close(pair[1], after)


@on_ranks(4, "bluefog")
def test_what_cannot_be_is_said():
    model, inner = wrapped(None)
    for words, call in [
        (
            "topology must be a networkx.DiGraph, got str",
            partial(model.set_topology, {"topology": "ring"}),
        ),
        (
            "the nodes must be the ranks 0 to 3, got 3 nodes",
            partial(model.set_topology, T.RingGraph(3)),
        ),
        (
            "param_as_bucket_view=False",
            partial(DecentralizedDataParallel, inner, optim_fn, param_as_bucket_view=False),
        ),
        ("nothing to train", partial(DecentralizedDataParallel, torch.nn.ReLU(), optim_fn)),
    ]:
        assert words in message(call)
    model.eval()
    with torch.no_grad():
        model(batch(0, 0))  # no training has begun
    model.set_topology(T.StarGraph(4))
    model.train()
    model(batch(0, 0)).sum().backward()
    late = message(partial(model.set_topology, T.RingGraph(4)))
    assert "the topology cannot change after training has begun" in late
    assert "copy or save its state_dict()" in message(partial(copy.deepcopy, model))
    model.close()
    assert not leftovers(inner)


def test_its_sampler_is_there_too():
    batches = list(LocalStepRandomBatchSampler(range(10), 4, 7, rank=1))
    assert sorted(place for batch in batches for place in batch) == list(range(10))


@on_ranks(2)
def test_a_model_in_eval_mode_is_trained():
    bf.init()
    model, inner = wrapped(None)
    model.eval()
    start = flat(inner)
    for step in range(2):
        model(batch(bf.rank(), step)).square().mean().backward()
    moved = (flat(inner) - start).abs().max().item()
    model.close()
    assert moved > 1e-3
