"""DeAR's update on every rank, after both halves: for optimizers that need whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dear.buckets.dear_updates import Update
from dear.buckets.flat import shaped
from dear.buckets.updates import PartialUpdate, with_gradients
from dear.comm.communicator import buffer
from dear.lazy import torch

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
        self._partial = PartialUpdate(self.optimizer, self.plain)
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
        if not self._partial.possible():
            means: dict[Parameter, torch.Tensor | None] = {}
            for index in range(len(self.parts)):
                means |= self._take(index)
            with_gradients(means, update)
            return set()
        self._partial.note()
        return set(started)

    def step_averaged(self, update: Callable[[], Any]) -> Any:
        return None if self.frozen else update()

    def finish(self, index: int) -> None:
        self._partial.run(self._take(index))

    def _take(self, index: int) -> dict[Parameter, torch.Tensor | None]:
        with torch.inference_mode(False):
            self.parts[index].finish_gather()
        pairs = zip(self.parts[index].group.params, self._views[index], strict=True)
        return {param: None if param in self.unused else view for param, view in pairs}
