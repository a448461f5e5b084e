"""`Bucket` by the name and arguments that it had for values; use `flat.value_bucket` instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dear.buckets.flat import Bucket
from dear.comm.communicator import buffer
from dear.errors import UserError
from dear.lazy import torch


class FlatValues(Bucket):
    """See `dear.buckets.flat.value_bucket`."""

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        communicator: Any,
        *,
        viewed: bool = True,
        shared: bool = True,
        spare: bool = False,
    ) -> None:
        like, numel = params[0], max(1, sum(param.numel() for param in params))

        def memory() -> torch.Tensor:
            if shared:
                return buffer(like, numel, communicator)
            return torch.zeros(numel, dtype=like.dtype, device=like.device)

        super().__init__(params, values=memory(), spare=memory() if spare else None, viewed=viewed)
        self.viewed = viewed

    def new(self) -> torch.Tensor:
        """Zeros like `values`."""
        return torch.zeros_like(self.values)

    def reclaim(self) -> None:
        if not super().reclaim():
            raise UserError(
                "the model was moved or converted after it was distributed; close() the "
                "optimizer first, and wrap it again afterwards"
            )

    def load_gradients(self, flat: torch.Tensor) -> None:
        """Copies the gradients into `flat`, laid out like `values`; those there are not are 0."""
        self.copy_gradients(self.views(flat))
