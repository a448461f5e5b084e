"""Modelled profiles for GPUs that are not available: counted work, scaled to published speeds.

`python -m common.profiling.modelled` writes the profiles in configs/profiles/rtx2080ti-modelled/.
`profile_of_any` models any model on any GPU of configs/gpus.yaml.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from common.models import registry
from common.models.profile import FOLDER, Profile
from common.models.workload import Workload
from common.profiling import gpus, published
from common.profiling.gpus import Device
from common.profiling.recorder import Clock, Layers, Stretches, failing, hooked_step
from common.profiling.work import Args, kernels
from dear.errors import UserError


class Roofline(Clock[float], TorchDispatchMode):
    """Clock that adds up max(operations / peak, bytes / bandwidth) of all kernels run inside it.

    Tensors may be on the `meta` device, on which nothing is computed.
    """

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device
        self._total_s = 0.0
        self.flops = 0
        """Multiplications and additions so far."""

    def mark(self) -> float:
        return self._total_s

    def seconds(self, earlier: float, later: float) -> float:
        return later - earlier

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Args = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        for kernel in kernels(func, args, kwargs, out):
            self.flops += kernel.flops
            arithmetic_s = kernel.flops / self._device.flops
            self._total_s += max(arithmetic_s, kernel.nbytes / self._device.bandwidth)
        return out


_RTX_2080_TI = gpus.find("rtx2080ti")
FOLDER_NAME, RTX_2080_TI = _RTX_2080_TI.folder_name, _RTX_2080_TI.device


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Factors from the counted times at a GPU's peak rates to the real times of the two passes.

    A factor below 1 means fewer operations than counted, as with Winograd's 3 x 3 convolutions.
    """

    forward: float
    backward: float


_SEED = 1

EFFICIENCIES = {
    "resnet50-bs64": Efficiency(forward=1.1719, backward=1.4460),
    "densenet201-bs32": Efficiency(forward=1.5613, backward=1.7207),
    "vgg16-bs64": Efficiency(forward=0.7584, backward=0.8495),
    "bert_base-bs64": Efficiency(forward=1.2556, backward=1.2556),
    "bert-bs8": Efficiency(forward=1.8323, backward=1.8323),
}
"""Results of `efficiency` for the cases with published times, by name of the case."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Modelled profile, and which published times of an RTX 2080 Ti scale it."""

    model: str
    batch_size: int
    total: int | None = None
    """Batch size for which the time of a training step is published."""
    split: int | None = None
    """Batch size for which one source has published the times of a training step and of inference,
    from which two factors follow; None: both passes get the same factor."""
    like: str | None = None
    """Name of the case whose factors are used, if nothing is published for this one."""

    @property
    def name(self) -> str:
        return f"{self.model}-bs{self.batch_size}"


CASES = {
    case.name: case
    for case in (
        Case(model="resnet50", batch_size=64, total=64, split=12),
        *(Case(model="resnet50", batch_size=n, like="resnet50-bs64") for n in (16, 32, 128)),
        Case(model="densenet201", batch_size=32, total=12, split=12),
        Case(model="inceptionv4", batch_size=64, like="resnet50-bs64"),
        Case(model="vgg16", batch_size=64, total=12, split=12),
        Case(model="mobilenet_v2", batch_size=64, like="resnet50-bs64"),
        Case(model="mnist_cnn", batch_size=32, like="resnet50-bs64"),
        Case(model="bert_base", batch_size=64, total=64),
        Case(model="bert", batch_size=8, total=8),
        Case(model="bert", batch_size=32, like="bert-bs8"),
    )
}


def model_profile(case: Case) -> Profile:
    """Returns a profile of the counted work of a training step; each pass is scaled by a factor."""
    entry = registry.model_entry(case.model)
    return _profile(
        count(case.model, case.batch_size, _RTX_2080_TI),
        _RTX_2080_TI,
        case.like or case.name,
        _reason(case),
        model=case.model,
        batch_size=case.batch_size,
        sentence_len=entry.sentence_len,
        sample_unit=entry.sample_unit,
    )


def _profile(
    layers: Layers,
    gpu: gpus.Choice,
    like: str,
    reason: str,
    *,
    model: str,
    batch_size: int,
    sentence_len: int | None,
    sample_unit: str,
) -> Profile:
    """Returns the profile of counted layers.

    Args:
        like: case whose factors scale the layers.
        reason: source of the factors.
    """
    device, factors = gpu.device, EFFICIENCIES[like]
    counted = (
        f"per kernel max(flops / {device.flops / 1e12:g} TFLOP/s, bytes / "
        f"{device.bandwidth / 1e9:g} GB/s), added up by module (kernel launches cost nothing): "
        f"forward {layers.forward_s * 1e3:.4f} ms times {factors.forward:.4f}, "
        f"backward {layers.backward_s * 1e3:.4f} ms times {factors.backward:.4f}"
    )
    layers.scale(layers.forward_s * factors.forward, layers.backward_s * factors.backward)
    return Profile(
        model=model,
        device=gpu.folder_name,
        device_name=device.name,
        memory_bytes_per_s=device.bandwidth,
        kind="modelled",
        batch_size=batch_size,
        sentence_len=sentence_len,
        sample_unit=sample_unit,
        dtype=gpus.DTYPES[gpu.precision],
        rule=f"{counted}; {reason}",
        **layers.fields(),
    )


def _reason(case: Case) -> str:
    if case.like:
        return (
            f"these are the factors of {case.like}, because nothing usable is published for "
            f"{case.name} ({_reason(CASES[case.like])})"
        )
    total = published.find(case.model, gpus.DEFAULT, case.total)
    text = f"chosen so that a batch of {total.batch_size} takes {total.training_ms:g} ms"
    text += f" ({total.source})"
    if case.split is None:
        return f"{text}, with one factor for both passes"
    split = published.find(case.model, gpus.DEFAULT, case.split)
    return (
        f"{text}; the ratio of the passes follows from the published inference of a batch of "
        f"{split.batch_size}, {split.inference_ms:g} of {split.training_ms:g} ms ({split.source})"
    )


def efficiency(case: Case) -> Efficiency:
    """Returns the factors of a case from its published times; for cases without `like`."""
    forward = backward = 1.0
    if case.split is not None:
        split = published.find(case.model, gpus.DEFAULT, case.split)
        layers = count(case.model, case.split, _RTX_2080_TI)
        forward = split.inference_ms / 1e3 / inference_s(case.model, case.split)
        rest_s = split.training_ms / 1e3 - forward * layers.forward_s
        backward = rest_s / layers.backward_s
    total = published.find(case.model, gpus.DEFAULT, case.total)
    layers = count(case.model, case.total, _RTX_2080_TI)
    step_s = forward * layers.forward_s + backward * layers.backward_s
    scale = total.training_ms / 1e3 / step_s
    return Efficiency(forward=forward * scale, backward=backward * scale)


def _workload(model: str, batch_size: int, side: int | None, dtype: torch.dtype) -> Workload:
    """Returns a model of the registry on `meta`; `side` replaces the default size of images."""
    length = registry.model_entry(model).sentence_len
    with torch.device("meta"):
        workload = registry.build(model, batch_size, length, torch.Generator())
        if side is not None:
            workload.inputs = (torch.empty(batch_size, 3, side, side),)
    return workload.to(torch.device("meta"), dtype)


def count(model: str, batch_size: int, gpu: gpus.Choice, side: int | None = None) -> Layers:
    """Returns the counted times of a training step of a model of the registry, unscaled."""
    return _layers(_workload(model, batch_size, side, _dtype(gpu)), gpu.device)


def inference_s(model: str, batch_size: int) -> float:
    """Returns the counted seconds of inference on an RTX 2080 Ti, unscaled."""
    workload = _workload(model, batch_size, None, torch.float32)
    workload.model.eval()
    clock = Roofline(RTX_2080_TI)
    with torch.no_grad(), clock:
        workload.model(*workload.inputs)
    return clock.mark()


def _dtype(gpu: gpus.Choice) -> torch.dtype:
    return torch.float16 if gpu.precision == "fp16" else torch.float32


def _layers(workload: Workload, device: Device) -> Layers:
    kinds = (kind.__module__ for kind in type(workload.model).__mro__)
    if isinstance(workload.inputs, dict) and any(k.startswith("transformers.") for k in kinds):
        # The work does not depend on the mask. It is left out, because transformers would read its
        # values, which do not exist on `meta`.
        workload.inputs.pop("attention_mask", None)
    workload.model.train()
    clock = Roofline(device)
    stretches = Stretches(workload.model, clock)
    try:
        # Attention as plain matrix products, as in the published measurements.
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), clock:
            step = hooked_step(workload, stretches)
            return Layers(workload.model, [step], clock.flops)
    finally:
        stretches.remove()


def profile_of_any(
    name: str,
    build: Callable[[], Workload],
    gpu: gpus.Choice,
    *,
    batch_size: int,
    sentence_len: int | None,
    sample_unit: str,
) -> Profile:
    """Returns a modelled profile of any model for any GPU: counted work times an efficiency.

    The efficiency is the same model's on an RTX 2080 Ti; if it is not known, ResNet-50's.

    Args:
        name: name of the model, without a device.
        build: returns the model and a batch; called again on the CPU if counting on `meta` fails.

    Raises:
        UserError: the model fails in its forward or backward pass, or has no parameter to train.
    """
    cases = (case.like or case.name for case in CASES.values() if case.model == name)
    like = next(cases, "resnet50-bs64")
    reason = (
        f"these are the factors of {like} on an RTX 2080 Ti ({_reason(CASES[like])}), "
        f"assumed because nothing is published for this GPU; peaks: {gpu.gpu.source}"
    )
    return _profile(
        _counted(name, build, gpu),
        gpu,
        like,
        reason,
        model=name,
        batch_size=batch_size,
        sentence_len=sentence_len,
        sample_unit=sample_unit,
    )


def profile_on(gpu: gpus.Choice, name: str, batch_size: int, sentence_len: int | None) -> Profile:
    """Returns `profile_of_any` for a model of the registry."""

    def build() -> Workload:
        torch.manual_seed(_SEED)
        generator = torch.Generator().manual_seed(_SEED)
        return registry.build(name, batch_size, sentence_len, generator)

    return profile_of_any(
        name,
        build,
        gpu,
        batch_size=batch_size,
        sentence_len=sentence_len,
        sample_unit=registry.model_entry(name).sample_unit,
    )


def step_flops(name: str, build: Callable[[], Workload]) -> int | None:
    """Returns the multiplications and additions of a training step on the batch of `build`.

    Attention counts as two matrix products, and as four in the backward pass. Operations that the
    model repeats in its backward pass (gradient checkpointing) count, too. No value is computed:
    other ranks may be waiting.

    Raises:
        UserError: the model cannot be counted, or only with values.
    """
    with torch.random.fork_rng(devices=[]):
        return _counted(name, build, _RTX_2080_TI, ("meta",)).flops


def counted(name: str, build: Callable[[], Workload]) -> Layers:
    """Returns the counted times of a training step on an RTX 2080 Ti, unscaled.

    Raises:
        UserError: the model cannot be counted, as in `profile_of_any`.
    """
    with torch.random.fork_rng(devices=[]):
        return _counted(name, build, _RTX_2080_TI)


def _counted(
    name: str,
    build: Callable[[], Workload],
    gpu: gpus.Choice,
    devices: Sequence[str] = ("meta", "cpu"),
) -> Layers:
    def counted_on(device: str) -> Layers:
        with torch.device(device):
            workload = build().to(torch.device(device), _dtype(gpu))
            if not any(param.requires_grad for param in workload.model.parameters()):
                raise UserError(f"model {name}: has no parameters to train")
            return _layers(workload, gpu.device)

    # Tensors on `meta` have no values, which a model or the code that makes it may depend on.
    for device in devices:
        try:
            return counted_on(device)
        except Exception as error:
            failure = error
    raise failure if isinstance(failure, UserError) else failing(name, failure) from failure


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m common.profiling.modelled")
    parser.description = __doc__
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)} (default: all)")
    parser.add_argument("--folder", type=Path, default=FOLDER / FOLDER_NAME)
    options = parser.parse_args(arguments)
    for name in options.cases or CASES:
        if name not in CASES:
            parser.error(f"unknown case {name!r} (allowed: {', '.join(CASES)})")
        profile = model_profile(CASES[name])
        path = options.folder / f"{name}.json"
        profile.save(path)
        print(
            f"{path}: forward {profile.forward_s * 1e3:.2f} ms, backward "
            f"{profile.backward_s * 1e3:.2f} ms, {len(profile.calls)} calls, "
            f"{len(profile.parameters)} parameters, {path.stat().st_size / 1e3:.0f} kB"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
