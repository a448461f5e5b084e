"""Training trial: trains for some seconds or epochs, and copies parameters for evaluation."""

from __future__ import annotations

import dataclasses
from dataclasses import asdict
from pathlib import Path

import torch

import dear
from common.harness.trial import Briefing, Trial
from common.harness.worker import evaluation
from common.harness.worker.checking import deviation
from common.harness.worker.evaluation import Measurements
from common.harness.worker.loop import Loop, Schedule, TrainingClock
from common.harness.worker.lr_schedule import make_schedule
from common.harness.worker.throughput import Phase
from common.harness.worker.timing import evidence
from common.harness.worker.timing.canary import canary_s, first_of_machine, work_s
from common.harness.worker.timing.priority import hurry_helpers
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


def learn(
    trial: Trial,
    briefing: Briefing,
    workload: Workload,
    data: Parts | None,
    check: Check,
    repeat: int,
    phase: Phase,
) -> Result | None:
    """Runs one repeat on all ranks; rank 0 returns the result.

    Each rank writes its results to a file. Ranks at their own pace go on if one has died, but
    messages would fail.

    Args:
        data: training and test data; None: the model's synthetic batch.
        check: result of the check before the training.

    Raises:
        UserError: copies of the parameters take too much memory.
    """
    phase("warming up")
    if data is not None:
        # A pass without an update loads libraries and allocates memory.
        workload.backward(workload.loss())
        workload.model.zero_grad()
    # Dropout draws the same masks for every algorithm; ranks have different masks.
    torch.manual_seed(trial.seed * 1000 + dear.rank())
    training = Training(trial, workload)
    if data is None:
        # With synthetic data there is no accuracy, so warm-up steps are no unfair advantage.
        training.run(max(untimed_steps(trial), 1))
        training.synchronize()
    session = _Session(trial, briefing, workload, training, data)
    phase("measuring")
    measurements = session.run()
    phase("leaving")
    if not trial.own_pace:
        runtime.communicator().barrier()
    training.close()  # ranks at their own pace wait here for the others, except dead ones
    session.end(measurements)
    rank, size = dear.rank(), dear.size()
    session.snapshots.save(_path(briefing.folder, repeat, rank), measurements)
    if not trial.own_pace:
        runtime.communicator().barrier()
    dear.shutdown()
    if rank != 0:
        return None
    phase("judging")
    paths = [_path(briefing.folder, repeat, other) for other in range(size)]
    # A rank that died has left no file.
    saved = [torch.load(path, weights_only=True) if path.exists() else None for path in paths]
    result = evaluation.result(trial, saved, data, check)
    name = evidence.file_name(repeat)
    about = {"trial": briefing.folder.name, "repeat": repeat, "time_scale": briefing.time_scale}
    evidence.write(briefing.folder / name, about | evidence.learning(saved))
    for path in paths:
        path.unlink(missing_ok=True)
    return dataclasses.replace(result, evidence=name)


class _Session:
    def __init__(
        self,
        trial: Trial,
        briefing: Briefing,
        workload: Workload,
        training: Training,
        data: Parts | None,
    ) -> None:
        self._trial, self._workload, self._training = trial, workload, training
        self._communicator = runtime.communicator()
        self._batches: Batches | None = None
        self._rates: torch.optim.lr_scheduler.LRScheduler | None = None
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
        """Sum of the losses since the last mark, and the number of steps since then."""
        self.snapshots = evaluation.Snapshots(self._state(), len(trial.learn.marks))
        self._clock = TrainingClock(self._communicator.clock, briefing.time_scale)
        hurried = hurry_helpers(trial, briefing)
        self._gauge = Gauge(briefing.links_pid, lambda: training.absorbed_s, hurried)
        self._counters = evidence.network_counters()
        self._works = first_of_machine(self._communicator)
        self._before_s = canary_s(self._communicator)

    def run(self) -> Measurements:
        """Trains to the end; returns the measurements that do not need the other ranks."""
        learn, own_pace = self._trial.learn, self._trial.own_pace
        training, communicator = self._training, self._communicator
        loop = Loop(
            step=self._step,
            settle=training.synchronize,
            take=self._take,
            schedule=Schedule(learn.marks),
            clock=self._clock,
            communicator=communicator,
        )
        sent = communicator.bytes_sent
        with self._gauge.block():
            if learn.epochs is not None:
                pace = loop.for_epochs(self._batches.per_round, own_pace=own_pace)
            else:
                pace = loop.own_pace() if own_pace else loop.in_step()
        sent = communicator.bytes_sent - sent
        times, agreement = [self._before_s], None
        if not own_pace:  # ranks at their own pace: another one may be dead by now
            times.append(canary_s(communicator))
            agreement = deviation.agreement(
                self._workload.model, training.consistency, communicator
            )
        return {
            "steps": pace.steps,
            "samples": pace.samples,
            "elapsed_s": pace.elapsed_s,
            "bytes_sent": sent,
            "pressure": asdict(self._gauge.pressure),
            "loss": training.loss.item(),
            "statistics": training.engine.statistics(),
            "canary_s": times,
            "network": {},
            "agreement": agreement,
        }

    def end(self, measurements: Measurements) -> None:
        """Adds the measurements that need all ranks to have ended training."""
        if self._batches is not None:
            self._batches.close()
        if self._trial.own_pace:  # no collective call: a rank may be dead
            measurements["canary_s"].append(work_s() if self._works else 0.0)
        measurements["network"] = evidence.gained(self._counters, evidence.network_counters())

    def _step(self) -> int:
        samples = self._trial.rank_batches[dear.rank()]
        if self._batches is not None:
            inputs, targets = next(self._batches)
            self._workload.feed(inputs, targets)
            samples = len(targets)
        self._training.unmarked_step()
        if self._rates is not None:
            self._rates.step()
        self._lost += self._training.loss.detach()
        self._lost_steps += 1
        if self._trial.own_pace:  # only finished steps count; `settle` does this for ranks in step
            self._training.finish()
        return samples

    def _take(self, marks: range, seconds: float, steps: int) -> None:
        loss = self._lost.item() / self._lost_steps if self._lost_steps else None
        self._lost.zero_()
        self._lost_steps = 0
        self.snapshots.take(marks, self._state(), seconds, steps, self._behind(), loss)

    def _behind(self) -> dict[str, list[float]]:
        ages = self._training.engine.statistics().get("staleness", {})
        return {
            peer: [age["uses"], age["uses"] * age["mean"]]
            for peer, age in ages.items()
            if age["uses"]
        }

    def _state(self) -> dict[str, torch.Tensor]:
        return {} if self._trial.learn.data is None else self._workload.model.state_dict()


def load_data(trial: Trial) -> Parts | None:
    """Returns the trial's data set; None if its data are synthetic.

    Raises:
        UserError: the data are missing, or their digest differs from the trial's.
    """
    learn = trial.learn
    if learn is None or learn.data is None:
        return None
    path = datasets.path_of(learn.data, None)
    digest = datasets.digest(learn.data, path)
    if digest != trial.sources.data_digest:
        raise UserError(
            f"learn.data: {learn.data} has changed since the sweep began, or differs on this "
            f"host: digest {digest}, but the sweep has {trial.sources.data_digest}"
        )
    return datasets.load(learn.data, path, registry.sample_size(trial.model, trial.sentence_len))


def _path(folder: Path, repeat: int, rank: int) -> Path:
    return folder / f"learned-{repeat}-rank{rank}.pt"
