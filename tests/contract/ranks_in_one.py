"""All ranks of a job in one process, as the serial references see them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn


class Ranks:
    """Models and optimizers of all ranks; `x` and `g` have a row of float64 for each.

    Args:
        prepare: called with a rank just before its optimizer steps; False: it shall not.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        prepare: Callable[[int], bool] = lambda rank: True,
    ) -> None:
        self.models, self.optimizers = models, optimizers
        self._prepare = prepare
        self._params = [[p for p in model.parameters() if p.requires_grad] for model in models]
        sizes = [_reals(param).numel() for param in self._params[0]]
        ends = torch.tensor(sizes).cumsum(0).tolist()
        self.tensors = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        """The columns of each tensor."""

    @property
    def x(self) -> torch.Tensor:
        """The trained parameters, `[ranks, elements]`."""
        return torch.stack([_row(params, params) for params in self._params])

    @x.setter
    def x(self, values: torch.Tensor) -> None:
        for params, row in zip(self._params, values, strict=True):
            for param, tensor in zip(params, self.tensors, strict=True):
                param.data.copy_(_shaped(row[tensor], param))

    @property
    def g(self) -> torch.Tensor:
        """Gradients, `[ranks, elements]`; zeros where there is none."""
        return torch.stack([_row([p.grad for p in params], params) for params in self._params])

    @g.setter
    def g(self, values: torch.Tensor) -> None:
        """Sets each rank's row, or one for all; a parameter with nothing but zeros gets None."""
        for params, row in zip(self._params, values.expand(len(self.models), -1), strict=True):
            for param, tensor in zip(params, self.tensors, strict=True):
                gradient = row[tensor] if param.requires_grad else row[:0]
                param.grad = _shaped(gradient, param) if gradient.count_nonzero() else None

    def update(self, rank: int | None = None) -> None:
        """The optimizer of one rank, or of all, steps."""
        for one in range(len(self.models)) if rank is None else [rank]:
            if self._prepare(one):
                self.optimizers[one].step()


def _reals(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _row(tensors: Sequence[Any], params: Sequence[nn.Parameter]) -> torch.Tensor:
    pairs = zip(tensors, params, strict=True)
    whole = [torch.zeros_like(param) if value is None else value for value, param in pairs]
    return torch.cat([_reals(value).double().flatten() for value in whole])


def _shaped(row: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """In the type and the memory layout of `like`."""
    if like.is_complex():
        row = torch.view_as_complex(row.reshape(*like.shape, 2))
    return torch.empty_like(like, requires_grad=False).copy_(row.reshape(like.shape))
