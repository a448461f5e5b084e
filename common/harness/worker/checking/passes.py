"""What forward passes are given: how many samples, which ones, and a model that trains.

A rank's gradients are taken at their word (`checking.witness`), so what they are of is looked at
here: a program that trains on half of its batch, or without dropout, has gradients of that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

VALUES = 64
"""Elements of the first layer's input at most."""
Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Pass:
    """What one forward pass was given, as far as it was looked at."""

    training: int
    """Modules in training mode when it began."""
    shapes: dict[str, frozenset[Shapes]]
    """Of the tensors that each layer got and gave, by its name."""
    first: str | None
    """The layer that was done first."""
    values: torch.Tensor | None
    """Some of what that layer got."""


class Passes:
    """Watches the forward passes of a model that compute gradients.

    Args:
        limit: watch so many passes only; None: all until `end`.
    """

    def __init__(self, model: torch.nn.Module, limit: int | None = None) -> None:
        self._modules = list(model.modules())
        self._layers = {
            module: name for name, module in model.named_modules() if module._parameters
        }
        self._limit = limit
        self._passes: list[dict[str, Any]] = []
        self._hooks = [model.register_forward_pre_hook(lambda *_: self._begin())]
        self._looking: list[Any] = []
        self._places: dict[int, torch.Tensor] = {}
        self.look(self._layers)

    def look(self, layers: Iterable[torch.nn.Module]) -> None:
        """From now on at these only; the one that is done first is always among them."""
        chosen = set(layers)
        first = self._passes[0]["first"] if self._passes else None
        _remove(self._looking)
        for layer, name in self._layers.items():
            if layer in chosen or name == first:
                self._looking.append(layer.register_forward_hook(self._note))

    def end(self) -> list[Pass]:
        """All passes that were watched."""
        _remove(self._looking)
        _remove(self._hooks)
        return [
            Pass(**seen | {"shapes": {n: frozenset(s) for n, s in seen["shapes"].items()}})
            for seen in self._passes
        ]

    def _begin(self) -> None:
        if not torch.is_grad_enabled():
            return
        if len(self._passes) == self._limit:
            _remove(self._looking)
            _remove(self._hooks)
            return
        training = sum(module.training for module in self._modules)
        self._passes.append({"training": training, "shapes": {}, "first": None, "values": None})

    def _note(self, layer: torch.nn.Module, given: Any, result: Any) -> None:
        if not torch.is_grad_enabled() or not self._passes:
            return
        seen, name = self._passes[-1], self._layers[layer]
        tensors = [v for v in (*given, *_tuple(result)) if isinstance(v, torch.Tensor)]
        seen["shapes"].setdefault(name, set()).add(tuple(tuple(t.shape) for t in tensors))
        if seen["first"] is None:
            seen["first"] = name
            if given and isinstance(given[0], torch.Tensor):
                seen["values"] = self._some(given[0].detach())

    def _some(self, value: torch.Tensor) -> torch.Tensor:
        # Taken on its device, and looked at when training is over: nothing waits for it.
        if value.numel() not in self._places:
            places = torch.linspace(0, max(value.numel() - 1, 0), min(VALUES, value.numel()))
            self._places[value.numel()] = places.long().to(value.device)
        return torch.take(value, self._places[value.numel()])


def strange(plain: Pass, seen: list[Pass], known: int) -> str | None:
    """What a trial's passes were given otherwise than one of plain training; None: nothing.

    Args:
        known: so many of the first passes have been compared with plain training as a whole. Where
            they were all given the same batch, so must be all others.
    """
    wanted = seen[0].values
    constant = known > 1 and all(_equal(one.values, wanted) for one in seen[:known])
    for step, one in enumerate(seen, 1):
        if one.training != plain.training:
            return (
                f"in step {step} {one.training} of the model's modules were in training mode, and "
                f"{plain.training} in plain training"
            )
        for layer, shapes in one.shapes.items():
            if shapes != plain.shapes.get(layer):
                return (
                    f"in step {step} layer {layer!r} got and gave tensors of other shapes than in "
                    f"plain training: {_shown(shapes)} instead of "
                    f"{_shown(plain.shapes.get(layer, frozenset()))}"
                )
        if constant and one.first == seen[0].first and not _equal(one.values, wanted):
            return f"in step {step} layer {one.first} got other samples than in the first steps"
    return None


def _equal(some: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if some is None or other is None:
        return some is other
    return torch.equal(some.nan_to_num(), other.nan_to_num())


def _shown(shapes: frozenset[Shapes]) -> str:
    return ", ".join(str(list(map(list, calls))) for calls in sorted(shapes)) or "none"


def _tuple(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def _remove(handles: list[Any]) -> None:
    while handles:
        handles.pop().remove()
