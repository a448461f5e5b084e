"""Promises of every algorithm about the optimizer and the model that it is given."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import StepLR

import dear
from tests.contract.algorithms import IN_BACKWARD, Meaning, algorithm_class, algorithm_names
from tests.contract.loops import (
    batch,
    difference,
    everybody,
    leftovers,
    loss_of,
    make_model,
    make_sgd,
    mean_loss,
    message,
    mine,
    run_both,
    steps,
)
from tests.ranks import on_ranks


def _marked(name: str) -> Any:
    missing = algorithm_class(name).unavailable()
    return pytest.param(name, marks=pytest.mark.skipif(bool(missing), reason=str(missing)))


def _those(*without: str, only: str = "") -> Any:
    families = {name: algorithm_class(name).capabilities.consistency for name in algorithm_names()}
    names = [n for n, family in families.items() if n not in without and family.startswith(only)]
    return pytest.mark.parametrize("name", [_marked(name) for name in names])


every = _those()
every_but_fsdp = _those("fsdp")
synchronous = _those(only="synchronous")


def wrapped(name: str, make: Any = make_sgd, model: Any = None, **options: Any) -> Any:
    model = make_model() if model is None else model
    return model, wrap(make(model), model, name, **options)


def wrap(optimizer: Any, model: nn.Module, name: str, **options: Any) -> Any:
    chosen = {**Meaning.of(name).options[0], **options}
    return dear.DistributedOptimizer(optimizer, model, algorithm=name, **chosen)


@every
@on_ranks(2)
def test_the_returned_optimizer_is_the_old_one(name: str) -> None:
    model = make_model()
    plain = make_sgd(model)
    groups = plain.param_groups
    optimizer = wrap(plain, model, name)
    steps(model, optimizer, mine(), range(1))
    assert optimizer is plain and optimizer.param_groups is groups
    assert isinstance(optimizer, torch.optim.SGD)
    assert "SGD" in repr(optimizer) and "momentum: 0.9" in repr(optimizer)
    assert {"state", "param_groups"} <= optimizer.state_dict().keys()
    assert "state_dict()" in message(lambda: copy.deepcopy(optimizer))
    for whole in (optimizer, StepLR(optimizer, 1)):
        assert "state_dict()" in message(lambda whole=whole: torch.save(whole, io.BytesIO()))
    assert isinstance(optimizer.statistics(), dict)
    optimizer.close()


def _closed(name: str, when: str) -> dict[str, Any]:
    model = make_model()
    optimizer = make_sgd(model)
    scheduler = StepLR(optimizer, 1)
    wrap(optimizer, model, name)
    if when == "after a step":
        steps(model, optimizer, mine())
    if when == "after a backward":
        loss_of(model, dear.rank(), 0).backward()
    if when == "after an evaluation":
        model(batch(0, 0)[0])
    optimizer.close()
    whole = {p.untyped_storage().nbytes() == p.nbytes for p in model.parameters()}
    reference = copy.deepcopy(model)
    other = make_sgd(reference)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if dear.rank() == 0:  # a collective would wait for the other rank in vain
            steps(model, optimizer, [0])
            steps(reference, other, [0])
            scheduler.step()
    return {
        "class": type(optimizer) is torch.optim.SGD,
        "leftovers": leftovers(model),
        "memory of its own": whole,
        "far": difference(model, reference),
    }


@every
@pytest.mark.parametrize("size", [1, 2])
def test_close_gives_back_a_plain_optimizer_and_model(world, size, name):
    wanted = {"class": True, "leftovers": [], "memory of its own": {True}, "far": 0.0}
    for when in ("at once", "after a backward", "after a step", "after an evaluation"):
        assert world(size, name).run(_closed, name, when) == [wanted] * size


@every
@on_ranks(2)
def test_what_cannot_be_trained_is_a_user_error_that_changes_nothing(name: str) -> None:
    model = make_model()
    optimizer = make_sgd(model)
    frozen = make_model().requires_grad_(False)
    outside = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(2))], lr=0.1)
    assert "not in the model" in message(lambda: wrap(outside, model, name))
    assert "nothing to train" in message(lambda: wrap(make_sgd(frozen), frozen, name))
    line = message(lambda: wrap(optimizer, model, name, nonsense=1))
    assert "nonsense" in line and name in line
    unknown = {"algorithm": name + "x"}
    line = message(lambda: dear.DistributedOptimizer(optimizer, model, **unknown))
    assert f"did you mean '{name}'" in line
    assert [*leftovers(model), type(optimizer).__name__] == ["SGD"]
    wrap(optimizer, model, name)
    assert "already" in message(lambda: wrap(optimizer, model, name))
    optimizer.close()


@every
@on_ranks(2)
def test_step_hooks_run_once_per_step_also_after_loading_a_state(name: str) -> None:
    model, optimizer = wrapped(name)
    optimizer.load_state_dict(optimizer.state_dict())
    calls: list[int] = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    meaning = Meaning.of(name)
    if meaning.lacks_with(meaning.options[0]) >= IN_BACKWARD:
        line = message(lambda: steps(model, optimizer, mine()))
        assert "step hooks" in line and "update='step'" in line and calls == []
        return
    steps(model, optimizer, mine())
    optimizer.close()
    assert len(calls) == 3


@every_but_fsdp
@on_ranks(2)
def test_copies_of_a_wrapped_model_are_plain_models(name: str) -> None:
    model, optimizer = wrapped(name)
    steps(model, optimizer, mine(), range(2))
    optimizer.synchronize()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [copy.deepcopy(model), torch.load(file, weights_only=False)]
    far = [difference(copied, model) for copied in copies]
    moved = []
    for copied in copies:
        if dear.rank() == 0:
            steps(copied, make_sgd(copied), [0], range(2))
            moved.append(difference(copied, model) > 1e-3)
    steps(model, optimizer, mine(), range(2, 4))
    optimizer.close()
    assert max(far) == 0.0 and all(moved)


@every
@on_ranks(2)
def test_states_of_plain_torch_are_taken_and_given(name: str) -> None:
    plain_model = make_model()
    plain = torch.optim.AdamW(plain_model.parameters())
    steps(plain_model, plain, [0], range(2))
    model, optimizer = wrapped(name, lambda model: torch.optim.AdamW(model.parameters()))
    steps(model, optimizer, mine(), range(1))
    optimizer.load_state_dict(plain.state_dict())
    model.load_state_dict(plain_model.state_dict())
    taken = difference(model, plain_model)
    steps(model, optimizer, mine(), range(2, 5))
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.close()
    plain.load_state_dict(state)
    steps(plain_model, plain, [0], range(1))
    assert all(p.isfinite().all() for p in plain_model.parameters()) and taken == 0.0


@pytest.mark.parametrize("name", ["neighbor", "decentralized", "dadt"])
@on_ranks(2)
def test_a_model_converted_after_wrapping_is_refused(name: str) -> None:
    model, optimizer = wrapped(name, lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    steps(model, optimizer, mine(), range(4))
    optimizer.flush()
    optimizer.synchronize()
    model.double()

    def go_on() -> None:
        for step in range(2):
            optimizer.zero_grad()
            x, y = batch(dear.rank(), step)
            functional.cross_entropy(model(x.double()), y).backward()
            optimizer.step()
        optimizer.synchronize()

    line = message(go_on)
    assert "wrap it again" in line or "before you move" in line or "moved or converted" in line


@synchronous
@on_ranks(2)
def test_algorithms_may_change_in_the_middle_of_training(name: str) -> None:
    model, wanted = make_model(), make_model()
    optimizer = make_sgd(model)
    for step, algorithm in enumerate(("allreduce", name, "dear", name)):
        steps(model, wrap(optimizer, model, algorithm), mine(), [step])
        optimizer.close()
    steps(wanted, make_sgd(wanted), everybody(), range(4))
    assert difference(model, wanted) < 1e-5


@_those("fsdp", only="synchronous")
@on_ranks(2)
def test_two_optimizers_of_one_model_equal_serial(name: str) -> None:
    def run(ranks: list[int], wrap: Any) -> nn.Module:
        model = make_model()
        biases = [param for param in model.parameters() if param.dim() == 1]
        weights = [param for param in model.parameters() if param.dim() == 2]
        optimizers = [torch.optim.Adam(biases, 0.01), torch.optim.SGD(weights, 0.1)]
        optimizers = [wrap(optimizer, model) for optimizer in optimizers]
        for step in range(3):
            model.zero_grad()
            mean_loss(model, ranks, step).backward()
            for optimizer in optimizers:
                optimizer.step()
        return model

    assert run_both(name, run) < 1e-5


def _without_a_last_pass(name: str, last_but_one: bool, clipped: bool) -> float:
    """The last backward pass before a step is under `no_sync()`."""

    def run(ranks: list[int], wrap: Any) -> nn.Module:
        model = make_model()
        optimizer = wrap(make_sgd(model), model)
        alone = not hasattr(optimizer, "no_sync")
        for step in range(3):
            optimizer.zero_grad()
            for micro, paused in enumerate((last_but_one, True)):
                with contextlib.nullcontext() if alone or not paused else optimizer.no_sync():
                    mean_loss(model, ranks, 2 * step + micro).backward()
                if not (alone or paused):
                    optimizer.synchronize()
            if clipped:
                if not alone:
                    optimizer.synchronize()
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
        return model

    return run_both(name, run)


@synchronous
@on_ranks(2)
def test_gradients_added_under_no_sync_just_before_a_step_are_not_lost(name: str) -> None:
    for case in itertools.product([True, False], [False, True]):
        if name == "ddp":
            assert "no_sync()" in message(lambda case=case: _without_a_last_pass(name, *case))
        else:
            assert _without_a_last_pass(name, *case) < 1e-5


@pytest.mark.parametrize("name", ["allreduce", "dear", "wfbp"])
@on_ranks(2)
def test_sparse_gradients_are_a_user_error(name: str) -> None:
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 4))
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, name)
    line = message(lambda: model(torch.tensor([1, 2])).sum().backward())
    optimizer.close()
    assert "sparse=False" in line


@pytest.mark.parametrize("every", [1, 2])
@on_ranks(4)
def test_who_goes_on_exchanges_with_whom_comes_next(every: int) -> None:
    how = {"dynamic": "one-peer-exp", "every": every}
    model, optimizer = wrapped("neighbor", **how)
    steps(model, optimizer, mine(), range(3))
    state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    steps(model, optimizer, mine(), range(3, 7))
    other, resumed = wrapped("neighbor", **how)
    other.load_state_dict(state[0])
    resumed.load_state_dict(state[1])
    steps(other, resumed, mine(), range(3, 7))
    assert difference(model, other) == 0.0
    for closing in (optimizer, resumed):
        closing.close()
