"""Makes the profiles of a GPU that nobody lent: counted work, scaled to published speeds.

`python -m common.profiling.modelled` writes those that come with the project to
configs/profiles/rtx2080ti-modelled/; `profile_of_any` makes one of any model for any GPU of
configs/gpus.yaml.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from common.models import registry
from common.models.profile import FOLDER, Profile
from common.models.workload import Workload
from common.profiling import gpus
from common.profiling.gpus import Device
from common.profiling.recorder import Clock, Layers, Stretches, failing, hooked_step, tensors
from dear.errors import UserError


class Roofline(Clock, TorchDispatchMode):
    """Adds up max(operations / peak, bytes / bandwidth) of what runs inside it.

    Tensors may be on the `meta` device: nothing is computed then. Each operation reads its inputs
    and writes its outputs once; views cost nothing.
    """

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device
        self._total_s = 0.0

    def mark(self) -> float:
        return self._total_s

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not _is_free(func):
            count = flop_registry.get(func.overloadpacket)
            flops = count(*args, **kwargs, out_val=out) if count else 0
            nbytes = sum(tensor.nbytes for tensor in tensors((args, kwargs, out)))
            self._total_s += max(flops / self._device.flops, nbytes / self._device.bandwidth)
        return out


def _is_free(func: Any) -> bool:
    """True for operations that only describe memory: views, and memory not yet written."""
    if func.overloadpacket.__name__.startswith(("empty", "new_empty")):
        return True
    results = func._schema.returns
    return any(r.alias_info is not None and not r.alias_info.is_write for r in results)


_RTX_2080_TI = gpus.find("rtx2080ti")
FOLDER_NAME, RTX_2080_TI = _RTX_2080_TI.folder_name, _RTX_2080_TI.device
_SOURCE = "HKBU-HPML/ddl-benchmarks, results of 2020-05-29 (arXiv 2005.13247)"
EFFICIENCIES = {"resnet50-bs64": 1.4511, "bert_base-bs64": 1.2261, "bert-bs8": 1.7966}
"""By how much a step takes longer than its counted operations and bytes at the peaks of an RTX 2080
Ti, of those cases whose speed is published."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A profile to make; without a published speed it is as efficient as another case."""

    model: str
    batch_size: int
    published: float | None = None
    """Samples per second of one GPU."""
    like: str | None = None

    @property
    def name(self) -> str:
        return f"{self.model}-bs{self.batch_size}"


CASES = {
    case.name: case
    for case in (
        Case(model="resnet50", batch_size=64, published=253.1),
        Case(model="densenet201", batch_size=32, like="resnet50-bs64"),
        Case(model="inceptionv4", batch_size=64, like="resnet50-bs64"),
        Case(model="vgg16", batch_size=64, like="resnet50-bs64"),
        Case(model="mobilenet_v2", batch_size=64, like="resnet50-bs64"),
        Case(model="mnist_cnn", batch_size=32, like="resnet50-bs64"),
        Case(model="bert_base", batch_size=64, published=212.8),
        Case(model="bert", batch_size=8, published=49.0),
        Case(model="bert", batch_size=32, like="bert-bs8"),
    )
}


def model_profile(case: Case) -> Profile:
    """Counts the work of every operation of a training step and scales all by one factor."""
    layers = _count(case)
    counted_s = layers.forward_s + layers.backward_s
    factor = _factor(CASES[case.like or case.name])
    layers.scale(layers.forward_s * factor, layers.backward_s * factor)
    entry = registry.model_entry(case.model)
    return Profile(
        model=case.model,
        device=FOLDER_NAME,
        device_name=RTX_2080_TI.name,
        memory_bytes_per_s=RTX_2080_TI.bandwidth,
        kind="modelled",
        batch_size=case.batch_size,
        sentence_len=entry.sentence_len,
        sample_unit=entry.sample_unit,
        dtype="float32",
        rule=_rule(case, factor, counted_s),
        **layers.fields(),
    )


def _rule(case: Case, factor: float, counted_s: float) -> str:
    speed = CASES[case.like or case.name]
    text = _counted_words(RTX_2080_TI, counted_s, factor)
    if case.like is None:
        return (
            f"{text} so that forward and backward take {case.batch_size} / {case.published:g} "
            f"samples/s, published for one GPU in {_SOURCE}"
        )
    return (
        f"{text}, which is the factor of {case.like} (scaled to {speed.published:g} samples/s, "
        f"{_SOURCE}): nothing is published for this model and batch"
    )


@functools.cache
def _factor(case: Case) -> float:
    """By how much the published step is longer than the counted one."""
    layers = _count(case)
    return case.batch_size / case.published / (layers.forward_s + layers.backward_s)


def _counted_words(device: Device, counted_s: float, factor: float) -> str:
    return (
        f"per operation max(flops / {device.flops / 1e12:g} TFLOP/s, bytes / "
        f"{device.bandwidth / 1e9:g} GB/s), added up by module "
        f"(launching kernels costs nothing); {counted_s * 1e3:.4f} ms in all, times {factor:.4f}"
    )


def _count(case: Case) -> Layers:
    length = registry.model_entry(case.model).sentence_len
    with torch.device("meta"):
        workload = registry.build(case.model, case.batch_size, length, torch.Generator())
    return _layers(workload, RTX_2080_TI)


def _layers(workload: Workload, device: Device) -> Layers:
    """The work of one step, by module."""
    if isinstance(workload.inputs, dict):
        # All ones, which transformers would look up; without values the answer is to leave it out.
        workload.inputs.pop("attention_mask", None)
    workload.model.train()
    clock = Roofline(device)
    stretches = Stretches(workload.model, clock)
    try:
        # Attention in plain matrix products, as the published figures had it.
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), clock:
            return Layers(workload.model, [hooked_step(workload, stretches)])
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
    """A profile of any model for any GPU, measured by nobody: counted work times an efficiency.

    That is what is known of the same model on an RTX 2080 Ti, else of ResNet-50 there.

    Args:
        name: of the model, without a device.
        build: makes it with its batch; called again if it cannot be counted without computing.

    Raises:
        UserError: the model fails in its forward or backward pass, or has nothing to train.
    """
    layers = _counted(name, build, gpu)
    like = _like(name)
    factor, counted_s = EFFICIENCIES[like], layers.forward_s + layers.backward_s
    layers.scale(layers.forward_s * factor, layers.backward_s * factor)
    rule = (
        f"{_counted_words(gpu.device, counted_s, factor)}, which is the factor of {like} on an "
        f"RTX 2080 Ti ({_SOURCE}), assumed here, where nothing is published; peaks: "
        f"{gpu.gpu.source}"
    )
    return Profile(
        model=name,
        device=gpu.folder_name,
        device_name=gpu.gpu.name,
        memory_bytes_per_s=gpu.device.bandwidth,
        kind="modelled",
        batch_size=batch_size,
        sentence_len=sentence_len,
        sample_unit=sample_unit,
        dtype={"fp32": "float32", "tf32": "float32 (tf32)", "fp16": "float16"}[gpu.precision],
        rule=rule,
        **layers.fields(),
    )


def _like(name: str) -> str:
    """The case with a published speed whose efficiency is assumed of a model."""
    for case in CASES.values():
        if case.model == name:
            return case.like or case.name
    return "resnet50-bs64"


def _counted(name: str, build: Callable[[], Workload], gpu: gpus.Choice) -> Layers:
    dtype = torch.float16 if gpu.precision == "fp16" else torch.float32

    def count(place: str) -> Layers:
        with torch.device(place):
            workload = build().to(torch.device(place), dtype)
            if not any(param.requires_grad for param in workload.model.parameters()):
                raise UserError(f"model {name}: has no parameters that could be trained")
            return _layers(workload, gpu.device)

    try:
        return count("meta")
    except UserError:
        raise
    except Exception:
        # Perhaps because what it does depends on values, which tensors on `meta` have not.
        try:
            return count("cpu")
        except UserError:
            raise
        except Exception as error:
            raise failing(name, error) from error


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m common.profiling.modelled")
    parser.description = __doc__
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; all by default")
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
