"""What mgwfbp, mgs and bytescheduler alone promise: plans, sparse replicas."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dear
from dear.comm import runtime
from dear.errors import UserError
from tests.contract import awkward


def _wrapped(algorithm, **options):
    model = awkward.make_model()
    optimizer = awkward.make_optimizer("sgd", model)
    return model, dear.DistributedOptimizer(optimizer, model, algorithm=algorithm, **options)


def _train(algorithm, options, steps=awkward.STEPS):
    """Trains and returns the state, with the planned groups as lists of parameter numbers."""
    model, optimizer = _wrapped(algorithm, **options)
    rows = slice(dear.rank() * awkward.BATCH, (dear.rank() + 1) * awkward.BATCH)
    for step in range(steps):
        optimizer.zero_grad()
        x, y = awkward.data(step, 0, dear.size())
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    engine = optimizer._engine
    number = {param: i for i, param in enumerate(model.parameters())}
    groups = None
    if hasattr(engine, "planned_groups"):
        planned = engine.planned_groups()
        groups = planned and [[number[param] for param in group] for group in planned]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer.close()
    return state, groups


def same(states):
    return all(
        torch.equal(states[0][name], state[name]) for state in states[1:] for name in states[0]
    )


def test_plans_are_the_same_on_all_ranks_and_cover_every_parameter(world):
    for merge in ("greedy", "asc", "optimal"):
        results = world(2).run(_train, "mgwfbp", {"merge": merge})
        groups = [found for _, found in results]
        assert groups[0] == groups[1]
        model = awkward.make_model()
        trained = [i for i, p in enumerate(model.parameters()) if p.requires_grad]
        assert sorted(index for group in groups[0] for index in group) == trained


def test_there_is_no_plan_before_the_profile_is_complete(world):
    early = world(2).run(_train, "mgwfbp", {"profile_steps": 3}, 2)
    assert all(groups is None for _, groups in early)
    late = world(2).run(_train, "mgwfbp", {"profile_steps": 3}, 3)
    assert all(groups for _, groups in late)


def test_threshold_merges_in_the_order_of_arrival(world):
    ((_, alone), _) = world(2).run(_train, "mgwfbp", {"merge": "threshold", "threshold_mb": 0.0})
    assert all(len(group) == 1 for group in alone)
    ((_, whole), _) = world(2).run(_train, "mgwfbp", {"merge": "threshold", "threshold_mb": 9.0})
    assert len(whole) == 1
    names = [name for name, _ in awkward.make_model().named_parameters()]
    order = [names[group[0]] for group in alone]
    # The last layer's gradient comes first, that of the unused one never.
    assert order[0].startswith("late")
    assert all(name.startswith("unused") for name in order[-2:])


def test_tables_serve_worker_counts_that_they_do_not_list(world):
    results = world(3).run(_train, "mgwfbp", {"costs": "10gbe", "merge": "optimal"})
    assert results[0][1] == results[2][1]


def test_sparse_replicas_agree_and_what_does_not_travel_is_kept(world):
    states = [state for state, _ in world(3).run(_train, "mgs", {"density": 0.05})]
    assert same(states)
    dense = [state for state, _ in world(3).run(_train, "mgs", {"density": 1.0})]
    assert same(dense)
    assert any(not torch.equal(states[0][name], dense[0][name]) for name in dense[0])


def _refuse_unsynchronized_change():
    model, optimizer = _wrapped("bytescheduler")
    nn.functional.cross_entropy(model(torch.ones(2, 3, 5, 5)), torch.zeros(2).long()).backward()
    model.late.weight.grad.mul_(2)
    with pytest.raises(UserError, match=r"optimizer\.synchronize\(\)"):
        optimizer.step()


def test_changing_a_gradient_under_way_is_refused(world):
    world(2).run(_refuse_unsynchronized_change)


def _channels():
    communicator = runtime.communicator()
    before = len(communicator.groups)
    communicator.ensure_channels(before + 2)
    communicator.ensure_channels(1)
    tensor = torch.ones(3)
    communicator.all_reduce(tensor, op="sum", channel=before + 1).wait()
    return len(communicator.groups) - before, tensor.tolist()


def test_channels_are_added_once(world):
    assert world(2).run(_channels) == [(2, [2.0, 2.0, 2.0])] * 2
