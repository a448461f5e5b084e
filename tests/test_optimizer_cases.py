"""Models, optimizers and loops that data-parallel training trips over, against serial training."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import dear
from tests.test_optimizer import (
    algorithms,
    algorithms_but_ddp,
    algorithms_but_ddp_and_fsdp,
    algorithms_but_fsdp,
    batch,
    difference,
    everybody,
    far_from_serial,
    leftovers,
    loss_of,
    make_model,
    make_sgd,
    mean_loss,
    message,
    mine,
    run_both,
    steps,
    synchronize_and_clip,
    wrap,
)

fusions = pytest.mark.parametrize("fusion", ["threshold", "none"])
last_passes = pytest.mark.parametrize(
    ("paused", "clipped"), list(itertools.product([(True, True), (False, True)], [False, True]))
)


class Decaying(torch.optim.Optimizer):
    """An optimizer that torch does not have; it counts its steps in its parameter group."""

    def __init__(self, params: Iterable[nn.Parameter], rate: float) -> None:
        super().__init__(params, {"lr": rate, "count": 0})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    param.data.sub_(group["lr"] / group["count"] * param.grad.sign())


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


_OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), momentum=0.9, centered=True),
    "Adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr_decay=0.1),
    "Adam": lambda m: torch.optim.Adam(m.parameters(), amsgrad=True, lr=0.01),
    "own class": lambda m: Decaying(m.parameters(), 0.01),
    "step hooks": _with_hooks,
}


def _make(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    return _OPTIMIZERS[kind](model)


@pytest.mark.parametrize("kind", ["RMSprop", "Adagrad", "Adam", "own class", "step hooks"])
def test_dear_with_other_optimizers_equals_serial(world, kind):
    given = {"make_optimizer": partial(_make, kind), "options": {"fusion": "none"}}
    assert far_from_serial(world(2), "dear", **given) < 1e-5


@algorithms
def test_an_optimizer_that_needs_arguments_equals_serial(world, algorithm):
    make = partial(_make, "own class")
    assert far_from_serial(world(2), algorithm, make_optimizer=make) < 1e-5


def _lbfgs() -> tuple[float, str]:
    def run(ranks: list[int], wrap: Callable[..., Any]) -> nn.Module:
        model = make_model()
        optimizer = wrap(torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4), model)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = mean_loss(model, ranks, 0)
            loss.backward()
            return dear.allreduce(loss)  # LBFGS stops by it, which all ranks must do together

        optimizer.step(closure)
        optimizer.step(closure)
        return model

    other = make_model()
    refused = message(lambda: wrap(torch.optim.LBFGS(other.parameters()), other, "dear"))
    return run_both("allreduce", run), refused


def test_lbfgs_equals_serial_with_allreduce_and_is_refused_by_dear(world):
    for far, said in world(2).run(_lbfgs):
        assert far < 1e-4
        assert "LBFGS" in said


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.sometimes, self.never = (nn.Linear(6, 4) for _ in range(3))

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        return self.first(x) + (self.sometimes(x) if both else 0.0)


def _branch_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    # Both branches run on rank 0 only, then on rank 1 only, then nowhere.
    x, y = batch(rank, step)
    return functional.cross_entropy(model(x, both=rank == step % 3), y)


@algorithms_but_fsdp
def test_a_parameter_that_one_rank_uses_is_averaged_with_zeros_and_an_unused_one_left_alone(
    world, algorithm
):
    loop = {"which": range(6), "loss_of": _branch_loss}
    assert far_from_serial(world(2), algorithm, make_model=Branches, **loop) < 1e-5


def _loss_on_some_ranks(model: nn.Module, rank: int, step: int) -> torch.Tensor | None:
    has_loss = {0: rank != 0, 1: True, 2: rank == 0, 3: False, 4: True}[step]
    return loss_of(model, rank, step) if has_loss else None


@algorithms_but_ddp_and_fsdp
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_without_a_backward_pass_still_takes_part(world, world_size, algorithm):
    loop = {"which": range(5), "loss_of": _loss_on_some_ranks}
    assert far_from_serial(world(world_size), algorithm, **loop) < 1e-5


def _without_a_last_pass(algorithm: str, paused: tuple[bool, bool], clipped: bool) -> float:
    model, wanted = make_model(), make_model()
    optimizer, serial = wrap(make_sgd(model), model, algorithm), make_sgd(wanted)
    for step in range(3):
        optimizer.zero_grad()
        serial.zero_grad()
        for micro, pause in enumerate(paused):
            with optimizer.no_sync() if pause else contextlib.nullcontext():
                loss_of(model, dear.rank(), 2 * step + micro).backward()
            if not pause:
                optimizer.synchronize()
            mean_loss(wanted, everybody(), 2 * step + micro).backward()
        if clipped:
            synchronize_and_clip(optimizer, model)
            synchronize_and_clip(serial, wanted)
        optimizer.step()
        serial.step()
    far = difference(model, wanted)
    optimizer.close()
    return far


@algorithms_but_ddp
@last_passes
def test_gradients_added_under_no_sync_just_before_a_step_are_not_lost(
    world, algorithm, paused, clipped
):
    assert max(world(2).run(_without_a_last_pass, algorithm, paused, clipped)) < 1e-5


@last_passes
def test_ddp_refuses_gradients_added_under_no_sync_just_before_a_step(world, paused, clipped):
    train = partial(_without_a_last_pass, "ddp", paused, clipped)
    assert all("no_sync()" in said for said in world(2).run(message, train))


def _repeated_steps(algorithm: str, how: str) -> float:
    def run(ranks: list[int], wrap: Callable[..., Any]) -> nn.Module:
        model = make_model()
        optimizer = wrap(make_sgd(model), model)
        for step in range(5):
            optimizer.zero_grad()
            mean_loss(model, ranks, step).backward()
            for _ in range({"left out": step % 2, "twice": 2}[how]):
                optimizer.step()
        return model

    return run_both(algorithm, run)


@algorithms
@pytest.mark.parametrize("how", ["left out", "twice"])
def test_a_step_may_be_left_out_or_repeated(world, algorithm, how):
    assert max(world(2).run(_repeated_steps, algorithm, how)) < 1e-5


@algorithms
def test_zeroing_gradients_in_place_equals_serial(world, algorithm):
    assert far_from_serial(world(2), algorithm, set_to_none=False) < 1e-5


def _freeze_first(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    model[0].requires_grad_(False)


@algorithms
def test_freezing_a_layer_later_equals_serial(world, algorithm):
    assert far_from_serial(world(2), algorithm, after_step=_freeze_first) < 1e-5


def _unfrozen(algorithm: str) -> str:
    model = make_model()
    model[0].requires_grad_(False)
    optimizer = wrap(make_sgd(model), model, algorithm)
    steps(model, optimizer, mine(), range(1))
    model[0].requires_grad_(True)
    return message(lambda: steps(model, optimizer, mine(), range(1)))


@algorithms
def test_unfreezing_a_layer_later_is_a_user_error(world, algorithm):
    assert all("frozen" in said for said in world(2).run(_unfrozen, algorithm))


def _adversaries(algorithm: str) -> float:
    """Two models with an optimizer each; the loss of one goes through the other."""

    def run(ranks: list[int], wrap: Callable[..., Any]) -> nn.Module:
        torch.manual_seed(8)
        maker = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 6))
        judge = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
        making = wrap(torch.optim.SGD(maker.parameters(), 0.1, momentum=0.9), maker)
        judging = wrap(torch.optim.SGD(judge.parameters(), 0.1, momentum=0.9), judge)
        for step in range(3):
            x = torch.cat([batch(rank, step)[0] for rank in ranks])
            with torch.no_grad():
                made = maker(x)
            judging.zero_grad()
            true, false = judge(torch.cat([x, made])).chunk(2)
            torch.tanh(true - false).mean().backward()
            judging.step()
            making.zero_grad()
            judge(maker(x)).mean().backward()
            making.step()
        return nn.ModuleList([maker, judge])

    return run_both(algorithm, run)


@algorithms
def test_two_models_that_train_each_other_equal_serial(world, algorithm):
    assert max(world(2).run(_adversaries, algorithm)) < 1e-5


def _two_optimizers(algorithm: str) -> float:
    def run(ranks: list[int], wrap: Callable[..., Any]) -> nn.Module:
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

    return run_both(algorithm, run)


@algorithms_but_fsdp
def test_two_optimizers_of_one_model_equal_serial(world, algorithm):
    assert max(world(2).run(_two_optimizers, algorithm)) < 1e-5


def _wrong_wraps(algorithm: str) -> dict[str, str]:
    model = make_model()
    optimizer = make_sgd(model)
    frozen = make_model().requires_grad_(False)
    outside = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(2))], lr=0.1)
    said = {
        "outside": message(lambda: wrap(outside, model, algorithm)),
        "nothing": message(lambda: wrap(make_sgd(frozen), frozen, algorithm)),
        "option": message(lambda: wrap(optimizer, model, algorithm, nonsense=1)),
        "algorithm": message(lambda: wrap(optimizer, model, algorithm + "x")),
        "left": str([*leftovers(model), type(optimizer).__name__]),
    }
    wrap(optimizer, model, algorithm)
    group = {"params": [nn.Parameter(torch.ones(2))]}
    said["twice"] = message(lambda: wrap(optimizer, model, algorithm))
    said["group"] = message(lambda: optimizer.add_param_group(group))
    optimizer.close()
    return said


@algorithms
def test_what_cannot_be_trained_is_a_user_error_that_changes_nothing(world, algorithm):
    for said in world(2).run(_wrong_wraps, algorithm):
        assert "not in the model" in said["outside"]
        assert "nothing to train" in said["nothing"]
        assert "nonsense" in said["option"] and algorithm in said["option"]
        assert f"did you mean '{algorithm}'" in said["algorithm"]
        assert said["left"] == "['SGD']"
        assert "already" in said["twice"]
        assert "wrap it again" in said["group"]


def _sparse(algorithm: str) -> str:
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 4))
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, algorithm)
    said = message(lambda: model(torch.tensor([1, 2])).sum().backward())
    optimizer.close()
    return said


@pytest.mark.parametrize("algorithm", ["allreduce", "dear", "wfbp"])
def test_sparse_gradients_are_a_user_error(world, algorithm):
    assert all("sparse=False" in said for said in world(2).run(_sparse, algorithm))


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(6, 5).bfloat16()
        self.full = nn.Linear(5, 5)
        self.norm = nn.LayerNorm(5).bfloat16()
        self.last = nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x.bfloat16()))
        return self.last(self.norm(self.full(x.float()).bfloat16()).float())


@fusions
def test_dear_with_parameters_of_two_types_equals_serial(world, fusion):
    # A mean over two ranks is exact in any type: nothing but the order of sums may differ.
    options = {"fusion": fusion}
    assert far_from_serial(world(2), "dear", make_model=Mixed, options=options) < 1e-5


def _make_channels_last() -> nn.Module:
    torch.manual_seed(9)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(16, 4))
    return model.to(memory_format=torch.channels_last)


def _image_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(2, 3, 6, 6, generator=generator).to(memory_format=torch.channels_last)
    return model(x).square().mean()


@algorithms
def test_a_channels_last_model_equals_serial(world, algorithm):
    given = {"make_model": _make_channels_last, "loss_of": _image_loss}
    assert far_from_serial(world(2), algorithm, **given) < 1e-5


class Odd(nn.Module):
    """With a parameter of an unusual shape, layout or type."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.linear = nn.Linear(6, 4)
        value = {
            "scalar": torch.randn(()),
            "empty": torch.randn(0),
            "complex": torch.randn(6, dtype=torch.complex64),
            "transposed": torch.randn(4, 6).t(),
            "gaps": torch.randn(6, 8)[:, ::2],
        }[kind]
        self.odd = nn.Parameter(value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.odd.is_complex():
            return self.linear((x * self.odd).abs())
        if self.odd.dim() == 2:
            return self.linear(x) + x @ self.odd
        return self.linear(x) * (1 + self.odd.sum())


@algorithms
@pytest.mark.parametrize("kind", ["scalar", "empty", "transposed", "gaps", "complex"])
def test_odd_parameters_equal_serial(world, algorithm, kind):
    if kind == "complex" and algorithm in ("horovod", "mgs"):
        pytest.skip(f"{algorithm} has no complex numbers")
    assert far_from_serial(world(2), algorithm, make_model=partial(Odd, kind)) < 1e-5


class Recurrent(nn.Module):
    """Layers that keep the weights they read somewhere else, or make them anew in each forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.lstm = nn.LSTM(3, 5, num_layers=2, batch_first=True)
        self.attention = nn.MultiheadAttention(5, 1, batch_first=True)
        self.normed = parametrizations.weight_norm(nn.Linear(5, 5))
        self.head = nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, _ = self.lstm(x.view(-1, 2, 3))
        return self.head(self.normed(self.attention(x, x, x)[0].mean(dim=1)))


@fusions
def test_dear_with_lstm_attention_and_weight_norm_equals_serial(world, fusion):
    options = {"fusion": fusion}
    assert far_from_serial(world(2), "dear", make_model=Recurrent, options=options) < 1e-5


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.layers = make_model()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[:2](x.requires_grad_())
        x = checkpoint(self.layers[2:4], x, use_reentrant=self.reentrant)
        return self.layers[4](x)


@fusions
@pytest.mark.parametrize("reentrant", [False, True], ids=["saved", "reentrant"])
def test_dear_with_activation_checkpointing_equals_serial(world, fusion, reentrant):
    given = {"make_model": partial(Checkpointed, reentrant), "options": {"fusion": fusion}}
    assert far_from_serial(world(2), "dear", **given) < 1e-5


class Reader(nn.Module):
    """In evaluation it reads a layer's weight without running the layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            return self.last(torch.tanh(self.first(x)))
        return functional.linear(x, self.last.weight)


def _evaluated(make: Callable[[], nn.Module], mode: Any) -> float:
    model, wanted = make(), make()
    optimizer, serial = wrap(make_sgd(model), model, "dear"), make_sgd(wanted)
    x, far = batch(0, 9)[0], 0.0
    for which in ([0], [1, 2]):
        steps(model, optimizer, mine(), which)
        steps(wanted, serial, everybody(), which)
        with mode():
            far = max(far, (model.eval()(x) - wanted.eval()(x)).abs().max().item())
        model.train(), wanted.train()
    optimizer.close()
    return max(far, difference(model, wanted))


@pytest.mark.parametrize("make", [make_model, Reader])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_an_evaluation_between_steps_sees_current_parameters(world, make, mode):
    assert max(world(2).run(_evaluated, make, mode)) < 1e-5
