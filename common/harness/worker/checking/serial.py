"""All ranks of a job in one process, as the serial references of algorithms see them.

With the gradients that the ranks of a trial have had at a sample of the elements, a reference makes
all its steps again.
"""

from __future__ import annotations

import contextlib
from collections import deque
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
Wire = Callable[[torch.Tensor, Trial], torch.Tensor]
"""From the gradients of all ranks, `[ranks, elements]`, to what the other ranks receive of them."""
ORDERS = 3
"""How much larger the rounding error of a 16-bit sum may be than that of a sum in rank order. The
largest factor seen was 1.7 (fp16, AdamW, 3 ranks)."""


class _Sampled(nn.Module):
    """One rank's parameters at the elements that were watched, as one tensor."""

    def __init__(self, values: np.ndarray, dtype: torch.dtype) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.tensor(values, dtype=dtype))  # a copy: it is trained


def whole(gradients: torch.Tensor, trial: Trial) -> torch.Tensor:
    """The gradients as they are: nothing is rounded."""
    return gradients


def on_the_wire(gradients: torch.Tensor, trial: Trial) -> torch.Tensor:
    """What arrives of a rank's gradient where it travels in a smaller type, divided by the ranks.

    An optimizer such as Adam makes much of gradients so small that such a type does not know them:
    no bound of the error would be narrow enough to find anything, but the rounding is known.
    """
    if getattr(trial.options, "wire", None) is None:
        return gradients
    size = trial.world_size
    return trial.options.narrowed(gradients, size).to(gradients.dtype) * size


def summed_on_the_wire(gradients: torch.Tensor, trial: Trial) -> torch.Tensor:
    """The mean of all ranks, for each rank, where the sum is rounded to the smaller type, too.

    The sum goes in rank order. A program may use another order, so the rounding error of this sum
    is an estimate of the program's own (`ORDERS`). Only for trials that send a smaller type.
    """
    first, *others = trial.options.narrowed(gradients, trial.world_size)
    for other in others:
        first = first + other
    return first.to(gradients.dtype).expand_as(gradients)


def again(
    trial: Trial,
    reference: Reference,
    seen: Sequence[Testimony],
    local_size: int,
    changed: int | None = None,
    wire: Wire = on_the_wire,
) -> Iterator[np.ndarray]:
    """Where a reference leads with the gradients that ranks have had: before, and by step.

    The optimizer is that of the trial, in its precision; it must treat each element by itself.

    Args:
        seen: of all ranks.
        changed: the step, from 0, before which `change_settings` changed the optimizer's settings.
        wire: what the other ranks receive of the gradients.

    Yields:
        The parameters of all ranks, `[ranks, elements]`.
    """
    dtype, _ = precision(trial.dtype)
    models = [_Sampled(one.start, dtype) for one in seen]
    optimizers = [make_optimizer(trial.optimizer, model) for model in models]
    ranks = Ranks(models, optimizers, local_size=local_size)
    yield ranks.x.numpy()
    with contextlib.closing(reference(ranks, trial.options)) as steps:
        for step, gradients in enumerate(zip(*(one.gradients for one in seen), strict=True)):
            if step == changed:
                for optimizer in optimizers:
                    change_settings(optimizer)
            values = torch.from_numpy(np.nan_to_num(np.stack(gradients)))
            ranks.g = wire(values, trial).double()
            next(steps)
            yield ranks.x.numpy()


def change_settings(optimizer: torch.optim.Optimizer) -> None:
    """Other settings from the next step on, as a scheduler sets them: who has kept older ones is
    found by that."""
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
        group["weight_decay"] += 0.1
        if group.get("momentum"):
            group["momentum"] *= 0.5
        if "betas" in group:
            group["betas"] = tuple(0.9 * beta for beta in group["betas"])
        if "eps" in group:
            group["eps"] = max(1e3 * group["eps"], 1e-4)


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
    """In the worst forward pass that was watched: by how much more it was off than the one that was
    watched before, relative to how far all steps between moved. The last one is the end."""
    read_in: int
    """The step of that, from 1; one more than there are: the end."""


def compare(
    trial: Trial,
    reference: Reference,
    seen: Sequence[Testimony],
    local_size: int,
    tolerance: float,
    changed: int | None = None,
    mixed: bool = False,
) -> Comparison:
    """How far the ranks are from the reference, at the sampled elements.

    Rounding on the wire adds up over the steps, so what a forward pass reads may be off by more
    than one step moves. But from one look to the next that may grow by no more than a share of what
    the steps between have moved: who reads old values now is off by a step more than in the end.

    Args:
        tolerance: what rounding alone is held to be below.
        changed: as of `again`.
        mixed: as of `rounding`.
    """
    sample = Sample(seen)
    path = again(trial, reference, seen, local_size, changed)
    # Who still measures in the first steps may send gradients as they are.
    wires = (whole, summed_on_the_wire) if getattr(trial.options, "wire", None) else ()
    others = [again(trial, reference, seen, local_size, changed, wire) for wire in wires]
    before = at = next(path)
    apart = known_apart = _apart(at, others)
    start, read, read_in = at, Farthest(), 1
    known = np.zeros_like(at)
    """How far each element was off when it was last read."""
    moved = sample.norms(known)
    """How far each tensor has moved since then, step by step."""
    count = np.zeros_like(moved)
    ends = np.nan_to_num(np.stack([one.end for one in seen]), nan=np.inf)
    for step in range(sample.steps + 1):
        rows = ends if step == sample.steps else _rows(seen, step)
        if rows is not None:
            off = np.where(np.isnan(rows), known, rows - at)
            # Exact diffusion adds the rounding of a step in each of the later ones anew.
            rounds = step if mixed else count
            least = rounding(trial.dtype, rounds, mixed=mixed) / tolerance
            room = np.maximum(moved, least * sample.norms(at))
            gained = map(sample.norms, apart - known_apart)
            room = np.maximum.reduce([room, *(norms / tolerance for norms in gained)])
            worst = sample.farthest(sample.norms(off - known), room)
            if worst.error > read.error:
                read, read_in = worst, step + 1
            read_now = ~sample.unread(rows)
            known_apart = np.where(np.isnan(rows), known_apart, apart)
            known, moved = off, np.where(read_now, 0.0, moved)
            count = np.where(read_now, 0.0, count)
        if step < sample.steps:
            before, at = at, next(path)
            apart = _apart(at, others)
            moved = moved + sample.norms(at - before)
            count = count + 1
    least = rounding(trial.dtype, sample.steps, mixed=mixed) / tolerance
    way = np.maximum(sample.norms(at - start), least * sample.norms(at))
    way = np.maximum.reduce([way, *(sample.norms(one) / tolerance for one in apart)])
    end = sample.farthest(sample.norms(ends - at), way)
    return Comparison(end=end, read=read, read_in=read_in)


def _apart(at: np.ndarray, others: Sequence[Iterator[np.ndarray]]) -> np.ndarray:
    """Allowed distances from `at`, `[2, ranks, elements]`: of a program that does not round, and of
    one that sums in another order. Empty without `others`."""
    if not others:
        return at[:0, None]
    unrounded, summed = (at - next(other) for other in others)
    return np.stack([unrounded, ORDERS * summed])


def difference(
    trial: Trial,
    some: Reference,
    other: Reference,
    seen: Sequence[Testimony],
    local_size: int,
    tolerance: float,
) -> Farthest:
    """How far one reference leads from another one, relative to how far that leads."""
    sample = Sample(seen)
    paths = [deque(again(trial, one, seen, local_size), maxlen=1)[0] for one in (some, other)]
    start = np.stack([one.start for one in seen])
    least = rounding(trial.dtype, sample.steps) / tolerance
    way = np.maximum(sample.norms(paths[1] - start), least * sample.norms(paths[1]))
    return sample.farthest(sample.norms(paths[0] - paths[1]), way)


def always_used(seen: Sequence[Testimony]) -> set[str]:
    """Tensors of which some rank had a gradient in each step."""
    known = np.any([np.isfinite(one.gradients) for one in seen], axis=0)
    starts = [0, *seen[0].ends[:-1]]
    whole = np.logical_or.reduceat(known, starts, axis=1).all(axis=0)
    return {name for name, used in zip(seen[0].names, whole, strict=True) if used}


def _rows(seen: Sequence[Testimony], step: int) -> np.ndarray | None:
    """What all ranks read in a step; None where one of them was not watched."""
    if not all(step in one.reads for one in seen):
        return None
    return np.stack([one.reads[step] for one in seen])


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
        sums = np.sqrt(np.add.reduceat(squares, self._starts, axis=1))
        return np.where(self.unread(squares), 0.0, sums)

    def unread(self, values: np.ndarray) -> np.ndarray:
        """By rank and tensor: nothing of it was read."""
        return np.logical_and.reduceat(np.isnan(values), self._starts, axis=1)

    def farthest(self, off: np.ndarray, moved: np.ndarray) -> Farthest:
        """The worst tensor of any rank, from norms."""
        with np.errstate(divide="ignore", invalid="ignore"):
            errors = np.where(off == 0, 0.0, off / moved)
        errors = np.where(np.isnan(errors), np.inf, errors).max(axis=0)
        errors = np.where(self._known, errors, 0.0)
        worst = int(errors.argmax())
        return Farthest(error=float(errors[worst]), tensor=self._names[worst])
