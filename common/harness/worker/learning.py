"""A trial that learns: real data, with copies of the parameters to judge afterwards."""

from __future__ import annotations

import dataclasses
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import dear
from common.harness.trial import Briefing, Trial
from common.harness.worker import judge
from common.harness.worker.checking import correctness
from common.harness.worker.loop import Loop, Schedule, TrainingClock
from common.harness.worker.schedule import make_schedule
from common.harness.worker.timing import evidence
from common.harness.worker.timing.canary import canary_s, first_of_machine, work_s
from common.harness.worker.timing.strain import Gauge
from common.harness.worker.training import Training, untimed_steps
from common.models import datasets, registry
from common.models.datasets import Parts
from common.models.datasets.batches import Batches
from common.models.workload import Workload
from common.results.records import Result
from common.results.records.trust import Check
from dear.comm import runtime
from dear.errors import UserError
from dear.training.pace import Pace


def learn(
    trial: Trial,
    briefing: Briefing,
    workload: Workload,
    data: Parts | None,
    check: Check,
    repeat: int,
    phase: Any,
) -> Result | None:
    """One repeat of the trial, on all ranks; rank 0 returns the result.

    Ranks hand over what they have in files, not in messages: of ranks at their own pace one may be
    dead by then, and the others go on without it.

    Args:
        data: what is learned; None: nothing is.
        check: what was found before, where it was looked for.

    Raises:
        UserError: copies of the parameters are too much for memory.
    """
    phase("warming up")
    if trial.learn.data is not None:
        # Once without an update, so that libraries are loaded and memory is there.
        workload.backward(workload.loss())
        workload.model.zero_grad()
    # Dropout then draws the same masks whatever the algorithm; each rank has its own.
    torch.manual_seed(trial.seed * 1000 + dear.rank())
    training = Training(trial, workload)
    if trial.learn.data is None:
        # Nothing is learned, so windows, buckets and settings can be made before the clock runs.
        training.run(max(untimed_steps(trial), 1))
        training.synchronize()
    session = _Session(trial, briefing, workload, training, data)
    session.begin()
    phase("measuring")
    session.run()
    phase("leaving")
    if not trial.own_pace:
        runtime.communicator().barrier()
    training.close()  # at their own pace it waits for those that still train, unless they are dead
    session.end()
    session.save(_path(briefing.folder, repeat, dear.rank()))
    rank, size = dear.rank(), dear.size()
    if not trial.own_pace:
        runtime.communicator().barrier()
    dear.shutdown()
    if rank != 0:
        return None
    phase("judging")
    paths = [_path(briefing.folder, repeat, other) for other in range(size)]
    # One that is not there is of a rank that has died before.
    saved = [torch.load(path, weights_only=True) if path.exists() else None for path in paths]
    result = judge.result(trial, saved, data, check)
    name = evidence.file_name(repeat)
    about = {"trial": briefing.folder.name, "repeat": repeat, "time_scale": briefing.time_scale}
    evidence.write(briefing.folder / name, about | evidence.learning(saved))
    for path in paths:
        path.unlink(missing_ok=True)
    return dataclasses.replace(result, evidence=name)


class _Session:
    """The training itself, on one rank."""

    def __init__(
        self,
        trial: Trial,
        briefing: Briefing,
        workload: Workload,
        training: Training,
        data: Parts | None,
    ) -> None:
        self._trial, self._learn, self._workload = trial, trial.learn, workload
        self._training = training
        self._communicator = runtime.communicator()
        self._batches: Batches | None = None
        self._rates: Any = None
        """The scheduler of the learning rate."""
        if data is not None:
            self._batches = Batches(
                data.train,
                batch_size=trial.rank_batches[dear.rank()],
                sampler=trial.learn.sampler,
                seed=trial.seed,
                rank=dear.rank(),
                size=dear.size(),
                workers=trial.learn.loader_workers,
            )
            if trial.learn.schedule is not None:
                self._rates = make_schedule(
                    training.optimizer,
                    trial.learn.schedule,
                    steps_per_epoch=self._batches.per_round,
                    epochs=trial.learn.epochs,
                    world_size=trial.world_size,
                )
        self._lost, self._lost_steps = torch.zeros((), device=training.loss.device), 0
        """Sum of the losses of the steps since the last mark, and how many there are."""
        self._snapshots = judge.Snapshots(self._state(), len(trial.learn.marks))
        self._clock = TrainingClock(self._communicator.clock, briefing.time_scale)
        self._links_pid = briefing.links_pid
        self._pace = Pace(steps=0, samples=0, elapsed_s=0.0)
        self._more: dict[str, Any] = {}

    def begin(self) -> None:
        """What is to be measured before; nothing may be under way."""
        self._counted = evidence.network_counters()
        self._works = first_of_machine(self._communicator)
        self._canary_s = [canary_s(self._communicator)]

    def run(self) -> None:
        """Trains to the end of the time."""
        loop = Loop(
            step=self._step,
            settle=self._training.synchronize,
            take=self._take,
            schedule=Schedule(self._learn.marks),
            clock=self._clock,
            communicator=self._communicator,
        )
        own_pace = self._trial.own_pace
        sent = self._communicator.bytes_sent
        gauge, before_s = Gauge(self._links_pid), self._training.absorbed_s
        with gauge.block():
            if self._learn.epochs is not None:
                self._pace = loop.for_epochs(self._batches.per_round, own_pace=own_pace)
            else:
                self._pace = loop.own_pace() if own_pace else loop.in_step()
        if not own_pace:
            self._canary_s.append(canary_s(self._communicator))
        if before_s is not None:
            gauge.found.absorbed_s = self._training.absorbed_s - before_s
        self._more = {
            "bytes_sent": self._communicator.bytes_sent - sent,
            "pressure": asdict(gauge.found),
            "loss": self._training.loss.item(),
            "statistics": self._training.statistics(),
        }
        if not own_pace:  # else a rank may be dead by now
            self._more["agreement"] = correctness.agreement(
                self._workload.model, self._training.consistency, self._communicator
            )

    def end(self) -> None:
        """What remains to be measured when no rank trains any more."""
        if self._batches is not None:
            self._batches.close()
        if len(self._canary_s) == 1:
            # Without a word to the others: of ranks at their own pace one may be dead by now.
            self._canary_s.append(work_s() if self._works else 0.0)
        self._more |= {
            "canary_s": self._canary_s,
            "network": evidence.gained(self._counted, evidence.network_counters()),
        }

    def save(self, path: Path) -> None:
        """Writes what rank 0 needs to judge."""
        self._snapshots.save(path, {**self._more, **asdict(self._pace)})

    def _step(self) -> int:
        samples = self._trial.batch_size
        if self._batches is not None:
            batch = next(self._batches)
            self._workload.feed(*batch)
            samples = len(batch[1])
        self._training.step()
        self._training.forget_parts()
        if self._rates is not None:
            self._rates.step()
        self._lost += self._training.loss.detach()
        self._lost_steps += 1
        if self._trial.own_pace:  # steps count once they are done; ranks in step settle for that
            self._training.finish()
        return samples

    def _take(self, marks: range, seconds: float, steps: int) -> None:
        loss = self._lost.item() / self._lost_steps if self._lost_steps else None
        self._lost.zero_()
        self._lost_steps = 0
        self._snapshots.take(marks, self._state(), seconds, steps, self._behind(), loss)

    def _behind(self) -> dict[str, list[float]]:
        """By neighbour: uses of its values so far, and the sum of the steps they were behind."""
        ages = self._training.statistics().get("staleness", {})
        return {
            peer: [age["uses"], age["uses"] * age["mean"]]
            for peer, age in ages.items()
            if age["uses"]
        }

    def _state(self) -> dict[str, torch.Tensor]:
        return {} if self._learn.data is None else self._workload.model.state_dict()


def load_data(trial: Trial) -> Parts | None:
    """What the trial learns; None: nothing.

    Raises:
        UserError: the data is not there, or not that of the trial.
    """
    learn = trial.learn
    if learn is None or learn.data is None:
        return None
    path = datasets.path_of(learn.data, None)
    found = datasets.digest(learn.data, path)
    if found != trial.sources.data_digest:
        raise UserError(
            f"learn.data: {learn.data} has changed since the sweep began, or is another one "
            f"on this host: digest {found}, wanted {trial.sources.data_digest}"
        )
    return datasets.load(learn.data, path, registry.sample_size(trial.model, trial.sentence_len))


def _path(folder: Path, repeat: int, rank: int) -> Path:
    return folder / f"learned-{repeat}-rank{rank}.pt"
