"""Plain trainings on a GPU are equal bit for bit in blocks of `repeatable`."""

from __future__ import annotations

import contextlib

import pytest
import torch

from common.harness.worker.checking.repeatable import repeatable
from common.models import registry

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


def _trained(steps: int, within: contextlib.AbstractContextManager[None]) -> list[torch.Tensor]:
    torch.manual_seed(1)
    workload = registry.build("resnet18", 8, None, torch.Generator().manual_seed(1))
    workload = workload.to(torch.device("cuda"), *registry.precision("float32"))
    optimizer = torch.optim.SGD(workload.model.parameters(), lr=0.01, momentum=0.9)
    with within:
        for _ in range(steps):
            optimizer.zero_grad()
            workload.backward(workload.loss())
            workload.update(optimizer)
    return [param.detach().clone() for param in workload.model.parameters()]


def test_two_trainings_from_one_start_are_equal():
    device = torch.device("cuda")
    first, second = (_trained(3, repeatable(device)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_without_it_they_may_differ(record_property):
    """Notes by how much, relative to the distance that a tensor moves; no GPU has to differ."""
    start = _trained(0, contextlib.nullcontext())
    for steps in (1, 3, 5):
        first, second = (_trained(steps, contextlib.nullcontext()) for _ in range(2))
        trained = zip(first, second, start, strict=True)
        apart = max(float((a - b).norm() / (a - s).norm()) for a, b, s in trained)
        record_property(f"apart after {steps} steps", apart)
        assert apart < 1, "not the same training"
