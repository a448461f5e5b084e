"""DeAR's update on every rank, after both halves: for optimizers that need whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dear.dear_updates import Update
from dear.flat import buffer, shaped
from dear.lazy import torch
from dear.sharding import has_hooks

if TYPE_CHECKING:
    from torch.nn import Parameter


class Replicated(Update):
    """The paper's way: the second half carries mean gradients, every rank updates everything.

    With torch's own optimizers a group is updated just before its layers run, with the
    hyper-parameters that `step()` saw. Of others it is not known whether updating group by group
    equals updating all at once, and step hooks expect the whole step: these update in `step()`.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._hyperparameters: list[dict[str, Any]] = []
        self._means = []
        self._views: list[list[torch.Tensor]] = []
        for part in self.parts:
            group = part.group
            mean = buffer(group.gradients, group.gradients.numel(), self.communicator)
            places = zip(group.offsets, group.params, strict=True)
            self._means.append(mean)
            self._views.append([shaped(mean, offset, param) for offset, param in places])

    def step(self, update: Callable[[], Any], arrival: Sequence[int]) -> set[int]:
        for index in arrival:
            self.parts[index].finish_reduce()
        if self.frozen:
            return set()
        started = [index for index in range(len(self.parts)) if not self.idle(index)]
        for index in started:
            self.parts[index].start_gather_mean(self._means[index])
        if not self._may_split():
            self._at_once(update)
            return set()
        # Schedulers change hyper-parameters after this call, some of them in place.
        self._hyperparameters = [
            {
                key: value.clone() if torch.is_tensor(value) else value
                for key, value in group.items()
                if key != "params"
            }
            for group in self.optimizer.param_groups
        ]
        return set(started)

    def step_averaged(self, update: Callable[[], Any]) -> Any:
        return None if self.frozen else update()

    def finish(self, index: int) -> None:
        gradients = self._take(index)
        groups = self.optimizer.param_groups
        kept = {param: param.grad for param in gradients}
        self.optimizer.param_groups = [
            {**hyper, "params": [param for param in group["params"] if param in gradients]}
            for hyper, group in zip(self._hyperparameters, groups, strict=True)
        ]
        # State made by the first step must outlive an evaluation, and the update is no part of a
        # forward pass that runs in lower precision.
        device = self._means[index].device.type
        try:
            for param, gradient in gradients.items():
                param.grad = gradient
            with torch.inference_mode(False), torch.autocast(device, enabled=False):
                self.plain.step(self.optimizer)
        finally:
            self.optimizer.param_groups = groups
            for param, gradient in kept.items():
                param.grad = gradient

    def _take(self, index: int) -> dict[Parameter, torch.Tensor | None]:
        with torch.inference_mode(False):
            self.parts[index].finish_gather()
        pairs = zip(self.parts[index].group.params, self._views[index], strict=True)
        return {param: None if param in self.unused else view for param, view in pairs}

    def _at_once(self, update: Callable[[], Any]) -> Any:
        kept = {}
        for index in range(len(self.parts)):
            for param, gradient in self._take(index).items():
                kept[param] = param.grad
                param.grad = gradient
        try:
            return update()
        finally:
            for param, gradient in kept.items():
                param.grad = gradient

    def _may_split(self) -> bool:
        of_torch = f"{self.plain.__module__}.".startswith("torch.optim.")
        return of_torch and not has_hooks(self.optimizer)
