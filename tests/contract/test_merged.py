"""Promises of mgwfbp, mgs and bytescheduler alone: plans, sparse replicas."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import dear
from dear.algorithms.synchronous.mgwfbp import MergedEngine
from dear.comm import runtime
from dear.errors import UserError
from tests.contract.loops import make_sgd, mine, moved_and_spread, steps
from tests.contract.models import loss_of, make_model
from tests.ranks import on_ranks


def _train(name, options, count=4):
    """The state after some steps, and the planned groups as lists of parameter numbers."""
    model = make_model("awkward")
    optimizer = make_sgd(model)
    dear.DistributedOptimizer(optimizer, model, algorithm=name, **options)
    steps(model, optimizer, mine(), range(count), loss_of=partial(loss_of, "awkward"))
    engine = optimizer._engine
    number = {param: i for i, param in enumerate(model.parameters())}
    groups = None
    if hasattr(engine, "planned_groups"):
        planned = engine.planned_groups()
        groups = planned and [[number[param] for param in group] for group in planned]
    _, spread = moved_and_spread(model, optimizer)
    return groups, spread, model.late.weight.sum().item()


@on_ranks(2)
def test_it_is_what_a_call_as_in_mg_wfbp_trains_with():
    model = make_model("awkward")
    optimizer = make_sgd(model)
    dear.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    assert isinstance(optimizer._engine, MergedEngine)
    optimizer.close()


@pytest.mark.parametrize("merge", ["greedy", "asc", "optimal"])
def test_plans_are_the_same_on_all_ranks_and_cover_every_parameter(world, merge):
    groups, other = (plan for plan, *_ in world(2).run(_train, "mgwfbp", {"merge": merge}))
    assert groups == other
    model = make_model("awkward")
    trained = [i for i, p in enumerate(model.parameters()) if p.requires_grad]
    assert sorted(index for group in groups for index in group) == trained


def test_there_is_no_plan_before_the_profile_is_complete(world):
    early = world(2).run(_train, "mgwfbp", {"profile_steps": 3}, 2)
    assert all(groups is None for groups, *_ in early)
    late = world(2).run(_train, "mgwfbp", {"profile_steps": 3}, 3)
    assert all(groups for groups, *_ in late)


def test_threshold_merges_in_the_order_of_arrival(world):
    ((alone, *_), _) = world(2).run(_train, "mgwfbp", {"merge": "threshold", "threshold_mb": 0.0})
    assert all(len(group) == 1 for group in alone)
    ((whole, *_), _) = world(2).run(_train, "mgwfbp", {"merge": "threshold", "threshold_mb": 9.0})
    assert len(whole) == 1
    names = [name for name, _ in make_model("awkward").named_parameters()]
    order = [names[group[0]] for group in alone]
    # The last layer's gradient comes first, that of the unused one never.
    assert order[0].startswith("late")
    assert all(name.startswith("unused") for name in order[-2:])


def _times(each_s):
    return {name: each_s for name, _ in make_model("awkward").named_parameters()}


def test_a_plan_follows_the_layer_times_that_are_given(world):
    """Gradients that come far apart go alone after one step, those that come at once together."""
    given = {"costs": "10gbe"}
    ((apart, *_), _) = world(2).run(_train, "mgwfbp", {**given, "layer_times": _times(9.0)}, 1)
    ((close, *_), _) = world(2).run(_train, "mgwfbp", {**given, "layer_times": _times(1e-9)}, 1)
    assert all(len(group) == 1 for group in apart) and len(close) == 1
    order = [index for group in apart for index in group]
    assert order == sorted(order, reverse=True), "the last parameter's gradient comes first"


@on_ranks(2)
def test_times_of_no_layer_are_refused():
    model = make_model("awkward")
    with pytest.raises(UserError, match="unknown parameter of 'layer_times' 'nowhere'"):
        dear.DistributedOptimizer(
            make_sgd(model), model, algorithm="mgwfbp", layer_times={"nowhere": 1.0}
        )


def test_tables_serve_worker_counts_that_they_do_not_list(world):
    results = world(3).run(_train, "mgwfbp", {"costs": "10gbe", "merge": "optimal"})
    assert results[0][0] == results[2][0]


def test_sparse_replicas_agree_and_what_does_not_travel_is_kept(world):
    sparse = world(3).run(_train, "mgs", {"density": 0.05})
    dense = world(3).run(_train, "mgs", {"density": 1.0})
    assert [spread for _, spread, _ in sparse + dense] == [0.0] * 6
    assert sparse[0][2] != dense[0][2]


@on_ranks(2)
def test_changing_a_gradient_under_way_is_refused():
    model = make_model("awkward")
    optimizer = make_sgd(model)
    dear.DistributedOptimizer(optimizer, model, algorithm="bytescheduler")
    loss_of("awkward", model, dear.rank(), 0).backward()
    model.late.weight.grad.mul_(2)
    with pytest.raises(UserError, match=r"optimizer\.synchronize\(\)"):
        optimizer.step()


@on_ranks(2)
def test_channels_are_added_once():
    communicator = runtime.communicator()
    before = len(communicator.groups)
    communicator.ensure_channels(before + 2)
    communicator.ensure_channels(1)
    tensor = torch.ones(3)
    communicator.all_reduce(tensor, op="sum", channel=before + 1).wait()
    assert (len(communicator.groups) - before, tensor.tolist()) == (2, [2.0, 2.0, 2.0])
