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
from common.results.comparison import Comparison
from dear.cost.collectives import AlphaBeta
from dear.errors import UserError
from dear.training.algorithm import algorithm_class

Rerun = Literal["failed", "all"]


class Sweep:
    """One experiment with its folder of records.

    Args:
        folder: `logs/<name>`; made if it is not there.
        report: called whenever the progress has changed.
    """

    def __init__(
        self,
        experiment: Experiment,
        trials: list[Trial],
        comparison: Comparison,
        folder: Path,
        fabric: Fabric,
        machine: dict[str, Any],
        report: Callable[[Progress], None],
    ) -> None:
        self._experiment = experiment
        self._trials = trials
        self._comparison = comparison
        self._folder = folder
        self._fabric = fabric
        self._machine = machine
        self._report = report
        self._path = folder / "records.jsonl"
        self._run_id = f"{_now()}-{os.getpid()}"
        self._costs: dict[tuple[Any, ...], dict[str, AlphaBeta]] = {}

    def run(self, rerun: Rerun = "failed", fail_fast: bool = False) -> None:
        """Runs what has no `ok` record (or everything), and records each trial as it ends.

        Raises:
            UserError: the folder cannot be written, or another sweep is using it.
            KeyboardInterrupt: after the trial under way has been recorded as interrupted.
        """
        with _exclusive(self._folder):
            records.mend(self._path)
            self._comparison.save(self._folder)
            (self._folder / "machine.json").write_text(json.dumps(self._machine, indent=2))
            todo = to_run(self._trials, self._path, rerun)
            launches = [(trial.cell, r) for trial in todo for r in range(trial.measure.repeats)]
            progress = Progress(total=len(launches), left=[cell for cell, _ in launches])
            if not todo:
                return
            with self._fabric:
                for _, cell in groupby(todo, key=lambda trial: trial.cell):
                    turns = [_Turn(trial, self._folder) for trial in cell]
                    block = _Block(self, turns, progress)
                    try:
                        self._fabric.enter_cell([turn.trial for turn in turns])
                    except RuntimeError as error:  # the network is not what it should be
                        block.fail(f"the cluster could not be prepared: {error}")
                        going_on = not fail_fast
                    else:
                        going_on = block.run(fail_fast)
                    if not going_on:
                        return

    def launch(self, trial: Trial, folder: Path, repeat: int) -> tuple[Outcome, Result | None]:
        """Runs one repeat; the workers are told what collectives cost, if another trial knows."""
        job = Job(
            folder=folder,
            repeat=repeat,
            world_size=trial.world_size,
            timeout_s=self._experiment.timeout_s,
            worker_module=WORKER,
            env=self._experiment.worker_env,
            may_lose_ranks=trial.own_pace,
        )
        briefing = self._fabric.briefing(trial, folder)
        place = cost_place(trial, briefing.time_scale)
        dataclasses.replace(briefing, costs=self._costs.get(place)).save()
        outcome = self._fabric.run(trial, job)
        result = Result.from_json(outcome.result) if outcome.result is not None else None
        if result is not None and result.costs:
            self._costs[place] = result.costs
        return outcome, result

    def report(self, progress: Progress) -> None:
        self._report(progress)

    def record(self, turn: _Turn, outcome: Outcome) -> None:
        record = make_record(
            turn.trial,
            turn.results,
            outcome,
            self._machine,
            turn.started,
            turn.duration_s,
            self._fabric.describe(turn.trial),
            self._run_id,
        )
        records.append(self._path, record)


class _Turn:
    """A trial under way: its repeats so far."""

    def __init__(self, trial: Trial, sweep_folder: Path) -> None:
        self.trial = trial
        self.folder = sweep_folder / trial.id
        self.results: list[Result] = []
        self.started = _now()
        self.duration_s = 0.0

    def prepare(self) -> None:
        """Makes the folder that the workers read."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.trial.save(self.folder)


class _Block:
    """The compared trials of one cell: every repeat runs all of them, in turn."""

    def __init__(self, sweep: Sweep, turns: list[_Turn], progress: Progress) -> None:
        self._sweep = sweep
        self._running = turns
        self._progress = progress
        self._best: tuple[float, str] | None = None

    def fail(self, message: str) -> None:
        """Records all of them as failed, without a start."""
        error = {"kind": "failed", "message": message, "rank": None, "where": None}
        for turn in list(self._running):
            self._end(turn, Outcome(status="failed", error=error), 0)

    def run(self, fail_fast: bool) -> bool:
        """False if a trial failed and `fail_fast` says to stop."""
        for turn in list(self._running):
            turn.prepare()
            reason = _unavailable(turn.trial)
            if reason:
                error = {"kind": "unsupported", "message": reason, "rank": None, "where": None}
                self._end(turn, Outcome(status="unsupported", error=error), 0)
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
        self._progress.title = turn.trial.title
        self._sweep.report(self._progress)
        began = time.monotonic()
        try:
            outcome, result = self._sweep.launch(turn.trial, turn.folder, repeat)
        except KeyboardInterrupt:
            error = {"kind": "interrupted", "message": "Ctrl-C", "rank": None, "where": None}
            for other in self._running:
                if other is not turn and not other.results:
                    continue
                self._sweep.record(other, Outcome(status="interrupted", error=error))
            raise
        spent = time.monotonic() - began
        turn.duration_s += spent
        self._progress.spent_s.setdefault(turn.trial.cell, []).append(spent)
        self._progress.done += 1
        self._progress.left.remove(turn.trial.cell)
        if outcome.status != "ok":
            self._end(turn, outcome, repeat + 1)
            return outcome.status
        assert result is not None
        turn.results.append(result)
        self._note_best(turn)
        if repeat + 1 == turn.trial.measure.repeats:
            self._end(turn, outcome, repeat + 1)
        return "ok"

    def _end(self, turn: _Turn, outcome: Outcome, launched: int) -> None:
        self._sweep.record(turn, outcome)
        self._running = [other for other in self._running if other is not turn]
        for _ in range(turn.trial.measure.repeats - launched):
            self._progress.done += 1
            self._progress.left.remove(turn.trial.cell)
        self._sweep.report(self._progress)

    def _note_best(self, turn: _Turn) -> None:
        rate = turn.results[-1].rate(turn.trial)
        if turn.trial.algorithm != BASELINE and (self._best is None or rate > self._best[0]):
            self._best = (rate, turn.trial.label)
            self._progress.best = f"{turn.trial.label} {rate:.3g}/s"


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
    return (
        trial.model,
        trial.dtype,
        trial.world_size,
        trial.ranks_per_host,
        trial.network,
        time_scale,
        trial.launcher,
        trial.backend,
        trial.device,
    )


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
