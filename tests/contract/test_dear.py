"""Promises of `dear` alone: whom it shards, what it refuses, few messages, clipping of shards."""

from __future__ import annotations

import contextlib
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from itertools import product
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import nn

import dear
from dear.buckets import halves
from dear.buckets.flat import flatten
from dear.buckets.grouping import MIB
from dear.comm import runtime
from dear.cost import collectives
from dear.cost.collectives import SIZES
from dear.cost.measurement import Measurement
from dear.training import tuning
from tests.contract import models
from tests.contract.loops import (
    difference,
    error,
    everybody,
    far_from_serial,
    loss_of,
    make_model,
    make_sgd,
    mean_loss,
    message,
    mine,
    moved_and_spread,
    steps,
    wrap,
)
from tests.ranks import on_ranks


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


def _first_mb(given: float | None) -> tuple[dict[str, Any], list[int]]:
    """Returns findings where a start-up costs as much as 1.1 KB, and the groups in bytes."""
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(8)))  # 1 KB each
    optimizer = wrap(make_sgd(model), model, "dear", first_mb=given, small_kb=0)
    nbytes = [1024, 4096, 1 << 20]
    times = [[1e-4 + count * 1e-4 / 1100] for count in nbytes]
    measured = Measurement(operation="all_reduce", nbytes=nbytes, seconds=times)
    kept = mock.patch.object(collectives, "_fits", WeakKeyDictionary())
    with kept, mock.patch.object(collectives, "measure_collective", lambda *_, **__: measured):
        model(torch.ones(2, 16)).sum().backward()
        optimizer.step()
    groups = [sum(param.nbytes for param in params) for _, params in optimizer.groups()]
    findings = optimizer.findings()
    optimizer.close()
    return findings, groups


def test_groups_at_both_ends_are_as_large_as_a_start_up_is_long(world):
    ranks = world(2)
    findings, groups = ranks.run(_first_mb, None)[0]
    assert findings == {"first_mb": 2 / 1024}
    assert groups == [1024, 1024, 1024, 2048, 1024, 1024, 1024], "those inside grow"
    assert ranks.run(_first_mb, 1.0)[0] == ({}, [8192])


def _measured_sizes(start_up_s: float) -> tuple[dict[str, float], list[int]]:
    """Returns findings where a byte takes 1 ns, and the largest message of each measurement."""
    model = nn.Linear(16, 16)
    optimizer = wrap(make_sgd(model), model, "dear")
    largest = []

    def measure(*_: object, sizes: list[int], **__: object) -> Measurement:
        # In the regime of small messages, the bytes take almost no time.
        largest.append(sizes[-1])
        times = [[start_up_s + size * (1e-9 if sizes[-1] > MIB else 1e-12)] for size in sizes]
        return Measurement(operation="all_reduce", nbytes=list(sizes), seconds=times)

    kept = mock.patch.object(collectives, "_fits", WeakKeyDictionary())
    whole = mock.patch.object(tuning, "measured_costs", collectives.measured_costs)
    with kept, whole, mock.patch.object(collectives, "measure_collective", measure):
        model(torch.ones(2, 16)).sum().backward()
        optimizer.step()
    findings = optimizer.findings()
    optimizer.close()
    return findings, largest


def test_larger_messages_are_measured_where_a_start_up_takes_longer_than_a_mebibyte(world):
    ranks = world(2)
    assert ranks.run(_measured_sizes, 8e-3)[0] == ({"first_mb": 8.0}, [MIB, SIZES[-1]])
    assert ranks.run(_measured_sizes, 1e-7)[0][1] == [MIB]


def _clip(optimizer: Any, model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def _change_one_value(optimizer: Any, model: nn.Module) -> None:
    model[2].weight.grad[3, 3] = 0.0


def _replace(optimizer: Any, model: nn.Module) -> None:
    model[2].bias.grad = model[2].bias.grad * 2


def _drop(optimizer: Any, model: nn.Module) -> None:
    model[2].bias.grad = None


@pytest.mark.parametrize("change", [_clip, _change_one_value, _replace, _drop])
@on_ranks(2)
def test_dear_refuses_gradients_changed_without_synchronize(change: Any) -> None:
    model = make_model()
    optimizer = wrap(make_sgd(model), model, "dear")
    step = partial(steps, model, optimizer, mine(), range(1), before_step=change)
    assert "synchronize()" in message(step)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("calls", ["", "unscale", "unscale synchronize"])
@on_ranks(2)
def test_dear_refuses_a_grad_scaler_before_synchronize(fused: bool, calls: str) -> None:
    model, scaler = make_model(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = wrap(make_sgd(model, fused=fused), model, "dear")
    scaler.scale(loss_of(model, dear.rank(), 0)).backward()

    def step() -> None:
        for call in calls.split():
            optimizer.synchronize() if call == "synchronize" else scaler.unscale_(optimizer)
        scaler.step(optimizer)

    assert "synchronize()" in message(step)


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


def _far(name: str, options: dict[str, Any]) -> tuple[bool, bool]:
    """Returns whether the optimizer equals serial, and whether its state is whole."""
    model, wanted = make_model(), make_model()
    optimizer, serial = make_optimizer(name, model), make_optimizer(name, wanted)
    wrap(optimizer, model, "dear", **options)
    steps(model, optimizer, mine(), range(4))
    held = [key for key in optimizer.state if key in set(model.parameters())]
    steps(wanted, serial, everybody(), range(4))
    far = difference(model, wanted)
    optimizer.close()
    got, whole = optimizer.state_dict(), serial.state_dict()
    assert got["param_groups"] == whole["param_groups"]
    assert got["state"].keys() == whole["state"].keys()
    for place, state in whole["state"].items():
        assert {k: torch.is_tensor(v) and (v.shape, v.dtype) for k, v in state.items()} == {
            k: torch.is_tensor(v) and (v.shape, v.dtype) for k, v in got["state"][place].items()
        }
        as_tensors = [
            {k: torch.as_tensor(v, dtype=torch.float64) for k, v in states[place].items()}
            for states in (got["state"], whole["state"])
        ]
        far = max(far, error(*as_tensors))
    return far < 1e-5, bool(held)


@pytest.mark.parametrize("name", _ELEMENT_WISE)
def test_element_wise_optimizers_are_sharded_and_equal_serial(world, name):
    assert world(3).run(_far, name, {"threshold_mb": 0.0002}) == [(True, False)] * 3


@pytest.mark.parametrize("name", ["Rprop", "Adagrad"])
def test_the_same_optimizers_may_be_replicated(world, name):
    assert world(2).run(_far, name, {"update": "replicated"}) == [(True, True)] * 2


class Whole(torch.optim.SGD):
    """A user's class that does not say that it works element by element."""


class Halving(Whole):
    """One that does."""

    element_wise = True


@pytest.mark.parametrize("kind", [Halving, Whole])
@on_ranks(2)
def test_a_class_may_declare_that_it_works_element_by_element(kind: type[Whole]) -> None:
    model = make_model()
    optimizer = wrap(kind(model.parameters(), lr=0.1, momentum=0.9), model, "dear")
    steps(model, optimizer, mine(), range(1))
    whole = any(param in optimizer.state for param in model.parameters())
    optimizer.close()
    assert whole == (kind is Whole)
    refused = message(lambda: wrap(kind(model.parameters(), 0.1), model, "dear", update="sharded"))
    assert ("element by element" in refused) == whole


def _clipped_twice(optimizer: Any, model: nn.Module, ranks: Iterable[int]) -> nn.Module:
    """Another pass follows on the clipped gradients, and another step."""
    for step in range(4):
        optimizer.zero_grad()
        for place in (step, 10 + step):
            mean_loss(model, ranks, place).backward()
            if hasattr(optimizer, "clip_grad_norm_"):
                optimizer.clip_grad_norm_(0.05)
            else:
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.step()
    return model


@on_ranks(2)
def test_gradients_stay_clipped_in_later_passes_and_steps() -> None:
    model, wanted = make_model(), make_model()
    optimizer = wrap(make_sgd(model), model, "dear")
    _clipped_twice(optimizer, model, mine())
    far = difference(model, _clipped_twice(make_sgd(wanted), wanted, everybody()))
    optimizer.close()
    assert far < 1e-5


@pytest.mark.parametrize("update", ["sharded", "replicated"])
@pytest.mark.parametrize("parts", ["reducescatter", "allgather", "reducescatter,allgather"])
@on_ranks(2)
def test_without_some_parts_training_is_wrong_but_the_same_everywhere(
    parts: str, update: str
) -> None:
    model = make_model()
    options = {"update": update, "exclude_parts": parts}
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, "dear", **options)
    steps(model, optimizer, mine())
    moved, spread = moved_and_spread(model, optimizer)
    assert (moved > 0) == ("allgather" not in parts)
    assert spread == 0.0


@on_ranks(2)
def test_the_arguments_of_the_seed_are_understood() -> None:
    names = []
    for options in ({"threshold": 8}, {"num_nearby_layers": 2}, {"threshold": None}):
        model = make_model()
        optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, "dear", **options)
        steps(model, optimizer, mine(), range(1))
        names.append(type(optimizer).__name__)
        optimizer.close()
    assert names == ["DistributedSGD"] * 3


_CALLS = ("all_reduce", "reduce_scatter", "all_gather", "reduce", "broadcast")
_HALVES = {"reduce_scatter": 1, "all_gather": 1}


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"small_kb": 8}, {"all_reduce": 1}),
        ({"small_kb": 0}, _HALVES),
        # Weights of 192, 256 and 128 bytes, biases of 32, 32 and 16: the last one to arrive is
        # small, or is not.
        ({"small_kb": 0.2, "fusion": "none"}, {"all_reduce": 5} | _HALVES),
        ({"small_kb": 0.05, "fusion": "none"}, dict.fromkeys(_CALLS[:3], 3)),
        ({"small_kb": 0, "compression": "fp16"}, _HALVES),
        ({"small_kb": 8, "update": "replicated", "compression": "bf16"}, {"all_reduce": 1}),
        ({"small_kb": 8, "compression": "topk"}, {"all_gather": 1}),
        # The owner alone would see the sums of the marks.
        (
            {"small_kb": 8, "threshold_mb": 25.0, "decouple": "reduce_broadcast"},
            {"reduce": 1, "broadcast": 1, "all_reduce": 1},
        ),
        ({"small_kb": 8, "exclude_parts": ("reducescatter",)}, {"all_gather": 1, "all_reduce": 1}),
        ({"small_kb": 8, "exclude_parts": ("allgather",)}, {"reduce_scatter": 1}),
    ],
    ids=lambda value: "-".join(map(str, value.values())),
)
@on_ranks(2)
def test_marks_of_used_parameters_travel_in_the_last_message_where_they_can(
    options: dict[str, Any], wanted: dict[str, int]
) -> None:
    assert _messages(options) == wanted


@on_ranks(2)
def test_marks_travel_beside_a_large_message_which_is_not_copied() -> None:
    # 164 gradients and 6 marks for each of 2 ranks: 704 bytes.
    for limit, wanted in ((703, {"all_reduce": 1} | _HALVES), (704, _HALVES)):
        with mock.patch.object(halves, "COPIED_BYTES", limit):
            assert _messages({"small_kb": 0}) == wanted
            # What travels in another type is copied anyway.
            assert _messages({"small_kb": 0, "compression": "bf16"}) == _HALVES


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


def _trained(kind: str, options: dict[str, Any], separate: bool) -> dict[str, torch.Tensor]:
    """Values and state after steps of which every second accumulates two passes.

    Args:
        separate: the marks travel in a message of their own.
    """
    model = models.make_model(kind)
    optimizer = wrap(make_sgd(model), model, "dear", **options)
    start = halves.Usage.start
    alone = mock.patch.object(halves.Usage, "start", lambda usage, carrier: start(usage))
    with alone if separate else contextlib.nullcontext():
        for step in range(7):
            optimizer.zero_grad()
            for micro in range(1 + step % 2):
                last = micro == step % 2
                with contextlib.nullcontext() if last else optimizer.no_sync():
                    loss = models.loss_of(kind, model, dear.rank(), step, micro)
                    if loss is not None:
                        loss.backward()
            optimizer.step()
    values = {name: value.clone() for name, value in model.state_dict().items()}
    for place, state in optimizer.state_dict()["state"].items():
        values |= {f"{place} {key}": value for key, value in state.items()}
    optimizer.close()
    return values


def _as_with_separate_marks(kind: str, options: dict[str, Any]) -> None:
    wanted, values = (_trained(kind, options, separate) for separate in (True, False))
    assert values.keys() == wanted.keys()
    differ = {name for name, value in values.items() if not torch.equal(value, wanted[name])}
    assert not differ, (options, differ)
    never = {name: value for name, value in values.items() if name.startswith("never.")}
    start = models.make_model(kind).state_dict()
    assert all(torch.equal(value, start[name]) for name, value in never.items())
    assert bool(never) == (kind == "branches")


_CARRIED: list[dict[str, Any]] = [
    {},
    {"fusion": "none"},
    {"update": "replicated", "fusion": "none"},
    {"small_kb": 0.05, "fusion": "none"},
    {"compression": "fp16"},
    {"compression": "fp16", "fusion": "none", "update": "replicated"},
    {"compression": "bf16", "fusion": "none"},
    {"fusion": "wait_time", "cycle_time_ms": 1e6},  # other groups from the sixth step on
]


_QUICK = {(1, "bfloat16"), (2, "awkward"), (3, "odd")}


@pytest.mark.parametrize(
    ("size", "kind"),
    [
        pytest.param(*case, marks=() if case in _QUICK else pytest.mark.full)
        for case in product(
            [1, 2, 3, 4], ["awkward", "branches", "bfloat16", "idle", "odd", "complex"]
        )
    ],
)
def test_results_are_bit_for_bit_those_with_marks_in_a_message_of_their_own(world, size, kind):
    for options in _CARRIED:
        if kind == "complex" and "compression" in options:
            continue  # refused
        world(size).run(_as_with_separate_marks, kind, options)


def _far_from_whole(kind: str, compression: str) -> float:
    """Distance of values in half precision from those of gradients that travel as they are."""
    replicated = {"update": "replicated", "fusion": "none"}
    half = _trained(kind, {**replicated, "compression": compression}, separate=False)
    return error(half, _trained(kind, replicated, separate=False))


@pytest.mark.parametrize("compression", ["fp16", "bf16"])
@pytest.mark.parametrize("kind", ["branches", "idle"])
def test_the_mean_of_a_layer_that_has_not_run_since_is_not_overwritten(world, kind, compression):
    far = world(2).run(_far_from_whole, kind, compression)
    assert far[0] == far[1] < 0.03


@on_ranks(2)
def test_a_rank_with_gradients_for_a_bucket_does_not_wait_for_the_marks() -> None:
    model = make_model()
    here, missing, *_ = params = list(model.parameters())
    here.grad = torch.zeros_like(here)
    if dear.rank() == 0:
        missing.grad = torch.zeros_like(missing)
    usage = halves.Usage(params, runtime.communicator())
    (bucket,) = flatten([[here]], runtime.communicator(), values=False)
    carrier = halves.ScatterGather(bucket, runtime.communicator(), marks=len(params))
    usage.start(carrier)
    carrier.start_reduce()
    with mock.patch.object(carrier, "await_reduce", side_effect=AssertionError):
        assert usage.unused([here]) == set()
    assert usage.unused() == set(params[2:])
    carrier.finish_reduce()


def _norms(kind: float, branches: bool, options: dict[str, Any]) -> list[float]:
    """Returns the norm of each step; it is the same as serially.

    Args:
        branches: something is not used.
    """
    loop: dict[str, Any] = {"which": range(4)}
    if branches:
        loop["loss_of"] = partial(models.loss_of, "branches")
    make = partial(models.make_model, "branches") if branches else make_model
    model, wanted = make(), make()
    optimizer = wrap(make_sgd(model), model, "dear", threshold_mb=0.0002, **options)
    got: list[float] = []
    serial: list[float] = []

    def clip(optimizer: Any, model: nn.Module) -> None:
        got.append(optimizer.clip_grad_norm_(0.05, kind).item())

    def clip_serially(optimizer: Any, model: nn.Module) -> None:
        serial.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05, kind).item())

    steps(model, optimizer, mine(), before_step=clip, **loop)
    steps(wanted, make_sgd(wanted), everybody(), before_step=clip_serially, **loop)
    assert difference(model, wanted) < 1e-5
    assert got == pytest.approx(serial, abs=1e-5)
    optimizer.close()
    return got


@pytest.mark.parametrize(("size", "small_kb"), [(1, 0), (3, 0), (3, 0.1), (3, 8)])
def test_clipping_equals_serial_and_returns_the_norm_to_every_rank(world, size, small_kb):
    for case in product([1.0, 2.0, 3.5, math.inf], [False, True]):
        norms = world(size).run(_norms, *case, {"small_kb": small_kb})
        assert all(norm == norms[0] for norm in norms)


def _loss_of_all_but(silent: int, first: int, model: Any, rank: int, step: int) -> Any:
    return None if rank == silent and step >= first else loss_of(model, rank, step)


@pytest.mark.parametrize(("silent", "first"), [(0, 0), (1, 0), (1, 1)])
@pytest.mark.parametrize(
    ("name", "options"),
    [("wfbp", {}), ("bytescheduler", {}), ("dear", {}), ("dear", {"update": "replicated"})],
)
def test_a_rank_without_a_backward_pass_joins_in_step_with_zeros(
    world, name, options, silent, first
):
    loss = partial(_loss_of_all_but, silent, first)
    assert far_from_serial(world(2), name, options=options, loss_of=loss) < 1e-5


def _clipped_without_a_pass(name: str) -> torch.Tensor:
    """Rank 1 skips the backward pass of step 1; both ranks clip."""
    model = make_model()
    optimizer = wrap(make_sgd(model), model, name)
    for step in range(3):
        optimizer.zero_grad()
        if (step, dear.rank()) != (1, 1):
            loss_of(model, dear.rank(), step).backward()
        optimizer.clip_grad_norm_(0.05)
        optimizer.step()
    optimizer.close()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def _synchronized_without_a_pass(name: str, zeroed: bool) -> str:
    """Neither rank makes a pass, so that none waits for the other."""
    model = make_model()
    optimizer = wrap(make_sgd(model), model, name)
    steps(model, optimizer, mine())
    if zeroed:
        optimizer.zero_grad()
    optimizer.synchronize()
    line = message(optimizer.step)
    optimizer.zero_grad()
    optimizer.close()
    return line


SKIPPING = ["wfbp", "bytescheduler", "dear", "dadt"]


@pytest.mark.parametrize("name", SKIPPING)
def test_a_rank_without_a_pass_clips_what_the_others_do(world, name):
    first, second = world(2).run(_clipped_without_a_pass, name)
    assert torch.equal(first, second)


@pytest.mark.parametrize("name", SKIPPING)
@pytest.mark.parametrize("zeroed", [True, False])
def test_a_rank_without_a_pass_that_synchronizes_is_refused(world, name, zeroed):
    for line in world(2).run(_synchronized_without_a_pass, name, zeroed):
        assert "no gradient has reached this rank's parameters" in line and "\n" not in line


def _cleared(optimizer: Any) -> None:
    optimizer.state.clear()


def _replaced(optimizer: Any) -> None:
    optimizer.state = defaultdict(dict)


@pytest.mark.parametrize("reset", [_cleared, _replaced])
@pytest.mark.parametrize(("name", "options"), [("dear", {}), ("ddp", {"zero": True})])
@on_ranks(2)
def test_cleared_state_does_not_come_back_after_a_load(
    name: str, options: dict[str, Any], reset: Callable[[Any], None]
) -> None:
    model = make_model()
    optimizer = wrap(make_sgd(model), model, name, **options)
    steps(model, optimizer, mine())
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state_dict()["state"]
    reset(optimizer)
    assert not optimizer.state_dict()["state"]
    optimizer.close()
    assert not optimizer.state
