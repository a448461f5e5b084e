"""Algorithms that keep sums over all ranks: what a script loads, writes, freezes and rolls back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector

import dear
from dear.comm import runtime
from tests.contract.algorithms import skip_if_unavailable
from tests.contract.loops import (
    difference,
    leftovers,
    make_model,
    make_sgd,
    message,
    mine,
    steps,
    wrap,
)
from tests.ranks import on_ranks

SUMMING = ["gradient-tracking", "push-diging", "exact-diffusion"]
TINY = 0.0002  # MB: many buckets


class Point(nn.Module):
    """Parameters that a rank wants near its own centre; the best for all is the mean of centres."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.right = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self) -> torch.Tensor:
        return torch.cat([self.left, self.right])


def centre(rank: int) -> torch.Tensor:
    return torch.tensor([1.0, -2.0, 0.5, 3.0, -1.0]).double() * (rank + 1) ** 2


def new(name: str, **options: Any) -> tuple[Point, Any]:
    model = Point()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    return model, wrap(optimizer, model, name, **options)


def train(model: nn.Module, optimizer: Any, count: int, weight: float = 1.0) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        (weight * (model() - centre(dear.rank())).square().sum() / 2).backward()
        optimizer.step()


def off(model: nn.Module) -> float:
    """Distance to the best point for all ranks."""
    best = sum(centre(rank) for rank in range(dear.size())) / dear.size()
    return (parameters_to_vector(model.parameters()) - best).abs().max().item()


def ends_at_the_best_point(model: nn.Module, optimizer: Any) -> None:
    train(model, optimizer, 120)
    far = off(model)
    optimizer.close()
    assert far < 1e-6


def from_root(model: nn.Module, optimizer: Any) -> None:
    dear.broadcast_parameters(model.state_dict())
    dear.broadcast_optimizer_state(optimizer)


def states(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    return copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})


def load(model: nn.Module, optimizer: Any, saved: dict[str, Any]) -> None:
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])


# --- states of other ranks ------------------------------------------------------------------------


@pytest.mark.parametrize("name", SUMMING)
@on_ranks(3)
def test_a_state_that_is_broadcast_begins_sums_anew(name: str) -> None:
    model, optimizer = new(name)
    train(model, optimizer, 5)
    from_root(model, optimizer)
    ends_at_the_best_point(model, optimizer)


@pytest.mark.parametrize("wrapped", ["before", "after loading", "after broadcasting"])
@pytest.mark.parametrize("name", SUMMING)
@on_ranks(2)
def test_one_rank_loads_and_broadcasts(name: str, wrapped: str) -> None:
    model, optimizer = new(name)
    train(model, optimizer, 5)
    saved = states(model, optimizer)
    optimizer.close()
    model = Point()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    if wrapped == "before":
        wrap(optimizer, model, name)
    if dear.rank() == 0:
        load(model, optimizer, saved)
    if wrapped == "after loading":
        wrap(optimizer, model, name)
    from_root(model, optimizer)
    if wrapped == "after broadcasting":
        wrap(optimizer, model, name)
    ends_at_the_best_point(model, optimizer)


@pytest.mark.parametrize("name", SUMMING)
@on_ranks(2)
def test_the_state_of_another_rank_is_refused_before_it_is_loaded(name: str) -> None:
    model, optimizer = new(name)
    train(model, optimizer, 5)
    of_root = runtime.communicator().broadcast_object(states(model, optimizer), root=0)
    optimizer.param_groups[0]["lr"] = 0.1
    line = message(partial(optimizer.load_state_dict, of_root["optimizer"]))
    rate = optimizer.param_groups[0]["lr"]
    optimizer.close()
    plain = torch.optim.SGD(model.parameters(), lr=0.2)
    plain.load_state_dict(of_root["optimizer"])
    wrapping = message(partial(wrap, plain, model, name))
    if dear.rank() == 0:
        assert (line, wrapping, rate) == ("", "", 0.2)
        plain.close()
        return
    assert rate == 0.1 and leftovers(model) == []
    for text in (line, wrapping):
        assert "rank 0" in text and "broadcast_optimizer_state" in text and "\n" not in text


def _saved_after(name: str, count: int) -> dict[str, Any]:
    model, optimizer = new(name)
    train(model, optimizer, count)
    saved = states(model, optimizer)
    optimizer.close()
    return saved


def _resumed(name: str, files: list[dict[str, Any]]) -> None:
    model, optimizer = new(name)
    load(model, optimizer, files[dear.rank() % len(files)])
    ends_at_the_best_point(model, optimizer)


@pytest.mark.parametrize(("before", "after"), [(2, 3), (2, 1), (1, 2)])
@pytest.mark.parametrize("name", SUMMING)
def test_sums_of_another_world_begin_anew(world, name, before, after):
    files = world(before).run(_saved_after, name, 5)
    world(after).run(_resumed, name, files)


# --- states of other algorithms, buckets and parameters -------------------------------------------


@pytest.mark.parametrize("other", ["neighbor", *SUMMING])
@pytest.mark.parametrize("name", SUMMING)
@on_ranks(2)
def test_a_state_of_another_algorithm_begins_sums_anew(name: str, other: str) -> None:
    saved = _saved_after(other, 5)
    model, optimizer = new(name)
    train(model, optimizer, 2)
    load(model, optimizer, saved)
    ends_at_the_best_point(model, optimizer)


@pytest.mark.parametrize("name", SUMMING)
@on_ranks(2)
def test_buckets_may_have_another_size_after_a_load(name: str) -> None:
    model, other = make_model(), make_model()
    optimizer = wrap(make_sgd(model), model, name, bucket_mb=TINY)
    steps(model, optimizer, mine(), range(4))
    saved = states(model, optimizer)
    steps(model, optimizer, mine(), range(4, 8))
    again = wrap(make_sgd(other), other, name)
    load(other, again, saved)
    steps(other, again, mine(), range(4, 8))
    buckets, far = [len(o.groups()) for o in (optimizer, again)], difference(other, model)
    optimizer.close()
    again.close()
    assert buckets[0] > buckets[1] and far < 1e-5


@pytest.mark.parametrize("name", SUMMING)
@on_ranks(2)
def test_a_state_of_other_parameters_is_refused_before_it_is_loaded(name: str) -> None:
    saved = _saved_after(name, 2)["optimizer"]
    model = nn.Linear(2, 2)
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, name)
    line = message(partial(optimizer.load_state_dict, saved))
    rate = optimizer.param_groups[0]["lr"]
    optimizer.close()
    assert rate == 0.1
    assert "same parameters as when it was saved" in line and "\n" not in line


# --- writes, roll-backs and frozen layers ---------------------------------------------------------


def _written(name: str, assigned: bool) -> None:
    """Gradients are 0; each rank writes to its parameters once."""
    model, optimizer = new(name)
    train(model, optimizer, 2, weight=0.0)
    with torch.no_grad():
        for param in model.parameters():
            if assigned:
                param.data = param + dear.rank() + 1
            else:
                param.add_(dear.rank() + 1)
    train(model, optimizer, 60, weight=0.0)
    values = parameters_to_vector(model.parameters()).detach()
    optimizer.close()
    assert torch.allclose(values, torch.full_like(values, (dear.size() + 1) / 2), atol=1e-6)


@pytest.mark.parametrize("assigned", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", SUMMING)
def test_a_write_to_parameters_counts_once(world, name, size, assigned):
    world(size).run(_written, name, assigned)


@pytest.mark.parametrize("name", SUMMING)
@on_ranks(2)
def test_a_rank_may_load_other_parameters_for_a_while(name: str) -> None:
    """Example: rank 0 evaluates averaged weights."""
    model, optimizer = new(name)
    train(model, optimizer, 5)
    if dear.rank() == 0:
        before = copy.deepcopy(model.state_dict())
        model.load_state_dict(Point().state_dict())
        model.load_state_dict(before)
    ends_at_the_best_point(model, optimizer)


@pytest.mark.parametrize("name", SUMMING)
@on_ranks(2)
def test_parameters_alone_do_not_undo_a_gradient_that_is_not_finite(name: str) -> None:
    model, optimizer = new(name)
    train(model, optimizer, 5)
    saved = states(model, optimizer)
    train(model, optimizer, 1, weight=torch.nan)
    model.load_state_dict(saved["model"])
    lines = [message(partial(train, model, optimizer, 1)) for _ in range(2)]
    assert all("load the state of the optimizer, too" in line for line in lines)
    load(model, optimizer, saved)
    ends_at_the_best_point(model, optimizer)


def _frozen_later(name: str) -> None:
    """Replicas and gradients are equal, so averages change nothing."""
    model = make_model()
    optimizer = wrap(make_sgd(model), model, name)
    steps(model, optimizer, [0], range(2))
    optimizer.synchronize()
    model[0].requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    steps(model, optimizer, [0], range(2, 5))
    after = model.state_dict()
    changed = [key for key in after if not torch.equal(before[key], after[key])]
    optimizer.close()
    assert changed == [f"{layer}.{kind}" for layer in (2, 4) for kind in ("weight", "bias")]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", ["gradient-tracking", "push-diging"])
def test_a_layer_that_is_frozen_later_stays_as_it_is(world, name, size):
    world(size).run(_frozen_later, name)


# --- sparse gradients -----------------------------------------------------------------------------


def _words(sparse: bool) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Embedding(8, 6, sparse=sparse), make_model())


def _loss_of_words(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    words = torch.tensor([rank, step, 5])
    return nn.functional.cross_entropy(model(words), words % 4)


Trained = Callable[[nn.Module, Any, Iterable[int]], None]
_train_words: Trained = partial(steps, loss_of=_loss_of_words)


@pytest.mark.parametrize("name", ["gradient-tracking", "push-diging"])
@on_ranks(2)
def test_estimates_of_sparse_gradients_are_refused(name: str) -> None:
    model = _words(sparse=True)
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, name)
    line = message(partial(_train_words, model, optimizer, mine()))
    optimizer.close()
    assert "sparse=False" in line and "\n" not in line


@pytest.mark.parametrize(
    ("name", "options"),
    [("neighbor", {}), ("neighbor", {"combine": "atc"}), ("exact-diffusion", {})],
)
@on_ranks(2)
def test_sparse_gradients_are_right_where_only_parameters_are_sent(
    name: str, options: dict[str, Any]
) -> None:
    model, wanted = _words(sparse=True), _words(sparse=False)
    for replica in (model, wanted):
        optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
        wrap(optimizer, replica, name, **options)
        _train_words(replica, optimizer, mine())
        optimizer.close()
    assert difference(model, wanted) < 1e-6


def _trained_on_words(name: str) -> tuple[str, list[torch.Tensor]]:
    model = _words(sparse=True)
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, name)
    line = message(partial(_train_words, model, optimizer, mine()))
    optimizer.close()
    return line, [param.detach().clone() for param in model.parameters()]


def _trained_on_dense_words() -> list[torch.Tensor]:
    model = _words(sparse=False)
    _train_words(model, torch.optim.SGD(model.parameters(), lr=0.1), range(2))
    return [param.detach() for param in model.parameters()]


def test_sparse_gradients_are_averaged_by_ddp_on_gloo(world):
    wanted = _trained_on_dense_words()
    for line, values in world(2, "gloo").run(_trained_on_words, "ddp"):
        assert line == ""
        torch.testing.assert_close(values, wanted)


@pytest.mark.parametrize(
    ("name", "size", "kind"), [("ddp", 2, ""), ("ddp", 1, ""), ("horovod", 2, "horovod")]
)
def test_sparse_gradients_that_a_library_cannot_send_are_refused(world, name, size, kind):
    skip_if_unavailable(name)
    for line, _ in world(size, kind).run(_trained_on_words, name):
        assert "sparse=False" in line and "\n" not in line
