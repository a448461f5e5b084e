"""Serial references: all ranks of a trial in one process.

A reference is a generator that makes the steps of an algorithm for all ranks, in a few lines. Only
a sample of each tensor's elements takes part, with the gradients that the ranks have recorded.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import nn

from common.harness.trial import Trial
from common.harness.worker.checking.deviation import Deviation, rounding
from common.harness.worker.checking.recording import Recording
from common.harness.worker.training import make_optimizer
from common.models.registry import precision
from dear.training.algorithm import Options


class Ranks:
    """Models and optimizers of all ranks; `x` and `g` have a row of float64 for each rank.

    Args:
        prepare: called with a rank just before its optimizer steps; if it returns False, the
            optimizer does not step.
        local_size: ranks on a host, for options that do not contain it.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        prepare: Callable[[int], bool] = lambda rank: True,
        local_size: int = 1,
    ) -> None:
        self.models, self.optimizers, self.local_size = models, optimizers, local_size
        self.recorded_present: torch.Tensor | None = None
        """Result of `present`, as recorded. None: it follows from the gradients of the models."""
        self._prepare = prepare
        self._params = [[p for p in model.parameters() if p.requires_grad] for model in models]
        sizes = [_reals(param).numel() for param in self._params[0]]
        ends = torch.tensor(sizes).cumsum(0).tolist()
        self.tensors = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        """Columns of each tensor."""

    @property
    def x(self) -> torch.Tensor:
        """Trained parameters, `[ranks, elements]`."""
        return torch.stack([_row(params, params) for params in self._params])

    @x.setter
    def x(self, values: torch.Tensor) -> None:
        for params, row in zip(self._params, values, strict=True):
            for param, tensor in zip(params, self.tensors, strict=True):
                param.data.copy_(_shaped(row[tensor], param))

    @property
    def g(self) -> torch.Tensor:
        """Gradients, `[ranks, elements]`; zeros for parameters without a gradient."""
        return torch.stack([_row([p.grad for p in params], params) for params in self._params])

    @g.setter
    def g(self, values: torch.Tensor) -> None:
        """Sets the gradients from a row per rank or one for all; zeros make a gradient None."""
        for params, row in zip(self._params, values.expand(len(self.models), -1), strict=True):
            for param, tensor in zip(params, self.tensors, strict=True):
                gradient = row[tensor] if param.requires_grad else row[:0]
                param.grad = _shaped(gradient, param) if gradient.count_nonzero() else None

    @property
    def present(self) -> torch.Tensor:
        """True for elements with a gradient, `[ranks, elements]`."""
        if self.recorded_present is not None:
            return self.recorded_present
        rows = [[param.grad is not None for param in params] for params in self._params]
        sizes = [tensor.stop - tensor.start for tensor in self.tensors]
        return torch.tensor(rows).repeat_interleave(torch.tensor(sizes), dim=1)

    def update(self, rank: int | None = None) -> None:
        """Steps the optimizer of a rank (None: the optimizers of all ranks)."""
        for each in range(len(self.models)) if rank is None else [rank]:
            if self._prepare(each):
                self.optimizers[each].step()


def _reals(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _row(tensors: Sequence[torch.Tensor | None], params: Sequence[nn.Parameter]) -> torch.Tensor:
    pairs = zip(tensors, params, strict=True)
    whole = [torch.zeros_like(param) if value is None else value for value, param in pairs]
    return torch.cat([_reals(value).double().flatten() for value in whole])


def _shaped(row: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if like.is_complex():
        row = torch.view_as_complex(row.reshape(*like.shape, 2))
    return torch.empty_like(like, requires_grad=False).copy_(row.reshape(like.shape))


Reference = Callable[["Ranks", Options], Iterator[None]]
Wire = Callable[[torch.Tensor, Trial], torch.Tensor]
"""Function that returns the gradients as other ranks receive them. Arguments: the gradients of all
ranks, `[ranks, elements]`, and the trial."""
ORDERS = 3
"""Allowed rounding error of a 16-bit sum in any order, relative to that of a sum in rank order. The
largest ratio in tests was 1.7 (fp16, AdamW, 3 ranks)."""


class _Sampled(nn.Module):
    def __init__(self, values: np.ndarray, dtype: torch.dtype) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.tensor(values, dtype=dtype))  # a copy: it is trained


def unrounded(gradients: torch.Tensor, trial: Trial) -> torch.Tensor:
    """Returns the gradients unchanged."""
    return gradients


def on_the_wire(gradients: torch.Tensor, trial: Trial) -> torch.Tensor:
    """Returns the gradients, rounded to the dtype in which the trial's algorithm sends them.

    Optimizers such as Adam magnify the rounding of small gradients without a useful bound. So the
    reference rounds in the same way.
    """
    if getattr(trial.options, "wire", None) is None:
        return gradients
    size = trial.world_size
    sent = trial.options.narrowed(gradients, size).to(gradients.dtype)
    return trial.options.mean(sent, size) * size


def summed_on_the_wire(gradients: torch.Tensor, trial: Trial) -> torch.Tensor:
    """Returns the mean of all ranks, for each rank, with the sum rounded to the 16-bit dtype, too.

    The sum is in rank order. The algorithm may use another order, so the rounding error of this sum
    only estimates the algorithm's (`ORDERS`). Only for trials that send 16-bit gradients.
    """
    total, *others = trial.options.narrowed(gradients, trial.world_size)
    for other in others:
        total = total + other
    mean = trial.options.mean(total.to(gradients.dtype), trial.world_size)
    return mean.expand_as(gradients)


def change_settings(optimizer: torch.optim.Optimizer) -> None:
    """Changes settings as a scheduler does, to find algorithms that keep using the old ones."""
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
        group["weight_decay"] += 0.1
        if group.get("momentum"):
            group["momentum"] *= 0.5
        if "betas" in group:
            group["betas"] = tuple(0.9 * beta for beta in group["betas"])
        if "eps" in group:
            group["eps"] = max(1e3 * group["eps"], 1e-4)


def isolated(ranks: Ranks, options: Options) -> Iterator[None]:
    """Reference in which every rank trains without the others; no algorithm may equal it."""
    while True:
        ranks.update()
        yield


class RecordedJob:
    """Recordings of all ranks of a trial, from the first to the last step, at sampled elements.

    Args:
        local_size: ranks on a host.
        changed: index of the step before which `change_settings` changed the optimizers.
    """

    def __init__(
        self, trial: Trial, recordings: Sequence[Recording], local_size: int, changed: int
    ) -> None:
        self.trial, self.recordings = trial, recordings
        self.local_size, self.changed = local_size, changed
        self.names, ends = recordings[0].names, recordings[0].ends
        self.steps = len(recordings[0].gradients)
        self.start = np.stack([r.start for r in recordings]).astype(np.float64)
        """Parameters before the first step, `[ranks, elements]`."""
        self.end = np.stack([r.end for r in recordings]).astype(np.float64)
        self._starts = [0, *ends[:-1]]
        known = np.any([np.isfinite(r.gradients) for r in recordings], axis=0)
        used = np.logical_or.reduceat(known, self._starts, axis=1)
        self._used = used.any(axis=0)
        pairs = zip(self.names, used.all(axis=0), strict=True)
        self.always_used = {name for name, always in pairs if always}
        """Tensors of which at least one rank had a gradient in each step."""

    def reads(self, step: int) -> np.ndarray | None:
        """Returns the parameters that all ranks read in a step; None if a rank was not watched."""
        if not all(step in recording.reads for recording in self.recordings):
            return None
        return np.stack([recording.reads[step] for recording in self.recordings])

    def rerun(self, reference: Reference, wire: Wire = on_the_wire) -> Iterator[np.ndarray]:
        """Repeats the steps of all ranks with a reference and the recorded gradients.

        The trial's optimizer runs in the trial's precision; it must be element-wise.

        Args:
            wire: function that returns the gradients as other ranks receive them.

        Yields:
            The parameters of all ranks, `[ranks, elements]`: at the start, and after each step.
        """
        trial = self.trial
        models = [_Sampled(r.start, precision(trial.dtype)[0]) for r in self.recordings]
        optimizers = [make_optimizer(trial.optimizer, model) for model in models]
        ranks = Ranks(models, optimizers, local_size=self.local_size)
        yield ranks.x.numpy()
        with contextlib.closing(reference(ranks, trial.options)) as steps:
            for step in range(self.steps):
                if step == self.changed:
                    for optimizer in optimizers:
                        change_settings(optimizer)
                recorded = np.stack([r.gradients[step] for r in self.recordings])
                gradients = np.nan_to_num(recorded)
                ranks.g = wire(torch.from_numpy(gradients), trial).double()
                ranks.recorded_present = torch.from_numpy(~np.isnan(recorded))
                next(steps)
                yield ranks.x.numpy()

    def end_of(self, reference: Reference) -> np.ndarray:
        """Returns the last parameters of `rerun`."""
        return deque(self.rerun(reference), maxlen=1)[0]

    def norms(self, values: np.ndarray) -> np.ndarray:
        """Returns norms by rank and tensor; 0 for a tensor without recorded elements."""
        squares = np.square(values, dtype=np.float64)
        sums = np.sqrt(np.add.reduceat(squares, self._starts, axis=1))
        return np.where(self.unread(squares), 0.0, sums)

    def unread(self, values: np.ndarray) -> np.ndarray:
        """Returns, by rank and tensor, True if no element was recorded."""
        return np.logical_and.reduceat(np.isnan(values), self._starts, axis=1)

    def worst(self, errors: np.ndarray, moved: np.ndarray) -> Deviation:
        """Returns the largest `errors / moved` of any rank; skips tensors without gradients."""
        with np.errstate(divide="ignore", invalid="ignore"):
            relative = np.where(errors == 0, 0.0, errors / moved)
        relative = np.where(np.isnan(relative), np.inf, relative).max(axis=0)
        relative = np.where(self._used, relative, 0.0)
        place = int(relative.argmax())
        return Deviation(error=float(relative[place]), tensor=self.names[place])

    def difference(self, reference: Reference, other: Reference, tolerance: float) -> Deviation:
        """Returns how far the last parameters differ, relative to how far `other`'s moved."""
        end, wanted = self.end_of(reference), self.end_of(other)
        least = rounding(self.trial.dtype, self.steps) / tolerance
        moved = np.maximum(self.norms(wanted - self.start), least * self.norms(wanted))
        return self.worst(self.norms(end - wanted), moved)


class Comparison:
    """Comparison of the ranks with a reference, at the sampled elements.

    Rounding of sent gradients adds up over the steps. So the parameters that a forward pass reads
    may have larger errors than the movement of a step. But from one watched pass to the next, the
    error may grow only by a share of the movement between them. A rank that reads old parameters in
    one pass and current ones in another exceeds this.

    Args:
        tolerance: largest error that is due to rounding alone.
        mixed: True if parameters are averaged in each step, as for `rounding`.
    """

    def __init__(
        self, job: RecordedJob, reference: Reference, tolerance: float, *, mixed: bool = False
    ) -> None:
        self._job, self._tolerance, self._mixed = job, tolerance, mixed
        self.read, self.read_in = Deviation(), 1
        """Worst growth of the error from one watched pass to the next, relative to the movement in
        between, and the number of the step (from 1); number of steps + 1: after the last step."""
        path = job.rerun(reference)
        # Algorithms that measure in the first steps may send unrounded gradients.
        wires = (unrounded, summed_on_the_wire) if getattr(job.trial.options, "wire", None) else ()
        others = [job.rerun(reference, wire) for wire in wires]
        at = next(path)
        slack = _slack(at, others)
        self._known, self._known_slack = np.zeros_like(at), slack
        """Error and slack of each element when it was last read."""
        self._moved = job.norms(self._known)
        """Sum of each tensor's movements since it was last read, and the number of these steps."""
        self._steps = np.zeros_like(self._moved)
        for step in range(job.steps):
            rows = job.reads(step)
            if rows is not None:
                self._look(step, rows, at, slack)
            before, at = at, next(path)
            slack = _slack(at, others)
            self._moved = self._moved + job.norms(at - before)
            self._steps = self._steps + 1
        end = np.where(np.isnan(job.end), np.inf, job.end)
        self._look(job.steps, end, at, slack)
        room = self._room(job.norms(at - job.start), job.steps, at, slack)
        self.end = job.worst(job.norms(end - at), room)
        """Deviation after the last step, relative to the movement in all steps."""

    def _room(
        self, moved: np.ndarray, steps: float | np.ndarray, at: np.ndarray, slack: np.ndarray
    ) -> np.ndarray:
        """Returns the movement of each tensor, or the possible rounding error if it is larger."""
        job = self._job
        least = rounding(job.trial.dtype, steps, mixed=self._mixed) * job.norms(at)
        return np.maximum.reduce(
            [moved, *(r / self._tolerance for r in (least, *map(job.norms, slack)))]
        )

    def _look(self, step: int, rows: np.ndarray, at: np.ndarray, slack: np.ndarray) -> None:
        """Compares the values that ranks read in a step (NaN: not read) with the reference's."""
        job, unread = self._job, np.isnan(rows)
        errors = np.where(unread, self._known, rows - at)
        # In exact diffusion, the rounding of a step has an effect in each later step.
        steps = step if self._mixed else self._steps
        room = self._room(self._moved, steps, at, slack - self._known_slack)
        worst = job.worst(job.norms(errors - self._known), room)
        if worst.error > self.read.error:
            self.read, self.read_in = worst, step + 1
        self._known, self._known_slack = errors, np.where(unread, self._known_slack, slack)
        self._moved, self._steps = (
            np.where(job.unread(rows), value, 0.0) for value in (self._moved, self._steps)
        )


def _slack(at: np.ndarray, others: Sequence[Iterator[np.ndarray]]) -> np.ndarray:
    """Returns allowed distances from `at`, `[2, ranks, elements]`; empty without `others`.

    The first distance is for algorithms that do not round, the second for another order of sums.
    """
    if not others:
        return at[:0, None]
    plain, summed = (at - next(other) for other in others)
    return np.stack([plain, ORDERS * summed])
