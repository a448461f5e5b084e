"""Gradients of a replayed model: random numbers that depend on the step and on the parameters."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence

import torch

# The numbers of a large gradient repeat at this distance. It is a prime, so that a collective that
# misplaces a piece by a round number of elements gives a wrong result.
BLOCK = 262_139
SCALE = 0.1
_PIECE = 2 * BLOCK
HEAD = 16_384
"""Number of elements of each gradient that depend on the values of the parameter."""
SEEN = 16
"""Number of elements of each parameter that the first elements of the gradient depend on."""
_STRENGTH = 20.0
_signs: dict[torch.dtype, torch.Tensor] = {}


class GradientSource:
    """Source of gradients: a block of normal random numbers that fits into a CPU's cache."""

    def __init__(self, generator: torch.Generator) -> None:
        block = torch.randn(BLOCK, generator=generator) * SCALE
        # The block is stored twice, so that `BLOCK` numbers from any offset are contiguous.
        self._twice = torch.cat([block, block])
        self._cast: dict[torch.dtype, torch.Tensor] = {}

    def window(self, dtype: torch.dtype, offset: int) -> torch.Tensor:
        """Returns `BLOCK` numbers from this offset on."""
        if dtype not in self._cast:
            self._cast[dtype] = self._twice.to(dtype)
        return self._cast[dtype].narrow(0, offset % BLOCK, BLOCK)


class Gradients:
    """Gradients of one step, which are made early, whenever the thread has time.

    Args:
        key: distinguishes the gradients of this step from those of other steps.
        chain: parameters with their index in the model, in the order of the backward pass.
    """

    def __init__(
        self, source: GradientSource, key: int, chain: Sequence[tuple[torch.Tensor, int]]
    ) -> None:
        self._source = source
        self._key = key
        self._ready: dict[int, torch.Tensor] = {}
        self._pieces = self._make(chain)
        self._piece_s = 0.0

    def take(
        self, param: torch.Tensor, index: int, scale: float, factor: float = 1.0
    ) -> torch.Tensor:
        """Returns the gradient of `param`, the parameter `index` of the model, times `scale`.

        Args:
            factor: result of `fingerprint`, by which the gradient's first `HEAD` elements are
                multiplied. The other elements were made before the parameter was read.
        """
        while index not in self._ready:
            if next(self._pieces, None) is None:  # taken before, or frozen when the step began
                self._pieces = self._make([(param, index)])
        gradient = self._ready.pop(index)
        gradient.view(-1)[:HEAD].mul_(factor)
        return gradient if scale == 1.0 else gradient.mul_(scale)

    def link(self, x: torch.Tensor) -> torch.Tensor:
        """Returns a copy of the number that connects the units of the backward pass."""
        return x.clone()

    def scale_of(self, gradient: torch.Tensor) -> float:
        """Returns the factor of all gradients, from the gradient of that number."""
        return gradient.item()

    def work_ahead(self, rest_s: Callable[[], float]) -> None:
        """Makes later gradients, piece by piece, while another piece fits into `rest_s()`."""
        while rest_s() > 1.5 * self._piece_s:
            began = time.perf_counter()
            if next(self._pieces, None) is None:
                return
            self._piece_s = 0.5 * (self._piece_s + time.perf_counter() - began)

    def _make(self, chain: Sequence[tuple[torch.Tensor, int]]) -> Iterator[bool]:
        for param, index in chain:
            gradient = torch.empty(param.shape, dtype=param.dtype)  # `param` may be sharded by now
            window = self._source.window(param.dtype, self._key + index * 65_537)
            for piece in gradient.view(-1).split(_PIECE):
                tile(piece, window)
                yield True
            self._ready[index] = gradient


class Blank(Gradients):
    """Gradients whose values nobody reads; those of all steps have the same memory.

    They are made below the modes of torch's dispatcher, which make each operator some times slower.

    Args:
        memory: memory of the gradients by index of the parameter; filled as needed.
    """

    def __init__(self, memory: dict[int, torch.Tensor]) -> None:
        self._memory = memory

    def take(
        self, param: torch.Tensor, index: int, scale: float, factor: float = 1.0
    ) -> torch.Tensor:
        """Returns a gradient of `param` with any values."""
        with torch._C._DisableTorchDispatch():
            memory = self._memory.get(index)
            if memory is None or memory.shape != param.shape or memory.dtype != param.dtype:
                memory = self._memory[index] = torch.empty(param.shape, dtype=param.dtype)
            return memory.data  # a tensor of its own, which autograd need not copy

    def link(self, x: torch.Tensor) -> torch.Tensor:
        with torch._C._DisableTorchDispatch():
            return x.clone()

    def scale_of(self, gradient: torch.Tensor) -> float:
        return 1.0

    def work_ahead(self, rest_s: Callable[[], float]) -> None:
        """Does nothing."""


def fingerprint(param: torch.Tensor) -> float:
    """Returns a number from 0.5 to 1.5 that changes when the values of a parameter change.

    With this factor, a gradient depends on the parameter's values, as a real one does. Only some
    elements, spread over the tensor, have an influence. A usual step of the optimizer changes the
    number by some percent; a rounding error in the parameters has less effect than its own size.
    """
    if param.dtype not in _signs:
        # The sum of all signs is not 0, nor are the sums of neighbours.
        alternating = torch.arange(SEEN) % 3 - 0.9
        _signs[param.dtype] = alternating.to(param.dtype)
    count = min(param.numel(), SEEN)
    if not count:
        return 1.0
    chosen = param.detach().as_strided((count,), (param.numel() // count,))
    total = chosen.dot(_signs[param.dtype][:count]).item()
    # A triangle wave has the same slope everywhere, so that every change has an effect.
    return 1 + math.asin(math.sin(_STRENGTH * total)) / math.pi


def tile(target: torch.Tensor, source: torch.Tensor) -> None:
    """Fills `target` with repetitions of `source`."""
    flat, count, size = target.view(-1), target.numel(), source.numel()
    rows, rest = divmod(count, size)
    if rows:
        flat[: rows * size].view(rows, size).copy_(source.expand(rows, size))
    if rest:
        flat[rows * size :].copy_(source[:rest])
