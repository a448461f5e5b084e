"""Checkpoints of `dear`: plain torch's format, any world, in the middle of training."""

from __future__ import annotations

import copy
import io
from functools import partial
from typing import Any

import pytest
import torch

import dear
from tests.contract.loops import difference, everybody, make_model, mean_loss, mine, steps, wrap
from tests.contract.test_dear import make_optimizer
from tests.ranks import on_ranks

_OPTIONS = [
    {"threshold_mb": 0.0002},
    {"fusion": "none", "decouple": "reduce_broadcast"},
    {"fusion": "none", "small_kb": 0.1},
    {},
]


def _saved(name: str, options: dict[str, Any], total: int) -> bytes:
    """A checkpoint after two steps on the joined data of `total` ranks, split among the ranks."""
    model = make_model()
    optimizer = wrap(make_optimizer(name, model), model, "dear", **options)
    steps(model, optimizer, mine(), range(2), loss_of=partial(_share, total))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    optimizer.close()
    return file.getvalue()


def _share(total: int, model: Any, rank: int, step: int) -> torch.Tensor:
    """The mean loss of this rank's part of `total` virtual ranks."""
    ranks = range(rank * total // dear.size(), (rank + 1) * total // dear.size())
    return mean_loss(model, ranks, step)


def _resumed(name: str, options: dict[str, Any], total: int, saved: bytes, late: bool) -> float:
    model, wanted = make_model(), make_model()
    optimizer = wrap(make_optimizer(name, model), model, "dear", **options)
    if late:
        steps(model, optimizer, mine(), range(1), loss_of=partial(_share, total))
    checkpoint = torch.load(io.BytesIO(saved), weights_only=True)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    steps(model, optimizer, mine(), range(2, 4), loss_of=partial(_share, total))
    reference = make_optimizer(name, wanted)
    steps(wanted, reference, everybody(), range(4), loss_of=partial(_share, total))
    far = difference(model, wanted)
    optimizer.close()
    return far


def _resumed_plainly(name: str, total: int, saved: bytes) -> float:
    model, wanted = make_model(), make_model()
    checkpoint = torch.load(io.BytesIO(saved), weights_only=True)
    optimizer, reference = make_optimizer(name, model), make_optimizer(name, wanted)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    steps(model, optimizer, range(total), range(2, 4))
    steps(wanted, reference, range(total), range(4))
    return difference(model, wanted)


@pytest.mark.parametrize(
    ("number", "name"), list(enumerate(["SGD", "AdamW", "Adagrad", "NAdam", "ASGD"]))
)
def test_a_checkpoint_goes_on_in_another_world_and_in_plain_torch(world, number, name):
    options, later, late = _OPTIONS[number % 4], _OPTIONS[number % 4 - 1], number % 2 == 0
    checkpoints = world(2).run(_saved, name, options, 4)
    for saved in checkpoints:
        assert _resumed_plainly(name, 4, saved) < 1e-5
    assert max(world(4).run(_resumed, name, later, 4, checkpoints[0], late)) < 1e-5
    assert max(world(1).run(_resumed, name, later, 4, checkpoints[1], late)) < 1e-5


@pytest.mark.parametrize("name", ["SGD", "Adam", "RMSprop"])
def test_a_checkpoint_of_plain_torch_goes_on(world, name):
    model = make_model()
    optimizer = make_optimizer(name, model)
    steps(model, optimizer, range(4), range(2))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    saved = file.getvalue()
    for number, options in enumerate(_OPTIONS):
        assert max(world(2).run(_resumed, name, options, 4, saved, number % 2 == 0)) < 1e-5


def _held(name: str) -> tuple[int, int]:
    """Elements of state on this rank, and in all."""
    model = make_model()
    optimizer = wrap(make_optimizer(name, model), model, "dear")
    steps(model, optimizer, mine(), range(1))
    part = _elements(optimizer.state.values())
    whole = _elements(copy.deepcopy(optimizer.state_dict())["state"].values())
    optimizer.close()
    return part, whole


def _elements(states: Any) -> int:
    return sum(
        value.numel()
        for state in states
        for value in state.values()
        if torch.is_tensor(value) and value.dim() > 0
    )


def test_each_rank_holds_its_part_of_the_state_only(world):
    seen = world(4).run(_held, "AdamW")
    parameters = sum(param.numel() for param in make_model().parameters())
    assert [whole for _, whole in seen] == [2 * parameters] * 4
    assert sum(part for part, _ in seen) == 2 * parameters
    assert max(part for part, _ in seen) <= 2 * (-(-parameters // 4))


@on_ranks(3)
def test_a_state_broadcast_in_the_middle_changes_nothing() -> None:
    model, wanted = make_model(), make_model()
    optimizer, serial = make_optimizer("Adam", model), make_optimizer("Adam", wanted)
    wrap(optimizer, model, "dear")
    steps(model, optimizer, mine(), range(2))
    steps(wanted, serial, everybody(), range(2))
    dear.broadcast_optimizer_state(optimizer, root_rank=1)
    dear.broadcast_parameters(model.state_dict(), root_rank=1)
    steps(model, optimizer, mine(), range(2, 4))
    steps(wanted, serial, everybody(), range(2, 4))
    far = difference(model, wanted)
    optimizer.close()
    assert far < 1e-5


def _only_on_rank_0() -> str:
    model = make_model()
    optimizer = wrap(make_optimizer("Adam", model), model, "dear")
    steps(model, optimizer, mine(), range(1))
    try:
        if dear.rank() == 0:
            optimizer.state_dict()
        else:
            steps(model, optimizer, mine(), range(1, 3))
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.full  # it waits for the time-out
def test_a_state_dict_on_one_rank_only_is_an_error_that_says_so(own_pool):
    # Rank 1 waits for its own collective, on another queue, as long as any may take.
    lines = own_pool(2, timeout_s=8.0).run(_only_on_rank_0)
    assert "call state_dict() and close() of the optimizer on every rank" in lines[0]
    assert lines[1]
