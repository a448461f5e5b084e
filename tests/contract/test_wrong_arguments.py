"""Arguments of the library's functions that would silently do something else are refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

import dear
import dear.bluefog as bf
from dear.decentralized import DecentralizedDataParallel
from dear.errors import UserError
from tests.contract.loops import make_model, make_sgd, message
from tests.ranks import on_ranks


def _refused() -> list[tuple[str, Callable[[], object]]]:
    """Returns words of the error and the call."""
    model, square = make_model(), torch.arange(9.0).view(3, 3)
    wrap, broadcast = dear.DistributedOptimizer, dear.broadcast_parameters
    state, optimizer = model.state_dict(), make_sgd(model)
    model(torch.ones(3, 6)).sum().backward()
    optimizer.step()
    return [
        ("average must be True or False", lambda: dear.allreduce(square, "sum")),
        ("symmetric must be True or False", lambda: dear.allreduce(square, symmetric="yes")),
        ("got a Sequential; give model.state_dict()", lambda: broadcast(model)),
        ("got no pairs of names and tensors", lambda: broadcast(model.parameters())),
        ("'model' is a", lambda: broadcast({"model": state})),
        ("broadcast_optimizer_state", lambda: broadcast(optimizer.state_dict())),
        ("model: must be a torch.nn.Module", lambda: wrap(make_sgd(model), [model])),
        ("optimizer: must be a torch optimizer", lambda: wrap(model, model)),
        (
            "named_parameters: of another model",
            lambda: wrap(make_sgd(model), model, named_parameters=make_model().named_parameters()),
        ),
        ("this job already uses", lambda: dear.init("mpi")),
        ("timeout_s must be greater than 0 and finite", lambda: dear.init(timeout_s=float("inf"))),
        ("norm_clip must be a number", lambda: wrap(make_sgd(model), model, norm_clip="1")),
    ]


@on_ranks(2)
def test_wrong_arguments_are_refused_in_one_line() -> None:
    for words, call in _refused():
        line = message(call)
        assert words in line and "\n" not in line, (words, line)


@on_ranks(2)
def test_a_third_argument_of_allreduce_is_a_name_and_none_means_the_mean() -> None:
    square = torch.arange(9.0).view(3, 3)
    assert torch.equal(dear.allreduce(square, True, "loss"), square)
    assert torch.equal(dear.allreduce(square, None), square)


@on_ranks(4, "bluefog")
def test_a_number_of_steps_that_is_not_whole_is_refused() -> None:
    model = make_model()
    make = partial(bf.DistributedAdaptWithCombineOptimizer, make_sgd(model), model=model)
    line = message(lambda: make(num_steps_per_communication=2.5))
    assert "num_steps_per_communication must be a whole number" in line
    assert "average must be True or False" in message(lambda: bf.allreduce(torch.ones(1), "sum"))


@on_ranks(2)
def test_a_closed_model_refuses_to_train_and_still_evaluates() -> None:
    model = make_model()
    wrapped = DecentralizedDataParallel(
        model, lambda params: torch.optim.SGD(params, lr=0.1), topology="complete"
    )
    wrapped.close()
    with pytest.raises(UserError, match="is closed: nothing would be updated"):
        wrapped(torch.ones(3, 6))
    assert isinstance(wrapped.eval()(torch.ones(3, 6)), torch.Tensor)
    assert isinstance(model, nn.Module)
