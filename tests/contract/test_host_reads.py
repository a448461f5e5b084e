"""No algorithm reads from the device, or writes host values to it, in ordinary steps.

The host waits in both cases: for the device, or for a copy from memory that is not pinned.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dear
from dear.comm import communicator
from tests.contract.algorithms import skip_if_unavailable
from tests.contract.loops import make_model, make_sgd, mine, steps

ALGORITHMS = [
    ("allreduce", {}),
    ("wfbp", {}),
    ("ddp", {}),
    ("mgwfbp", {"profile_steps": 1}),
    ("mgwfbp", {"profile_steps": 1, "compression": "fp16"}),
    (
        "mgwfbp",
        {"profile_steps": 1, "merge": "threshold", "threshold_mb": 1.0, "compression": "eftopk"},
    ),
    ("mgwfbp", {"profile_steps": 1, "compression": "signum"}),
    ("bytescheduler", {}),
    ("dear", {}),
    ("dear", {"fusion": "none"}),
    ("dear", {"update": "replicated"}),
    ("dadt", {}),
    ("decentralized", {}),
    ("neighbor", {"topology": "ring"}),
]
READS = ("tolist", "item", "__bool__", "__float__", "__int__", "numpy", "cpu")
WRITES = ("tensor", "as_tensor", "from_numpy")


def _reads(algorithm: str, options: dict[str, Any]) -> dict[str, int]:
    model = make_model()
    optimizer = make_sgd(model)
    dear.DistributedOptimizer(optimizer, model, algorithm=algorithm, **options)
    steps(model, optimizer, mine(), range(4))  # plans are made by then
    counted: Counter[str] = Counter()
    places = [*((torch.Tensor, name) for name in READS), *((torch, name) for name in WRITES)]
    kept = [(place, name, getattr(place, name)) for place, name in places]

    def counting(name: str, plain: Any) -> Any:
        def call(*args: Any, **more: Any) -> Any:
            counted[name] += 1
            return plain(*args, **more)

        return call

    batches = mine()
    for place, name, plain in kept:
        setattr(place, name, counting(name, plain))
    try:
        steps(model, optimizer, batches, range(4, 7))
    finally:
        for place, name, plain in kept:
            setattr(place, name, plain)
    optimizer.close()
    return dict(counted)


@pytest.mark.parametrize(
    ("algorithm", "options"), ALGORITHMS, ids=[f"{name}-{given}" for name, given in ALGORITHMS]
)
def test_an_ordinary_step_reads_and_writes_nothing(world, algorithm, options):
    skip_if_unavailable(algorithm)
    assert world(2).run(_reads, algorithm, options) == [{}, {}]


def test_marks_of_missing_gradients_go_to_a_gpu_without_a_wait(monkeypatch):
    seen: list[dict[str, Any]] = []

    class OnGpu:
        dtype, is_cuda = torch.uint8, True

        def copy_(self, host: Any, **how: Any) -> None:
            seen.append({"host": host, **how})

    pretended = SimpleNamespace(tensor=lambda *args, **how: how["pin_memory"] and args[0])
    monkeypatch.setattr(communicator, "torch", pretended)
    communicator.mark(OnGpu(), [True, False])
    assert seen == [{"host": [True, False], "non_blocking": True}]
