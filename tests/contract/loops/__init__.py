"""The ordinary loop on a rank and serially, for what one algorithm alone promises."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import dear
from dear.errors import UserError
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
    return error(model.state_dict(), wanted.state_dict())


def error(state: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """The largest difference of any tensor, relative to its norm."""
    return max(
        ((state[name] - value).norm() / value.norm().clamp_min(1e-3)).item()
        for name, value in wanted.items()
        if value.is_floating_point()
    )


def moved_and_spread(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[float, float]:
    """Distances of the model from `make_model()`, if it is one, and from rank 0's; closes the
    optimizer."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    dear.broadcast_parameters(model.state_dict())
    start = make_model().state_dict()
    moved = error(state, start) if start.keys() == state.keys() else 0.0
    result = moved, error(state, model.state_dict())
    optimizer.close()
    return result


def message(call: Callable[[], Any]) -> str:
    """Returns the `UserError` of `call` as text, an empty one where it raises none."""
    try:
        call()
    except UserError as raised:
        return str(raised)
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
    names = [name for module in model.modules() for name in _MODULE_HOOKS if getattr(module, name)]
    return names + ["gradient" for p in model.parameters() if p._post_accumulate_grad_hooks]
