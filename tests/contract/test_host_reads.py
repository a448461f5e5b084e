"""No algorithm asks the device for a value in ordinary steps; that would hold up the host."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import dear
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
    ("bytescheduler", {}),
    ("dear", {}),
    ("dear", {"fusion": "none"}),
    ("dear", {"update": "replicated"}),
    ("dadt", {}),
    ("decentralized", {}),
    ("neighbor", {"topology": "ring"}),
]
READS = ("tolist", "item", "__bool__", "__float__", "__int__", "numpy")


def _reads(algorithm: str, options: dict[str, Any]) -> dict[str, int]:
    model = make_model()
    optimizer = make_sgd(model)
    dear.DistributedOptimizer(optimizer, model, algorithm=algorithm, **options)
    steps(model, optimizer, mine(), range(4))  # plans are made by then
    counted: Counter[str] = Counter()
    kept = {name: getattr(torch.Tensor, name) for name in READS}

    def counting(name: str) -> Any:
        def read(tensor: torch.Tensor, *args: Any, **more: Any) -> Any:
            counted[name] += 1
            return kept[name](tensor, *args, **more)

        return read

    batches = mine()
    for name in READS:
        setattr(torch.Tensor, name, counting(name))
    try:
        steps(model, optimizer, batches, range(4, 7))
    finally:
        for name, plain in kept.items():
            setattr(torch.Tensor, name, plain)
    optimizer.close()
    return dict(counted)


@pytest.mark.parametrize(
    ("algorithm", "options"), ALGORITHMS, ids=[f"{name}-{given}" for name, given in ALGORITHMS]
)
def test_an_ordinary_step_reads_nothing_back(world, algorithm, options):
    skip_if_unavailable(algorithm)
    assert world(2).run(_reads, algorithm, options) == [{}, {}]
