"""The mean of models that differ between ranks, and how far each is from it."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from dear.comm.communicator import Communicator
from dear.errors import UserError

PIECE = 1 << 20


class GlobalAverage:
    """Replaces tensors by their means over all ranks, and puts them back if asked to.

    Its calls are collective: all ranks make them, with tensors of the same shapes.

    Args:
        tensors: floating-point or complex; whatever else there is is left as it is.
    """

    def __init__(self, communicator: Communicator, tensors: Iterable[torch.Tensor]) -> None:
        self._communicator = communicator
        self._tensors = [t for t in tensors if t.is_floating_point() or t.is_complex()]
        self._kept: list[torch.Tensor] | None = None

    @property
    def applied(self) -> bool:
        """True while `revert` would put something back."""
        return self._kept is not None

    @torch.no_grad()
    def apply(self, *, keep: bool = True, measure: bool = True) -> float | None:
        """Averages in place.

        Args:
            keep: make a copy to revert to.
            measure: return this rank's distance to the mean (the norm of the difference).

        Raises:
            UserError: they are averaged already, and not reverted yet.
        """
        if self._kept is not None:
            raise UserError("the models are averaged already; revert first")
        own = [tensor.clone() for tensor in self._tensors] if keep or measure else []
        works = [
            self._communicator.all_reduce(tensor, op="mean")
            for tensor in self._tensors
            if tensor.numel()
        ]
        for work in works:
            work.wait()
        if keep:
            self._kept = own
        return distance(own, self._tensors) if measure else None

    @torch.no_grad()
    def revert(self) -> None:
        """Puts back what was there; raises `UserError` if nothing was kept."""
        if self._kept is None:
            raise UserError("there is nothing to revert: no average with a copy has been made")
        for tensor, kept in zip(self._tensors, self._kept, strict=True):
            tensor.copy_(kept)
        self._kept = None


def distance(some: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> float:
    """The Euclidean norm of the difference of two lists of tensors, in float64."""
    total = 0.0
    for one, other in zip(some, others, strict=True):
        # In pieces: in float64 a large tensor would take three times its memory.
        pieces = zip(_real(one).split(PIECE), _real(other).split(PIECE), strict=True)
        total += sum((a.double() - b.double()).square().sum().item() for a, b in pieces)
    return math.sqrt(total)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).flatten()
