"""Every synchronous algorithm trains exactly like one process on the joined batch."""

from __future__ import annotations

import pytest

import dear
from dear.training.algorithm import algorithm_class, algorithm_names
from tests import awkward

# What an algorithm must be told to train this model; DDP refuses unused parameters by default.
# mgs keeps most of a gradient back by default.
_EXTRA = {"ddp": {"find_unused_parameters": True}, "mgs": {"density": 1.0}}
_ALGORITHMS: list[tuple[str, dict]] = [
    (name, {})
    for name in algorithm_names()
    if algorithm_class(name).capabilities.consistency == "synchronous"
]
# The modes of dear are in test_dear_modes.py.
_MODES: list[tuple[str, dict]] = [
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
_KINDS = ("sgd", "adamw")
_LOOPS: list[dict] = [
    {"micro_steps": 2},
    {"micro_steps": 2, "no_sync": True},
    {"read_every_step": True},
    {"evaluate": "grad"},
    {"evaluate": "no_grad", "micro_steps": 2},
]
_CASES = [(name, options, kind) for name, options in _ALGORITHMS for kind in _KINDS]
_CASES += [(name, options, _KINDS[i % 2]) for i, (name, options) in enumerate(_MODES)]
_OTHER = [(name, {}, loop, size) for name, _ in _ALGORITHMS for loop in _LOOPS for size in (2, 3)]
_OTHER += [(name, options, loop, 3) for name, options in _MODES for loop in _LOOPS[1::3]]


def _id(*values: object) -> str:
    words = (v.values() if isinstance(v, dict) else [v] for v in values)
    return "-".join(str(word) for several in words for word in several)


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


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("algorithm", "options", "kind"), _CASES, ids=[_id(*case) for case in _CASES]
)
def test_equals_serial_training(world, algorithm, options, world_size, kind):
    _skip_if_unavailable(algorithm)
    errors = world(world_size).run(_train, algorithm, options, kind, {})
    assert max(errors) < 1e-5


@pytest.mark.parametrize(
    ("algorithm", "options", "loop", "world_size"), _OTHER, ids=[_id(*case) for case in _OTHER]
)
def test_equals_serial_training_in_other_loops(world, algorithm, options, world_size, loop):
    _skip_if_unavailable(algorithm)
    errors = world(world_size).run(_train, algorithm, options, "sgd", loop)
    assert max(errors) < 1e-5
