"""Sections `optimizer`, `measure` and `learn` of an experiment file; trials have them unchanged."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from common.models.datasets import SOURCES
from dear.errors import UserError, one_of
from dear.options import at_least, positive


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer and its settings, which are equal for every algorithm of an experiment."""

    name: Literal["sgd", "adamw"] = "sgd"
    """Optimizer of torch."""
    lr: float = 0.01
    """Learning rate."""
    momentum: float = 0.0
    """Momentum of SGD."""
    weight_decay: float = 0.0
    """Weight decay."""

    def __post_init__(self) -> None:
        positive("optimizer.lr", self.lr)
        at_least("optimizer.momentum", self.momentum, 0)
        at_least("optimizer.weight_decay", self.weight_decay, 0)
        if self.name != "sgd" and self.momentum:
            raise UserError(f"optimizer.momentum: {self.name} has no momentum; leave it out")

    @property
    def state_copies(self) -> int:
        """Tensors of optimizer state per parameter."""
        return 2 if self.name == "adamw" else int(self.momentum > 0)

    @property
    def update_passes(self) -> int:
        """Number of times that an update reads or writes memory of the parameters' size.

        An update reads gradients, and reads and writes parameters and state.
        """
        return 3 + 2 * self.state_copies


@dataclass(frozen=True, kw_only=True)
class MeasureConfig:
    """Number and length of the measurements. Each step is timed; warm-up steps are left out."""

    repeats: int | tuple[int, int] = 3
    """Number of launches of a trial, interleaved with those of the trials that it is compared with.
    With `precision`: the smallest and the largest number, as [5, 12]."""
    precision: float | None = None
    """Half width of the 95 % intervals, relative to the value. Trials that are compared with each
    other end together, when all their intervals are this narrow."""
    repeats_at_2k: int = 0
    """Extra repeats of emulated trials at 2k, twice their time scale. They estimate the systematic
    error, and are not part of the result."""
    warmup_steps: int = 3
    """Smallest number of untimed steps. Steps in which the algorithm reports that it tunes itself
    are untimed, too."""
    num_iters: int = 1
    """Blocks of steps per repeat, with a barrier before each block. With 1, the first repeat of a
    model that computes has two blocks of half the steps."""
    steps_per_iter: int | None = None
    """Steps per block, rounded up to whole periods of the algorithm, at least two; null: rank 0
    chooses, so that a block takes `min_iter_s`."""
    min_iter_s: float = 1.0
    """Duration of a block in real seconds, if rank 0 chooses the number of steps: at least
    `min_steps` and two periods of the algorithm, and at most about 1000 steps."""
    min_steps: int = 3
    """Smallest number of steps per block, if rank 0 chooses it."""
    check_steps: int = 2
    """Number of steps that run both with and without the algorithm, to compare the results."""

    def __post_init__(self) -> None:
        if not isinstance(self.repeats, int):
            object.__setattr__(self, "repeats", tuple(self.repeats))
            if len(self.repeats) != 2 or self.repeats[0] > self.repeats[1]:
                raise UserError(
                    f"measure.repeats: must be a number or [least, most], got {list(self.repeats)}"
                )
        positive("measure.precision", self.precision)
        if isinstance(self.repeats, int) != (self.precision is None):
            raise UserError(
                "measure: `precision` and a range of `repeats` need each other, e.g. "
                "{repeats: [5, 12], precision: 0.02}"
            )
        at_least("measure.repeats", self.least_repeats, 1)
        for name in ("num_iters", "min_steps", "check_steps"):
            at_least(f"measure.{name}", getattr(self, name), 1)
        at_least("measure.repeats_at_2k", self.repeats_at_2k, 0)
        at_least("measure.warmup_steps", self.warmup_steps, 0)
        positive("measure.min_iter_s", self.min_iter_s)
        if self.steps_per_iter is not None:
            at_least("measure.steps_per_iter", self.steps_per_iter, 1)

    @property
    def least_repeats(self) -> int:
        """Smallest number of repeats."""
        return self.repeats if isinstance(self.repeats, int) else self.repeats[0]

    @property
    def most_repeats(self) -> int:
        """Largest number of repeats, which is reached if the intervals stay too wide."""
        return self.repeats if isinstance(self.repeats, int) else self.repeats[1]

    @property
    def plan(self) -> str:
        """Text with the number of repeats, and the precision at which they end."""
        text = f"{self.least_repeats} repeats"
        if self.precision is not None:
            text = (
                f"{self.least_repeats} to {self.most_repeats} repeats, until the interval is "
                f"+-{100 * self.precision:g} % of its value"
            )
        more = self.repeats_at_2k
        return text + (f", and {more} at twice the time scale" if more else "")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Schedule of the learning rate, by torch's schedulers; it changes before each step."""

    kind: Literal["constant", "multistep", "cosine", "exponential"] = "constant"
    """Form of the schedule. `multistep`: the rate is multiplied by `gamma` after each of
    `milestones`; `cosine`: it falls along half a cosine, to 0 at the end; `exponential`: it is
    multiplied by `gamma` per epoch, by a small factor in each step."""
    milestones: tuple[int, ...] = ()
    """Epochs in ascending order, for `multistep`."""
    gamma: float = 0.1
    """Factor of `multistep` and `exponential`."""
    warmup_epochs: float = 0.0
    """Epochs in which the rate rises linearly to its full value. It starts at the unscaled rate if
    `scale` is set and there are several workers, otherwise at a tenth of the full rate."""
    scale: Literal["none", "linear", "sqrt"] = "none"
    """Factor of the learning rate, because several workers have a larger batch together. `linear`:
    the number of workers (Goyal et al. 2017, arXiv 1706.02677); `sqrt`: its square root."""

    def __post_init__(self) -> None:
        positive("learn.schedule.gamma", self.gamma)
        at_least("learn.schedule.warmup_epochs", self.warmup_epochs, 0)
        object.__setattr__(self, "milestones", tuple(self.milestones))
        if list(self.milestones) != sorted(set(self.milestones)):
            raise UserError(f"learn.schedule.milestones must ascend, got {list(self.milestones)}")
        if bool(self.milestones) != (self.kind == "multistep"):
            raise UserError("learn.schedule: `milestones` and `kind: multistep` need each other")
        if self.gamma != ScheduleConfig.gamma and self.kind not in ("multistep", "exponential"):
            raise UserError(f"learn.schedule.gamma: {self.kind} has no factor; leave it out")

    def check(self, epochs: int) -> None:
        """Raises `UserError` if the warm-up or a milestone is not within `epochs` epochs."""
        if self.warmup_epochs >= epochs:
            raise UserError(
                f"learn.schedule.warmup_epochs must be below learn.epochs, got "
                f"{self.warmup_epochs:g} and {epochs}"
            )
        if self.milestones and not 0 < self.milestones[0] <= self.milestones[-1] < epochs:
            raise UserError(
                f"learn.schedule.milestones must lie between 0 and learn.epochs={epochs}, got "
                f"{list(self.milestones)}"
            )
        if self.milestones and self.milestones[0] <= self.warmup_epochs:
            raise UserError(
                f"learn.schedule.milestones must come after warmup_epochs={self.warmup_epochs:g}, "
                f"got {list(self.milestones)}"
            )


@dataclass(frozen=True, kw_only=True)
class LearnConfig:
    """Training for a number of seconds or epochs. Ranks of asynchronous algorithms make steps at
    their own pace."""

    budget_s: float = 20.0
    """Seconds of training, without evaluation; on virtual hosts, emulated seconds."""
    eval_every_s: float = 1.0
    """Seconds of training between two copies of the parameters, which are evaluated afterwards."""
    epochs: int | None = None
    """Epochs of training, in place of `budget_s`. Needs `data`."""
    eval_every_epochs: int = 1
    """Epochs between two copies of the parameters."""
    data: str | None = None
    """Data set: `mnist`, `cifar10`, `cifar100`, `imagefolder` (ImageNet's layout) or `text`, with
    files in `data_dir`; `digits` of scikit-learn. null: the model's synthetic batch, without
    evaluation."""
    loader_workers: int = 0
    """Processes of each rank that read batches ahead; 0: the rank reads them itself."""
    schedule: ScheduleConfig | None = None
    """Schedule of the learning rate. Needs `epochs`."""
    sampler: Literal["shared", "own"] = "shared"
    """Order of the data. `shared`: in each epoch all ranks share one order; `own`: each rank reads
    all data in an order of its own (dear.training.pace.LocalStepRandomBatchSampler)."""
    batch_sizes: tuple[int, ...] | None = None
    """Samples per step of each rank, in place of the model's. A slower host may have fewer.
    Averages weigh all ranks equally."""
    target_accuracy: float | None = None
    """Accuracy, 0 .. 1, as a target; the time to reach it is recorded. null: no target."""

    def __post_init__(self) -> None:
        if self.batch_sizes is not None:
            for rank, size in enumerate(self.batch_sizes):
                at_least(f"learn.batch_sizes.{rank}", size, 1)
        positive("learn.budget_s", self.budget_s)
        positive("learn.eval_every_s", self.eval_every_s)
        at_least("learn.eval_every_epochs", self.eval_every_epochs, 1)
        at_least("learn.loader_workers", self.loader_workers, 0)
        if self.data is not None:
            one_of("learn.data", self.data, SOURCES)
        self._check_epochs()
        if self.eval_every_s > self.budget_s:
            raise UserError(
                f"learn.eval_every_s must be at most learn.budget_s, got {self.eval_every_s:g} "
                f"and {self.budget_s:g}"
            )
        if self.target_accuracy is not None and not 0 < self.target_accuracy <= 1:
            raise UserError(
                f"learn.target_accuracy must be above 0 and at most 1, got {self.target_accuracy:g}"
            )
        if self.data is None:
            self._needs("data", "sampler", "target_accuracy", "epochs", "loader_workers")

    def _check_epochs(self) -> None:
        if self.epochs is None:
            self._needs("epochs", "eval_every_epochs", "schedule")
            return
        at_least("learn.epochs", self.epochs, 1)
        for field in ("budget_s", "eval_every_s"):
            if self._is_set(field):
                raise UserError(f"learn.{field} and learn.epochs exclude each other; leave one out")
        if self.schedule is not None:
            self.schedule.check(self.epochs)

    def _needs(self, other: str, *fields: str) -> None:
        for field in fields:
            if self._is_set(field):
                raise UserError(f"learn.{field}: needs learn.{other}")

    def _is_set(self, field: str) -> bool:
        return getattr(self, field) != self.__dataclass_fields__[field].default

    @property
    def marks(self) -> tuple[float, ...]:
        """Times at which parameters are copied, from 0 to the end, in seconds or in epochs."""
        if self.epochs is not None:
            return (*range(0, self.epochs, self.eval_every_epochs), self.epochs)
        count = math.ceil(self.budget_s / self.eval_every_s - 1e-9)
        return (*(i * self.eval_every_s for i in range(count)), self.budget_s)
