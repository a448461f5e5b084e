"""Parameters as views of flat buffers that neighbours exchange; gradients stay as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dear.errors import UserError
from dear.flat import buffer, shaped
from dear.lazy import torch

if TYPE_CHECKING:
    from torch.nn import Parameter

    from dear.communicator import Communicator


class FlatValues:
    """Parameters of one dtype and device side by side in `values`, in memory order."""

    def __init__(self, params: Sequence[Parameter], communicator: Communicator) -> None:
        self.params = list(params)
        numel = sum(param.numel() for param in params)
        self.values = buffer(params[0], max(numel, 1), communicator)
        """Flat, of at least one element."""
        self._offsets: list[int] = []
        offset = 0
        for param in params:
            self._offsets.append(offset)
            offset += param.numel()
        with torch.no_grad():
            for param, view in zip(self.params, self.views(self.values), strict=True):
                view.copy_(param)
                param.data = view
        self._pointers = [param.data_ptr() for param in self.params]

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Pieces of `flat`, laid out like `values`, in shape and memory order of the parameters."""
        places = zip(self._offsets, self.params, strict=True)
        return [shaped(flat, offset, param) for offset, param in places]

    def new(self) -> torch.Tensor:
        """Zeros like `values`."""
        return torch.zeros_like(self.values)

    def reclaim(self) -> None:
        """Takes parameters back that got other memory, as `module.to(...)` does.

        Raises:
            UserError: they are of another dtype, device or memory order now.
        """
        for index, param in enumerate(self.params):
            if param.data_ptr() == self._pointers[index]:
                continue
            view = self.views(self.values)[index]
            like = (param.dtype, param.device, param.stride())
            if like != (view.dtype, view.device, view.stride()):
                raise UserError(
                    "the model was moved or converted after it was distributed; close() the "
                    "optimizer first, and wrap it again afterwards"
                )
            with torch.no_grad():
                view.copy_(param)
            param.data = view

    def load_gradients(self, flat: torch.Tensor) -> None:
        """Copies the gradients into `flat`, laid out like `values`; those there are not are 0."""
        for param, view in zip(self.params, self.views(flat), strict=True):
            if param.grad is None:
                view.zero_()
            else:
                view.copy_(param.grad)

    def touched(self) -> None:
        """Tells autograd that the values have changed, as an optimizer's update would."""
        torch.autograd.graph.increment_version(self.params)

    def release(self) -> None:
        """Gives the parameters memory of their own again."""
        for param, pointer in zip(self.params, self._pointers, strict=True):
            if param.data_ptr() == pointer:
                param.data = param.data.clone()
