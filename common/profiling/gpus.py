"""GPUs that a profile can be modelled for, from `configs/gpus.yaml`. Imports no torch."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import yaml

from common.paths import CONFIGS
from dear.errors import UserError, unknown
from dear.options import build_options, positive

TABLE = CONFIGS / "gpus.yaml"
DEFAULT = "rtx2080ti"
"""GPU that is modelled by default: for it, published times of training steps are known."""
PRECISIONS = ("fp32", "tf32", "fp16")
"""Precisions of matrix products; with `fp16`, all other operations have 16 bits, too."""
DTYPES = {"fp32": "float32", "tf32": "float32 (tf32)", "fp16": "float16"}
"""Dtype of a profile by precision."""
MODELLED = "-modelled"
"""Suffix of the names of devices that were not measured."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Entry of configs/gpus.yaml: peak rates of a GPU for dense matrices, with their source."""

    name: str
    """Name, as the manufacturer writes it."""
    fp32_tflops: float
    """10^12 operations per second."""
    tf32_tflops: float | None = None
    """None: the device has no units for it."""
    fp16_tflops: float | None = None
    """Rate with sums in float32; None: the device computes in fp16 more slowly than in fp32."""
    memory_gb_per_s: float
    """10^9 bytes per second."""
    source: str
    """Document with these numbers, and the page or table in it."""
    cuda_names: tuple[str, ...] = ()
    """Further names, by which CUDA reports the device."""

    def __post_init__(self) -> None:
        for precision in PRECISIONS:
            positive(f"{precision}_tflops", getattr(self, f"{precision}_tflops"))
        positive("memory_gb_per_s", self.memory_gb_per_s)


@dataclass(frozen=True, kw_only=True)
class Device:
    """Peak rates of a processor."""

    name: str
    flops: float
    """Operations per second in the chosen precision."""
    bandwidth: float
    """Bytes per second to and from its memory."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """GPU of the table, with the precision of a step."""

    key: str
    gpu: Gpu
    precision: str

    @property
    def device(self) -> Device:
        tflops = getattr(self.gpu, f"{self.precision}_tflops")
        bandwidth = self.gpu.memory_gb_per_s * 1e9
        return Device(name=self.gpu.name, flops=tflops * 1e12, bandwidth=bandwidth)

    @property
    def folder_name(self) -> str:
        """Part of a replayed model's name after the `@`, such as `a100-40g-tf32-modelled`."""
        suffix = "" if self.precision == "fp32" else f"-{self.precision}"
        return f"{self.key}{suffix}{MODELLED}"


@functools.cache
def table(path: Path = TABLE) -> dict[str, Gpu]:
    """Returns all entries by name, in the order of the file."""
    entries = yaml.safe_load(path.read_bytes())
    return {key: build_options(Gpu, given, f"key of GPU {key}") for key, given in entries.items()}


def peak_flops(device_name: str, dtype: str, *, tf32: bool = False) -> float | None:
    """Returns the peak of matrix products in operations per second; None: not in the table.

    Args:
        device_name: the device's name, as the manufacturer or CUDA writes it.
        dtype: dtype of a trial or a profile; mixed precision multiplies in 16 bits.
        tf32: True if products of float32 may use units for tf32.
    """
    key = key_of(device_name)
    if key is None:
        return None
    gpu = table()[key]
    # Devices with units for tf32 have units for bfloat16 at the rate of float16.
    rates = {
        "float32": (tf32 and gpu.tf32_tflops) or gpu.fp32_tflops,
        "float32 (tf32)": gpu.tf32_tflops,
        "float16": gpu.fp16_tflops,
        "bfloat16": gpu.tf32_tflops and gpu.fp16_tflops,
    }
    tflops = rates.get(dtype.replace("amp-bf", "bfloat").replace("amp-fp", "float"))
    return tflops and tflops * 1e12


def key_of(device_name: str) -> str | None:
    """Returns the key of a GPU in the table by the name that the manufacturer or CUDA gives it.

    None: it is not in the table.
    """
    named = (k for k, gpu in table().items() if device_name in (gpu.name, *gpu.cuda_names))
    return next(named, None)


def choice_of(device_name: str, dtype: str) -> Choice | None:
    """Returns the GPU and precision of a profile with this dtype; None: none are in the table."""
    key = key_of(device_name)
    precision = next((name for name, of_profile in DTYPES.items() if of_profile == dtype), None)
    if key is None or precision is None:
        return None
    return Choice(key=key, gpu=table()[key], precision=precision)


def choice_in(folder_name: str) -> str | None:
    """Returns the text for `find` of a `Choice.folder_name`; None: it is not of a modelled GPU."""
    return folder_name.removesuffix(MODELLED) if folder_name.endswith(MODELLED) else None


def find(text: str) -> Choice:
    """Returns the GPU `NAME` for float32, `NAME-tf32` or `NAME-fp16`.

    Raises:
        UserError: the GPU does not exist, or has no units for this precision.
    """
    name, precision = text, "fp32"
    for choice in PRECISIONS:
        if text.endswith(f"-{choice}"):
            name, precision = text.removesuffix(f"-{choice}"), choice
    if name not in table():
        raise unknown("GPU", text, table())
    gpu = table()[name]
    if getattr(gpu, f"{precision}_tflops") is None:
        raise UserError(f"GPU {name} has no units for {precision}; leave -{precision} out")
    return Choice(key=name, gpu=gpu, precision=precision)
