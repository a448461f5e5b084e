"""Notices gradients that somebody changes between `backward()` and `step()`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dear.errors import UserError
from dear.lazy import torch

if TYPE_CHECKING:
    from torch.nn import Parameter


def sample(params: Sequence[Parameter]) -> torch.Tensor | None:
    """Some bytes of the last gradient; as bytes, so that nan equals nan.

    A GradScaler changes values and leaves version counters as they are.
    """
    for param in reversed(params):
        gradient = param.grad
        if gradient is None or gradient.layout is not torch.strided:
            continue
        if gradient.numel():
            count = min(8, gradient.numel())
            return gradient.as_strided((count,), (1,)).clone().view(torch.uint8)
    return None


def refuse_changed(param: Parameter | None) -> None:
    """Raises `UserError` if there is one: the parameter whose gradient has been changed."""
    if param is not None:
        raise UserError(
            f"the gradient of a parameter of shape {tuple(param.shape)} was changed between "
            "backward() and step(); call optimizer.synchronize() before clipping or unscaling, so "
            "that the change applies to the averaged gradient"
        )


class Unchanged:
    """What the gradients of `params` were at the last `note`."""

    def __init__(self, params: Sequence[Parameter]) -> None:
        self._params = params
        self._seen: list[tuple[torch.Tensor | None, int]] | None = None
        self._sampled: torch.Tensor | None = None

    def note(self) -> None:
        """Remembers the gradients as they are."""
        grads = [param.grad for param in self._params]
        self._seen = [(grad, 0 if grad is None else grad._version) for grad in grads]
        self._sampled = sample(self._params)

    def changed(self) -> Parameter | None:
        """A parameter whose gradient is another, or has been written to."""
        for param, (grad, version) in zip(self._params, self._seen or (), strict=False):
            if param.grad is not grad or (grad is not None and grad._version != version):
                return param
        return None

    def scaled_in_place(self) -> bool:
        """True if values are others; waits for the device."""
        now = sample(self._params)
        return self._seen is not None and now is not None and not torch.equal(now, self._sampled)
