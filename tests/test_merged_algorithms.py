"""wfbp, mgwfbp, mgs and bytescheduler: what they are told, what they send, what they refuse."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dear
from dear.comm import runtime
from dear.errors import UserError
from dear.training.algorithm import algorithm_options
from tests import awkward


def refusal(algorithm, **options):
    with pytest.raises(UserError) as caught:
        algorithm_options(algorithm, options)
    text = str(caught.value)
    assert "\n" not in text
    assert algorithm in text
    return text


@pytest.mark.parametrize(
    ("algorithm", "options", "named"),
    [
        ("wfbp", {"channels": 0}, "'channels'"),
        ("wfbp", {"chanels": 2}, "did you mean 'channels'"),
        ("mgwfbp", {"merge": "gredy"}, "did you mean 'greedy'"),
        ("mgwfbp", {"costs": "1gbe"}, "'costs'"),
        ("mgwfbp", {"profile_steps": 0}, "'profile_steps'"),
        ("mgwfbp", {"small_elements": -1}, "'small_elements'"),
        ("mgwfbp", {"small_elements": 10, "merge": "optimal"}, "'small_elements'"),
        ("mgwfbp", {"threshold_mb": 5.0}, "'threshold_mb'"),
        ("mgwfbp", {"merge": "threshold"}, "'threshold_mb'"),
        ("mgwfbp", {"merge": "threshold", "threshold_mb": -1.0}, "'threshold_mb'"),
        ("mgwfbp", {"merge": "threshold", "threshold_mb": 1.0, "costs": "10gbe"}, "'costs'"),
        ("mgs", {"density": 0.0}, "'density'"),
        ("mgs", {"density": 1.5}, "'density'"),
        ("mgs", {"profile_steps": 0}, "'profile_steps'"),
        ("bytescheduler", {"partition_mb": 0.0}, "'partition_mb'"),
        ("bytescheduler", {"credit_mb": -1.0}, "'credit_mb'"),
        ("bytescheduler", {"levels": 0}, "'levels'"),
        ("bytescheduler", {"levels": 2, "credit_mb": 4.0}, "exclude each other"),
        ("bytescheduler", {"profile_steps": 0}, "'profile_steps'"),
    ],
)
def test_bad_options_are_refused_in_one_line(algorithm, options, named):
    assert named in refusal(algorithm, **options)


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


def _mixed(algorithm, options):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double(), nn.Linear(4, 2))

    def forward(x):
        return model[2](model[1](model[0](x).double()).float())

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = dear.DistributedOptimizer(optimizer, model, algorithm=algorithm, **options)
    for step in range(4):
        optimizer.zero_grad()
        torch.manual_seed(100 * step + dear.rank())
        forward(torch.randn(3, 4)).square().sum().backward()
        optimizer.step()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer.close()
    return state


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("wfbp", {"channels": 2}),
        ("mgwfbp", {"merge": "optimal"}),
        ("mgs", {"density": 1.0}),
        ("bytescheduler", {}),
        ("bytescheduler", {"credit_mb": 1.0}),
    ],
)
def test_dtypes_may_differ(world, algorithm, options):
    wanted = world(2).run(_mixed, "allreduce", {})
    states = world(2).run(_mixed, algorithm, options)
    assert same(states)
    for name, value in wanted[0].items():
        torch.testing.assert_close(states[0][name], value)


def _lone_backward(algorithm, options):
    """Rank 1 takes part in steps without a backward pass of its own."""
    torch.manual_seed(3)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = dear.DistributedOptimizer(optimizer, model, algorithm=algorithm, **options)
    for _ in range(4):
        optimizer.zero_grad()
        if dear.rank() == 0:
            model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer.close()
    return state


@pytest.mark.parametrize("algorithm", ["mgwfbp", "bytescheduler"])
def test_a_rank_without_a_backward_pass_takes_part(world, algorithm):
    wanted = world(2).run(_lone_backward, "allreduce", {})
    states = world(2).run(_lone_backward, algorithm, {})
    assert same(states)
    for name, value in wanted[0].items():
        torch.testing.assert_close(states[0][name], value)


def _refuse_unsynchronized_change():
    model, optimizer = _wrapped("bytescheduler")
    nn.functional.cross_entropy(model(torch.ones(2, 3, 5, 5)), torch.zeros(2).long()).backward()
    model.late.weight.grad.mul_(2)
    with pytest.raises(UserError, match=r"optimizer\.synchronize\(\)"):
        optimizer.step()


def test_changing_a_gradient_under_way_is_refused(world):
    world(2).run(_refuse_unsynchronized_change)


def _refuse_lbfgs():
    model = nn.Linear(2, 2)
    with pytest.raises(UserError, match="LBFGS"):
        dear.DistributedOptimizer(
            torch.optim.LBFGS(model.parameters()), model, algorithm="bytescheduler"
        )


def test_lbfgs_is_refused_where_it_cannot_be_trained(world):
    world(1).run(_refuse_lbfgs)


def _clip(algorithm):
    model, optimizer = _wrapped(algorithm)
    norms = []
    rows = slice(dear.rank() * awkward.BATCH, (dear.rank() + 1) * awkward.BATCH)
    for step in range(4):
        optimizer.zero_grad()
        x, y = awkward.data(step, 0, dear.size())
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.synchronize()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
        optimizer.step()
    optimizer.close()
    return norms


@pytest.mark.parametrize("algorithm", ["mgwfbp", "bytescheduler"])
def test_clipping_sees_the_mean_gradient(world, algorithm):
    wanted = world(2).run(_clip, "allreduce")[0]
    for norms in world(2).run(_clip, algorithm):
        assert norms == pytest.approx(wanted, rel=1e-4)


def _exposed(algorithm, options):
    """After wrapping and closing, nothing is left on the model."""
    model, optimizer = _wrapped(algorithm, **options)
    optimizer.close()
    left = [
        hooks
        for module in model.modules()
        for hooks in (module._forward_hooks, module._forward_pre_hooks, module._state_dict_hooks)
        if hooks
    ]
    params = [p for p in model.parameters() if p._post_accumulate_grad_hooks]
    assert not left and not params
    assert type(optimizer) is torch.optim.SGD


@pytest.mark.parametrize("algorithm", ["wfbp", "mgwfbp", "mgs", "bytescheduler"])
def test_close_takes_every_hook_out(world, algorithm):
    world(2).run(_exposed, algorithm, {})


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
