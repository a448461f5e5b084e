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
from tests.contract.loops import make_model, make_sgd, message, mine, steps, wrap
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
        ("write symmetric=True", lambda: dear.allreduce(square, True, True)),
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
def test_a_closed_model_says_that_it_updates_nothing_and_still_evaluates() -> None:
    model = make_model()
    wrapped = DecentralizedDataParallel(
        model, lambda params: torch.optim.SGD(params, lr=0.1), topology="complete"
    )
    wrapped.close()
    with pytest.warns(UserWarning, match="is closed: its backward passes update nothing"):
        wrapped(torch.ones(3, 6))
    assert isinstance(wrapped.eval()(torch.ones(3, 6)), torch.Tensor)


@on_ranks(2)
def test_what_other_scripts_give_beside_the_model_is_taken() -> None:
    model = make_model()
    for named in (
        list(model.named_parameters()),
        dict(model.named_parameters()).items(),
        ((name, param) for name, param in model.named_parameters() if param.requires_grad),
    ):
        dear.DistributedOptimizer(make_sgd(model), model, named_parameters=named).close()
    dear.init("comm_core")
    assert dear.allreduce(torch.ones(2), 0).tolist() == [2.0, 2.0]
    dear.broadcast_parameters({"packed": (torch.ones(1), None), "x._extra_state": {"a": 1}})


@pytest.mark.parametrize("name", ["wfbp", "dear"])
@on_ranks(2)
def test_gradients_that_the_script_sets_are_averaged_after_synchronize_too(name: str) -> None:
    model = make_model()
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=1.0), model, name)
    steps(model, optimizer, mine())
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    for param in model.parameters():
        param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        param.grad.data.fill_(1.0 + dear.rank())
    optimizer.synchronize()
    optimizer.step()
    optimizer.close()
    after = nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.testing.assert_close(before - after, torch.full_like(before, 1.5))
