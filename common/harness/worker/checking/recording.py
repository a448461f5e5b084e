"""Recording of a rank's training at a sample of each tensor's elements, from the first step on.

Each rank records its gradients before the algorithm changes them, and the parameters that its
layers read in forward passes. A serial reference repeats every step (timed steps, too) from the
recordings of all ranks. It must get the parameters that the ranks have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import nn

SAMPLE = 32
"""Largest number of recorded elements of a tensor: the first, the last, and some between."""
GLANCES = 4
"""Number of layers whose reads are recorded in timed steps: first, last, and some between."""


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Recording of one rank: sampled elements of all tensors in a row; NaN: unknown."""

    names: tuple[str, ...]
    """Names of the tensors."""
    ends: tuple[int, ...]
    """Index of the end of each tensor's elements."""
    start: np.ndarray
    """Parameters before the first step, `[elements]` like all arrays below."""
    gradients: np.ndarray
    """Gradients, `[steps, elements]`."""
    reads: dict[int, np.ndarray]
    """Parameters that the watched layers read in forward passes, by index of the step."""
    buffers: dict[int, tuple[np.ndarray, np.ndarray]]
    """Sampled floating-point buffers at the start and the end of the forward pass, by index of the
    step; only for steps in which buffers were watched."""
    end: np.ndarray
    """Parameters after the last step."""
    end_buffers: np.ndarray
    """Sampled buffers after the last step."""

    def tensors(self, row: np.ndarray) -> dict[str, np.ndarray]:
        """Splits a row of elements by tensor."""
        return dict(zip(self.names, np.split(row, self.ends[:-1]), strict=True))


class Recorder:
    """Recorder of a model's training, until `finish`.

    Args:
        model: model that no algorithm has wrapped yet. (An algorithm that shards parameters
            replaces them.)
        seed: seed of the choice of elements; the same on all ranks.
    """

    def __init__(self, model: nn.Module, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad and p.numel()}
        self._places = {n: _places(p, generator) for n, p in trained.items()}
        ends = np.cumsum([len(places) for places in self._places.values()]).tolist()
        self._parts = {n: slice(*ab) for n, ab in zip(trained, pairwise([0, *ends]), strict=True)}
        first = next(iter(trained.values()))
        self._unknown = torch.full((ends[-1],), torch.nan, dtype=first.dtype, device=first.device)
        names = {id(param): name for name, param in trained.items()}
        self._owned: dict[nn.Module, list[tuple[str, str]]] = {}
        """Parameters of each module (without children): attribute, and name in the model."""
        for module in model.modules():
            owned = [(n, names[id(p)]) for n, p in module._parameters.items() if id(p) in names]
            if owned:
                self._owned[module] = owned
        self._buffer_places = {
            name: _places(value, generator)
            for name, value in model.named_buffers()
            if value.is_floating_point() and value.numel()
        }
        self._buffers: dict[int, list[np.ndarray]] = {}
        self._chosen = _choice(list(self._owned), generator)
        self._gradients: list[torch.Tensor] = []
        self._reads: dict[int, torch.Tensor] = {}
        self._backward = True
        """True if the latest step has gradients already."""
        self._hooks, self._watching = ExitStack(), ExitStack()
        self._hooked: set[int] = set()
        self._model = model
        self._start = self._sample(model)
        for name, param in trained.items():
            self._hook_gradient(name, param)

    def start(self, model: nn.Module) -> None:
        """Starts to record and to count steps; `model` is the model that is trained."""
        hook = model.register_forward_pre_hook(lambda *_: self._begin_step())
        self._hooks.callback(hook.remove)
        self.watch_all()

    @property
    def steps(self) -> int:
        """Number of steps that have begun."""
        return len(self._gradients)

    def watch_all(self) -> None:
        """Records all parameters that forward passes read from now on, and buffers."""
        self._watch(self._owned)
        self.watch_buffers()

    def watch_buffers(self) -> None:
        """Records buffers, too, until the next `watch_all` or `watch_some`."""
        before = self._model.register_forward_pre_hook(lambda *_: self._record_buffers())
        after = self._model.register_forward_hook(lambda *_: self._record_buffers())
        self._watching.callback(before.remove)
        self._watching.callback(after.remove)

    def watch_some(self) -> list[nn.Module]:
        """Records only gradients, and the reads of a few layers; returns these layers.

        This costs some microseconds per tensor and step. The host does not wait for the device:
        elements stay there until training is over.
        """
        self._watch(self._chosen)
        return self._chosen

    def finish(self, model: nn.Module) -> Recording:
        """Stops; returns the recording, up to the present state. Collective for sharded models."""
        self._watching.close()
        self._hooks.close()
        return Recording(
            names=tuple(self._parts),
            ends=tuple(part.stop for part in self._parts.values()),
            start=self._start,
            gradients=np.stack([_numbers(row) for row in self._gradients]),
            reads={step: _numbers(row) for step, row in self._reads.items()},
            buffers={s: (p[0], p[1]) for s, p in self._buffers.items() if len(p) == 2},
            end=self._sample(model),
            end_buffers=self.buffers(),
        )

    def gradients(self, gradients: Mapping[str, torch.Tensor | None]) -> dict[str, np.ndarray]:
        """Returns sampled elements of dense gradients by tensor; zeros for a missing gradient."""
        return {
            name: np.zeros(len(self._places[name]))
            if (value := gradients[name]) is None
            else _numbers(torch.take(value, self._places[name]))
            for name in self._parts
            if (value := gradients[name]) is None or value.layout is torch.strided
        }

    def buffers(self) -> np.ndarray:
        """Returns the sampled elements of the current floating-point buffers."""
        current = dict(self._model.named_buffers())
        row = [torch.take(current[name].detach(), at) for name, at in self._buffer_places.items()]
        return np.concatenate([np.empty(0), *(part.to("cpu", torch.float64) for part in row)])

    def _watch(self, modules: Iterable[nn.Module]) -> None:
        self._watching.close()
        # This hook runs after the algorithm's hooks, which make the parameters current.
        for module in modules:
            hook = module.register_forward_pre_hook(lambda layer, _: self._record_reads(layer))
            self._watching.callback(hook.remove)

    def _record_buffers(self) -> None:
        if self._buffer_places and torch.is_grad_enabled():
            self._buffers.setdefault(self.steps - 1, []).append(self.buffers())

    def _sample(self, model: nn.Module) -> np.ndarray:
        state = model.state_dict()
        row = self._unknown.clone()
        for name, part in self._parts.items():
            row[part] = torch.take(state[name].detach(), self._places[name])
        return _numbers(row)

    def _begin_step(self) -> None:
        if self._backward and torch.is_grad_enabled():
            self._backward = False
            self._gradients.append(self._unknown.clone())

    def _record_reads(self, module: nn.Module) -> None:
        if not torch.is_grad_enabled():
            return
        self._begin_step()
        row = self._reads.setdefault(self.steps - 1, self._unknown.clone())
        for attribute, name in self._owned[module]:
            param = module._parameters[attribute]
            if hasattr(param, "to_local"):  # a DTensor is a part, which this module does not read
                continue
            if id(param) not in self._hooked:
                self._hook_gradient(name, param)
            with torch.no_grad():
                row[self._parts[name]] = torch.take(param, self._places[name])

    def _hook_gradient(self, name: str, param: torch.Tensor) -> None:
        self._hooked.add(id(param))
        part, places = self._parts[name], self._places[name]

        def record(gradient: torch.Tensor) -> None:
            self._backward = True
            if self._gradients and gradient.layout is torch.strided:
                self._gradients[-1][part] = torch.take(gradient, places)

        self._hooks.callback(param.register_hook(record).remove)


def _choice(layers: list[nn.Module], generator: torch.Generator) -> list[nn.Module]:
    between = layers[1:-1]
    order = torch.randperm(len(between), generator=generator).tolist()
    return [*layers[:1], *layers[1:][-1:], *(between[place] for place in order[: GLANCES - 2])]


def _numbers(row: torch.Tensor) -> np.ndarray:
    # Float32 holds every value of bfloat16, which numpy lacks.
    wide = torch.float64 if row.dtype == torch.float64 else torch.float32
    return row.to("cpu", wide).numpy()


def _places(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    numel = tensor.numel()
    if numel <= SAMPLE:
        return torch.arange(numel, device=tensor.device)
    edges = torch.linspace(0, numel - 1, SAMPLE, dtype=torch.float64)
    jitter = torch.rand(SAMPLE, generator=generator, dtype=torch.float64) * (numel / SAMPLE)
    jitter[0] = jitter[-1] = 0.0
    return (edges + jitter).long().clamp(max=numel - 1).to(tensor.device)
