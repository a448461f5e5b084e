"""The GPUs that a profile can be modelled for, by name: `configs/gpus.yaml`. No torch in here."""

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
"""What is modelled where nobody says, and there is no GPU to measure: that which the efficiency of
training steps is known of."""
PRECISIONS = ("fp32", "tf32", "fp16")
"""What the matrices of a step are multiplied in; `fp16`: everything is in 16 bits."""
MODELLED = "-modelled"
"""How the names of devices end that nobody has measured."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One entry of the table: peaks of a device, of dense matrices, and who says so."""

    name: str
    """As its maker calls it."""
    fp32_tflops: float
    """10^12 operations per second."""
    tf32_tflops: float | None = None
    """None: it has no such units."""
    fp16_tflops: float
    """With sums in float32."""
    memory_gb_per_s: float
    """10^9 bytes per second."""
    source: str
    """Which document, and where in it."""

    def __post_init__(self) -> None:
        for key in (*(f"{precision}_tflops" for precision in PRECISIONS), "memory_gb_per_s"):
            positive(key, getattr(self, key))


@dataclass(frozen=True, kw_only=True)
class Device:
    """A processor's limits."""

    name: str
    flops: float
    """Operations per second in the precision that is meant."""
    bandwidth: float
    """Bytes per second to and from its memory."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A GPU of the table, and the precision of a step on it."""

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
        """What stands behind the `@` of a replayed model: `a100-40g-tf32-modelled`."""
        of_what = "" if self.precision == "fp32" else f"-{self.precision}"
        return f"{self.key}{of_what}{MODELLED}"


@functools.cache
def table(path: Path = TABLE) -> dict[str, Gpu]:
    """All entries by name, as the file has them."""
    entries = yaml.safe_load(path.read_text())
    return {key: build_options(Gpu, given, f"key of GPU {key}") for key, given in entries.items()}


def find(text: str) -> Choice:
    """The GPU called `text`, `NAME` for float32, or `NAME-tf32` or `NAME-fp16`.

    Raises:
        UserError: there is no such GPU, or it has no such units.
    """
    name, precision = text, "fp32"
    for one in PRECISIONS:
        if text.endswith(f"-{one}"):
            name, precision = text.removesuffix(f"-{one}"), one
    if name not in table():
        raise unknown("GPU", text, table())
    gpu = table()[name]
    if getattr(gpu, f"{precision}_tflops") is None:
        raise UserError(f"GPU {name} has no units for {precision}; leave -{precision} out")
    return Choice(key=name, gpu=gpu, precision=precision)
