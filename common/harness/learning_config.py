"""What an experiment may say about learning: real training for a time instead of timed steps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from common.models.registry import is_replay, model_entry
from dear.errors import UserError
from dear.options import at_least, positive


@dataclass(frozen=True, kw_only=True)
class LearnConfig:
    """Training for a time; the key `learn:`. Algorithms that wait for nobody run at own pace."""

    budget_s: float = 20.0
    """Seconds of training, of the emulated cluster where there is one. Judging does not count."""
    eval_every_s: float = 1.0
    """Seconds of training between two copies of the parameters, which are judged afterwards."""
    data: Literal["mnist", "digits"] | None = None
    """What the model learns. `mnist`: the files in `data_dir`; `digits`: those of scikit-learn;
    null: the model's made-up batch, for rates of steps at own pace; nothing is judged."""
    sampler: Literal["shared", "own"] = "shared"
    """`shared`: in each round all ranks share one order of the data; `own`: each rank goes through
    the whole data in an order of its own (dear.pace.LocalStepRandomBatchSampler)."""
    batch_sizes: tuple[int, ...] | None = None
    """Samples per step of each rank instead of the model's: a slower host may have a smaller part.
    In averages every rank counts the same. Goes with `data`."""
    target_accuracy: float | None = None
    """Share of right answers, 0 .. 1, whose first time is recorded; null: none."""

    def __post_init__(self) -> None:
        if self.batch_sizes is not None:
            # JSON has lists; a trial equals itself read back.
            object.__setattr__(self, "batch_sizes", tuple(self.batch_sizes))
            for rank, size in enumerate(self.batch_sizes):
                at_least(f"learn.batch_sizes.{rank}", size, 1)
        positive("learn.budget_s", self.budget_s)
        positive("learn.eval_every_s", self.eval_every_s)
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
            for field in ("sampler", "batch_sizes", "target_accuracy"):
                if getattr(self, field) != LearnConfig.__dataclass_fields__[field].default:
                    raise UserError(f"learn.{field}: goes with learn.data=mnist or digits")

    @property
    def marks(self) -> tuple[float, ...]:
        """The times of the copies in seconds of training, 0 and the end among them."""
        count = math.ceil(self.budget_s / self.eval_every_s - 1e-9)
        return (*(i * self.eval_every_s for i in range(count)), self.budget_s)


def check_learning(
    learn: LearnConfig,
    *,
    model: str,
    world_sizes: Sequence[int],
    measure: object,
    timeout_s: float,
) -> None:
    """Raises `UserError` for what does not go with learning.

    Args:
        world_sizes: all of the experiment.
        measure: the experiment's `MeasureConfig`, of which only `repeats` means something, and
            `warmup_steps` where nothing is learned.
        timeout_s: longest duration of a repeat.
    """
    used = {"repeats"} | ({"warmup_steps"} if learn.data is None else set())
    for field in dataclasses.fields(measure):
        if field.name not in used and getattr(measure, field.name) != field.default:
            raise UserError(
                f"measure.{field.name}: means nothing with learn; allowed: "
                f"{', '.join(sorted(used))}"
            )
    if learn.data is not None and (is_replay(model) or not model_entry(model).learns):
        raise UserError(f"learn.data: {model} cannot learn {learn.data}; use model mnist_cnn")
    for world_size in world_sizes if learn.batch_sizes is not None else ():
        if world_size != len(learn.batch_sizes):
            raise UserError(
                f"learn.batch_sizes: {len(learn.batch_sizes)} batch sizes for {world_size} workers"
            )
    if timeout_s <= learn.budget_s:
        raise UserError(
            f"timeout_s: {timeout_s:g} s leave no time for learn.budget_s={learn.budget_s:g}"
        )
