"""The gradients of one late step, computed once more by the model as it was before it was wrapped.

Elsewhere a rank's gradients are taken at their word (`checking.witness`). Here is looked what they
are of: with the same parameters, batch and random state, forward and backward pass are made again
without the algorithm. A scaled loss, other labels or a layer that is left out give others.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from common.harness.worker.checking.correctness import Farthest
from common.models.workload import Workload

SMALL = 1e-3
"""A tensor's gradient counts as at least so much of the largest one: a bias before a batch norm has
nothing but rounding."""


class Afresh:
    """Watches one step (`watch`, `unwatch`), and makes its passes again when the algorithm is gone.

    Args:
        workload: as it is before an algorithm wraps it.
    """

    def __init__(self, workload: Workload) -> None:
        self._workload, self._model = workload, workload.model
        self._inner = {
            module: (type(module), {k: _kept(v) for k, v in vars(module).items()})
            for module in self._model.modules()
        }
        """Of every module its class and its attributes, hooks among them."""
        self._params = {n: p for n, p in self._model.named_parameters() if p.requires_grad}
        self._names = {id(param): name for name, param in self._params.items()}
        self._read: dict[str, torch.Tensor] = {}
        self._buffers: dict[str, torch.Tensor] = {}
        self._random: list[torch.Tensor] = []
        self._hooks: list[Any] = []

    def watch(self, called: frozenset[str]) -> None:
        """From now on, for one step.

        Args:
            called: layers that forward passes call, by name. Parameters of the others are read by
                the modules around them.
        """
        names = {module: name for name, module in self._model.named_modules()}
        for module in names:
            read = [
                (layer, own, self._names[id(param)])
                for layer in module.modules()
                if layer is module or names[layer] not in called
                for own, param in self._inner[layer][1]["_parameters"].items()
                if id(param) in self._names
            ]
            if read:
                hook = module.register_forward_pre_hook(lambda *_, read=read: self._copy(read))
                self._hooks.append(hook)
        self._hooks.append(self._workload.model.register_forward_pre_hook(lambda *_: self._begin()))

    def unwatch(self) -> None:
        """What the step has read is kept."""
        while self._hooks:
            self._hooks.pop().remove()

    def passes(self) -> dict[str, torch.Tensor | None]:
        """Gradients that both passes give, of what is trained.

        The model is bare afterwards, with the buffers that they leave, and no more to be trained.
        """
        for module, (kind, inner) in self._inner.items():
            module.__class__ = kind
            vars(module).clear()
            vars(module).update(inner)
        for name, param in self._params.items():
            param._backward_hooks = None
            param.requires_grad_()
            param.data = self._read.pop(name)
        for name, buffer in self._model.named_buffers():
            buffer.copy_(self._buffers[name])
        state, *device_state = self._random
        torch.set_rng_state(state)
        if device_state:
            torch.cuda.set_rng_state(device_state[0])
        self._workload.model = self._model
        loss = self._workload.loss()
        gradients = torch.autograd.grad(loss, list(self._params.values()), allow_unused=True)
        return dict(zip(self._params, gradients, strict=True))

    @property
    def complete(self) -> bool:
        """Whether the step was seen to read all parameters as wholes, in their own type."""
        read = {name: value.dtype for name, value in self._read.items()}
        own = {name: param.dtype for name, param in self._params.items()}
        return bool(self._random) and read == own

    def _begin(self) -> None:
        if not torch.is_grad_enabled() or self._random:
            return
        self._random.append(torch.get_rng_state())
        if next(iter(self._params.values())).is_cuda:
            self._random.append(torch.cuda.get_rng_state())
        self._buffers = {name: value.clone() for name, value in self._model.named_buffers()}

    def _copy(self, read: list[tuple[torch.nn.Module, str, str]]) -> None:
        if not torch.is_grad_enabled():
            return
        for layer, own, name in read:
            param = layer._parameters[own]
            if not hasattr(param, "to_local"):  # not a part of it
                self._read[name] = param.detach().clone()


def farthest(seen: Mapping[str, np.ndarray], afresh: Mapping[str, np.ndarray]) -> Farthest:
    """Of the gradients of a step, the one that is farthest from what was computed afresh.

    Args:
        seen: elements of each tensor, not numbers where there was no gradient.
        afresh: the same elements, zeros where there was none.
    """
    sizes = {name: float(np.linalg.norm(value)) for name, value in afresh.items()}
    least = SMALL * max(sizes.values(), default=0.0)
    worst = Farthest()
    for name, value in afresh.items():
        off = float(np.linalg.norm(np.nan_to_num(seen[name]) - value))
        size = max(sizes[name], least)
        error = off / size if size else math.inf if off else 0.0
        error = error if math.isfinite(error) else math.inf
        if error > worst.error:
            worst = Farthest(error=error, tensor=name)
    return worst


def _kept(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, dict) else value
