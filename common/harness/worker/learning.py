"""A trial that learns: real data for a time, with copies of the parameters to judge afterwards.

Each rank trains at its own pace, or all in step until rank 0 says that it is over. Ranks in step
must all end at the same step and copy their parameters at the same ones. A word from rank 0 in
every step would be a collective in every step: instead it says after how many steps it speaks
next, from how long the last ones took, so that this is about when the next copy is due.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain, count, repeat
from pathlib import Path
from typing import Any

import torch
from torch.utils.data.distributed import DistributedSampler

import dear
from common.harness.record import Result
from common.harness.trial import Briefing, LearnConfig, Trial
from common.harness.worker import judge
from common.harness.worker.checking import correctness
from common.harness.worker.timing import evidence
from common.harness.worker.timing.canary import canary_s, first_of_machine, work_s
from common.harness.worker.timing.strain import Gauge
from common.harness.worker.training import Training, untimed_steps
from common.models import datasets
from common.models.datasets import Split
from common.models.workload import Workload
from common.results.records.learned import Data
from common.results.records.trust import Check
from dear.comm import runtime
from dear.comm.communicator import Communicator
from dear.errors import UserError
from dear.training.pace import LocalStepRandomBatchSampler, Pace, run_for

Take = Callable[[range, float, int], None]
"""Copies the parameters for the marks of these numbers: at so many seconds, after so many steps."""


def learn(
    trial: Trial, briefing: Briefing, workload: Workload, check: Check, repeat: int, phase: Any
) -> Result | None:
    """One repeat of the trial, on all ranks; rank 0 returns the result.

    Ranks hand over what they have in files, not in messages: of ranks at their own pace one may be
    dead by then, and the others go on without it.

    Args:
        check: what was found before, where it was looked for.

    Raises:
        UserError: the data is not there, not that of the trial, or too much for memory.
    """
    train, test = _data(trial)
    phase("warming up")
    if trial.learn.data is not None:
        # Once without an update, so that libraries are loaded and memory is there.
        workload.loss().backward()
        workload.model.zero_grad()
    # Dropout then draws the same masks whatever the algorithm; each rank has its own.
    torch.manual_seed(trial.seed * 1000 + dear.rank())
    training = Training(trial, workload)
    if trial.learn.data is None:
        # Nothing is learned, so windows, buckets and settings can be made before the clock runs.
        training.run(max(untimed_steps(trial), 1))
        training.synchronize()
    session = _Session(trial, briefing, workload, training, train)
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
    result = judge.result(trial, saved, test, _described(trial, train, test), check)
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
        train: Split | None,
    ) -> None:
        self._trial, self._learn, self._workload = trial, trial.learn, workload
        self._training = training
        self._communicator = runtime.communicator()
        self._batches: Batches | None = None
        if train is not None:
            size = trial.rank_batches[dear.rank()]
            place = {"rank": dear.rank(), "size": dear.size(), "seed": trial.seed}
            self._batches = Batches(trial.learn, train, batch_size=size, **place)
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
            budget_s=self._learn.budget_s,
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
            samples = self._batches.feed(self._workload)
        self._training.step()
        self._training.parts.clear()
        if self._trial.own_pace:  # steps count once they are done; ranks in step settle for that
            self._training.finish()
        return samples

    def _take(self, marks: range, seconds: float, steps: int) -> None:
        self._snapshots.take(marks, self._state(), seconds, steps, self._behind())

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


def _data(trial: Trial) -> tuple[Split | None, Split | None]:
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


def _described(trial: Trial, train: Split | None, test: Split | None) -> Data | None:
    if train is None or test is None:
        return None
    sizes = len(train[1]), len(test[1])
    split = datasets.split_of(trial.learn.data, None, sum(sizes))
    return Data(name=trial.learn.data, train=sizes[0], test=sizes[1], split=split)


def _path(folder: Path, repeat: int, rank: int) -> Path:
    return folder / f"learned-{repeat}-rank{rank}.pt"


@dataclass(frozen=True, kw_only=True)
class Loop:
    """What both kinds of training for a time need.

    Attributes:
        budget_s: seconds of training, on `clock`.
        step: one step; returns its number of samples.
        settle: called before copies of ranks in step; nothing is in flight afterwards.
        take: makes copies, with the clock standing still.
        schedule: when copies are due; its last mark is `budget_s`.
    """

    budget_s: float
    step: Callable[[], int]
    settle: Callable[[], None]
    take: Take
    schedule: Schedule
    clock: TrainingClock
    communicator: Communicator

    def own_pace(self) -> Pace:
        """Ranks make different numbers of steps, and copy when it is time on their own clock."""
        steps = 0

        def step() -> int:
            nonlocal steps
            samples = self.step()
            steps += 1
            self._copy(self.clock.now(), steps)
            return samples

        self.communicator.barrier()
        self.clock.start()
        self._copy(0.0, 0)
        pace = run_for(self.budget_s, step, self.communicator, self.clock.now)
        # Where the time has run out between the look at the clock in `step` and the last one.
        self._copy(self.clock.now(), steps)
        return pace

    def in_step(self) -> Pace:
        """The clock is rank 0's. What is in flight when copies are made is waited for in time."""
        steps = samples = 0
        block, block_began_s = 1, 0.0
        self.communicator.barrier()
        self.clock.start()
        now_s = 0.0
        self._copy(now_s, steps)
        while now_s < self.budget_s:
            for _ in range(block):
                samples += self.step()
            steps += block
            self.settle()
            self.communicator.barrier()  # a rank that is behind takes its time on the clock
            with self.clock.stopped():
                step_s = (self.clock.now() - block_began_s) / block
                # Not much more at once than there were: the first steps tell little.
                said = self.clock.now(), self._next_block(step_s, most=2 * steps)
                now_s, block = self.communicator.broadcast_object(said)
                self._copy(now_s, steps)
                self.communicator.barrier()
            block_began_s = self.clock.now()
        return Pace(steps=steps, samples=samples, elapsed_s=now_s)

    def _copy(self, now_s: float, steps: int) -> None:
        passed = self.schedule.passed(now_s)
        if passed:
            with self.clock.stopped():
                self.take(passed, now_s, steps)

    def _next_block(self, step_s: float, most: int) -> int:
        now_s = self.clock.now()
        due_s = self.schedule.next_after(now_s)
        if due_s is None:
            return 0
        return max(1, min(most, math.ceil((due_s - now_s) / step_s)))


class TrainingClock:
    """Seconds of training since `start`, without those in which it is `stopped`.

    Args:
        clock: seconds of this machine.
        time_scale: of them per second of training.
    """

    def __init__(self, clock: Callable[[], float], time_scale: float) -> None:
        self._clock = clock
        self._time_scale = time_scale
        self._began = 0.0
        self._stopped_at: float | None = None

    def start(self) -> None:
        """Training begins now, at 0."""
        self._began = self._clock()

    def now(self) -> float:
        at = self._clock() if self._stopped_at is None else self._stopped_at
        return (at - self._began) / self._time_scale

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """It stands still meanwhile; within another such block it does so already."""
        if self._stopped_at is not None:
            yield
            return
        self._stopped_at = self._clock()
        yield
        self._began += self._clock() - self._stopped_at
        self._stopped_at = None


class Schedule:
    """Marks in time, each of which is passed once.

    Args:
        marks: seconds of training, ascending.
    """

    def __init__(self, marks: Sequence[float]) -> None:
        self._marks = marks
        self._passed = 0

    def next_after(self, now_s: float) -> float | None:
        """The first mark after `now_s`, None if there is none."""
        return next((mark for mark in self._marks[self._passed :] if mark > now_s), None)

    def passed(self, now_s: float) -> range:
        """The numbers of the marks that are passed by `now_s` and were not before."""
        first = self._passed
        while self._passed < len(self._marks) and self._marks[self._passed] <= now_s:
            self._passed += 1
        return range(first, self._passed)


class Batches:
    """Endless; smaller batches at the end of a round are left out.

    Args:
        train: all images and labels, the same on all ranks.
        size: number of ranks.

    Raises:
        UserError: a round has no whole batch.
    """

    def __init__(
        self, learn: LearnConfig, train: Split, *, batch_size: int, seed: int, rank: int, size: int
    ) -> None:
        self._images, self._labels = train
        sharing = size if learn.sampler == "shared" else 1
        if batch_size > len(self._labels) // sharing:
            raise UserError(
                f"batch_size: {batch_size} is more than the {len(self._labels) // sharing} images "
                "that a worker gets in a round"
            )
        if learn.sampler == "own":
            own = LocalStepRandomBatchSampler(
                self._labels, batch_size, seed, rank=rank, drop_last=True
            )
            self._orders = chain.from_iterable(repeat(own))  # each time in another order
        else:
            shared = DistributedSampler(self._labels, size, rank, seed=seed, drop_last=True)
            self._orders = _in_batches(shared, batch_size)

    def feed(self, workload: Workload) -> int:
        """Makes the next batch the workload's; returns its number of samples."""
        order = torch.tensor(next(self._orders))
        (before,) = workload.inputs
        workload.inputs = (self._images[order].to(before.device, before.dtype),)
        workload.targets = (self._labels[order].to(before.device),)
        return len(order)


def _in_batches(sampler: DistributedSampler, batch_size: int) -> Iterator[list[int]]:
    for round_ in count():
        sampler.set_epoch(round_)
        order = list(sampler)
        for start in range(0, len(order) - batch_size + 1, batch_size):
            yield order[start : start + batch_size]
