"""Recomputation of one late step's gradients, by the model without the algorithm.

Other checks use the gradients that a rank reports (`checking.recording`). This check runs the
forward and the backward pass again, without the algorithm, on the same parameters, batch and random
state. The result differs if, for example, the algorithm has scaled the loss or skipped a layer.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import ExitStack

import numpy as np
import torch

from common.harness.worker.checking.deviation import Deviation, worst_deviation
from common.harness.worker.checking.repeatable import repeatable
from common.models.workload import Workload

SMALL = 1e-3
"""Smallest compared gradient of a tensor, relative to the largest gradient. Smaller ones may be
only rounding errors, such as the gradient of a bias before a batch norm."""
Read = list[tuple[torch.nn.Module, str, str]]
"""Parameters that a module reads: owning module, attribute of the owner, and name in the model."""


class Recomputation:
    """Record of one step's inputs, and the step's repetition without the algorithm.

    Args:
        workload: workload that no algorithm has wrapped yet.
    """

    def __init__(self, workload: Workload) -> None:
        self._workload, self._model = workload, workload.model
        self.device = next(workload.model.parameters()).device
        self._original = {
            module: (
                type(module),
                {k: copy.copy(v) if isinstance(v, dict) else v for k, v in vars(module).items()},
            )
            for module in self._model.modules()
        }
        """Class and attributes (with hooks) of every module, before the algorithm."""
        self._params = {n: p for n, p in self._model.named_parameters() if p.requires_grad}
        self._names = {id(param): name for name, param in self._params.items()}
        self._read: dict[str, torch.Tensor] = {}
        self._buffers: dict[str, torch.Tensor] = {}
        self._random: list[torch.Tensor] = []
        self._hooks = ExitStack()

    def watch(self, called: frozenset[str]) -> None:
        """Records the next step, until `unwatch`.

        Args:
            called: names of the layers that forward passes call. The parameters of other layers
                are read by the modules that contain them.
        """
        names = {module: name for name, module in self._model.named_modules()}
        for module in names:
            read = [
                (layer, attribute, self._names[id(param)])
                for layer in module.modules()
                if layer is module or names[layer] not in called
                for attribute, param in self._original[layer][1]["_parameters"].items()
                if id(param) in self._names
            ]
            if read:
                hook = module.register_forward_pre_hook(lambda *_, read=read: self._copy(read))
                self._hooks.callback(hook.remove)
        begin = self._workload.model.register_forward_pre_hook(lambda *_: self._begin())
        self._hooks.callback(begin.remove)

    def unwatch(self) -> None:
        """Stops recording."""
        self._hooks.close()

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """Repeats the passes of the step; returns the gradients of the trained parameters.

        Afterwards, the model has the buffers of these passes and no algorithm. It cannot be
        trained.
        """
        for module, (kind, attributes) in self._original.items():
            module.__class__ = kind
            vars(module).clear()
            vars(module).update(attributes)
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
        with repeatable(self.device):
            loss = self._workload.loss()
            gradients = torch.autograd.grad(loss, list(self._params.values()), allow_unused=True)
        return dict(zip(self._params, gradients, strict=True))

    @property
    def complete(self) -> bool:
        """True if the step read all parameters completely, in their own dtype."""
        read = {name: value.dtype for name, value in self._read.items()}
        wanted = {name: param.dtype for name, param in self._params.items()}
        return bool(self._random) and read == wanted

    def _begin(self) -> None:
        if not torch.is_grad_enabled() or self._random:
            return
        self._random.append(torch.get_rng_state())
        if next(iter(self._params.values())).is_cuda:
            self._random.append(torch.cuda.get_rng_state())
        self._buffers = {name: value.clone() for name, value in self._model.named_buffers()}

    def _copy(self, read: Read) -> None:
        if not torch.is_grad_enabled():
            return
        for layer, attribute, name in read:
            param = layer._parameters[attribute]
            if not hasattr(param, "to_local"):  # a DTensor is a part of the parameter
                self._read[name] = param.detach().clone()


def worst_gradient(
    seen: Mapping[str, np.ndarray], recomputed: Mapping[str, np.ndarray]
) -> Deviation:
    """Returns the tensor whose gradient differs most from the recomputed one.

    Args:
        seen: recorded elements of each gradient; NaN if there was no gradient.
        recomputed: the same elements, computed again; zeros if there was no gradient.
    """
    sizes = {name: float(np.linalg.norm(value)) for name, value in recomputed.items()}
    least = SMALL * max(sizes.values(), default=0.0)
    errors = {
        name: float(np.linalg.norm(np.nan_to_num(seen[name]) - value))
        for name, value in recomputed.items()
    }
    return worst_deviation(errors, {name: max(size, least) for name, size in sizes.items()})
