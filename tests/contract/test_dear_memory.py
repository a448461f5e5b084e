"""Parameters and gradients as views of flat buffers: what a training script may do with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dear
from tests.contract.awkward import error
from tests.contract.loops import (
    difference,
    everybody,
    far_from_serial,
    make_model,
    make_sgd,
    mine,
    run_both,
    steps,
    wrap,
)


def _storages(tensors: Any) -> int:
    return len({tensor.untyped_storage().data_ptr() for tensor in tensors})


def _laid_out(set_to_none: bool) -> dict[str, Any]:
    model = make_model()
    optimizer = wrap(make_sgd(model), model, "dear")
    steps(model, optimizer, mine(), set_to_none=set_to_none)
    params = list(model.parameters())
    seen = {
        "parameters": _storages(params),
        "gradients": _storages([param.grad for param in params]),
        "leaves": all(param.is_leaf and param.requires_grad for param in params),
    }
    optimizer.close()
    seen["given back"] = _storages(params) == len(params)
    return seen


@pytest.mark.parametrize("set_to_none", [True, False])
def test_parameters_and_gradients_share_flat_buffers_until_close(world, set_to_none):
    for seen in world(2).run(_laid_out, set_to_none):
        assert seen == {"parameters": 1, "gradients": 1, "leaves": True, "given back": True}


def _far(change: Callable[[nn.Module], Any]) -> float:
    def run(ranks: list[int], wrap: Callable[..., Any]) -> nn.Module:
        model = make_model()
        optimizer = wrap(make_sgd(model, momentum=0.0), model)
        steps(model, optimizer, ranks, range(2))
        if hasattr(optimizer, "synchronize"):
            optimizer.synchronize()
        change(model)
        steps(model, optimizer, ranks, range(2, 4))
        return model

    return run_both("dear", run)


def _replace_data(model: nn.Module) -> None:
    for param in model.parameters():
        param.data = param.data * 0.5


def _write_data(model: nn.Module) -> None:
    with torch.no_grad():
        model[2].weight.fill_(0.25)


def _same_type(model: nn.Module) -> None:
    model.to("cpu").float()


def _double_and_back(model: nn.Module) -> None:
    model.double()
    model.float()


def _assign(model: nn.Module) -> None:
    model.load_state_dict({k: v.clone() for k, v in make_model().state_dict().items()})


@pytest.mark.parametrize(
    "change", [_replace_data, _write_data, _same_type, _double_and_back, _assign]
)
def test_parameters_changed_from_outside_train_on_as_in_plain_torch(world, change):
    assert max(world(2).run(_far, change)) < 1e-5


class Double(nn.Module):
    """Reads its inputs in its own type."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.to(self.inner[0].weight.dtype)).float()


def _moved() -> tuple[float, torch.dtype]:
    def run(ranks: list[int], wrap: Callable[..., Any]) -> nn.Module:
        model = Double(make_model())
        optimizer = wrap(make_sgd(model, momentum=0.0), model)
        steps(model, optimizer, ranks, range(2))
        optimizer.zero_grad()
        if hasattr(optimizer, "synchronize"):
            optimizer.synchronize()
        model.double()
        steps(model, optimizer, ranks, range(2, 4))
        kinds.append(next(model.parameters()).dtype)
        return model

    kinds: list[torch.dtype] = []
    return run_both("dear", run), kinds[0]


def test_a_model_may_change_its_type_between_steps(world):
    for far, kind in world(2).run(_moved):
        assert far < 1e-5
        assert kind == torch.float64


def _make_image_model() -> nn.Module:
    torch.manual_seed(9)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(16, 4))
    return model.to(memory_format=torch.channels_last)


def _image_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(2, 3, 6, 6, generator=generator).to(memory_format=torch.channels_last)
    return model(x).square().mean()


def _formats() -> tuple[float, bool]:
    model, wanted = _make_image_model(), _make_image_model()
    optimizer, serial = torch.optim.Adam(model.parameters()), torch.optim.Adam(wanted.parameters())
    wrap(optimizer, model, "dear")
    steps(model, optimizer, mine(), loss_of=_image_loss)
    steps(wanted, serial, everybody(), loss_of=_image_loss)
    kept = all(
        param.is_contiguous(memory_format=torch.channels_last)
        and param.grad.is_contiguous(memory_format=torch.channels_last)
        for param in (model[0].weight, model[1].weight)
    )
    far = difference(model, wanted)
    mean = optimizer.state_dict()["state"][0]["exp_avg"]
    far = max(far, (mean - serial.state_dict()["state"][0]["exp_avg"]).norm().item())
    optimizer.close()
    return far, kept


def test_channels_last_is_kept(world):
    for far, kept in world(2).run(_formats):
        assert far < 1e-5
        assert kept


@pytest.mark.parametrize("compression", ["bf16", "fp16"])
@pytest.mark.parametrize("update", ["sharded", "replicated"])
@pytest.mark.parametrize("decouple", ["reduce_scatter_all_gather", "reduce_broadcast"])
def test_gradients_may_travel_in_half_precision(world, compression, update, decouple):
    options = {"compression": compression, "update": update, "decouple": decouple}
    far = far_from_serial(world(3), "dear", options=options)
    assert 1e-7 < far < 2e-2


def _spread(options: dict[str, Any]) -> float:
    model = make_model()
    optimizer = wrap(make_sgd(model), model, "dear", **options)
    steps(model, optimizer, mine())
    state = {name: value.clone() for name, value in model.state_dict().items()}
    dear.broadcast_parameters(model.state_dict())
    spread = error([state], [model.state_dict()])
    optimizer.close()
    return spread


@pytest.mark.parametrize("update", ["sharded", "replicated"])
def test_replicas_are_bitwise_equal_also_in_half_precision(world, update):
    assert world(3).run(_spread, {"compression": "bf16", "update": update}) == [0.0] * 3


def _stale() -> str:
    model = make_model()
    optimizer = wrap(make_sgd(model), model, "dear")
    steps(model, optimizer, mine(), range(1))
    loss = model(torch.ones(2, 6)).sum()
    steps(model, optimizer, mine(), range(1, 2))
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    finally:
        optimizer.close()
    return ""


def test_autograd_notices_a_graph_from_before_the_update(world):
    assert all("modified by an inplace operation" in said for said in world(2).run(_stale))
