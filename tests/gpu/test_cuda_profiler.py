"""The layer profiler sees a GPU's own time, which passes while the host is elsewhere."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn
from torch.nn import functional

from common.models.workload import Workload
from common.profiling.recorder import record
from tests.gpu.cuda_worlds import keep_busy

WAIT_S = 0.02
LAYERS = 4


class Slow(nn.Module):
    """Takes its time in the forward pass: on a GPU without the host's noticing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_cuda:
            keep_busy(x.device)
        else:
            time.sleep(WAIT_S)
        return x * self.weight


def _model() -> nn.Sequential:
    layers = [nn.Linear(8, 8) for _ in range(LAYERS)]
    layers.insert(2, Slow())
    return nn.Sequential(*layers)


@pytest.mark.parametrize("place", ["cpu", "cuda"], ids=["on_cpu", "on_gpu"])
def test_time_goes_to_the_layer_that_takes_it(place):
    if place == "cuda" and not torch.cuda.is_available():
        pytest.skip(f"torch {torch.__version__} sees no CUDA device here")
    device = torch.device(place)
    workload = Workload(
        model=_model(),
        inputs=(torch.ones(4, 8),),
        targets=(torch.zeros(4, 8),),
        criterion=functional.mse_loss,
    ).to(device, torch.float32)
    layers, _ = record(workload, device, warmup=2, steps=5)
    fields = layers.fields()
    by_module: dict[str, float] = {}
    for call in fields["calls"]:
        by_module[call.module] = by_module.get(call.module, 0.0) + call.forward_s
    assert by_module["2"] > sum(by_module.values()) / 2
    assert by_module["2"] > 0.001
    ready = sorted((param.position, param.ready_s) for param in fields["parameters"])
    assert [position for position, _ in ready] == list(range(2 * LAYERS + 1))
    times = [at for _, at in ready]
    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1] <= layers.backward_s * 1.001
