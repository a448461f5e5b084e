"""A trial that learns: real data for a time, with copies of the parameters to judge afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import dear
from common.harness import check, judging
from common.harness.batches import Batches
from common.harness.learning_clock import Schedule, TrainingClock
from common.harness.learning_loop import Loop
from common.harness.settings import EmulationSettings
from common.harness.snapshots import Snapshots
from common.harness.timing import Usage
from common.harness.training import Training, untimed_steps
from common.harness.trial import Trial
from common.models import datasets
from common.models.datasets import Split
from common.models.workload import Workload
from dear.comm import runtime
from dear.errors import UserError
from dear.pace import Pace


def learn(
    trial: Trial, settings: EmulationSettings, workload: Workload, repeat: int, phase: Any
) -> dict[str, Any]:
    """One repeat of the trial, on all ranks; what rank 0 returns is the result.

    Ranks hand over what they have in files, not in messages: of ranks at their own pace one may be
    dead by then, and the others go on without it.

    Raises:
        UserError: the data is not there, not that of the trial, or too much for memory.
    """
    assert trial.learn is not None
    train, test = _data(trial)
    phase("warming up")
    _warm_up(trial, workload)
    training = Training(trial, workload)
    if trial.learn.data is None:
        # Nothing is learned, so windows, buckets and settings can be made before the clock runs.
        training.run(max(untimed_steps(trial), 1))
    phase("measuring")
    session = _Session(trial, settings, workload, training, train)
    session.run()
    phase("leaving")
    session.save(_path(settings.folder, repeat, dear.rank()))
    rank, size = dear.rank(), dear.size()
    if not trial.own_pace:
        runtime.communicator().barrier()
    training.close()  # at their own pace it waits for those that still train, unless they are dead
    dear.shutdown()
    if rank != 0:
        return {}
    phase("judging")
    paths = [_path(settings.folder, repeat, other) for other in range(size)]
    result = judging.result(trial, [_load(path) for path in paths], test)
    for path in paths:
        path.unlink(missing_ok=True)
    return result


class _Session:
    """The training itself, on one rank."""

    def __init__(
        self,
        trial: Trial,
        settings: EmulationSettings,
        workload: Workload,
        training: Training,
        train: Split | None,
    ) -> None:
        assert trial.learn is not None
        self._trial, self._learn, self._workload = trial, trial.learn, workload
        self._training = training
        self._communicator = runtime.communicator()
        self._batches: Batches | None = None
        if train is not None:
            self._batches = Batches(
                trial.learn,
                train,
                batch_size=trial.rank_batches[dear.rank()],
                seed=trial.seed,
                rank=dear.rank(),
                size=dear.size(),
            )
        self._snapshots = Snapshots(self._state(), len(trial.learn.marks))
        self._clock = TrainingClock(self._communicator.clock, settings.time_scale)
        self._pace = Pace(steps=0, samples=0, elapsed_s=0.0)
        self._more: dict[str, Any] = {}

    def run(self) -> None:
        """Trains to the end of the time."""
        loop = Loop(
            budget_s=self._learn.budget_s,
            step=self._step,
            settle=self._training.synchronize,
            take=self._take,
            schedule=Schedule(self._learn.marks),
            clock=self._clock,
            communicator=self._communicator,
        )
        sent = self._communicator.bytes_sent
        usage = Usage()
        own_pace = self._trial.own_pace
        self._pace = loop.own_pace() if own_pace else loop.in_step()
        own_s, busy_s, elapsed_s = usage.since()
        self._more = {
            "bytes_sent": self._communicator.bytes_sent - sent,
            "cpu_s": own_s,
            "busy_s": busy_s,
            "wall_s": elapsed_s,
            "loss": self._training.loss.item(),
            "statistics": self._training.statistics(),
        }
        if not own_pace and self._training.consistency in ("synchronous", "delayed"):
            spread = check.replica_spread(self._workload.model, self._communicator)
            self._more["replica_spread"] = spread

    def save(self, path: Path) -> None:
        """Writes what rank 0 needs to judge."""
        pace = {key: getattr(self._pace, key) for key in ("steps", "samples", "elapsed_s")}
        self._snapshots.save(path, {**self._more, **pace})

    def _step(self) -> int:
        samples = self._trial.batch_size
        if self._batches is not None:
            samples = self._batches.feed(self._workload)
        self._training.step()
        self._training.parts.clear()
        return samples

    def _take(self, marks: range, seconds: float, steps: int) -> None:
        self._snapshots.take(marks, self._state(), seconds, steps, self._behind())

    def _behind(self) -> dict[str, list[float]]:
        """By neighbour: uses of its values so far, and the sum of the steps they were behind."""
        counted = self._training.statistics().get("staleness", {})
        ages = {peer: age for peer, age in counted.items() if isinstance(age, dict)}
        return {
            peer: [age["uses"], age["uses"] * age["mean"]]
            for peer, age in ages.items()
            if age["uses"]
        }

    def _state(self) -> dict[str, torch.Tensor]:
        return {} if self._learn.data is None else self._workload.model.state_dict()


def _data(trial: Trial) -> tuple[Split | None, Split | None]:
    assert trial.learn is not None
    if trial.learn.data is None:
        return None, None
    folder = datasets.folder_of(trial.learn.data, None)
    found = datasets.digest(trial.learn.data, folder)
    if found != trial.data_digest:
        raise UserError(
            f"learn.data: {trial.learn.data} has changed since the sweep began, or is another one "
            f"on this host: digest {found}, wanted {trial.data_digest}"
        )
    return datasets.load(trial.learn.data, folder)


def _warm_up(trial: Trial, workload: Workload) -> None:
    """Computes once without an update, so that libraries are loaded and memory is there."""
    if trial.learn is not None and trial.learn.data is not None:
        workload.loss().backward()
        workload.model.zero_grad()
    # Dropout then draws the same masks whatever the algorithm; each rank has its own.
    torch.manual_seed(trial.seed * 1000 + dear.rank())


def _path(folder: Path, repeat: int, rank: int) -> Path:
    return folder / f"learned-{repeat}-rank{rank}.pt"


def _load(path: Path) -> dict[str, Any] | None:
    """What a rank saved; None if it has died before."""
    return torch.load(path, weights_only=True) if path.exists() else None
