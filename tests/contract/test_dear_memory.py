"""Parameters and gradients as views of flat buffers: what a training script may do with them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.contract.loops import make_model, make_sgd, mine, run_both, steps, wrap
from tests.contract.models import loss_of as loss_of_kind
from tests.contract.models import make_model as make_kind
from tests.ranks import on_ranks


def _storages(tensors: Any) -> int:
    return len({tensor.untyped_storage().data_ptr() for tensor in tensors})


@pytest.mark.parametrize("set_to_none", [True, False])
@on_ranks(2)
def test_parameters_and_gradients_share_flat_buffers_until_close(set_to_none: bool) -> None:
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


def _same_type(model: nn.Module) -> None:
    model.to("cpu").float()


def _double_and_back(model: nn.Module) -> None:
    model.double()
    model.float()


def _assign(model: nn.Module) -> None:
    model.load_state_dict({k: v.clone() for k, v in make_model().state_dict().items()})


@on_ranks(2)
def test_parameters_changed_from_outside_train_on_as_in_plain_torch() -> None:
    changes = [_same_type, _double_and_back, _assign]
    far = {change.__name__: _far(change) for change in changes}
    assert max(far.values()) < 1e-5, far


class Double(nn.Module):
    """Reads its inputs in its own type."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.to(self.inner[0].weight.dtype)).float()


@on_ranks(2)
def test_a_model_may_change_its_type_between_steps() -> None:
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
    far, kind = run_both("dear", run), kinds[0]
    assert far < 1e-5 and kind == torch.float64


@on_ranks(2)
def test_channels_last_is_kept() -> None:
    model = make_kind("channels_last")
    optimizer = wrap(torch.optim.Adam(model.parameters()), model, "dear")
    steps(model, optimizer, mine(), loss_of=partial(loss_of_kind, "channels_last"))
    last = {"memory_format": torch.channels_last}
    kept = [p.is_contiguous(**last) and p.grad.is_contiguous(**last) for p in model[0].parameters()]
    optimizer.close()
    assert kept[:1] == [True]


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
    assert all("modified by an inplace operation" in line for line in world(2).run(_stale))
