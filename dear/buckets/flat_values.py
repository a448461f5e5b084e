"""Parameters as views of flat buffers that neighbours exchange; gradients stay as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dear.buckets.flat import buffer, shaped
from dear.errors import UserError
from dear.lazy import torch

if TYPE_CHECKING:
    from torch.nn import Parameter

    from dear.comm.communicator import Communicator


class FlatValues:
    """Parameters of one dtype and device side by side in `values`, in memory order.

    Args:
        viewed: let each `param.data` be a view of `values`, so that nothing is copied between the
            two; without it parameters keep memory of their own.
        shared: take memory that the backend reads in place.
    """

    def __init__(
        self,
        params: Sequence[Parameter],
        communicator: Communicator,
        *,
        viewed: bool = True,
        shared: bool = True,
    ) -> None:
        self.params = list(params)
        self.viewed = viewed
        self._offsets: list[int] = []
        numel = 0
        for param in params:
            self._offsets.append(numel)
            numel += param.numel()
        like = params[0]
        self.values = (
            buffer(like, max(numel, 1), communicator)
            if shared
            else torch.zeros(max(numel, 1), dtype=like.dtype, device=like.device)
        )
        """Flat, of at least one element."""
        self.pieces = self.views(self.values)
        """The pieces of `values` that belong to the parameters."""
        with torch.no_grad():
            for param, piece in zip(self.params, self.pieces, strict=True):
                piece.copy_(param)
                if viewed:
                    param.data = piece

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
            UserError: they are of another dtype, device, shape or memory order now.
        """
        for param, piece in zip(self.params, self.pieces, strict=True):
            same = (param.dtype, param.device, param.shape) == (
                piece.dtype,
                piece.device,
                piece.shape,
            )
            if self.viewed and same and param.data_ptr() == piece.data_ptr():
                continue
            if not same or (self.viewed and param.stride() != piece.stride()):
                raise UserError(
                    "the model was moved or converted after it was distributed; close() the "
                    "optimizer first, and wrap it again afterwards"
                )
            if self.viewed:
                with torch.no_grad():
                    piece.copy_(param)
                param.data = piece

    def load_gradients(self, flat: torch.Tensor) -> None:
        """Copies the gradients into `flat`, laid out like `values`; those there are not are 0."""
        for param, view in zip(self.params, self.views(flat), strict=True):
            if param.grad is None:
                view.zero_()
            else:
                view.copy_(param.grad)

    def touched(self) -> None:
        """Tells autograd that the values have changed, as an optimizer's update would."""
        # It refuses where nothing needs a gradient; then nothing keeps values for one either.
        if any(param.requires_grad for param in self.params):
            torch.autograd.graph.increment_version(self.params)

    def release(self) -> None:
        """Gives the parameters memory of their own again."""
        if self.viewed:
            for param, piece in zip(self.params, self.pieces, strict=True):
                if param.data_ptr() == piece.data_ptr():
                    param.data = piece.clone()
        self.viewed = False
