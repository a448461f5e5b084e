"""The drop-in contract: what a training script may do with a distributed optimizer."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import StepLR

import dear
from dear.errors import UserError
from dear.training.algorithm import algorithm_class, algorithm_names
from tests.awkward import error
from tests.ranks import RankPool

_MODULE_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def _synchronous(without: tuple[str, ...] = ()) -> list[Any]:
    classes = {name: algorithm_class(name) for name in algorithm_names() if name not in without}
    return [
        pytest.param(name, marks=pytest.mark.skipif(bool(missing), reason=str(missing)))
        for name, found in classes.items()
        if found.capabilities.consistency == "synchronous"
        for missing in [found.unavailable()]
    ]


algorithms = pytest.mark.parametrize("algorithm", _synchronous())
# FSDP wants all ranks to use the same parameters, one optimizer per model, and no copies.
algorithms_but_fsdp = pytest.mark.parametrize("algorithm", _synchronous(without=("fsdp",)))
algorithms_but_ddp = pytest.mark.parametrize("algorithm", _synchronous(without=("ddp",)))
algorithms_but_ddp_and_fsdp = pytest.mark.parametrize(
    "algorithm", _synchronous(without=("ddp", "fsdp"))
)


def make_model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def make_sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, **options}
    return torch.optim.SGD(model.parameters(), **options)


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(3, 6, generator=generator), torch.randint(4, (3,), generator=generator)


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x, y = batch(rank, step)
    return functional.cross_entropy(model(x), y)


def wrap(
    optimizer: torch.optim.Optimizer, model: nn.Module, algorithm: str, **options: Any
) -> torch.optim.Optimizer:
    if algorithm == "ddp":
        options["find_unused_parameters"] = True
    if algorithm == "mgs":  # which keeps most of a gradient back by default
        options.setdefault("density", 1.0)
    if algorithm == "dear":  # whose two halves tiny models would not show
        options.setdefault("small_kb", 0)
    return dear.DistributedOptimizer(optimizer, model, algorithm=algorithm, **options)


def steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ranks: Iterable[int],
    which: Iterable[int] = range(3),
    loss_of: Callable[..., torch.Tensor | None] = loss_of,
    before_step: Callable[[torch.optim.Optimizer, nn.Module], Any] = lambda *_: None,
    after_step: Callable[[torch.optim.Optimizer, nn.Module], Any] = lambda *_: None,
    set_to_none: bool = True,
) -> None:
    """The ordinary loop: one rank's part, or (serially) the mean of the losses of all `ranks`.

    Args:
        loss_of: one rank's loss in a step, None where it has none.
    """
    for step in which:
        optimizer.zero_grad(set_to_none)
        losses = [loss_of(model, rank, step) for rank in ranks]
        losses = [loss for loss in losses if loss is not None]
        if losses:
            (sum(losses) / len(ranks)).backward()
        before_step(optimizer, model)
        optimizer.step()
        after_step(optimizer, model)


def mine() -> list[int]:
    return [dear.rank()]


def everybody() -> range:
    return range(dear.size())


def mean_loss(model: nn.Module, ranks: Iterable[int], step: int) -> torch.Tensor:
    return torch.stack([loss_of(model, rank, step) for rank in ranks]).mean()


def difference(model: nn.Module, wanted: nn.Module) -> float:
    return error([model.state_dict()], [wanted.state_dict()])


def message(call: Callable[[], Any]) -> str:
    """What `call` says as a `UserError`; an empty text where it raises none."""
    try:
        call()
    except UserError as said:
        return str(said)
    return ""


def train_both(
    algorithm: str,
    make_model: Callable[[], nn.Module] = make_model,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = make_sgd,
    options: dict[str, Any] | None = None,
    **loop: Any,
) -> float:
    """Trains one rank's replica with `algorithm`, and a model serially; returns how they differ."""
    model, wanted = make_model(), make_model()
    optimizer = wrap(make_optimizer(model), model, algorithm, **(options or {}))
    steps(model, optimizer, mine(), **loop)
    steps(wanted, make_optimizer(wanted), everybody(), **loop)
    far = difference(model, wanted)
    optimizer.close()
    return far


def far_from_serial(pool: RankPool, algorithm: str, **given: Any) -> float:
    """`train_both` on every rank of `pool`; the largest difference."""
    return max(pool.run(partial(train_both, algorithm, **given)))


def run_both(
    algorithm: str, run: Callable[[list[int], Callable[..., torch.optim.Optimizer]], nn.Module]
) -> float:
    """Calls `run(ranks, wrap)` for this rank and serially; returns how the models differ."""
    trained = run(mine(), partial(wrap, algorithm=algorithm))
    return difference(trained, run(list(everybody()), lambda optimizer, model: optimizer))


def leftovers(model: nn.Module) -> list[str]:
    """Every kind of hook that there still is on `model`."""
    found = [name for module in model.modules() for name in _MODULE_HOOKS if getattr(module, name)]
    return found + ["gradient" for p in model.parameters() if p._post_accumulate_grad_hooks]


def _identity(algorithm: str) -> dict[str, bool]:
    model = make_model()
    plain = make_sgd(model)
    groups, keys = plain.param_groups, plain.state_dict().keys()
    optimizer = wrap(plain, model, algorithm)
    steps(model, optimizer, mine(), range(1))
    state = optimizer.state_dict()
    seen = {
        "same object": optimizer is plain and optimizer.param_groups is groups,
        "old class": isinstance(optimizer, torch.optim.SGD),
        "repr": "SGD" in repr(optimizer) and "momentum: 0.9" in repr(optimizer),
        "state": state.keys() == keys and len(state["state"]) == len(list(model.parameters())),
    }
    optimizer.close()
    return seen


@algorithms
def test_the_returned_optimizer_is_the_old_one(world, algorithm):
    for seen in world(2).run(_identity, algorithm):
        assert all(seen.values()), seen


def _scheduled(algorithm: str, before: bool) -> tuple[float, list[str]]:
    def run(ranks: list[int], wrap: Callable[..., Any]) -> nn.Module:
        model = make_model()
        optimizer = make_sgd(model)
        if not before:
            wrap(optimizer, model)
        schedulers = [StepLR(optimizer, 1, gamma=0.3), StepLR(optimizer, 2, gamma=2.0)]
        if before:
            wrap(optimizer, model)
        steps(model, optimizer, ranks, after_step=lambda *_: [s.step() for s in schedulers])
        return model

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        far = run_both(algorithm, run)
    return far, [str(warning.message) for warning in caught if "lr_s" in str(warning.message)]


@algorithms
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_schedulers_made_before_or_after_wrapping_equal_serial(world, algorithm, before):
    for far, warned in world(2).run(_scheduled, algorithm, before):
        assert far < 1e-5
        assert warned == []


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


def _closed(algorithm: str, when: str) -> dict[str, Any]:
    model = make_model()
    optimizer = make_sgd(model)
    scheduler = StepLR(optimizer, 1)
    wrap(optimizer, model, algorithm)
    if when == "after a step":
        steps(model, optimizer, mine())
    if when == "after a backward":
        loss_of(model, dear.rank(), 0).backward()
    if when == "after an evaluation":
        model(batch(0, 0)[0])
    optimizer.close()
    gradients = [p.grad for p in model.parameters()]
    wanted = make_model()
    mean_loss(wanted, everybody(), 0).backward()
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
        "far": difference(model, reference),
        "averaged": when != "after a backward"
        or all(
            torch.allclose(gradient, p.grad)
            for gradient, p in zip(gradients, wanted.parameters(), strict=True)
        ),
    }


@algorithms
@pytest.mark.parametrize(
    "when", ["at once", "after a backward", "after a step", "after an evaluation"]
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_close_gives_back_a_plain_optimizer_and_model(world, world_size, algorithm, when):
    for seen in world(world_size).run(_closed, algorithm, when):
        assert seen == {"class": True, "leftovers": [], "far": 0.0, "averaged": True}


def _rewrapped(algorithm: str) -> float:
    model, wanted = make_model(), make_model()
    optimizer = make_sgd(model)
    for step, name in enumerate(("allreduce", algorithm, "dear", algorithm)):
        steps(model, wrap(optimizer, model, name), mine(), [step])
        optimizer.close()
    steps(wanted, make_sgd(wanted), everybody(), range(4))
    return difference(model, wanted)


@algorithms
def test_algorithms_may_change_in_the_middle_of_training(world, algorithm):
    assert max(world(2).run(_rewrapped, algorithm)) < 1e-5


def synchronize(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    if hasattr(optimizer, "synchronize"):
        optimizer.synchronize()


def synchronize_and_clip(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    synchronize(optimizer, model)
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)


@algorithms
def test_clipping_after_synchronize_equals_serial_clipping(world, algorithm):
    assert far_from_serial(world(2), algorithm, before_step=synchronize_and_clip) < 1e-5


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
            {"synchronize": synchronize, "unscale": lambda *_: scaler.unscale_(optimizer)}[call](
                optimizer, model
            )
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale()


def _scaled(algorithm: str, fused: bool, calls: str) -> tuple[float, bool]:
    scales = []

    def run(ranks: list[int], wrap: Callable[..., Any]) -> nn.Module:
        model = make_model()
        optimizer = wrap(make_sgd(model, fused=fused), model)
        scales.append(_scale(model, optimizer, ranks, calls))
        return model

    return run_both(algorithm, run), scales[0] == scales[1]


@algorithms
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("calls", ["synchronize", "synchronize unscale"])
def test_grad_scaler_skips_steps_on_all_ranks_together(world, algorithm, fused, calls):
    if (algorithm, fused) == ("fsdp", True):
        pytest.skip("torch has no fused SGD for sharded tensors")
    for far, same_scale in world(2).run(_scaled, algorithm, fused, calls):
        assert far < 1e-5
        assert same_scale


def _scaled_too_early(fused: bool, calls: str) -> str:
    model = make_model()
    optimizer = wrap(make_sgd(model, fused=fused), model, "dear")
    return message(lambda: _scale(model, optimizer, mine(), calls, count=1))


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("calls", ["", "unscale", "unscale synchronize"])
def test_dear_refuses_a_grad_scaler_before_synchronize(world, fused, calls):
    assert all("synchronize()" in said for said in world(2).run(_scaled_too_early, fused, calls))


def _resumed(algorithm: str, first: str) -> float:
    model, wanted = make_model(), make_model()
    optimizer = wrap(make_sgd(model), model, algorithm)
    steps(model, optimizer, mine(), range(3))
    parts = {"model": model, "optimizer": optimizer}
    order = sorted(parts, key=lambda part: part != first)
    file = io.BytesIO()
    torch.save({part: copy.deepcopy(parts[part].state_dict()) for part in order}, file)
    optimizer.close()
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    model = make_model()
    optimizer = wrap(make_sgd(model, lr=55.0), model, algorithm)
    steps(model, optimizer, mine(), range(1))
    parts = {"model": model, "optimizer": optimizer}
    for part in order:
        parts[part].load_state_dict(saved[part])
    loaded = error([model.state_dict()], [saved["model"]])
    steps(model, optimizer, mine(), range(3, 5))
    steps(wanted, make_sgd(wanted), everybody(), range(5))
    far = difference(model, wanted)
    optimizer.close()
    return max(far, loaded)


@algorithms
@pytest.mark.parametrize("first", ["model", "optimizer"])
def test_a_loaded_checkpoint_goes_on_as_if_never_stopped(world, algorithm, first):
    assert max(world(2).run(_resumed, algorithm, first)) < 1e-5


def _hook_calls(algorithm: str) -> int:
    model = make_model()
    optimizer = wrap(make_sgd(model), model, algorithm)
    optimizer.load_state_dict(optimizer.state_dict())
    calls: list[int] = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    steps(model, optimizer, mine())
    optimizer.close()
    return len(calls)


@algorithms
def test_step_hooks_run_once_per_step_also_after_loading_a_state(world, algorithm):
    assert world(2).run(_hook_calls, algorithm) == [3, 3]


def _copied(algorithm: str) -> dict[str, Any]:
    model, wanted = make_model(), make_model()
    optimizer = wrap(make_sgd(model), model, algorithm)
    steps(model, optimizer, mine(), range(2))
    optimizer.synchronize()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [copy.deepcopy(model), torch.load(file, weights_only=False)]
    far = [difference(copied, model) for copied in copies]
    changed = []
    for copied in copies:
        if dear.rank() == 0:
            before = copy.deepcopy(copied.state_dict())
            steps(copied, make_sgd(copied), [0], range(2))
            changed.append(error([copied.state_dict()], [before]) > 1e-3)
    steps(model, optimizer, mine(), range(2, 4))
    steps(wanted, make_sgd(wanted), everybody(), range(4))
    far.append(difference(model, wanted))
    optimizer.close()
    return {"far": max(far), "trained": all(changed)}


@algorithms_but_fsdp
def test_copies_of_a_wrapped_model_are_plain_models(world, algorithm):
    for seen in world(2).run(_copied, algorithm):
        assert seen["far"] < 1e-5
        assert seen["trained"]


def _with_closure(algorithm: str) -> tuple[float, float]:
    losses = []

    def run(ranks: list[int], wrap: Callable[..., Any]) -> nn.Module:
        model = make_model()
        optimizer = wrap(make_sgd(model), model)

        def closure(step: int) -> torch.Tensor:
            optimizer.zero_grad()
            loss = mean_loss(model, ranks, step)
            loss.backward()
            return loss

        for step in range(3):
            losses.append(dear.allreduce(optimizer.step(partial(closure, step))).item())
        return model

    return run_both(algorithm, run), max(abs(losses[i] - losses[i + 3]) for i in range(3))


@algorithms
def test_step_takes_a_closure_and_returns_its_loss(world, algorithm):
    for far, loss in world(2).run(_with_closure, algorithm):
        assert far < 1e-5
        assert loss < 1e-5
