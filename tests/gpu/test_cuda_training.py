"""Training on CUDA tensors equals plain training: one rank per GPU, and ranks that share one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dear.training.algorithm import algorithm_class, algorithm_names
from tests.gpu import cuda_training_bodies as bodies
from tests.gpu.cuda_worlds import EVERYWHERE, Pools, World, named

# DDP refuses the model's unused parameters by default; mgs keeps most of a gradient back.
_EXTRA = {"ddp": {"find_unused_parameters": True}, "mgs": {"density": 1.0}}
_VARIANTS = [
    (name, _EXTRA.get(name, {}))
    for name in algorithm_names()
    if algorithm_class(name).capabilities.consistency == "synchronous"
    and "cuda" in algorithm_class(name).capabilities.devices
] + [("dear", {"threshold_mb": 0.0002})]
_IDS = ["-".join([name, *map(str, options.values())]) for name, options in _VARIANTS]

worlds = pytest.mark.parametrize("world", EVERYWHERE, ids=named)


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    pools = Pools()
    yield pools
    pools.close()


@worlds
@pytest.mark.parametrize(
    ("kind", "side"),
    [("sgd", False), ("sgd", True), ("adamw", False)],
    ids=["sgd", "side", "adamw"],
)
@pytest.mark.parametrize(("algorithm", "options"), _VARIANTS, ids=_IDS)
def test_equals_plain_training(pools, world: World, algorithm, options, kind, side):
    reason = algorithm_class(algorithm).unavailable()
    if reason:
        pytest.skip(reason)
    errors = pools.run(world, bodies.error_of, algorithm, options, kind, side)
    assert max(errors) < 1e-7


@worlds
def test_replicas_start_equal(pools, world: World):
    results = pools.run(world, bodies.state_is_broadcast)
    # Rank 0's weights are 1 and its input is 1: a step of 0.1 against gradients of 1.
    assert all(result == pytest.approx([5.4, 1.8, 6.0, 2.0]) for result in results)
