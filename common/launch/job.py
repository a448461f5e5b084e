"""What a launcher is asked to start, what it answers, and the launchers by name.

A launcher is the class `NameLauncher` of the file `common/launch/NAME.py`.
"""

from __future__ import annotations

import functools
import importlib
import json
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import common.launch
from common.launch.hosts import Host, require_slots
from dear.errors import UserError, unknown
from dear.options import build_options


@dataclass(frozen=True, kw_only=True)
class Job:
    """One repeat of one trial: `world_size` workers on `folder/trial.json`."""

    folder: Path
    repeat: int
    world_size: int
    timeout_s: float
    worker_module: str
    """What every rank runs, as `python -m MODULE FOLDER REPEAT`; where the launcher makes ranks of
    its own, as the module's `main(folder, repeat)`."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables that every rank gets besides the launcher's own."""
    may_lose_ranks: bool = False
    """If a rank is killed, the others go on, and may end well. (The launcher `local` lets them; the
    others end the job as soon as a rank has failed.)"""

    @property
    def result_path(self) -> Path:
        return self.folder / f"repeat-{self.repeat}.json"

    def clear(self) -> None:
        """Removes what an earlier launch of the same repeat has left; it would be taken for new."""
        self.result_path.unlink(missing_ok=True)
        for kind in ("error", "exit"):
            for path in self.folder.glob(f"{kind}-{self.repeat}-rank*"):
                path.unlink()

    def log_path(self, rank: int) -> Path:
        """What rank `rank` printed."""
        return self.folder / f"log-{self.repeat}-rank{rank}.txt"

    def exit_path(self, rank: int) -> Path:
        """Where a launcher's helper on the rank's host writes how the rank's process ended."""
        return self.folder / f"exit-{self.repeat}-rank{rank}"

    @property
    def worker(self) -> list[str]:
        """What every rank runs, after `python`."""
        return ["-m", self.worker_module, str(self.folder.resolve()), str(self.repeat)]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a job ended."""

    status: str
    """As in records: ok, failed, timeout, oom, unsupported, interrupted."""
    error: dict[str, Any] | None = None
    """kind, message, rank (None if it is not one rank's), where."""
    result: dict[str, Any] | None = None
    """What rank 0 wrote; with `lost_ranks` where some were killed and the others did well."""

    @classmethod
    def of(
        cls, kind: str, message: str, rank: int | None = None, where: str | None = None
    ) -> Outcome:
        """That of a job, or of a rank of it, that went wrong."""
        error = {"kind": kind, "message": message, "rank": rank, "where": where}
        return cls(status=kind, error=error)


class Launcher(ABC):
    """Starts the workers of a job and returns when none of them is left.

    Ranks fill the hosts in their order. Hosts must see the job's folder and this repository under
    the same paths (a shared file system); virtual hosts do.

    Args:
        hosts: None means this machine (slurm: whatever hosts it gives).
        options: None means the defaults.
        preload: modules to import once for all jobs, where the launcher can.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options:
        """What can be set; every launcher documents its own."""

    def __init__(
        self,
        *,
        hosts: Sequence[Host] | None = None,
        options: Any = None,
        preload: Sequence[str] = (),
    ) -> None:
        self._hosts = hosts
        self._options = options or self.Options()
        self._preload = preload

    def check(self) -> None:
        """Asks the hosts whether they are there, all at once; to be called before the first job.

        Raises:
            UserError: a host that does not answer, by name.
        """
        return None

    @abstractmethod
    def command(self, job: Job) -> str:
        """The job as a command that a person could type."""

    def batch_script(self, command: Sequence[str], name: str, world_size: int) -> str | None:
        """A script for a batch system that runs a whole sweep; None where there is no such system.

        Args:
            command: that runs the sweep.
            name: the sweep's.
            world_size: the largest of the sweep.
        """
        return None

    @abstractmethod
    def run(self, job: Job) -> Outcome:
        """Runs the job to its end, its time limit, or the first failure of a rank.

        On `KeyboardInterrupt` the workers are stopped, then it is raised again.
        """


def ranks_phase(job: Job, rank: int) -> str:
    """What the rank said it was doing last."""
    path = job.folder / f"phase-{job.repeat}-rank{rank}"
    return path.read_text().partition(" ")[2] if path.exists() else "starting"


def outcome_of(
    job: Job, exit_codes: Mapping[int, int | None], otherwise: str | None = None
) -> Outcome:
    """Judges a job whose processes have all ended.

    Args:
        exit_codes: per rank, as subprocess gives them (minus the signal's number for a signal), or
            None where the launcher stopped the rank itself.
        otherwise: what went wrong, where no rank says so itself.
    """
    # What failing ranks wrote before they left.
    paths = sorted(job.folder.glob(f"error-{job.repeat}-rank*.json"))
    errors = [json.loads(path.read_text()) for path in paths]
    killed = [rank for rank, code in exit_codes.items() if code is not None and code < 0]
    others = [code for rank, code in exit_codes.items() if rank not in killed]
    well = others != [] and not any(code != 0 for code in others) and job.result_path.exists()
    if killed and job.may_lose_ranks and well:
        result = json.loads(job.result_path.read_text())
        return Outcome(status="ok", result={**result, "lost_ranks": killed})
    if killed:
        # The others fail because this one is gone; it is the cause even if they were noticed first.
        rank = killed[0]
        message = f"rank {rank} was killed by signal {-exit_codes[rank]}"
        return Outcome.of("failed", message, rank, ranks_phase(job, rank))
    for kind in ("unsupported", "oom", "failed"):
        for error in errors:
            if error["kind"] == kind:
                return Outcome(status=kind, error=error)
    for rank, code in exit_codes.items():
        if code:
            message = f"rank {rank} exited with status {code}"
            return Outcome.of("failed", message, rank, ranks_phase(job, rank))
    if otherwise is None and not job.result_path.exists():
        otherwise = "the workers ended without a result"
    if otherwise is not None:
        return Outcome.of("failed", otherwise)
    return Outcome(status="ok", result=json.loads(job.result_path.read_text()))


def timed_out(job: Job) -> Outcome:
    """The outcome of a job that the launcher stopped at its time limit."""
    phases = "; ".join(f"rank {r}: {ranks_phase(job, r)}" for r in range(job.world_size))
    message = f"not finished after {job.timeout_s:g} s ({phases}); stacks are in the logs"
    return Outcome.of("timeout", message)


def launcher_names() -> list[str]:
    """Names of the launchers there are, found by file name."""
    return sorted(_launchers())


def launcher_options(name: str, options: Mapping[str, Any]) -> Any:
    """The launcher's options from untyped values.

    Raises:
        UserError: an unknown launcher, an option that it does not have, or a bad value.
    """
    if name not in _launchers():
        raise unknown("launcher", name, launcher_names())
    return build_options(_launchers()[name].Options, options, f"option of launcher {name}")


def make_launcher(
    name: str,
    *,
    hosts: Sequence[Host] | None,
    world_size: int,
    preload: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
) -> Launcher:
    """Makes a launcher; nothing is started or asked before `check` or `run`.

    Args:
        hosts, preload: as of `Launcher`.
        world_size: the largest world that will be asked for.
        options: what differs from the defaults of the launcher's `Options`.

    Raises:
        UserError: an unknown launcher or option, too few slots, or a launcher that cannot run here
            or on these hosts.
    """
    made = launcher_options(name, options or {})
    if hosts is not None:
        if not hosts:
            raise UserError(f"launcher {name}: the list of hosts is empty")
        require_slots(hosts, world_size, "the hosts have")
    return _launchers()[name](hosts=hosts, preload=preload, options=made)


@functools.cache
def _launchers() -> dict[str, type[Launcher]]:
    names = [module.name for module in pkgutil.iter_modules(common.launch.__path__)]
    found = {name: vars(importlib.import_module(f"common.launch.{name}")) for name in names}
    classes = {name: words.get(f"{name.capitalize()}Launcher") for name, words in found.items()}
    return {name: kind for name, kind in classes.items() if kind is not None}
