"""All ranks of a job in one process, as the serial references of algorithms see them.

With the gradients that the ranks of a trial have had at a sample of the elements, a reference makes
all its steps again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from common.harness.trial import Trial
from common.harness.worker.checking.correctness import Farthest, rounding
from common.harness.worker.checking.witness import Testimony
from common.harness.worker.training import make_optimizer
from common.models.registry import precision


class Ranks:
    """Models and optimizers of all ranks; `x` and `g` have a row of float64 for each.

    Args:
        prepare: called with a rank just before its optimizer steps; False: it shall not.
        local_size: ranks on a host, for options that leave it to the launcher.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        prepare: Callable[[int], bool] = lambda rank: True,
        local_size: int = 1,
    ) -> None:
        self.models, self.optimizers, self.local_size = models, optimizers, local_size
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


Reference = Callable[[Any, Any], Iterator[None]]


class _Sampled(nn.Module):
    """One rank's parameters at the elements that were watched, as one tensor."""

    def __init__(self, values: np.ndarray, dtype: torch.dtype) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.from_numpy(values).to(dtype))


def again(
    trial: Trial, reference: Reference, seen: Sequence[Testimony], local_size: int
) -> Iterator[np.ndarray]:
    """Where a reference leads with the gradients that ranks have had: before, and by step.

    The optimizer is that of the trial, in its precision; it must treat each element by itself.

    Args:
        seen: of all ranks.

    Yields:
        The parameters of all ranks, `[ranks, elements]`.
    """
    dtype, _ = precision(trial.dtype)
    models = [_Sampled(one.start, dtype) for one in seen]
    optimizers = [make_optimizer(trial.optimizer, model) for model in models]
    ranks = Ranks(models, optimizers, local_size=local_size)
    yield ranks.x.numpy()
    with contextlib.closing(reference(ranks, trial.options)) as steps:
        for gradients in zip(*(one.gradients for one in seen), strict=True):
            ranks.g = torch.from_numpy(np.nan_to_num(np.stack(gradients))).double()
            next(steps)
            yield ranks.x.numpy()


def alone(ranks: Any, options: Any) -> Iterator[None]:
    """Every rank for itself: what no algorithm shall come to."""
    while True:
        ranks.update()
        yield


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Of what ranks did with what a reference makes of their gradients."""

    end: Farthest
    """After the last step, relative to how far the parameters moved from the first on."""
    read: Farthest
    """In the worst forward pass that was watched, relative to how far the step before moved."""
    read_in: int
    """The step of that, from 1."""


def compare(
    trial: Trial,
    reference: Reference,
    seen: Sequence[Testimony],
    local_size: int,
    tolerance: float,
) -> Comparison:
    """How far the ranks are from the reference, at the sampled elements.

    Args:
        tolerance: what rounding alone is held to be below.
    """
    sample = Sample(seen)
    path = again(trial, reference, seen, local_size)
    before = at = next(path)
    start, read, read_in = at, Farthest(), 1
    for step in range(sample.steps):
        if all(step in one.reads for one in seen):
            least = rounding(trial.dtype, step) / tolerance
            off = np.stack([one.reads[step] for one in seen]) - at
            moved = np.maximum(sample.norms(at - before), least * sample.norms(at))
            found = sample.farthest(sample.norms(off), moved)
            if found.error > read.error:
                read, read_in = found, step + 1
        before, at = at, next(path)
    least = rounding(trial.dtype, sample.steps) / tolerance
    moved = np.maximum(sample.norms(at - start), least * sample.norms(at))
    off = sample.norms(np.stack([one.end for one in seen]) - at)
    return Comparison(end=sample.farthest(off, moved), read=read, read_in=read_in)


class Sample:
    """The tensors of what all ranks have seen, those without any gradient left out."""

    def __init__(self, seen: Sequence[Testimony]) -> None:
        self._names, ends = seen[0].names, seen[0].ends
        self._starts = [0, *ends[:-1]]
        self.steps = len(seen[0].gradients)
        known = np.any([np.isfinite(one.gradients).any(axis=0) for one in seen], axis=0)
        self._known = np.logical_or.reduceat(known, self._starts)

    def norms(self, values: np.ndarray) -> np.ndarray:
        """By rank and tensor; what was not read (all of a tensor) counts as zero."""
        squares = np.square(values, dtype=np.float64)
        unread = np.logical_and.reduceat(np.isnan(squares), self._starts, axis=1)
        return np.where(unread, 0.0, np.sqrt(np.add.reduceat(squares, self._starts, axis=1)))

    def farthest(self, off: np.ndarray, moved: np.ndarray) -> Farthest:
        """The worst tensor of any rank, from norms."""
        with np.errstate(divide="ignore", invalid="ignore"):
            errors = np.where(off == 0, 0.0, off / moved)
        errors = np.where(np.isnan(errors), np.inf, errors).max(axis=0)
        errors = np.where(self._known, errors, 0.0)
        worst = int(errors.argmax())
        return Farthest(error=float(errors[worst]), tensor=self._names[worst])
