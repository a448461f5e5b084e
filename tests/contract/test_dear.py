"""What `dear` alone promises: whom it shards, what it refuses, few messages, clipping of shards."""

from __future__ import annotations

import math
from collections import Counter
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import dear
from dear.comm import runtime
from tests.contract import awkward, models
from tests.contract.loops import (
    difference,
    everybody,
    far_from_serial,
    loss_of,
    make_model,
    make_sgd,
    message,
    mine,
    steps,
    wrap,
)


def _make_sgd_with(rate: str, model: nn.Module) -> torch.optim.Optimizer:
    return make_sgd(model, lr={"number": float, "tensor": torch.tensor}[rate](0.5))


def _lower_rate(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 0.01  # in place where it is a tensor
        group["weight_decay"] = 5.0


@pytest.mark.parametrize("rate", ["number", "tensor"])
def test_a_deferred_update_uses_the_learning_rate_that_step_saw(world, rate):
    given = {"make_optimizer": partial(_make_sgd_with, rate), "after_step": _lower_rate}
    assert far_from_serial(world(2), "dear", which=range(1), **given) < 1e-5


def _clipped_too_early(change: str) -> str:
    def before_step(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        if change == "clip":
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        if change == "one value":
            model[2].weight.grad[3, 3] = 0.0
        if change == "replace":
            model[2].bias.grad = model[2].bias.grad * 2
        if change == "drop":
            model[2].bias.grad = None

    model = make_model()
    optimizer = wrap(make_sgd(model), model, "dear")
    return message(lambda: steps(model, optimizer, mine(), range(1), before_step=before_step))


@pytest.mark.parametrize("change", ["clip", "one value", "replace", "drop"])
def test_dear_refuses_gradients_changed_without_synchronize(world, change):
    assert all("synchronize()" in said for said in world(2).run(_clipped_too_early, change))


def _scale(
    model: nn.Module, optimizer: torch.optim.Optimizer, ranks: list[int], calls: str, count: int = 5
) -> float:
    """Trains `count` steps with a GradScaler, the given calls between backward and step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step in range(count):
        optimizer.zero_grad()
        overflow = {rank: float("inf") if (rank, step) == (1, 1) else 1.0 for rank in ranks}
        losses = [loss_of(model, rank, step) * overflow[rank] for rank in ranks]
        scaler.scale(sum(losses) / len(losses)).backward()
        for call in calls.split():
            optimizer.synchronize() if call == "synchronize" else scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale()


def _scaled_too_early(fused: bool, calls: str) -> str:
    model = make_model()
    optimizer = wrap(make_sgd(model, fused=fused), model, "dear")
    return message(lambda: _scale(model, optimizer, mine(), calls, count=1))


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("calls", ["", "unscale", "unscale synchronize"])
def test_dear_refuses_a_grad_scaler_before_synchronize(world, fused, calls):
    assert all("synchronize()" in said for said in world(2).run(_scaled_too_early, fused, calls))


def _with_hooks(model: nn.Module) -> torch.optim.Optimizer:
    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for param in model.parameters():
            param.grad.add_(param.detach(), alpha=0.1)

    def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        norm = torch.cat([p.detach().flatten() for p in model.parameters()]).norm()
        for param in model.parameters():
            param.data.div_(norm)

    optimizer = make_sgd(model)
    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    return optimizer


def test_step_hooks_see_averages_and_current_parameters(world):
    given = {"make_optimizer": _with_hooks, "options": {"fusion": "none"}}
    assert far_from_serial(world(2), "dear", **given) < 1e-5


_ELEMENT_WISE = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-4},
    "Adam": {"lr": 0.01, "amsgrad": True},
    "AdamW": {"lr": 0.01},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Adagrad": {"lr_decay": 0.1},
    "Adadelta": {"lr": 0.5},
    "Adamax": {"lr": 0.01},
    "NAdam": {"lr": 0.01},
    "RAdam": {"lr": 0.01},
    "Rprop": {"lr": 0.01},
    "ASGD": {"lr": 0.05, "t0": 2},
}


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """One of torch's optimizers, with a group of other settings for every second parameter."""
    params = list(model.parameters())
    options = _ELEMENT_WISE[name]
    groups = [{"params": params[::2]}, {"params": params[1::2], "lr": 0.004}]
    return getattr(torch.optim, name)(groups, **options)


def _far(name: str, options: dict[str, Any]) -> tuple[float, str]:
    model, wanted = make_model(), make_model()
    optimizer, serial = make_optimizer(name, model), make_optimizer(name, wanted)
    wrap(optimizer, model, "dear", **options)
    steps(model, optimizer, mine(), range(4))
    held = [key for key in optimizer.state if key in set(model.parameters())]
    steps(wanted, serial, everybody(), range(4))
    far = awkward.error([model.state_dict()], [wanted.state_dict()])
    optimizer.close()
    far = max(far, _state_error(optimizer.state_dict(), serial.state_dict()))
    return far, "whole" if held else "sharded"


def _state_error(got: dict[str, Any], wanted: dict[str, Any]) -> float:
    assert got["param_groups"] == wanted["param_groups"]
    assert got["state"].keys() == wanted["state"].keys()
    far = 0.0
    for place, state in wanted["state"].items():
        assert got["state"][place].keys() == state.keys()
        for key, value in state.items():
            other = got["state"][place][key]
            if torch.is_tensor(value):
                assert other.shape == value.shape and other.dtype == value.dtype, key
                far = max(far, ((other - value).norm() / value.norm().clamp_min(1e-3)).item())
            else:
                assert other == value, key
    return far


@pytest.mark.parametrize("name", _ELEMENT_WISE)
def test_element_wise_optimizers_are_sharded_and_equal_serial(world, name):
    for far, held in world(3).run(_far, name, {"threshold_mb": 0.0002}):
        assert far < 1e-5
        assert held == "sharded"


@pytest.mark.parametrize("name", ["Rprop", "Adagrad"])
def test_the_same_optimizers_may_be_replicated(world, name):
    for far, held in world(2).run(_far, name, {"update": "replicated"}):
        assert far < 1e-5
        assert held == "whole"


class Halving(torch.optim.SGD):
    """A user's class that says what it is."""

    element_wise = True


class Whole(torch.optim.SGD):
    """A user's class that does not."""


def _chosen(kind: type[torch.optim.Optimizer]) -> bool:
    model = make_model()
    optimizer = wrap(kind(model.parameters(), lr=0.1, momentum=0.9), model, "dear")
    steps(model, optimizer, mine(), range(1))
    whole = any(param in optimizer.state for param in model.parameters())
    optimizer.close()
    return not whole


def test_a_class_may_declare_that_it_works_element_by_element(world):
    assert world(2).run(_chosen, Halving) == [True, True]
    assert world(2).run(_chosen, Whole) == [False, False]


def _refused() -> str:
    model = make_model()
    optimizer = Whole(model.parameters(), lr=0.1)
    return message(lambda: wrap(optimizer, model, "dear", update="sharded"))


def test_sharding_is_refused_to_others(world):
    assert all("element by element" in said for said in world(2).run(_refused))


def _excluded(parts: str, update: str) -> tuple[float, float]:
    model, before = make_model(), make_model()
    optimizer = wrap(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model,
        "dear",
        update=update,
        exclude_parts=parts,
    )
    steps(model, optimizer, mine())
    state = {name: value.clone() for name, value in model.state_dict().items()}
    moved = awkward.error([state], [before.state_dict()])
    dear.broadcast_parameters(model.state_dict())
    spread = awkward.error([state], [model.state_dict()])
    optimizer.close()
    return moved, spread


@pytest.mark.parametrize("update", ["sharded", "replicated"])
@pytest.mark.parametrize("parts", ["reducescatter", "allgather", "reducescatter,allgather"])
def test_without_some_parts_training_is_wrong_but_the_same_everywhere(world, parts, update):
    for moved, spread in world(2).run(_excluded, parts, update):
        assert (moved > 0) == ("allgather" not in parts)
        assert spread == 0.0


def _seed_arguments() -> list[str]:
    said = []
    for options in ({"threshold": 8}, {"num_nearby_layers": 2}, {"threshold": None}):
        model = make_model()
        optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, "dear", **options)
        steps(model, optimizer, mine(), range(1))
        said.append(type(optimizer).__name__)
        optimizer.close()
    return said


def test_the_arguments_of_the_seed_are_understood(world):
    assert world(2).run(_seed_arguments) == [["DistributedSGD"] * 3] * 2


_CALLS = ("all_reduce", "reduce_scatter", "all_gather")


def _messages(options: dict[str, Any]) -> dict[str, int]:
    """Collectives of one step, by name, once groups are laid out."""
    model = make_model()
    optimizer = wrap(make_sgd(model), model, "dear", **options)
    steps(model, optimizer, mine(), range(1))
    communicator, seen = runtime.communicator(), Counter[str]()
    with mock.patch.multiple(
        communicator, **{name: _counted(communicator, name, seen) for name in _CALLS}
    ):
        steps(model, optimizer, mine(), range(1, 2))
    optimizer.close()
    return dict(seen)


def _counted(communicator: Any, name: str, seen: Counter[str]) -> Any:
    call = getattr(communicator, name)

    def counted(*args: Any, **options: Any) -> Any:
        seen[name] += 1
        return call(*args, **options)

    return counted


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"small_kb": 8}, {"all_reduce": 1}),
        ({"small_kb": 0}, {"all_reduce": 1, "reduce_scatter": 1, "all_gather": 1}),
        # Weights of 192, 256 and 128 bytes, biases of 32, 32 and 16: the last one to arrive is
        # small, and carries the marks.
        (
            {"small_kb": 0.2, "fusion": "none"},
            {"all_reduce": 5, "reduce_scatter": 1, "all_gather": 1},
        ),
        # The last one to arrive is not: the marks travel alone.
        (
            {"small_kb": 0.05, "fusion": "none"},
            {"all_reduce": 4, "reduce_scatter": 3, "all_gather": 3},
        ),
        (
            {"small_kb": 8, "fusion": "none", "decouple": "reduce_broadcast"},
            {"all_reduce": 1},
        ),
        (
            {"small_kb": 8, "update": "replicated", "compression": "bf16"},
            {"all_reduce": 1},
        ),
    ],
    ids=lambda value: "-".join(map(str, value.values())),
)
def test_a_small_group_is_one_message_and_may_carry_the_marks(world, options, wanted):
    assert world(2).run(_messages, options) == [wanted] * 2


def _clip(norms: list[float], max_norm: float, kind: float, optimizer: Any, model: Any) -> None:
    if hasattr(optimizer, "clip_grad_norm_"):
        norm = optimizer.clip_grad_norm_(max_norm, kind)
    else:
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm, kind)
    norms.append(norm.item())


def _clipped(
    algorithm: str, max_norm: float, kind: float, branches: bool, options: dict[str, Any]
) -> tuple[float, float]:
    make = partial(models.make_model, "branches") if branches else make_model
    loop = {"which": range(4)}
    if branches:
        loop["loss_of"] = partial(models.loss_of, "branches")
    model, wanted = make(), make()
    optimizer = wrap(make_sgd(model), model, algorithm, **options)
    got: list[float] = []
    serial: list[float] = []
    steps(model, optimizer, mine(), before_step=partial(_clip, got, max_norm, kind), **loop)
    steps(
        wanted,
        make_sgd(wanted),
        everybody(),
        before_step=partial(_clip, serial, max_norm, kind),
        **loop,
    )
    far = difference(model, wanted)
    optimizer.close()
    return far, max(abs(a - b) for a, b in zip(got, serial, strict=True))


@pytest.mark.parametrize("branches", [False, True], ids=["all used", "some unused"])
@pytest.mark.parametrize("kind", [1.0, 2.0, 3.5, math.inf])
@pytest.mark.parametrize(("world_size", "small_kb"), [(1, 0), (3, 0), (3, 0.1), (3, 8)])
def test_clipping_equals_serial_and_returns_the_norm(world, world_size, small_kb, kind, branches):
    options = {"threshold_mb": 0.0002, "small_kb": small_kb}
    for far, off in world(world_size).run(_clipped, "dear", 0.05, kind, branches, options):
        assert far < 1e-5
        assert off < 1e-5


def _same_norm() -> float:
    model = make_model()
    optimizer = wrap(make_sgd(model), model, "dear")
    norms: list[float] = []
    steps(model, optimizer, mine(), before_step=partial(_clip, norms, 0.1, 2.0))
    optimizer.close()
    return torch.tensor(norms).double().sum().item()


def test_every_rank_gets_the_same_norm(world):
    assert len(set(world(3).run(_same_norm))) == 1
