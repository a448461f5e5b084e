"""Every synchronous algorithm trains exactly like one process on the joined batch."""

from __future__ import annotations

import pytest

import dear
from dear.algorithm import algorithm_class, algorithm_names
from tests import awkward

# What an algorithm must be told to train this model; DDP refuses unused parameters by default.
# mgs keeps most of a gradient back by default.
_EXTRA = {"ddp": {"find_unused_parameters": True}, "mgs": {"density": 1.0}}
_VARIANTS = [
    (name, {})
    for name in algorithm_names()
    if algorithm_class(name).capabilities.consistency == "synchronous"
] + [
    ("dear", {"fusion": "none"}),
    ("dear", {"threshold_mb": 0.0002}),
    ("ddp", {"bucket_cap_mb": 0.0002, "gradient_as_bucket_view": True}),
    ("ddp", {"static_graph": True}),
    ("ddp", {"zero": True}),
    ("fsdp", {"stage": 2}),
    ("wfbp", {"channels": 2}),
    ("mgwfbp", {"merge": "asc"}),
    ("mgwfbp", {"merge": "optimal"}),
    ("mgwfbp", {"merge": "threshold", "threshold_mb": 0.0}),
    ("mgwfbp", {"costs": "10gbe", "profile_steps": 1}),
    ("mgs", {"merge": "optimal"}),
    ("bytescheduler", {"partition_mb": 0.0001, "levels": 3}),
    ("bytescheduler", {"partition_mb": 0.0001, "credit_mb": 0.0003}),
]
_IDS = ["-".join([name, *map(str, options.values())]) for name, options in _VARIANTS]

variants = pytest.mark.parametrize(("algorithm", "options"), _VARIANTS, ids=_IDS)


def _train(algorithm: str, options: dict, kind: str, loop: dict) -> float:
    model = awkward.make_model()
    optimizer = awkward.make_optimizer(kind, model)
    optimizer = dear.DistributedOptimizer(
        optimizer, model, algorithm=algorithm, **_EXTRA.get(algorithm, {}), **options
    )
    states = awkward.train(model, optimizer, dear.rank(), dear.size(), **loop)
    optimizer.close()
    wanted = awkward.serial(kind, dear.size(), loop.get("micro_steps", 1))
    return awkward.error(states, wanted)


def _skip_if_unavailable(algorithm: str) -> None:
    reason = algorithm_class(algorithm).unavailable()
    if reason:
        pytest.skip(reason)


@variants
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_equals_serial_training(world, algorithm, options, world_size, kind):
    _skip_if_unavailable(algorithm)
    errors = world(world_size).run(_train, algorithm, options, kind, {})
    assert max(errors) < 1e-5


@variants
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "loop",
    [
        {"micro_steps": 2},
        {"micro_steps": 2, "no_sync": True},
        {"read_every_step": True},
        {"evaluate": "grad"},
        {"evaluate": "no_grad", "micro_steps": 2},
    ],
    ids=["accumulate", "accumulate-no_sync", "read", "evaluate-grad", "evaluate-accumulate"],
)
def test_equals_serial_training_in_other_loops(world, algorithm, options, world_size, loop):
    _skip_if_unavailable(algorithm)
    errors = world(world_size).run(_train, algorithm, options, "sgd", loop)
    assert max(errors) < 1e-5
