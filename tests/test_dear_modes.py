"""Every fusion and update mode of `dear` trains like one process on the joined batch."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import dear
from tests import awkward
from tests.test_optimizer import everybody, make_model, message, mine, steps, wrap

_FUSIONS: list[dict[str, Any]] = [
    {},
    {"fusion": "none"},
    {"threshold_mb": 0.0005, "first_mb": None},
    {"threshold_mb": 0.001, "first_mb": 0.0001},
    {"fusion": "nearby_layers", "nearby_layers": 2},
    {"fusion": "nearby_layers", "nearby_layers": -1},
    {"fusion": "wait_time", "cycle_time_ms": 0.05},
]
_UPDATES: list[dict[str, Any]] = [
    {"update": "sharded"},
    {"update": "replicated"},
    {"update": "sharded", "decouple": "reduce_broadcast"},
    {"update": "replicated", "decouple": "reduce_broadcast"},
]
_MODES = [fusion | update for fusion, update in itertools.product(_FUSIONS, _UPDATES)]
# All groups small, and some.
_SMALL: list[dict[str, Any]] = [
    {"fusion": fusion, "small_kb": kb, "update": update}
    for fusion, kb, update in itertools.product(
        ("threshold", "none"), (0.3, 8), ("sharded", "replicated")
    )
]
_LOOPS: list[dict[str, Any]] = [
    {},
    {"micro_steps": 2},
    {"micro_steps": 2, "no_sync": True},
    {"read_every_step": True},
    {"evaluate": "grad"},
]


def _train(options: dict[str, Any], kind: str, loop: dict[str, Any]) -> float:
    model = awkward.make_model()
    optimizer = awkward.make_optimizer(kind, model)
    optimizer = dear.DistributedOptimizer(optimizer, model, **{"small_kb": 0} | options)
    states = awkward.train(model, optimizer, dear.rank(), dear.size(), **loop)
    optimizer.close()
    wanted = awkward.serial(kind, dear.size(), loop.get("micro_steps", 1))
    return awkward.error(states, wanted)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("mode", _MODES, ids=lambda mode: "-".join(map(str, mode.values())))
def test_every_mode_equals_serial_training(world, world_size, mode):
    number = _MODES.index(mode)
    kind = ("sgd", "adamw")[number % 2]
    assert max(world(world_size).run(_train, mode, kind, {})) < 1e-5


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("mode", _SMALL, ids=lambda mode: "-".join(map(str, mode.values())))
def test_small_groups_equal_serial_training(world, world_size, mode):
    number = _SMALL.index(mode)
    kind = ("adamw", "sgd")[number % 2]
    loop = _LOOPS[number % len(_LOOPS)]
    assert max(world(world_size).run(_train, mode, kind, loop)) < 1e-5


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("update", _UPDATES, ids=lambda update: "-".join(update.values()))
@pytest.mark.parametrize("loop", _LOOPS, ids=lambda loop: "-".join(loop) or "plain")
def test_other_loops_equal_serial_training(world, world_size, update, loop):
    options = {"threshold_mb": 0.0005, **update}
    assert max(world(world_size).run(_train, options, "adamw", loop)) < 1e-5


_ELEMENT_WISE = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-4},
    "Adam": {"lr": 0.01, "amsgrad": True},
    "AdamW": {"lr": 0.01},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Adagrad": {"lr_decay": 0.1},
    "Adadelta": {"lr": 0.5},
    "Adamax": {"lr": 0.01},
    "NAdam": {"lr": 0.01},
    "RAdam": {"lr": 0.01},
    "Rprop": {"lr": 0.01},
    "ASGD": {"lr": 0.05, "t0": 2},
}


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """One of torch's optimizers, with a group of other settings for every second parameter."""
    params = list(model.parameters())
    options = _ELEMENT_WISE[name]
    groups = [{"params": params[::2]}, {"params": params[1::2], "lr": 0.004}]
    return getattr(torch.optim, name)(groups, **options)


def _far(name: str, options: dict[str, Any]) -> tuple[float, str]:
    model, wanted = make_model(), make_model()
    optimizer, serial = make_optimizer(name, model), make_optimizer(name, wanted)
    wrap(optimizer, model, "dear", **options)
    steps(model, optimizer, mine(), range(4))
    held = [key for key in optimizer.state if key in set(model.parameters())]
    steps(wanted, serial, everybody(), range(4))
    far = awkward.error([model.state_dict()], [wanted.state_dict()])
    optimizer.close()
    far = max(far, _state_error(optimizer.state_dict(), serial.state_dict()))
    return far, "whole" if held else "sharded"


def _state_error(got: dict[str, Any], wanted: dict[str, Any]) -> float:
    assert got["param_groups"] == wanted["param_groups"]
    assert got["state"].keys() == wanted["state"].keys()
    far = 0.0
    for place, state in wanted["state"].items():
        assert got["state"][place].keys() == state.keys()
        for key, value in state.items():
            other = got["state"][place][key]
            if torch.is_tensor(value):
                assert other.shape == value.shape and other.dtype == value.dtype, key
                far = max(far, ((other - value).norm() / value.norm().clamp_min(1e-3)).item())
            else:
                assert other == value, key
    return far


@pytest.mark.parametrize("name", _ELEMENT_WISE)
def test_element_wise_optimizers_are_sharded_and_equal_serial(world, name):
    for far, held in world(3).run(_far, name, {"threshold_mb": 0.0002}):
        assert far < 1e-5
        assert held == "sharded"


@pytest.mark.parametrize("name", ["Rprop", "Adagrad"])
def test_the_same_optimizers_may_be_replicated(world, name):
    for far, held in world(2).run(_far, name, {"update": "replicated"}):
        assert far < 1e-5
        assert held == "whole"


class Halving(torch.optim.SGD):
    """A user's class that says what it is."""

    element_wise = True


class Whole(torch.optim.SGD):
    """A user's class that does not."""


def _chosen(kind: type[torch.optim.Optimizer]) -> bool:
    model = make_model()
    optimizer = wrap(kind(model.parameters(), lr=0.1, momentum=0.9), model, "dear")
    steps(model, optimizer, mine(), range(1))
    whole = any(param in optimizer.state for param in model.parameters())
    optimizer.close()
    return not whole


def test_a_class_may_declare_that_it_works_element_by_element(world):
    assert world(2).run(_chosen, Halving) == [True, True]
    assert world(2).run(_chosen, Whole) == [False, False]


def _refused(options: dict[str, Any], whole: bool) -> str:
    model = make_model()
    kind = Whole if whole else torch.optim.SGD
    return message(lambda: wrap(kind(model.parameters(), lr=0.1), model, "dear", **options))


@pytest.mark.parametrize(
    ("options", "whole", "said"),
    [
        ({"threshold_mb": 0}, False, "'threshold_mb' must be greater than 0"),
        ({"threshold_mb": -1.0}, False, "'threshold_mb' must be greater than 0"),
        ({"threshold": 0}, False, "'threshold_mb' must be greater than 0"),
        ({"first_mb": 0}, False, "'first_mb' must be greater than 0"),
        ({"nearby_layers": 0}, False, "'nearby_layers' must not be 0"),
        ({"cycle_time_ms": 0}, False, "'cycle_time_ms' must be greater than 0"),
        ({"small_kb": -1}, False, "'small_kb' must be at least 0"),
        ({"small_kb": 4, "decouple": "reduce_broadcast"}, False, "'small_kb' goes with decouple"),
        (
            {"small_kb": 4, "exclude_parts": "allgather"},
            False,
            "'small_kb' goes with exclude_parts",
        ),
        ({"small_kb": 4, "compression": "topk"}, False, "'small_kb'=4"),
        ({"fusion": "none", "threshold_mb": 8.0}, False, "goes with fusion=threshold or tuned"),
        ({"nearby_layers": 2}, False, "goes with fusion=nearby_layers"),
        ({"cycle_time_ms": 2.0}, False, "goes with fusion=wait_time"),
        ({"fusion": "thresold"}, False, "did you mean 'threshold'"),
        ({"compression": "fp8"}, False, "unknown option of dear 'compression'"),
        ({"exclude_parts": "allgathers"}, False, "did you mean 'allgather'"),
        ({"update": "sharded"}, True, "element by element"),
        ({"threshold": 25, "threshold_mb": 25}, False, "threshold"),
        ({"threshold": 25, "num_nearby_layers": 2}, False, "num_nearby_layers"),
        ({"norm_clip": 1.0}, False, "unknown option of dear 'norm_clip'"),
    ],
)
def test_bad_options_are_refused_in_one_line(world, options, whole, said):
    for line in world(1).run(_refused, options, whole):
        assert said in line
        assert "\n" not in line


def _excluded(parts: str, update: str) -> tuple[float, float]:
    model, before = make_model(), make_model()
    optimizer = wrap(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model,
        "dear",
        update=update,
        exclude_parts=parts,
    )
    steps(model, optimizer, mine())
    state = {name: value.clone() for name, value in model.state_dict().items()}
    moved = awkward.error([state], [before.state_dict()])
    dear.broadcast_parameters(model.state_dict())
    spread = awkward.error([state], [model.state_dict()])
    optimizer.close()
    return moved, spread


@pytest.mark.parametrize("update", ["sharded", "replicated"])
@pytest.mark.parametrize("parts", ["reducescatter", "allgather", "reducescatter,allgather"])
def test_without_some_parts_training_is_wrong_but_the_same_everywhere(world, parts, update):
    for moved, spread in world(2).run(_excluded, parts, update):
        assert (moved > 0) == ("allgather" not in parts)
        assert spread == 0.0


def _seed_arguments() -> list[str]:
    said = []
    for options in ({"threshold": 8}, {"num_nearby_layers": 2}, {"threshold": None}):
        model = make_model()
        optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, "dear", **options)
        steps(model, optimizer, mine(), range(1))
        said.append(type(optimizer).__name__)
        optimizer.close()
    return said


def test_the_arguments_of_the_seed_are_understood(world):
    assert world(2).run(_seed_arguments) == [["DistributedSGD"] * 3] * 2
