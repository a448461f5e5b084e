"""Gradients that cost no more than a copy, yet differ by rank, step and parameter."""

from __future__ import annotations

import torch

# A prime: no part of a large gradient then equals another at a distance that a collective that
# misplaces its pieces is likely to be off by.
BLOCK = 262_139
SCALE = 0.1


class GradientSource:
    """Cuts gradients out of one block of normal random numbers, small enough for a CPU's cache."""

    def __init__(self, generator: torch.Generator) -> None:
        block = torch.randn(BLOCK, generator=generator) * SCALE
        self._twice = torch.cat([block, block])
        """So that `BLOCK` numbers from any offset lie in one piece."""
        self._cast: dict[torch.dtype, torch.Tensor] = {}

    def make(self, param: torch.Tensor, index: int, key: int, scale: float) -> torch.Tensor:
        """The gradient of parameter number `index` in the step called `key`, times `scale`."""
        source = self._cast.get(param.dtype)
        if source is None:
            source = self._cast[param.dtype] = self._twice.to(param.dtype)
        gradient = torch.empty_like(param, memory_format=torch.contiguous_format)
        offset = (key + index * 65_537) % BLOCK
        count = gradient.numel()
        flat = gradient.view(-1)
        if count <= BLOCK:
            flat.copy_(source[offset : offset + count])
        else:
            window = source[offset : offset + BLOCK]
            rows, rest = divmod(count, BLOCK)
            flat[: rows * BLOCK].view(rows, BLOCK).copy_(window.expand(rows, BLOCK))
            flat[rows * BLOCK :].copy_(window[:rest])
        return gradient if scale == 1.0 else gradient.mul_(scale)
