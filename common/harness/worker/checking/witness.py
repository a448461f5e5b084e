"""What a rank's training did, at a sample of the elements of every tensor, from the first step on.

Each rank notes the gradients that its own backward pass gave, before any algorithm touches them,
and what its layers read in forward passes. With that of all ranks a serial reference can make every
step again, timed ones included, and must arrive where the ranks are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

SAMPLE = 32
"""Elements of each tensor at most: first, last, and some of everywhere between."""
GLANCES = 4
"""Layers whose reading is watched in timed steps: the first, the last, and some between."""


@dataclass(frozen=True, kw_only=True)
class Testimony:
    """Of one rank; the elements of all tensors one after another, not a number where unknown."""

    names: tuple[str, ...]
    """Of the tensors."""
    ends: tuple[int, ...]
    """Where the elements of each tensor end."""
    start: np.ndarray
    """Before the first step, as all following `[elements]`."""
    gradients: np.ndarray
    """`[steps, elements]`."""
    reads: dict[int, np.ndarray]
    """By number of the step, what its forward pass read, as far as it was watched."""
    buffers: dict[int, tuple[np.ndarray, np.ndarray]]
    """By number of the step, the model's floating-point buffers when its forward pass began and
    when it had ended, as samples; only of steps in which buffers were looked at."""
    end: np.ndarray
    """After the last step."""
    left: np.ndarray
    """The buffers then, as samples."""


class Witness:
    """Watches the training of a model until `end`.

    Args:
        model: with all its parameters, before an algorithm wraps it. In forward passes they may be
            others then (where they are sharded).
        seed: for the choice of the elements; the same on all ranks.
    """

    def __init__(self, model: torch.nn.Module, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad and p.numel()}
        self._places = {n: _places(p.numel(), generator).to(p.device) for n, p in trained.items()}
        ends = np.cumsum([len(places) for places in self._places.values()]).tolist()
        starts = [0, *ends]
        self._parts = {n: slice(*ab) for n, ab in zip(trained, pairwise(starts), strict=True)}
        some = next(iter(trained.values()))
        self._unknown = torch.full((ends[-1],), torch.nan, dtype=some.dtype, device=some.device)
        names = {id(param): name for name, param in trained.items()}
        self._owned: dict[torch.nn.Module, list[tuple[str, str]]] = {}
        """By module its own parameters: their names there, and in the model."""
        for module in model.modules():
            owned = [(n, names[id(p)]) for n, p in module._parameters.items() if id(p) in names]
            if owned:
                self._owned[module] = owned
        self._buffers = {
            name: _places(value.numel(), generator).to(value.device)
            for name, value in model.named_buffers()
            if value.is_floating_point() and value.numel()
        }
        self._left: dict[int, list[np.ndarray]] = {}
        self._chosen = _some_of(list(self._owned), generator)
        self._gradients: list[torch.Tensor] = []
        self._reads: dict[int, torch.Tensor] = {}
        self._backward = True
        """Whether the last step that has begun has gradients already."""
        self._hooks: list[Any] = []
        self._looking: list[Any] = []
        self._noted: set[int] = set()
        self._model = model
        self._start = self._sample(model)
        for name, param in trained.items():
            self._note(name, param)

    def attend(self, model: torch.nn.Module) -> None:
        """To be called before the first step, with the model as it is trained."""
        self._hooks.append(model.register_forward_pre_hook(lambda *_: self._begin()))
        self.look()

    @property
    def steps(self) -> int:
        """Those that have begun."""
        return len(self._gradients)

    def look(self) -> None:
        """From now on at all that forward passes read, and at buffers."""
        self._watch(self._owned)
        self.look_at_buffers()

    def look_at_buffers(self) -> None:
        """Also records buffers from now on, until the next `look` or `look_away`."""
        self._looking.append(self._model.register_forward_pre_hook(lambda *_: self._keep()))
        self._looking.append(self._model.register_forward_hook(lambda *_: self._keep()))

    def look_away(self) -> list[torch.nn.Module]:
        """At gradients and at what a few layers read, which are returned.

        It takes some microseconds per tensor and step, and no device is waited for: elements are
        taken where they are, and read when training is over.
        """
        self._watch(self._chosen)
        return self._chosen

    def end(self, model: torch.nn.Module) -> Testimony:
        """What was seen, and where the model is now; a collective call where it is sharded."""
        _remove(self._looking)
        _remove(self._hooks)
        return Testimony(
            names=tuple(self._parts),
            ends=tuple(part.stop for part in self._parts.values()),
            start=self._start,
            gradients=np.stack([_numbers(row) for row in self._gradients]),
            reads={step: _numbers(row) for step, row in self._reads.items()},
            buffers={step: tuple(pair) for step, pair in self._left.items() if len(pair) == 2},
            end=self._sample(model),
            left=self.of_buffers(),
        )

    def of_gradients(self, gradients: Mapping[str, torch.Tensor | None]) -> dict[str, np.ndarray]:
        """The elements that are watched of these, by tensor; zeros of what is None."""
        return {
            name: np.zeros(part.stop - part.start)
            if (value := gradients[name]) is None
            else _numbers(torch.take(value, self._places[name]))
            for name, part in self._parts.items()
            if (value := gradients[name]) is None or value.layout is torch.strided
        }

    def of_buffers(self) -> np.ndarray:
        """The elements that are watched of the floating-point buffers, as they are."""
        held = dict(self._model.named_buffers())
        row = [torch.take(held[name].detach(), at) for name, at in self._buffers.items()]
        return np.concatenate([np.empty(0), *(part.to("cpu", torch.float64) for part in row)])

    def _watch(self, modules: Iterable[torch.nn.Module]) -> None:
        _remove(self._looking)
        # After all other hooks: by then an algorithm's have made the parameters current.
        for module in modules:
            self._looking.append(module.register_forward_pre_hook(lambda own, _: self._read(own)))

    def _keep(self) -> None:
        if not (self._buffers and torch.is_grad_enabled()):
            return
        self._left.setdefault(len(self._gradients) - 1, []).append(self.of_buffers())

    def _sample(self, model: torch.nn.Module) -> np.ndarray:
        state = model.state_dict()
        row = self._unknown.clone()
        for name, part in self._parts.items():
            row[part] = torch.take(state[name].detach(), self._places[name])
        return _numbers(row)

    def _begin(self) -> None:
        if self._backward and torch.is_grad_enabled():
            self._backward = False
            self._gradients.append(self._unknown.clone())

    def _read(self, module: torch.nn.Module) -> None:
        if not torch.is_grad_enabled():
            return
        self._begin()
        row = self._reads.setdefault(len(self._gradients) - 1, self._unknown.clone())
        for own, name in self._owned[module]:
            param = module._parameters[own]
            if hasattr(param, "to_local"):  # a part of it, which this module does not read
                continue
            if id(param) not in self._noted:
                self._note(name, param)
            with torch.no_grad():
                row[self._parts[name]] = torch.take(param, self._places[name])

    def _note(self, name: str, param: torch.Tensor) -> None:
        self._noted.add(id(param))
        part, places = self._parts[name], self._places[name]

        def note(gradient: torch.Tensor) -> None:
            self._backward = True
            if self._gradients and gradient.layout is torch.strided:
                self._gradients[-1][part] = torch.take(gradient, places)

        self._hooks.append(param.register_hook(note))


def _some_of(layers: list[torch.nn.Module], generator: torch.Generator) -> list[torch.nn.Module]:
    between = layers[1:-1]
    order = torch.randperm(len(between), generator=generator).tolist()
    ends = layers[:1] + layers[1:][-1:]
    return ends + [between[place] for place in order[: GLANCES - 2]]


def _remove(handles: list[Any]) -> None:
    while handles:
        handles.pop().remove()


def _numbers(row: torch.Tensor) -> np.ndarray:
    # Of bfloat16 and float32 every value is one of float32, and numpy has no bfloat16.
    wide = torch.float64 if row.dtype == torch.float64 else torch.float32
    return row.to("cpu", wide).numpy()


def _places(numel: int, generator: torch.Generator) -> torch.Tensor:
    if numel <= SAMPLE:
        return torch.arange(numel)
    edges = torch.linspace(0, numel - 1, SAMPLE, dtype=torch.float64)
    jitter = torch.rand(SAMPLE, generator=generator, dtype=torch.float64) * (numel / SAMPLE)
    jitter[0] = jitter[-1] = 0.0
    return (edges + jitter).long().clamp(max=numel - 1)
