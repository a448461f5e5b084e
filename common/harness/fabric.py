"""What a sweep runs on: this machine and the hosts of a hostfile, or an emulated cluster."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from common.harness.experiment import Experiment
from common.harness.memory import check_memory
from common.harness.recording import REAL
from common.harness.settings import EmulationSettings
from common.harness.trial import Trial
from common.launch.hosts import read_hostfile
from common.launch.job import Job, Launcher, Outcome, make_launcher
from common.models.registry import is_replay, model_entry, profile_of

WORKER = "common.harness.worker"
"""What every rank runs."""


class Fabric(ABC):
    """Runs jobs, and knows what of itself belongs into a record.

    A context manager: what it needs is built on entry and gone on exit.
    """

    @abstractmethod
    def __enter__(self) -> Fabric: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None

    @abstractmethod
    def command(self, job: Job) -> str:
        """The job as a command that a person could type."""

    @abstractmethod
    def enter_cell(self, trials: Sequence[Trial]) -> None:
        """Prepares for these trials, which are compared with each other and share a network.

        Raises:
            RuntimeError: they cannot be run, which one line says.
        """

    def settings(self, trial: Trial, folder: Path) -> EmulationSettings | None:
        """What the workers of the trial in `folder` must know of the fabric, or None."""
        return None

    @abstractmethod
    def run(self, trial: Trial, job: Job) -> Outcome:
        """Runs one repeat of the trial to its end."""

    @abstractmethod
    def describe(self, trial: Trial) -> dict[str, Any]:
        """The record's `fabric`, `network`, `time_scale` (and its reason), `fault_events`."""


class RealFabric(Fabric):
    """Processes of this machine, or of the hosts of a hostfile."""

    def __init__(self, experiment: Experiment, trials: Sequence[Trial]) -> None:
        self._launcher = launcher_for(experiment, trials)
        self._launcher.check()

    def __enter__(self) -> RealFabric:
        return self

    def command(self, job: Job) -> str:
        return self._launcher.command(job)

    def enter_cell(self, trials: Sequence[Trial]) -> None:
        return None

    def run(self, trial: Trial, job: Job) -> Outcome:
        return self._launcher.run(job)

    def describe(self, trial: Trial) -> dict[str, Any]:
        if not is_replay(trial.model):
            return dict(REAL)
        # Replayed compute is nobody's measurement, whatever moves the bytes.
        return {**REAL, "fabric": "emulated"}


def make_fabric(experiment: Experiment, trials: Sequence[Trial]) -> Fabric:
    """What the experiment asks for; virtual hosts only inside a sandbox."""
    if experiment.cluster is None:
        return RealFabric(experiment, trials)
    from common.harness.emulated import EmulatedFabric

    return EmulatedFabric(experiment, trials)


def check_fit(trials: Sequence[Trial]) -> None:
    """Raises `UserError` if the ranks of an emulated cluster need more memory than there is.

    Of a model that computes for real only the processes count: its size is not known before it is
    built.
    """
    for trial in trials:
        if trial.hosts is None or trial.ranks_per_host is None:
            continue
        size = 0
        if is_replay(trial.model):
            profile = profile_of(trial.model, trial.batch_size, trial.sentence_len)
            size = profile.parameter_bytes
        check_memory(
            size,
            hosts=trial.hosts,
            ranks_per_host=trial.ranks_per_host,
            # A delayed algorithm holds the gradients of several steps.
            optimizer_copies=trial.optimizer.state_copies + trial.staleness,
        )


def launcher_for(
    experiment: Experiment, trials: Sequence[Trial], hosts: Sequence[Any] | None = None
) -> Launcher:
    """The experiment's launcher for the largest of the trials' worlds, on `hosts` if given."""
    world_size = max(trial.world_size for trial in trials)
    if hosts is None and experiment.hostfile is not None:
        hosts = read_hostfile(Path(experiment.hostfile), world_size)
    return make_launcher(
        experiment.launcher,
        hosts=hosts,
        world_size=world_size,
        preload=[WORKER, *sorted({model_entry(trial.model).module for trial in trials})],
        options=experiment.launcher_options,
    )
