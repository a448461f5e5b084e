"""Fewer bytes for a gradient: which ways there are, as one group of options for all algorithms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from dear.errors import UserError
from dear.lazy import torch
from dear.options import Options, at_least, only_with, option_of

if TYPE_CHECKING:
    from torch.nn import Parameter

Half = Literal["none", "fp16", "bf16"]
Compression = Literal["none", "fp16", "bf16", "topk", "eftopk", "gaussian", "signum", "efsignum"]

SPARSE = ("topk", "eftopk", "gaussian")
"""Some elements travel, with their places."""
SIGNS = ("signum", "efsignum")
"""One bit per element travels."""
ERROR_FEEDBACK = ("eftopk", "gaussian", "efsignum")
"""What does not travel is added to the next gradient, so that nothing is lost (Stich et al. 2018,
arXiv 1809.07599; Karimireddy et al. 2019, arXiv 1901.09847)."""

DENSITY = 0.001
PLACE_BYTES = 4
"""The place of an element that travels, besides its value."""
WARM_UP_FROM = 0.25
"""Density with which a warm-up begins, as in Deep Gradient Compression (arXiv 1712.01887)."""


@dataclass(frozen=True, kw_only=True)
class HalfOptions(Options):
    """For algorithms that can only make each element smaller."""

    compression: Half = "none"
    """`fp16`, `bf16`: gradients travel in 16 bits per element, divided by the number of ranks
    before the sum, so that fp16 overflows no sooner than the gradient itself; everything else stays
    in its own type."""


@dataclass(frozen=True, kw_only=True)
class CompressedOptions(Options):
    """For algorithms that can carry everything."""

    compression: Compression = "none"
    """`fp16`, `bf16`: gradients travel in 16 bits per element. `topk`: the elements of largest
    magnitude. `eftopk`: the same, and the rest is added to the next gradient. `gaussian`: as
    `eftopk`, found faster, as if elements were normally distributed. `signum`: signs, by majority
    vote. `efsignum`: signs times the mean magnitude, and the rest is added to the next gradient."""
    density: float = DENSITY
    """Topk, eftopk and gaussian: share of the elements that travel, in (0, 1]; at least one
    does."""
    density_warmup_steps: int = 0
    """Topk, eftopk and gaussian: the density falls exponentially from 0.25 to `density` over so
    many communicated backward passes."""

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise UserError(f"{option_of(self, 'density')} must lie in (0, 1], got {self.density}")
        at_least(option_of(self, "density_warmup_steps"), self.density_warmup_steps, 0)
        only_with(self, "density", "compression", SPARSE)
        only_with(self, "density_warmup_steps", "compression", SPARSE)
        if self.density_warmup_steps and self.density >= WARM_UP_FROM:
            raise UserError(
                f"{option_of(self, 'density_warmup_steps')} needs a density below {WARM_UP_FROM}, "
                f"where the warm-up begins, got density={self.density}"
            )

    def settling_steps(self) -> int:
        return self.density_warmup_steps

    def density_at(self, step: int) -> float:
        """The density of communicated pass `step`, counted from 0."""
        if step >= self.density_warmup_steps:
            return self.density
        return WARM_UP_FROM * (self.density / WARM_UP_FROM) ** (step / self.density_warmup_steps)

    @property
    def gathers(self) -> bool:
        """True if ranks gather each other's payloads, which no reduction can add up."""
        return self.compression in SPARSE + SIGNS


def share_of(options: HalfOptions | CompressedOptions, element_size: int) -> float:
    """Bytes that a rank sends per byte of gradients with elements of `element_size` bytes."""
    if options.compression in SPARSE:
        return options.density * (1 + PLACE_BYTES / element_size)
    if options.compression in SIGNS:
        return 1 / (8 * element_size)
    wire = wire_dtype(options.compression)
    return wire.itemsize / element_size if wire else 1.0


def wire_name(compression: str) -> str | None:
    """Name of the torch type in which gradients travel, None if it is their own."""
    return {"fp16": "float16", "bf16": "bfloat16"}.get(compression)


def wire_dtype(compression: str) -> torch.dtype | None:
    """The torch type in which gradients travel, None if it is their own."""
    name = wire_name(compression)
    return getattr(torch, name) if name else None


def refuse_types(params: Sequence[Parameter], options: Any) -> None:
    """Raises `UserError` if a parameter is of a type that `options.compression` cannot carry."""
    for param in params if options.compression != "none" else ():
        if not param.is_floating_point():
            raise UserError(
                f"{option_of(options, 'compression')}={options.compression!r} is for real "
                f"floating-point gradients; a parameter of shape {tuple(param.shape)} is "
                f"{param.dtype}"
            )
