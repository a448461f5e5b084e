"""Parameters of one kind side by side in flat memory, with as much again for what peers send."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dear.buckets.flat import buffer
from dear.buckets.flat_values import FlatValues

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.nn import Parameter

    from dear.comm.communicator import Communicator


class FlatParameters(FlatValues):
    """`values` holds the parameters, `spare` is as large.

    Where the parameters keep memory of their own (`viewed=False`), `pull` copies them into `values`
    and `push` back.
    """

    def __init__(
        self,
        params: Sequence[Parameter],
        communicator: Communicator,
        *,
        shared: bool = False,
        **layout: Any,
    ) -> None:
        super().__init__(params, communicator, shared=shared, **layout)
        if shared:
            self.spare = buffer(self.values, self.values.numel(), communicator)
        else:
            self.spare = self.new()
        self._spare_pieces = self.views(self.spare)

    def pull(self) -> None:
        """`values` is what the parameters are."""
        if not self.viewed:
            for param, piece in zip(self.params, self.pieces, strict=True):
                piece.copy_(param)

    def push(self) -> None:
        """The parameters are what `values` is."""
        if self.viewed:
            self.touched()
            return
        for param, piece in zip(self.params, self.pieces, strict=True):
            param.copy_(piece)

    def take_spare(self) -> None:
        """The parameters become what `spare` is; by another view, where they are views."""
        self.values, self.spare = self.spare, self.values
        self.pieces, self._spare_pieces = self._spare_pieces, self.pieces
        if self.viewed:
            for param, piece in zip(self.params, self.pieces, strict=True):
                param.data = piece
        self.push()
