"""Check of forward passes: number of samples, the samples themselves, and training mode.

Other checks use the gradients that a rank reports (`checking.recording`). This check finds errors
in how they were computed, such as half of the batch, or no dropout.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

VALUES = 64
"""Largest number of recorded elements of the first layer's input."""
Shapes = tuple[tuple[int, ...], ...]


@dataclass(kw_only=True)
class ForwardPass:
    """Recorded inputs of one forward pass."""

    training: int
    """Number of modules in training mode at the start of the pass."""
    shapes: dict[str, set[Shapes]] = field(default_factory=dict)
    """Shapes of inputs and outputs by watched layer, for all calls of the layer in the pass."""
    first: str | None = None
    """Name of the layer that ended first."""
    values: torch.Tensor | None = None
    """Some elements of that layer's input."""


class ForwardPasses:
    """Recorder of a model's forward passes (only those with gradients).

    Args:
        limit: number of passes to record; None: all until `finish`.
    """

    def __init__(self, model: torch.nn.Module, limit: int | None = None) -> None:
        self._modules = list(model.modules())
        self._layers = {
            module: name for name, module in model.named_modules() if module._parameters
        }
        self._limit = limit
        self._passes: list[ForwardPass] = []
        self._hooks, self._watching = ExitStack(), ExitStack()
        self._hooks.callback(model.register_forward_pre_hook(lambda *_: self._begin()).remove)
        self._places: dict[int, torch.Tensor] = {}
        self.watch(self._layers)

    def watch(self, layers: Iterable[torch.nn.Module]) -> None:
        """Records only these layers from now on, and the layer that ends first."""
        chosen = set(layers)
        first = self._passes[0].first if self._passes else None
        self._watching.close()
        for layer, name in self._layers.items():
            if layer in chosen or name == first:
                self._watching.callback(layer.register_forward_hook(self._record).remove)

    def finish(self) -> list[ForwardPass]:
        """Stops; returns the recorded passes."""
        self._watching.close()
        self._hooks.close()
        return self._passes

    def _begin(self) -> None:
        if not torch.is_grad_enabled():
            return
        if len(self._passes) == self._limit:
            self.finish()
            return
        training = sum(module.training for module in self._modules)
        self._passes.append(ForwardPass(training=training))

    def _record(self, layer: torch.nn.Module, given: tuple[object, ...], result: object) -> None:
        if not torch.is_grad_enabled() or not self._passes:
            return
        current, name = self._passes[-1], self._layers[layer]
        results = tuple(result) if isinstance(result, (tuple, list)) else (result,)
        tensors = [v for v in (*given, *results) if isinstance(v, torch.Tensor)]
        current.shapes.setdefault(name, set()).add(tuple(tuple(t.shape) for t in tensors))
        if current.first is None:
            current.first = name
            if given and isinstance(given[0], torch.Tensor):
                current.values = self._sample(given[0].detach())

    def _sample(self, value: torch.Tensor) -> torch.Tensor:
        # The elements stay on their device until training is over, so that nothing waits for them.
        if value.numel() not in self._places:
            places = torch.linspace(0, max(value.numel() - 1, 0), min(VALUES, value.numel()))
            self._places[value.numel()] = places.long().to(value.device)
        return torch.take(value, self._places[value.numel()])


def unlike_plain(plain: ForwardPass, passes: list[ForwardPass], compared: int) -> str | None:
    """Returns the first difference between a trial's forward passes and a plain one, or None.

    Args:
        compared: number of first steps that were compared with plain training completely. If all
            of them had the same samples, later steps must have these, too.
    """
    first = passes[0]
    constant = compared > 1 and all(_equal(p.values, first.values) for p in passes[:compared])
    for step, current in enumerate(passes, 1):
        if current.training != plain.training:
            return (
                f"in step {step} {current.training} of the model's modules were in training mode, "
                f"and {plain.training} in plain training"
            )
        for layer, shapes in current.shapes.items():
            wanted = plain.shapes.get(layer, set())
            if shapes != wanted:
                return (
                    f"in step {step} the inputs and outputs of layer {layer!r} had other shapes "
                    f"than in plain training: {_shown(shapes)} instead of {_shown(wanted)}"
                )
        if constant and current.first == first.first and not _equal(current.values, first.values):
            return f"in step {step} layer {current.first} got other samples than in the first steps"
    return None


def _equal(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return torch.equal(first.nan_to_num(), second.nan_to_num())


def _shown(shapes: set[Shapes]) -> str:
    return ", ".join(str(list(map(list, calls))) for calls in sorted(shapes)) or "none"
