"""Runs the trials of an experiment, repeats interleaved, and appends a record for each."""

from __future__ import annotations

import dataclasses
import datetime
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from common.harness.experiment import Experiment
from common.harness.fabric import WORKER, Fabric
from common.harness.record import Result, make_record
from common.harness.trial import BASELINE, Trial
from common.harness.ui import Progress
from common.launch.job import Job, Outcome
from common.results import records
from common.results.records import Comparison, typed
from dear.cost.collectives import AlphaBeta
from dear.errors import UserError
from dear.training.algorithm import algorithm_class

Rerun = Literal["failed", "all"]


@dataclass
class Sweep:
    """One experiment with its folder of records.

    Attributes:
        folder: `logs/<name>`; made if it is not there.
        report: called whenever the progress has changed.
    """

    experiment: Experiment
    trials: list[Trial]
    comparison: Comparison
    folder: Path
    fabric: Fabric
    machine: dict[str, Any]
    report: Callable[[Progress], None]

    def __post_init__(self) -> None:
        self._path = self.folder / "records.jsonl"
        self._run_id = f"{_now()}-{os.getpid()}"
        self._costs: dict[tuple[Any, ...], dict[str, AlphaBeta]] = {}
        self._progress = Progress(total=0)
        self._running: list[_Turn] = []  # of the cell under way
        self._best_rate = 0.0

    def run(self, rerun: Rerun = "failed", fail_fast: bool = False) -> None:
        """Runs what has no `ok` record (or everything), and records each trial as it ends.

        Raises:
            UserError: the folder cannot be written, or another sweep is using it.
            KeyboardInterrupt: after the trial under way has been recorded as interrupted.
        """
        with _exclusive(self.folder):
            records.mend(self._path)
            self.comparison.save(self.folder)
            (self.folder / "machine.json").write_text(json.dumps(self.machine, indent=2))
            todo = to_run(self.trials, self._path, rerun)
            launches = [trial.cell for trial in todo for _ in range(trial.measure.repeats)]
            self._progress = Progress(total=len(launches), left=launches)
            if not todo:
                return
            with self.fabric:
                for _, cell in groupby(todo, key=lambda trial: trial.cell):
                    if not self._run_cell([_Turn(trial) for trial in cell], fail_fast):
                        return

    def _run_cell(self, turns: list[_Turn], fail_fast: bool) -> bool:
        """Every repeat runs all trials, in turn; False if one failed and `fail_fast` says to stop.

        Trials of a cell are compared with each other.
        """
        self._running, self._best_rate = turns, 0.0
        try:
            self.fabric.enter_cell([turn.trial for turn in turns])
        except RuntimeError as error:  # the network is not what it should be
            outcome = Outcome.of("failed", f"the cluster could not be prepared: {error}")
            for turn in turns:
                self._end(turn, outcome, 0)
            return not fail_fast
        for turn in turns:
            folder = self.folder / turn.trial.id
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            turn.trial.save(folder)
            reason = _unavailable(turn.trial)
            if reason:
                self._end(turn, Outcome.of("unsupported", reason), 0)
        most = max((turn.trial.measure.repeats for turn in self._running), default=0)
        for repeat in range(most):
            # Another one goes first in every round, so that no trial always has the same neighbour.
            shift = repeat % max(len(self._running), 1)
            for turn in self._running[shift:] + self._running[:shift]:
                status = self._take_turn(turn, repeat)
                if status not in ("ok", "unsupported") and fail_fast:
                    return False
        return True

    def _take_turn(self, turn: _Turn, repeat: int) -> str:
        trial, progress = turn.trial, self._progress
        progress.title = trial.title
        self.report(progress)
        began = time.monotonic()
        try:
            outcome, result = self._launch(trial, repeat)
        except KeyboardInterrupt:
            for other in self._running:
                if other is turn or other.results:
                    self._record(other, Outcome.of("interrupted", "Ctrl-C"))
            raise
        spent = time.monotonic() - began
        turn.duration_s += spent
        progress.spent_s.setdefault(trial.cell, []).append(spent)
        progress.done += 1
        progress.left.remove(trial.cell)
        if result is None:
            self._end(turn, outcome, repeat + 1)
            return outcome.status
        turn.results.append(result)
        rate = result.rate(trial)
        if trial.algorithm != BASELINE and rate > self._best_rate:
            self._best_rate = rate
            progress.best = f"{trial.label} {rate:.3g}/s"
        if repeat + 1 == trial.measure.repeats:
            self._end(turn, outcome, repeat + 1)
        return "ok"

    def _launch(self, trial: Trial, repeat: int) -> tuple[Outcome, Result | None]:
        """Runs one repeat; the workers are told what collectives cost, if another trial knows."""
        job = Job(
            folder=self.folder / trial.id,
            repeat=repeat,
            world_size=trial.world_size,
            timeout_s=self.experiment.timeout_s,
            worker_module=WORKER,
            env=self.experiment.worker_env,
            may_lose_ranks=trial.own_pace,
        )
        briefing = self.fabric.briefing(trial, job.folder)
        place = cost_place(trial, briefing.time_scale)
        dataclasses.replace(briefing, costs=self._costs.get(place)).save()
        outcome = self.fabric.run(trial, job)
        if outcome.status != "ok":
            return outcome, None
        result = typed(Result, outcome.result)
        if result.costs:
            self._costs[place] = result.costs
        return outcome, result

    def _end(self, turn: _Turn, outcome: Outcome, launched: int) -> None:
        self._record(turn, outcome)
        self._running = [other for other in self._running if other is not turn]
        for _ in range(turn.trial.measure.repeats - launched):
            self._progress.done += 1
            self._progress.left.remove(turn.trial.cell)
        self.report(self._progress)

    def _record(self, turn: _Turn, outcome: Outcome) -> None:
        record = make_record(
            turn.trial,
            turn.results,
            outcome,
            self.machine,
            started=turn.started,
            duration_s=turn.duration_s,
            fabric=self.fabric.describe(turn.trial),
            run=self._run_id,
        )
        records.append(self._path, record)


class _Turn:
    """A trial under way: its repeats so far."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.results: list[Result] = []
        self.started = _now()
        self.duration_s = 0.0


def to_run(trials: list[Trial], path: Path, rerun: Rerun) -> list[Trial]:
    """The trials that a run would run: all, or those whose newest record is not `ok`."""
    if rerun == "all":
        return trials
    newest = records.latest(records.load(path))
    return [trial for trial in trials if trial.hash not in newest or not newest[trial.hash].ok]


def _unavailable(trial: Trial) -> str | None:
    if trial.algorithm == BASELINE:
        return None
    algorithm = algorithm_class(trial.algorithm)
    if trial.device not in algorithm.capabilities.devices:
        return f"{trial.algorithm} does not run on {trial.device}"
    if trial.world_size < algorithm.capabilities.min_world_size:
        return f"{trial.algorithm} needs {algorithm.capabilities.min_world_size} workers"
    return algorithm.unavailable()


def cost_place(trial: Trial, time_scale: float) -> tuple[Any, ...]:
    """What the costs of collectives depend on; of the model, how large messages are."""
    same = ("model", "dtype", "world_size", "ranks_per_host", "network")
    same += ("launcher", "backend", "device")
    return (time_scale, *(getattr(trial, key) for key in same))


@contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another run is using {folder}; wait for it or name=OTHER") from None
        yield


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
