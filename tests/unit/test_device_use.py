"""Peak memory and operations of steps: as by hand, or unknown with a reason."""

from __future__ import annotations

import dataclasses
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from torch import nn

from common.harness.trial import Cuda
from common.harness.worker.timing import device_use
from common.harness.worker.timing.device_use import PeakMemory, arithmetic, memory
from common.models.workload import Workload
from common.profiling import modelled
from tests.system.made import make_trial

CPU, MIB = torch.device("cpu"), 1 << 20
REPLAY = {"model": "resnet50@rtx2080ti-modelled", "batch_size": 64}
IMAGES = 64


def workload(features):
    """Two layers and a batch of three samples."""
    model = nn.Sequential(nn.Linear(8, features), nn.Linear(features, 4))
    x, y = torch.ones(3, 8), torch.zeros(3, 4)
    return Workload(model=model, inputs=(x,), targets=(y,), criterion=nn.functional.mse_loss)


def resnet50_macs():
    """Multiplications of ResNet-50's forward pass for an image, and those of its first layer."""
    first = 112 * 112 * 64 * 3 * 49
    total, channels = first + 2048 * 1000, 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width, side = 64 << stage, 56 >> stage
        for block in range(blocks):
            # Later stages halve the side in the 3 x 3 layer of their first block.
            entry = side * (2 if stage and not block else 1)
            total += channels * width * entry**2 + (9 * width**2 + 4 * width**2) * side**2
            total += 0 if block else channels * 4 * width * side**2
            channels = 4 * width
    return total, first


def test_operations_of_a_linear_model_and_of_resnet50_are_those_by_hand():
    before = torch.get_rng_state()
    # Forward, and two gradients of each layer but the first, whose input needs none.
    assert modelled.step_flops("it", lambda: workload(16)) == 2 * 3 * (2 * 8 * 16 + 3 * 16 * 4)
    assert torch.equal(torch.get_rng_state(), before), "counting draws no random number"
    total, first = resnet50_macs()
    of_profile = arithmetic(make_trial("ddp", **REPLAY), None)
    assert of_profile.flops == IMAGES * 2 * (3 * total - first)
    assert of_profile.peak_flops == modelled.RTX_2080_TI.flops
    assert total == pytest.approx(4.09e9, rel=1e-3)  # as published with the weights


def peak_of_a_step(features):
    """Peak of one forward and backward pass of a model that is freed afterwards."""
    task, meter = workload(features), PeakMemory(CPU)
    task.backward(task.loss())
    return meter.read()


def test_the_peak_rises_with_the_model_and_begins_anew():
    if PeakMemory(CPU).read() is None:
        pytest.skip("this kernel does not reset the peak")
    more = 4_000_000
    # A process of its own: memory that other tests have freed would be used again.
    with ProcessPoolExecutor(1, multiprocessing.get_context("forkserver")) as fresh:
        small, large, after = fresh.map(peak_of_a_step, (8, 8 + more, 8))
    # Weights, bias and gradients of both layers, and the activations and their gradients.
    grown = 4 * more * (2 * (8 + 1 + 4) + 2 * 3)
    assert grown * 0.85 < large - small < grown * 1.3
    assert abs(after - small) < grown * 0.2


def test_no_number_where_the_kernel_cannot_reset_the_peak(tmp_path, monkeypatch):
    monkeypatch.setattr(device_use, "_CLEAR", tmp_path / "none" / "clear_refs")
    assert PeakMemory(CPU).read() is None
    use = memory(make_trial("ddp"), [5 * MIB, None])
    assert use.memory_bytes is None and "does not reset" in use.unknown


def test_a_replayed_models_memory_and_a_cpus_peak_are_unknown():
    use = memory(make_trial("ddp", **REPLAY), [5, 5])
    assert use.memory_bytes is None and "replayed" in use.unknown
    use = arithmetic(make_trial("ddp"), None)
    assert use.flops is None and "CPU" in use.unknown


def test_on_a_gpu_memory_is_the_allocators_and_operations_are_counted(monkeypatch):
    calls = []
    for name, value in (
        ("reset_peak_memory_stats", None),
        ("max_memory_allocated", 7 * MIB),
        ("get_device_name", "NVIDIA A100-SXM4-40GB"),
    ):
        monkeypatch.setattr(
            torch.cuda, name, lambda name=name, value=value: calls.append(name) or value
        )
    monkeypatch.setattr(device_use.dear, "rank", lambda: 0)
    assert PeakMemory(torch.device("cuda")).read() == 7 * MIB
    assert calls == ["reset_peak_memory_stats", "max_memory_allocated"]
    trial = make_trial("ddp", device="cuda", cuda=Cuda(tf32=True), model="resnet50", batch_size=2)
    total, first = resnet50_macs()
    use = arithmetic(trial, lambda peak: [peak, peak])
    assert (use.flops, use.peak_flops) == (2 * 2 * (3 * total - first), pytest.approx(156e12))
    for odd, gather in (
        (trial, lambda peak: [peak, 2 * peak]),
        (dataclasses.replace(trial, dtype="float64"), lambda peak: [peak]),
    ):
        use = arithmetic(odd, gather)
        assert use.flops is None and "NVIDIA A100-SXM4-40GB" in use.unknown
