"""Sweep: runs the trials of an experiment cell by cell, and appends a record for each trial.

A cell is the trials that are compared with each other (see `cell`).
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import shutil
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from common.emulation.dilation import Choice
from common.harness.experiment import Experiment
from common.harness.running import underway
from common.harness.running.cell import Cell
from common.harness.running.fabric import WORKER, Fabric, misfit
from common.harness.running.launches import CellContext
from common.harness.running.record import make_record
from common.harness.running.turn import Turn, now, order_seed, planned
from common.harness.running.ui import Progress
from common.harness.running.underway import SCHEMA, Standing, Underway, path_of
from common.harness.running.used import changes, used
from common.harness.trial import BASELINE, Trial
from common.launch.job import Job, Outcome
from common.paths import COMMAND, RECORDS
from common.results import store
from common.results.records import Record, Result, typed
from common.results.records.trust import CostCheck, Note
from common.results.store import Comparison
from common.results.validity import passing_flag
from dear.comm.flight import reading as flight
from dear.comm.flight.recorder import VARIABLE as FLIGHT
from dear.cost.fit import CollectiveCost
from dear.errors import UserError
from dear.training.algorithm import algorithm_class

_LAUNCH_BYTES = 1 << 18
"""Disk space in bytes for the files of a launch: logs, raw measurements, a part of the record."""
Rerun = Literal["failed", "all"]


@dataclass(frozen=True, kw_only=True)
class _Costs:
    """Costs of collectives, the launch that measured them, and their quality."""

    trial: str
    repeat: int
    costs: dict[str, CollectiveCost]
    check: CostCheck | None


@dataclass(frozen=True, kw_only=True)
class _Settled:
    """Time scale of a valid record. A long sweep keeps this much of each of its records."""

    hash: str
    run: str
    cell: tuple[object, ...]
    """Cell of the trial without its fault."""
    world_size: int
    choice: Choice

    @classmethod
    def of(cls, record: Record) -> _Settled:
        trial = Trial.from_json(record.trial)
        fabric = record.fabric
        return cls(
            hash=record.hash,
            run=record.run,
            cell=_without_fault(trial).cell,
            world_size=trial.world_size,
            choice=Choice(time_scale=fabric.time_scale, reason=fabric.time_scale_reason or ""),
        )


@dataclass
class Sweep:
    """Sweep of one experiment, with its folder of records.

    Attributes:
        folder: `logs/<name>`; created if it does not exist.
        report: called whenever the progress has changed.
        command: the user's command line and the text of the experiment file; None: not saved.
    """

    experiment: Experiment
    trials: list[Trial]
    comparison: Comparison
    folder: Path
    fabric: Fabric
    machine: dict[str, Any]
    report: Callable[[Progress], None]
    command: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        self._path = self.folder / RECORDS
        self._run_id = f"{now()}-{uuid.uuid4().hex[:8]}"
        self._costs: dict[tuple[Any, ...], _Costs] = {}
        self._progress = Progress(total=0)
        self._todo: list[Trial] = []
        self._kept: dict[str, Standing] = {}
        self._runs: dict[str, str] = {}
        self._begun_again: dict[str, str] = {}
        self._settled: list[_Settled] = []

    def run(self, rerun: Rerun = "failed", fail_fast: bool = False) -> None:
        """Runs the trials without a valid record (or all), and records each trial when it ends.

        Raises:
            UserError: the folder cannot be written, or another sweep is using it.
            KeyboardInterrupt: after the running trials have been recorded as interrupted.
        """
        with _exclusive(self.folder):
            store.mend(self._path)
            for stray in self.folder.glob(".*.json.*.partial"):  # of a run that was killed
                stray.unlink(missing_ok=True)
            self.comparison.save(self.folder)
            store.write_whole(self.folder / "machine.json", json.dumps(self.machine, indent=2))
            todo = self._todo = to_run(self.trials, self._path, rerun, self.experiment.base)
            self._say_changed_settings()
            for record in store.each(self._path):
                self._settle(record)
            if rerun == "failed":
                first = to_run(self.trials, self._path, rerun, self.experiment.base, at_2k=False)
                needed = {trial.hash for trial in first}
                for trials in _cells(todo):
                    self._go_on(trials, needed)
                # A valid record is not measured anew for repeats at twice the time scale.
                todo = [t for t in todo if t.hash in needed or t.hash in self._kept]
                self._todo = todo
            launches = planned(todo, self._kept)
            self._progress = Progress(total=len(launches), left=launches)
            if not todo:
                return
            store.check_room(self.folder, len(launches) * _LAUNCH_BYTES)
            if self.fabric.preparation:
                self._progress.title = self.fabric.preparation
                self.report(self._progress)
            if self.command is not None:
                words, text = self.command
                commit = self.machine.get("commit")
                run = store.Run(run=self._run_id, command=words, experiment=text, commit=commit)
                run.save(self.folder)
            if rerun == "all":  # else a later run would go on with what this one replaces
                for trials in _cells(todo):
                    path = self._underway(trials)
                    Underway.load(path).without({trial.hash for trial in trials}).save(path)
            with self.fabric:
                for trials in _cells(todo):
                    # Trials of an interrupted cell continue their rounds separately from others.
                    begun = [trial for trial in trials if trial.hash in self._kept]
                    others = [trial for trial in trials if trial.hash not in self._kept]
                    for some in filter(None, (begun, others)):
                        # Trials with different given time scales cannot share rounds.
                        for choice, alike in self._by_scale(some):
                            if not self._run_cell(alike, choice, fail_fast):
                                return

    def _say_changed_settings(self) -> None:
        """Prints which settings have changed, if earlier records are not used for this reason."""
        newest = store.latest(store.each(self._path))
        earlier = {
            _place(record.trial): record.trial
            for record in newest.values()
            if record.hash not in self.comparison.trials
        }
        counts: Counter[str] = Counter()
        for trial in self.trials:
            values = trial.to_json()
            before = None if trial.hash in newest else earlier.get(_place(values))
            if before is not None:
                counts[", ".join(changes(_flat(before), _flat(values)))] += 1
        for changed, count in counts.items():
            _say(f"earlier results of {count} trials are not used, because of changes: {changed}")

    def _go_on(self, trials: list[Trial], needed: Collection[str]) -> None:
        begun = Underway.load(self._underway(trials))
        if begun.schema != SCHEMA:
            _say(f"{trials[0].model}: interrupted repeats of another version are not used")
        for trial in trials:
            if trial.hash not in begun.standing:
                continue
            kept = begun.standing[trial.hash]
            changed = changes(kept.uses, used(trial, self.machine))
            if changed:
                reason = f"changes since it stopped: {', '.join(changed)}"
                if trial.hash in needed:
                    self._begin_again(trial, reason)
                else:
                    begun = begun.without({trial.hash})
                    begun.save(self._underway(trials))
                    _say(f"{trial.title}: stays without repeats at twice the time scale ({reason})")
                continue
            self._kept[trial.hash], self._runs[trial.hash] = kept, kept.run
            first = kept.results[0] if kept.results else None
            if first is not None and first.costs:
                self._costs.setdefault(
                    cost_place(trial, kept.facts.time_scale),
                    _Costs(trial=trial.hash, repeat=0, costs=first.costs, check=first.cost_check),
                )

    def _begin_again(self, trial: Trial, reason: str) -> None:
        text = self._begun_again[trial.hash] = f"begins again, because of {reason}"
        _say(f"{trial.title}: {text}")

    def _kept_at_scale(
        self, trials: Sequence[Trial], settled: Choice | None
    ) -> dict[str, Standing]:
        """Returns the kept results of trials; drops those of another time scale than the cell's.

        The repeats of a record form one sample. `--rerun all` may have chosen another scale before
        it was stopped.
        """
        kept = {trial.hash: self._kept[trial.hash] for trial in trials if trial.hash in self._kept}
        most = max(kept.values(), key=lambda standing: len(standing.results), default=None)
        scale = settled.time_scale if settled else most and most.facts.time_scale
        for trial in trials:
            before = kept.get(trial.hash)
            if before is None or before.facts.time_scale == scale:
                continue
            del kept[trial.hash]
            if before.results:
                given = f"time scale {before.facts.time_scale:g}, and the cell has {scale:g}"
                self._begin_again(trial, f"its repeats so far: they have {given}")
            fewer, launches = planned([trial], {trial.hash: before}), planned([trial], {})
            left = [launch for launch in self._progress.left if launch.trial.hash != trial.hash]
            self._progress.left = left + launches
            self._progress.total += len(launches) - len(fewer)
        return kept

    def _underway(self, trials: Sequence[Trial]) -> Path:
        return path_of(self.folder, order_seed(self.experiment.name, trials[0]))

    def _run_cell(self, trials: list[Trial], settled: Choice | None, fail_fast: bool) -> bool:
        kept = self._kept_at_scale(trials, settled)
        for trial in trials:
            self._runs[trial.hash] = kept[trial.hash].run if trial.hash in kept else self._run_id
            if trial.hash in kept and kept[trial.hash].results:
                continue  # the folder has the measurements
            folder = self.folder / trial.id
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            trial.save(folder)
        path = self._underway(trials)
        others = Underway.load(path).without({trial.hash for trial in trials})
        uses = {trial.hash: used(trial, self.machine) for trial in trials}

        def keep(now: Mapping[str, Standing]) -> None:
            standing = {
                key: dataclasses.replace(value, run=self._runs[key], uses=uses[key])
                for key, value in now.items()
            }
            Underway(standing=others.standing | standing).save(path)

        context = CellContext(
            sweep=self.experiment.name,
            fabric=self.fabric,
            base=self.experiment.base,
            timeout_s=self.experiment.timeout_s,
            launch=self._launch,
            record=self._record,
            progress=self._progress,
            report=self.report,
        )
        cell = Cell(
            trials,
            context,
            settled=settled,
            kept=kept,
            keep=keep,
        )
        going_on = cell.run(_unavailable, fail_fast)
        if cell.whole:
            others.save(path)
        return going_on

    def _settle(self, record: Record) -> None:
        if passing_flag(record) is None and record.hash in self.comparison.trials:
            self._settled.append(_Settled.of(record))

    def _by_scale(self, cell: list[Trial]) -> list[tuple[Choice | None, list[Trial]]]:
        """Groups trials of a cell by the time scale that they must have; None: not yet chosen."""
        again = {trial.hash for trial in self._todo}
        kept = [
            each
            for each in reversed(self._settled)
            if each.hash not in again or each.run == self._runs.get(each.hash)
        ]
        groups: dict[float | None, tuple[Choice | None, list[Trial]]] = {}
        for trial in cell:
            choice = _choice(trial, kept)
            key = choice and choice.time_scale
            groups.setdefault(key, (choice, []))[1].append(trial)
        return list(groups.values())

    def _launch(
        self, trial: Trial, repeat: int, slower: float = 1.0
    ) -> tuple[Outcome, Result | None]:
        """Runs one repeat; gives the workers costs of collectives that another trial measured."""
        job = Job(
            folder=self.folder / trial.id,
            repeat=repeat,
            world_size=trial.world_size,
            timeout_s=slower * self.experiment.timeout_s,
            worker_module=WORKER,
            env={**self.experiment.worker_env, FLIGHT: str((self.folder / trial.id).resolve())},
            may_lose_ranks=trial.own_pace,
        )
        job.clear()  # a launch may be repeated
        (job.folder / flight.MERGED).unlink(missing_ok=True)
        briefing = self.fabric.briefing(trial, job.folder)
        place = cost_place(trial, briefing.time_scale)
        known = self._costs.get(place)
        if known is not None and (known.trial, known.repeat) == (trial.hash, repeat):
            known = None  # a disturbed launch is repeated: its costs were disturbed, too
        dataclasses.replace(briefing, costs=known and known.costs).save()
        try:
            outcome = self.fabric.run(trial, job)
            if outcome.status != "ok":
                return _explained(outcome, job.folder), None
        finally:
            flight.clear(job.folder)
        result = typed(Result, outcome.result)
        if result.costs and known is None:
            self._costs[place] = _Costs(
                trial=trial.hash, repeat=repeat, costs=result.costs, check=result.cost_check
            )
        elif result.costs:
            result = dataclasses.replace(result, cost_check=known.check)
        return outcome, result

    def _record(self, turn: Turn, outcome: Outcome) -> None:
        record = make_record(
            turn.trial,
            turn.results,
            outcome,
            self.machine,
            started=turn.started,
            duration_s=turn.duration_s,
            fabric=turn.facts or self.fabric.describe(turn.trial),
            run=self._runs[turn.trial.hash],
        )
        changed = self._begun_again.get(turn.trial.hash)
        again = [Note(kind="interrupted", text=changed)] if changed else []
        record = dataclasses.replace(
            record,
            order=turn.order,
            set_aside=turn.set_aside,
            systematic=turn.systematic if record.ok else None,
            notes=list(dict.fromkeys((*record.notes, *turn.notes, *again))),
        )
        store.append(self._path, record)
        self._settle(record)


def _explained(outcome: Outcome, folder: Path) -> Outcome:
    """Adds to a failure where the ranks differed first, by their flight recorders."""
    try:
        sentence = flight.merge(folder)
    except OSError as error:  # such as a full disk
        sentence = f"no {flight.MERGED}: {error.strerror}"
    if sentence is None or outcome.error is None:
        return outcome
    message = f"{outcome.error['message']}; {sentence}"
    return dataclasses.replace(outcome, error={**outcome.error, "message": message})


def _say(text: str) -> None:
    with suppress(BrokenPipeError):  # as with the progress line
        print(text, file=sys.stderr)


def _place(trial: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns the settings by which rows of tables are grouped."""
    return tuple(trial[key] for key in ("model", "batch_size", "world_size", "label", "network"))


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in json.loads(json.dumps(values)).items():
        nested = isinstance(value, dict)
        flat |= _flat(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return flat


_AS_THE_OTHERS = "as others of the cell, which are on record: "


def _choice(trial: Trial, kept: Sequence[_Settled]) -> Choice | None:
    """Returns the time scale of the valid records with which the trial is compared, or None.

    These are the records with the trial's cell and world size; for a trial with a fault, also of
    the same trial without the fault; for the single worker, the records of all world sizes.

    Args:
        kept: those of valid records, newest first.
    """
    cell = _without_fault(trial).cell
    for each in kept:
        compared = trial.algorithm == BASELINE or each.world_size == trial.world_size
        if compared and each.cell == cell:
            reason = each.choice.reason
            if not reason.startswith(_AS_THE_OTHERS):
                reason = _AS_THE_OTHERS + reason
            return Choice(time_scale=each.choice.time_scale, reason=reason)
    return None


def _without_fault(trial: Trial) -> Trial:
    return dataclasses.replace(trial, fault=None)


def _cells(trials: Sequence[Trial]) -> list[list[Trial]]:
    cells: dict[tuple[Any, ...], list[Trial]] = {}
    for trial in trials:
        cells.setdefault(trial.cell, []).append(trial)
    return list(cells.values())


def to_run(
    trials: list[Trial], path: Path, rerun: Rerun, base: str, *, at_2k: bool = True
) -> list[Trial]:
    """Returns the trials that would run: all, or those whose newest record is not valid, or lacks
    only repeats at twice the time scale.

    If the baseline runs again, all trials that are compared with it run again, too: they must take
    turns with it, and may need another time scale.

    Args:
        at_2k: False leaves out trials that lack only repeats at twice the time scale.
    """
    if rerun == "all":
        return trials
    newest, begun = store.latest(store.each(path)), underway.begun(path.parent)

    def flawed(trial: Trial) -> bool:
        return trial.hash not in newest or passing_flag(newest[trial.hash]) is not None

    def stopped(trial: Trial) -> bool:  # between repeats at twice the scale
        ended = newest.get(trial.hash)
        return at_2k and ended is not None and begun.get(trial.hash) == ended.run

    lost = {
        (trial.cell, trial.world_size)
        for trial in trials
        if trial.label == base and trial.hash in newest and newest[trial.hash].ok and flawed(trial)
    }
    return [
        trial
        for trial in trials
        if flawed(trial) or stopped(trial) or (lost and (trial.cell, trial.world_size) in lost)
    ]


def _unavailable(trial: Trial) -> str | None:
    reason = misfit(trial)
    if reason is not None:
        return f"{reason}; `{COMMAND} predict` computes its steps"
    if trial.algorithm == BASELINE:
        return None
    algorithm = algorithm_class(trial.algorithm)
    if trial.device not in algorithm.capabilities.devices:
        return f"{trial.algorithm} does not run on {trial.device}"
    if trial.world_size < algorithm.capabilities.min_world_size:
        return f"{trial.algorithm} needs {algorithm.capabilities.min_world_size} workers"
    return algorithm.unavailable()


def cost_place(trial: Trial, time_scale: float) -> tuple[Any, ...]:
    """Returns all settings that the costs of collectives depend on."""
    same = ("model", "dtype", "world_size", "ranks_per_host", "network")
    same += ("launcher", "backend", "device")
    return (time_scale, *(getattr(trial, key) for key in same))


@contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{folder} is in use by another run: wait for it, or choose another name with "
                "`--set name=OTHER`"
            ) from None
        yield
