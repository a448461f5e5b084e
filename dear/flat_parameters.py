"""Parameters of one kind side by side in flat memory, with as much again for what peers send."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dear.flat import buffer, shaped
from dear.lazy import torch

if TYPE_CHECKING:
    from torch.nn import Parameter

    from dear.communicator import Communicator


class FlatParameters:
    """`values` holds the parameters, `spare` is as large.

    Args:
        params: of one dtype and device.
        views: let `param.data` be a view of `values`, so that nothing is copied between the two;
            without it the parameters keep memory of their own, `pull` copies them into `values` and
            `push` back.
        shared: take memory that the backend reduces in place.
    """

    def __init__(
        self,
        params: Sequence[Parameter],
        communicator: Communicator,
        *,
        views: bool = True,
        shared: bool = False,
    ) -> None:
        self.params = list(params)
        self.views = views
        numel = max(1, sum(param.numel() for param in params))
        like = params[0]
        self.values, self.spare = (
            buffer(like, numel, communicator)
            if shared
            else torch.zeros(numel, dtype=like.dtype, device=like.device)
            for _ in range(2)
        )
        self._value_pieces = self._pieces(self.values)
        self._spare_pieces = self._pieces(self.spare)
        with torch.no_grad():
            for param, piece in zip(self.params, self._value_pieces, strict=True):
                piece.copy_(param)
                if views:
                    param.data = piece

    def pull(self) -> None:
        """`values` is what the parameters are."""
        if not self.views:
            for param, piece in zip(self.params, self._value_pieces, strict=True):
                piece.copy_(param)

    def push(self) -> None:
        """The parameters are what `values` is."""
        if not self.views:
            for param, piece in zip(self.params, self._value_pieces, strict=True):
                param.copy_(piece)
        # The values of views have changed without a trace in the parameters' own counters.
        elif any(param.requires_grad for param in self.params):
            torch.autograd.graph.increment_version(self.params)

    def take_spare(self) -> None:
        """The parameters become what `spare` is; by another view, where they are views."""
        self.values, self.spare = self.spare, self.values
        self._value_pieces, self._spare_pieces = self._spare_pieces, self._value_pieces
        if self.views:
            for param, piece in zip(self.params, self._value_pieces, strict=True):
                param.data = piece
        self.push()

    def reclaim(self) -> bool:
        """Takes parameters back that got other memory; False if one is of another kind now.

        `module.to(...)` moves parameters by giving the same objects other memory.
        """
        kind = self.values.dtype, self.values.device
        if any((param.dtype, param.device) != kind for param in self.params):
            return False
        if not self.views:
            return True
        for param, piece in zip(self.params, self._value_pieces, strict=True):
            if param.data_ptr() != piece.data_ptr():
                if param.shape != piece.shape:
                    return False
                with torch.no_grad():
                    piece.copy_(param)
                param.data = piece
        return True

    def release(self) -> None:
        """Gives the parameters memory of their own again."""
        if self.views:
            for param, piece in zip(self.params, self._value_pieces, strict=True):
                if param.data_ptr() == piece.data_ptr():
                    param.data = piece.clone()
        self.views = False

    def _pieces(self, flat: torch.Tensor) -> list[torch.Tensor]:
        pieces, offset = [], 0
        for param in self.params:
            pieces.append(shaped(flat, offset, param))
            offset += param.numel()
        return pieces
