"""Models and optimizers that a script has changed before or after the optimizer is distributed."""

from __future__ import annotations

from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn

import dear
from dear.errors import UserError
from tests.contract.loops import (
    batch,
    difference,
    everybody,
    make_model,
    make_sgd,
    message,
    mine,
    steps,
    wrap,
)
from tests.contract.loops import functional as F  # noqa: N812
from tests.ranks import on_ranks


@pytest.mark.parametrize("algorithm", ["bytescheduler", "ddp", "fsdp", "hierarchical", "mgwfbp"])
@on_ranks(2)
def test_a_model_of_another_type_must_be_wrapped_again(algorithm: str) -> None:
    """`close()` then leaves a model that can be wrapped."""
    model = make_model()
    optimizer = wrap(torch.optim.SGD(model.parameters(), 0.1), model, algorithm)
    steps(model, optimizer, mine())
    optimizer.zero_grad()
    model.double()
    x, y = batch(dear.rank(), 3)
    words = message(lambda: F.cross_entropy(model(x.double()), y).backward())
    assert "close() the optimizer before" in words and "wrap again" in words
    optimizer.close()
    optimizer.zero_grad()
    wrap(optimizer, model.float(), algorithm)
    steps(model, optimizer, mine())
    assert all(param.isfinite().all() for param in model.parameters())
    optimizer.close()


@pytest.mark.parametrize("algorithm", ["allreduce", "bytescheduler", "dear"])
@on_ranks(2)
def test_a_compiled_step_runs_as_it_is(algorithm: str) -> None:
    model, wanted = make_model(), make_model()
    optimizer, serial = wrap(make_sgd(model), model, algorithm), make_sgd(wanted)
    step = torch.compile(optimizer.step, backend="eager")
    for i in range(3):
        optimizer.zero_grad()
        x, y = batch(dear.rank(), i)
        F.cross_entropy(model(x), y).backward()
        step()
    steps(wanted, serial, everybody())
    far = difference(model, wanted)
    optimizer.close()
    assert far < 1e-5


@on_ranks(2)
def test_zero_takes_no_scale_and_gives_the_declaration_back() -> None:
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    wrap(optimizer, model, "ddp", zero=True)
    assert not optimizer._step_supports_amp_scaling
    optimizer.close()
    assert optimizer._step_supports_amp_scaling


@on_ranks(2)
def test_zero_follows_what_the_script_does_to_its_state() -> None:
    model, wanted = make_model(), make_model()
    optimizer, serial = wrap(make_sgd(model), model, "ddp", zero=True), make_sgd(wanted)
    for which in range(2), range(2, 4):
        steps(model, optimizer, mine(), which)
        steps(wanted, serial, everybody(), which)
        optimizer.state.pop(model[2].weight, None)
        serial.state.pop(wanted[2].weight)
    far = difference(model, wanted)
    optimizer.close()
    assert far < 1e-5


@pytest.mark.parametrize("options", [{"update": "replicated"}, {}])
@on_ranks(2)
def test_state_is_that_of_the_last_step(options: dict[str, Any]) -> None:
    model = make_model()
    adam = torch.optim.Adam(model.parameters())
    algorithm = "dear" if options else "bytescheduler"
    optimizer = wrap(adam, model, algorithm, **options)
    for step in range(4):
        steps(model, optimizer, mine(), range(step, step + 1))
        seen = {int(state["step"]) for state in optimizer.state.values()}
        assert seen == {step + 1} and len(optimizer.state) == 6
    optimizer.close()


@pytest.mark.parametrize("scheduled", [False, True])
@on_ranks(2)
def test_a_replaced_step_is_refused_and_stays(scheduled: bool) -> None:
    def step(optimizer: torch.optim.Optimizer) -> None:
        """Replaces the optimizer's own step."""

    model = make_model()
    optimizer = make_sgd(model)
    optimizer.step = MethodType(step, optimizer)
    if scheduled:
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = optimizer.step
    assert "replace step() afterwards" in message(lambda: wrap(optimizer, model, "dear"))
    assert type(optimizer) is torch.optim.SGD and optimizer.step is before


@on_ranks(2)
def test_a_tensor_with_gaps_is_named() -> None:
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(torch.zeros(4, 8)[:, ::2])
    with pytest.raises(UserError, match=r"'weight'.*contiguous"):
        dear.broadcast_parameters(model.state_dict())
