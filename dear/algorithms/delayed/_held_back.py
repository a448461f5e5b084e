"""Gradients that wait for their update: kept in order, saved and loaded."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dear.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter

    from dear.algorithms.delayed._laps import Gradients, Lap


@dataclass(kw_only=True)
class Held:
    """The gradients of one step, sent or taken from a checkpoint, until an update applies them."""

    step: int
    scale: Tensor | None
    """The loss scale that they carry; None: 1."""
    lap: Lap | None = None
    loaded: Gradients | None = None

    def gradients(self) -> Gradients:
        """The averages; waits for them."""
        if self.lap is not None:
            return self.lap.gradients()
        return dict(self.loaded)

    def wait(self) -> None:
        """Returns when nothing of it is under way."""
        if self.lap is not None:
            self.lap.wait()


class HeldBack:
    """The gradients of the last steps, oldest first.

    Args:
        optimizer: whose parameters they are of.
        params: those of them that are trained.
        delay: steps between gradients and their update.
    """

    def __init__(self, optimizer: Any, params: Sequence[Parameter], delay: int) -> None:
        self._optimizer = optimizer
        self._params = params
        self._delay = delay
        self._held: deque[Held] = deque()

    def __len__(self) -> int:
        return len(self._held)

    @property
    def due(self) -> bool:
        """True if the oldest are to be applied now."""
        return len(self._held) > self._delay

    @property
    def next(self) -> Held | None:
        """What the next update is to apply, if that is there already."""
        return self._held[0] if len(self._held) == self._delay else None

    def push(self, held: Held) -> None:
        """Adds the gradients of one more step."""
        self._held.append(held)

    def pop(self) -> Held:
        """Takes the oldest out."""
        return self._held.popleft()

    def wait(self) -> None:
        """Returns when nothing is under way."""
        for held in self._held:
            held.wait()

    def saved(self) -> list[dict[str, Any]]:
        """Copies of all, in the order of the optimizer's parameters; waits for them."""
        return [
            {
                "gradients": [copied(found.get(param)) for param in self._all_params()],
                "scale": copied(held.scale),
            }
            for held in self._held
            for found in [held.gradients()]
        ]

    def check(self, given: Sequence[dict[str, Any]]) -> None:
        """Raises `UserError` if `given`, of `saved`, is of more steps than can wait here."""
        if len(given) > self._delay:
            raise UserError(
                f"the state holds back the gradients of {len(given)} steps, more than delay="
                f"{self._delay}: flush() before saving, or use the same delay"
            )

    def load(self, given: Sequence[dict[str, Any]], step: int) -> None:
        """Takes what `saved` gave, as gradients of `step`; nothing may be held back."""
        params = self._all_params()
        for entry in given:
            pairs = zip(params, entry["gradients"], strict=True)
            loaded = {param: copied(value, like=param) for param, value in pairs}
            managed = {param: loaded[param] for param in self._params}
            self.push(Held(step=step, scale=copied(entry["scale"]), loaded=managed))

    def _all_params(self) -> list[Parameter]:
        return [param for group in self._optimizer.param_groups for param in group["params"]]


def copied(value: Tensor | None, like: Tensor | None = None) -> Tensor | None:
    """A copy of a gradient, on the device and in the type of `like`."""
    if value is None:
        return None
    own = value.detach().clone()
    return own if like is None else own.to(device=like.device, dtype=like.dtype)


def unscale(gradients: Gradients, scale: Tensor) -> bool:
    """Divides by the loss scale; False if a gradient, and so one of every rank, is not finite."""
    finite = True
    for gradient in gradients.values():
        if gradient is None:
            continue
        values = gradient._values() if gradient.is_sparse else gradient
        values.div_(scale.to(values.device))
        finite = finite and bool(values.isfinite().all())
    return finite
