"""Gradients that cost no more than a copy, yet differ by rank, step and parameter."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch

# A prime: no part of a large gradient then equals another at a distance that a collective that
# misplaces its pieces is likely to be off by.
BLOCK = 262_139
SCALE = 0.1
_PIECE = 2 * BLOCK


class GradientSource:
    """Cuts gradients out of one block of normal random numbers, small enough for a CPU's cache."""

    def __init__(self, generator: torch.Generator) -> None:
        block = torch.randn(BLOCK, generator=generator) * SCALE
        self._twice = torch.cat([block, block])
        """So that `BLOCK` numbers from any offset lie in one piece."""
        self._cast: dict[torch.dtype, torch.Tensor] = {}

    def window(self, dtype: torch.dtype, offset: int) -> torch.Tensor:
        """`BLOCK` numbers."""
        if dtype not in self._cast:
            self._cast[dtype] = self._twice.to(dtype)
        return self._cast[dtype].narrow(0, offset % BLOCK, BLOCK)


class Gradients:
    """The gradients of one step, made one after the other, as early as there is time.

    Args:
        key: tells the step's gradients from those of others.
        chain: parameters with their place in the model, in the order of the backward pass.
    """

    def __init__(
        self, source: GradientSource, key: int, chain: Sequence[tuple[torch.Tensor, int]]
    ) -> None:
        self._source = source
        self._key = key
        self._made: dict[int, torch.Tensor] = {}
        self._pieces = self._make(chain)
        self._piece_s = 0.0

    def take(self, param: torch.Tensor, index: int, scale: float) -> torch.Tensor:
        """The gradient of `param`, number `index` of the model, times `scale`."""
        while index not in self._made:
            if next(self._pieces, None) is None:  # taken already, or frozen when the step began
                self._pieces = self._make([(param, index)])
        gradient = self._made.pop(index)
        return gradient if scale == 1.0 else gradient.mul_(scale)

    def work_ahead(self, rest_s: Callable[[], float]) -> None:
        """Makes gradients that are needed later, as long as a piece fits into `rest_s()`."""
        while rest_s() > 1.5 * self._piece_s:
            began = time.perf_counter()
            if next(self._pieces, None) is None:
                return
            self._piece_s = 0.5 * (self._piece_s + time.perf_counter() - began)

    def _make(self, chain: Sequence[tuple[torch.Tensor, int]]) -> Iterator[bool]:
        for param, index in chain:
            gradient = torch.empty_like(param, memory_format=torch.contiguous_format)
            window = self._source.window(param.dtype, self._key + index * 65_537)
            for piece in gradient.view(-1).split(_PIECE):
                tile(piece, window)
                yield True
            self._made[index] = gradient


def tile(target: torch.Tensor, source: torch.Tensor) -> None:
    """Fills `target` with `source`, over and over."""
    flat, count, size = target.view(-1), target.numel(), source.numel()
    rows, rest = divmod(count, size)
    if rows:
        flat[: rows * size].view(rows, size).copy_(source.expand(rows, size))
    if rest:
        flat[rows * size :].copy_(source[:rest])
