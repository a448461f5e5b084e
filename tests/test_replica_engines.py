"""What users do around a step: checkpoints, evaluation, clipping, scalers, and their mistakes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import dear
from dear.errors import UserError
from dear.training.algorithm import algorithm_options
from tests import awkward
from tests.decentral import error, loss

ALGORITHMS = [
    ("neighbor", {"combine": "awc", "dynamic": "one-peer-exp"}),
    ("neighbor", {"combine": "atc", "dynamic": "one-peer-exp"}),
    ("gradient-tracking", {}),
    ("exact-diffusion", {}),
    ("push-diging", {"topology": "star"}),
    ("win-put", {"barrier": True}),
    ("pull-get", {"barrier": True}),
    ("push-sum", {"barrier": True, "topology": "star"}),
]
NAMES = sorted({name for name, _ in ALGORITHMS})


def _wrapped(algorithm, options, kind="adamw"):
    model = awkward.make_model()
    optimizer = awkward.make_optimizer(kind, model)
    dear.DistributedOptimizer(optimizer, model, algorithm=algorithm, **options)
    return model, optimizer


def _steps(model, optimizer, numbers):
    for step in numbers:
        optimizer.zero_grad()
        loss(model, step, dear.rank(), dear.size()).backward()
        optimizer.step()


def _resumed(algorithm, options, earlier=None):
    """The end of five steps in one go, and of three, a checkpoint, and two in new objects.

    `earlier`: the checkpoint is as earlier versions wrote it.
    """
    model, optimizer = _wrapped(algorithm, options)
    _steps(model, optimizer, range(3))
    # Ranks differ: each saves and loads its own.
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    if earlier is not None:
        kept = saved[1]["param_groups"][0].pop("replica")
        earlier(saved[1], kept)
    _steps(model, optimizer, range(3, 5))
    whole = copy.deepcopy(model.state_dict())
    optimizer.close()
    model, optimizer = _wrapped(algorithm, options)
    _steps(model, optimizer, range(1))
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    _steps(model, optimizer, range(3, 5))
    resumed = copy.deepcopy(model.state_dict())
    optimizer.close()
    return error([resumed], [whole])


@pytest.mark.parametrize(("algorithm", "options"), ALGORITHMS)
def test_a_checkpoint_goes_on_identically(world, algorithm, options):
    assert max(world(3).run(_resumed, algorithm, options)) < 2e-5


def _beside_the_groups(state, kept):
    state["replica"] = kept


def _steps_alone(state, kept):
    state["param_groups"][0]["neighborhood_steps"] = kept["steps"]


@pytest.mark.parametrize(
    ("algorithm", "options", "earlier"),
    [
        ("neighbor", {"dynamic": "one-peer-exp"}, _beside_the_groups),
        ("gradient-tracking", {}, _beside_the_groups),
        ("push-diging", {"topology": "star"}, _beside_the_groups),
        ("decentralized", {}, _steps_alone),
    ],
)
def test_checkpoints_of_earlier_versions_are_read(world, algorithm, options, earlier):
    assert max(world(3).run(_resumed, algorithm, options, earlier)) < 2e-5


def _plain_state(algorithm, options):
    plain_model = awkward.make_model()
    plain = awkward.make_optimizer("adamw", plain_model)
    _steps(plain_model, plain, range(2))
    model, optimizer = _wrapped(algorithm, options)
    _steps(model, optimizer, range(1))
    optimizer.load_state_dict(plain.state_dict())
    model.load_state_dict(plain_model.state_dict())
    _steps(model, optimizer, range(2, 3))
    state = optimizer.state_dict()
    optimizer.close()
    plain.load_state_dict(state)
    return all(value.isfinite().all().item() for value in model.state_dict().values())


@pytest.mark.parametrize(("algorithm", "options"), ALGORITHMS)
def test_states_of_plain_torch_are_taken_and_given(world, algorithm, options):
    assert all(world(2).run(_plain_state, algorithm, options))


def _closed(algorithm, options):
    model, optimizer = _wrapped(algorithm, options)
    _steps(model, optimizer, range(2))
    optimizer.close()
    values = copy.deepcopy(model.state_dict())
    hooks = sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())
    _steps(model, optimizer, range(2, 3))  # alone now
    moved = any(not torch.equal(values[n], v) for n, v in model.state_dict().items())
    # Parameters have memory of their own again, and can be wrapped again.
    sizes = {p.untyped_storage().nbytes() == p.nbytes for p in model.parameters()}
    dear.DistributedOptimizer(optimizer, model, algorithm=algorithm, **options)
    _steps(model, optimizer, range(3, 4))
    optimizer.close()
    return hooks, moved, sizes


@pytest.mark.parametrize(("algorithm", "options"), ALGORITHMS)
def test_close_takes_everything_out_again(world, algorithm, options):
    assert world(2).run(_closed, algorithm, options) == [(0, True, {True})] * 2


def _evaluated(algorithm, options, with_gradients):
    model, optimizer = _wrapped(algorithm, options)
    model.train()
    for step in range(3):
        _steps(model, optimizer, range(step, step + 1))
        model.eval()
        with torch.set_grad_enabled(with_gradients):
            model(torch.ones(2, 3, 5, 5))
        with torch.inference_mode():
            model(torch.ones(2, 3, 5, 5))
        model.train()
        optimizer.clip_grad_norm_(1e9)
    evaluated = copy.deepcopy(model.state_dict())
    optimizer.close()
    model, optimizer = _wrapped(algorithm, options)
    _steps(model, optimizer, range(3))
    plain = copy.deepcopy(model.state_dict())
    optimizer.close()
    return error([evaluated], [plain])


@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize(("algorithm", "options"), ALGORITHMS)
def test_evaluation_between_steps_changes_nothing(world, algorithm, options, with_gradients):
    assert max(world(2).run(_evaluated, algorithm, options, with_gradients)) < 1e-6


def _accumulated(algorithm, options):
    """Two backward passes before a step, against one of their sum."""
    results = []
    for several in (True, False):
        model, optimizer = _wrapped(algorithm, options, "sgd")
        for step in range(3):
            optimizer.zero_grad()
            if several:
                with optimizer.no_sync():
                    loss(model, step, dear.rank(), dear.size()).backward()
                loss(model, step + 7, dear.rank(), dear.size()).backward()
            else:
                first = loss(model, step, dear.rank(), dear.size())
                (first + loss(model, step + 7, dear.rank(), dear.size())).backward()
            optimizer.step()
        results.append(copy.deepcopy(model.state_dict()))
        optimizer.close()
    return error([results[0]], [results[1]])


@pytest.mark.parametrize(("algorithm", "options"), ALGORITHMS)
def test_gradients_accumulate_as_in_plain_torch(world, algorithm, options):
    assert max(world(2).run(_accumulated, algorithm, options)) < 1e-5


def _closure(algorithm, options):
    model, optimizer = _wrapped(algorithm, options)

    def closure():
        optimizer.zero_grad()
        value = loss(model, 0, dear.rank(), dear.size())
        value.backward()
        return value

    value = optimizer.step(closure)
    closed = copy.deepcopy(model.state_dict())
    optimizer.close()
    model, optimizer = _wrapped(algorithm, options)
    _steps(model, optimizer, range(1))
    plain = copy.deepcopy(model.state_dict())
    optimizer.close()
    return error([closed], [plain]), value.item() > 0


@pytest.mark.parametrize(("algorithm", "options"), ALGORITHMS)
def test_a_closure_is_a_step(world, algorithm, options):
    for wrong, has_value in world(2).run(_closure, algorithm, options):
        assert wrong < 1e-6 and has_value


def _scaler(algorithm, options):
    """Rank 1 meets an overflow in its second step; nobody hangs, and only rank 1 skips."""
    model, optimizer = _wrapped(algorithm, options, "sgd")
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1000)
    skipped = []
    try:
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale(loss(model, step, dear.rank(), dear.size())).backward()
            if dear.rank() == 1 and step == 1:
                next(p for p in model.parameters() if p.grad is not None).grad.fill_(torch.inf)
            scaler.step(optimizer)
            before = scaler.get_scale()
            scaler.update()
            skipped.append(scaler.get_scale() < before)
        finite = all(v.isfinite().all().item() for v in model.state_dict().values())
        result = skipped, finite
    except UserError as refused:
        result = str(refused)
    optimizer.close()
    return result


@pytest.mark.parametrize(("algorithm", "options"), ALGORITHMS)
def test_a_scaler_skips_a_rank_or_is_refused(world, algorithm, options):
    first, second = world(2).run(_scaler, algorithm, options)
    if algorithm in ("gradient-tracking", "exact-diffusion", "push-diging"):
        assert "GradScaler" in first and "GradScaler" in second
    else:
        assert first == ([False] * 4, True)
        assert second == ([False, True, False, False], True)


def _changed_between(combine):
    model, optimizer = _wrapped("neighbor", {"combine": combine})
    optimizer.zero_grad()
    loss(model, 0, dear.rank(), dear.size()).backward()
    model.load_state_dict(awkward.make_model().state_dict())
    try:
        optimizer.step()
        said = ""
    except UserError as error:
        said = str(error)
    optimizer.close()
    return said


def test_parameters_changed_while_they_are_sent_are_refused(world):
    assert all("step()" in said for said in world(2).run(_changed_between, "awc"))
    assert world(2).run(_changed_between, "atc") == ["", ""]


def _made_half(algorithm, options):
    model, optimizer = _wrapped(algorithm, options)
    _steps(model, optimizer, range(1))
    optimizer.synchronize()
    model.to(torch.float64)
    try:
        optimizer.zero_grad()
        x, y = awkward.data(1, 0, dear.size())
        nn.functional.cross_entropy(model(x.double()), y).backward()
        optimizer.step()
        said = ""
    except UserError as error:
        said = str(error)
    return said


@pytest.mark.parametrize(("algorithm", "options"), ALGORITHMS[:2])
def test_a_model_converted_after_wrapping_is_refused(world, algorithm, options):
    assert all("wrap it again" in said for said in world(2).run(_made_half, algorithm, options))


def _lbfgs(algorithm):
    model = nn.Linear(2, 2)
    try:
        dear.DistributedOptimizer(torch.optim.LBFGS(model.parameters()), model, algorithm=algorithm)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("algorithm", NAMES)
def test_lbfgs_is_refused(world, algorithm):
    assert all("LBFGS" in said for said in world(1).run(_lbfgs, algorithm))


def _refused_worlds():
    said = {}
    for name, options in {
        "local_size": {"hierarchical": True, "local_size": 2},
        "small": {"dynamic": "inner-outer-ring", "local_size": 2},
        "machines": {"dynamic": "inner-outer-exp2", "local_size": 3},
    }.items():
        try:
            _wrapped("neighbor", options)
        except UserError as error:
            said[name] = str(error)
    return said


def test_worlds_that_do_not_fit_are_refused(world):
    words = {
        "local_size": "no whole number of machines",
        "small": "at least 3 ranks per machine",
        "machines": "at least 2 machines",
    }
    for said in world(3).run(_refused_worlds):
        assert all(word in said[name] and "\n" not in said[name] for name, word in words.items())


@pytest.mark.parametrize(
    ("algorithm", "options", "named"),
    [
        ("neighbor", {"topology": "exp3"}, "did you mean 'exp2'"),
        ("neighbor", {"combine": "cta"}, "'combine'"),
        ("neighbor", {"dynamic": "one-peer"}, "did you mean 'one-peer-exp'"),
        ("neighbor", {"every": 0}, "'every'"),
        ("neighbor", {"bucket_mb": 0.0}, "'bucket_mb'"),
        ("neighbor", {"local_size": 2}, "'local_size' goes with"),
        ("neighbor", {"dynamic": "one-peer-exp", "topology": "ring"}, "'topology' is not used"),
        ("neighbor", {"dynamic": "inner-outer-ring", "hierarchical": True}, "'dynamic'"),
        ("gradient-tracking", {"toplogy": "ring"}, "did you mean 'topology'"),
        ("exact-diffusion", {"topology": "exp2"}, "symmetric weights"),
        ("exact-diffusion", {"topology": "rng"}, "did you mean 'ring'"),
        ("push-diging", {"bucket_mb": -1.0}, "'bucket_mb'"),
        ("win-put", {"every": 0}, "'every'"),
        ("push-sum", {"barrier": 3}, "true or false"),
        ("pull-get", {"combine": "atc"}, "unknown option of pull-get"),
    ],
)
def test_bad_options_are_refused_in_one_line(algorithm, options, named):
    with pytest.raises(UserError) as caught:
        algorithm_options(algorithm, options)
    assert named in str(caught.value) and algorithm in str(caught.value)
    assert "\n" not in str(caught.value)


def test_names_with_underscores_are_corrected():
    with pytest.raises(UserError, match="did you mean 'gradient-tracking'"):
        algorithm_options("gradient_tracking", {})


def _alone(algorithm, options, kind):
    model, optimizer = _wrapped(algorithm, options, kind)
    states = awkward.train(model, optimizer, dear.rank(), dear.size())
    optimizer.close()
    return awkward.error(states, awkward.serial(kind, 1, 1))


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize(("algorithm", "options"), ALGORITHMS)
def test_a_rank_alone_trains_like_the_plain_optimizer(world, algorithm, options, kind):
    assert world(1).run(_alone, algorithm, options, kind)[0] < 1e-6
