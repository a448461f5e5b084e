"""Training for real: what an experiment says of it below the key `learn:`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from common.models.datasets import SOURCES
from dear.errors import UserError, one_of
from dear.options import at_least, positive

BUDGET_S = 20.0


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """How the learning rate changes, by torch's schedulers; it is set anew before every step."""

    kind: Literal["constant", "multistep", "cosine", "exponential"] = "constant"
    """`multistep`: it is multiplied by `gamma` after each of `milestones`; `cosine`: it falls to 0
    in the last epoch; `exponential`: it is multiplied by `gamma` in each epoch, evenly."""
    milestones: tuple[int, ...] = ()
    """Epochs, ascending."""
    gamma: float = 0.1
    warmup_epochs: float = 0.0
    """At first it rises evenly for so many epochs: from the unscaled one where it is scaled, else
    from a tenth."""
    scale: Literal["none", "linear", "sqrt"] = "none"
    """With more workers the batch of a step is larger: the learning rate is multiplied by their
    number (Goyal et al. 2017, arXiv 1706.02677), or by its square root."""

    def __post_init__(self) -> None:
        positive("learn.schedule.gamma", self.gamma)
        at_least("learn.schedule.warmup_epochs", self.warmup_epochs, 0)
        object.__setattr__(self, "milestones", tuple(self.milestones))
        if list(self.milestones) != sorted(set(self.milestones)):
            raise UserError(f"learn.schedule.milestones must ascend, got {list(self.milestones)}")
        if bool(self.milestones) != (self.kind == "multistep"):
            raise UserError("learn.schedule: `milestones` and `kind: multistep` go together")

    def check(self, epochs: int) -> None:
        """Raises `UserError` if not all of it comes within so many epochs."""
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


@dataclass(frozen=True, kw_only=True)
class LearnConfig:
    """Training for a time or for some epochs; the key `learn:`. Algorithms that wait for nobody run
    at own pace."""

    budget_s: float = BUDGET_S
    """Seconds of training, of the emulated cluster where there is one. Judging does not count."""
    eval_every_s: float = 1.0
    """Seconds of training between two copies of the parameters, which are judged afterwards."""
    epochs: int | None = None
    """Train for so many rounds of the data instead. Goes with `data`."""
    eval_every_epochs: int = 1
    """Epochs between two copies of the parameters."""
    data: str | None = None
    """What the model learns, of `common.models.datasets.SOURCES`: `mnist`, `cifar10`, `cifar100`,
    `imagefolder` (ImageNet's form) or `text`, whose files are in `data_dir`; `digits`: those of
    scikit-learn; null: the model's made-up batch, for rates of steps at own pace; nothing is
    judged."""
    loader_workers: int = 0
    """Processes of each rank that read batches ahead; 0: the rank reads them itself."""
    schedule: ScheduleConfig | None = None
    """How the learning rate changes from epoch to epoch. Goes with `epochs`."""
    sampler: Literal["shared", "own"] = "shared"
    """`shared`: in each round all ranks share one order of the data; `own`: each rank goes through
    the whole data in an order of its own (dear.training.pace.LocalStepRandomBatchSampler)."""
    batch_sizes: tuple[int, ...] | None = None
    """Samples per step of each rank instead of the model's: a slower host may have a smaller part.
    In averages every rank counts the same. Goes with `data`."""
    target_accuracy: float | None = None
    """Share of right answers, 0 .. 1; how soon it is reached is told. null: none."""

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
            self._goes_with(
                "data", "sampler", "batch_sizes", "target_accuracy", "epochs", "loader_workers"
            )

    def _check_epochs(self) -> None:
        if self.epochs is None:
            self._goes_with("epochs", "eval_every_epochs", "schedule")
            return
        at_least("learn.epochs", self.epochs, 1)
        for field in ("budget_s", "eval_every_s"):
            if getattr(self, field) != _default(field):
                raise UserError(f"learn.{field}: goes without learn.epochs")
        if self.schedule is not None:
            self.schedule.check(self.epochs)

    def _goes_with(self, other: str, *fields: str) -> None:
        """Raises `UserError` for one of `fields` that is set, which `other` is not."""
        for field in fields:
            if getattr(self, field) != _default(field):
                raise UserError(f"learn.{field}: goes with learn.{other}")

    @property
    def marks(self) -> tuple[float, ...]:
        """When copies are made, in seconds of training or in epochs; 0 and the end among them."""
        if self.epochs is not None:
            return (*range(0, self.epochs, self.eval_every_epochs), self.epochs)
        count = math.ceil(self.budget_s / self.eval_every_s - 1e-9)
        return (*(i * self.eval_every_s for i in range(count)), self.budget_s)


def _default(field: str) -> Any:
    return LearnConfig.__dataclass_fields__[field].default
