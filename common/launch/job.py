"""Jobs, their outcomes, and launchers by name.

The launcher NAME is the class `NameLauncher` in the file `common/launch/NAME.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import pkgutil
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import common.launch
from common.launch.hosts import Host, require_slots
from dear.errors import UserError, unknown
from dear.options import build_options

DONE = "done"
ENDS = ("judging", DONE)
"""Phases of a rank that has trained to the end."""
ADMINISTRATIVE = {"administrative": True}
"""Metadata of a launcher's option that changes no measurement: another value is no other trial."""
LEFT_S = 15.0
"""Time in which the other ranks follow the first one that comes to its end."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One repeat of one trial: `world_size` workers that run `folder/trial.json`."""

    folder: Path
    repeat: int
    world_size: int
    timeout_s: float
    worker_module: str
    """Module that every rank runs as `python -m MODULE FOLDER REPEAT`, or by a call of its
    `main(folder, repeat)` if the launcher forks ranks."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables of every rank, in addition to the launcher's."""
    may_lose_ranks: bool = False
    """True for a job that may succeed although a rank was killed. Most launchers would end the job
    then, so `common.launch.node --kept` hides from them that a rank was killed, and notes it."""

    @property
    def result_path(self) -> Path:
        return self.folder / f"repeat-{self.repeat}.json"

    def clear(self) -> None:
        """Removes the files of an earlier launch of this repeat."""
        self.result_path.unlink(missing_ok=True)
        for kind in ("error", "exit", "killed", "phase"):
            for path in self.folder.glob(f"{kind}-{self.repeat}-rank*"):
                path.unlink()

    def phase_path(self, rank: int) -> Path:
        """Returns the path of the PID and the present phase of a rank, which it writes."""
        return self.folder / f"phase-{self.repeat}-rank{rank}"

    def log_path(self, rank: int) -> Path:
        """Returns the path of the output of rank `rank`."""
        return self.folder / f"log-{self.repeat}-rank{rank}.txt"

    def exit_path(self, rank: int) -> Path:
        """Returns the path of the exit status of a rank, which `common.launch.node` writes."""
        return self.folder / f"exit-{self.repeat}-rank{rank}"

    def killed_path(self, rank: int) -> Path:
        """Returns the path of the signal that killed a rank, which `common.launch.node --kept`
        writes."""
        return self.folder / f"killed-{self.repeat}-rank{rank}"

    @property
    def worker(self) -> list[str]:
        """Arguments of `python` on every rank."""
        words = [str(self.folder.resolve()), str(self.repeat)]
        kept = ["-m", "common.launch.node", "--kept", *words, "--"] if self.may_lose_ranks else []
        return [*kept, "-m", self.worker_module, *words]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Outcome of a job."""

    status: str
    """One of ok, failed, timeout, oom, unsupported and interrupted, as in records."""
    error: dict[str, Any] | None = None
    """Keys kind, message, rank (None if no single rank failed) and where."""
    result: dict[str, Any] | None = None
    """Result that rank 0 wrote; with `lost_ranks` if ranks were killed and the others succeeded."""

    @classmethod
    def of(
        cls, kind: str, message: str, rank: int | None = None, where: str | None = None
    ) -> Outcome:
        """Returns the outcome of a failed job."""
        error = {"kind": kind, "message": message, "rank": rank, "where": where}
        return cls(status=kind, error=error)


class LeftBehind:
    """Says whether a rank has not come to its end, but another one did `LEFT_S` ago.

    In a job that may lose ranks, a rank comes to its end when all others have, or are lost to it: a
    rank that still runs then is stopped, or cut off. The time counts from the first call that sees
    the end: dates of files may be those of another host's clock.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._since: float | None = None

    def __call__(self, rank: int) -> bool:
        phases = [ranks_phase(self._job, other) for other in range(self._job.world_size)]
        if self._since is None and any(phase in ENDS for phase in phases):
            self._since = time.monotonic()
        late = self._since is not None and time.monotonic() - self._since > LEFT_S
        return late and phases[rank] not in ENDS


class Launcher(ABC):
    """Launcher of jobs; it returns when no worker is left.

    Ranks are assigned to the hosts in order. All hosts must have the job's folder and this
    repository under the same paths (a shared file system); virtual hosts do.

    Args:
        hosts: None means this machine, or for slurm the hosts that Slurm chooses.
        options: None means the defaults.
        preload: modules to import once for all jobs, if the launcher supports it.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options:
        """Options of the launcher."""

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
        """Checks that all hosts answer; called before the first job.

        Raises:
            UserError: hosts do not answer; the message names them.
        """
        return None

    @abstractmethod
    def command(self, job: Job) -> str:
        """Returns the job as a command line for a shell."""

    def batch_script(self, command: Sequence[str], name: str, world_size: int) -> str | None:
        """Returns a script for a batch system that runs a whole sweep; None without such a system.

        Args:
            command: command line that runs the sweep.
            name: name of the sweep.
            world_size: largest world size of the sweep.
        """
        return None

    @abstractmethod
    def run(self, job: Job) -> Outcome:
        """Runs the job until it ends, its time limit is reached, or a rank fails.

        A `KeyboardInterrupt` stops the workers and is raised again.
        """


def ranks_phase(job: Job, rank: int) -> str:
    """Returns the last phase that the rank has reported."""
    path = job.phase_path(rank)
    return path.read_text(encoding="utf-8").partition(" ")[2] if path.exists() else "starting"


def outcome_of(
    job: Job, exit_codes: Mapping[int, int | None], otherwise: str | None = None
) -> Outcome:
    """Returns the outcome of a job whose processes have all ended.

    Args:
        exit_codes: exit status by rank, as in `subprocess` (-N for signal N), or None for a rank
            that the launcher stopped.
        otherwise: description of the failure, used if no rank reports one.
    """
    # Failing ranks write errors before they end, so the cause is older than what followed from it.
    paths = sorted(
        job.folder.glob(f"error-{job.repeat}-rank*.json"),
        key=lambda path: (path.stat().st_mtime_ns, path.name),
    )
    errors = [json.loads(path.read_bytes()) for path in paths]
    kept = _kept(job)
    killed = {rank: -code for rank, code in exit_codes.items() if code is not None and code < 0}
    others = [code for rank, code in exit_codes.items() if rank not in killed]
    lasted = kept != {} or others != []
    succeeded = lasted and otherwise is None and not any(code != 0 for code in others)
    killed |= kept
    if killed and job.may_lose_ranks and succeeded and job.result_path.exists():
        result = json.loads(job.result_path.read_bytes())
        return Outcome(status="ok", result={**result, "lost_ranks": sorted(killed)})
    # NCCL aborts its own process (SIGABRT) when another rank ends, for example without memory.
    aborted = all(number == signal.SIGABRT for number in killed.values())
    if killed and not (aborted and any(error["kind"] != "failed" for error in errors)):
        # The killed rank is the cause, even if failures of the others were noticed first.
        rank = min(killed)
        message = f"rank {rank} was killed by signal {killed[rank]}"
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
    return Outcome(status="ok", result=json.loads(job.result_path.read_bytes()))


def _kept(job: Job) -> dict[int, int]:
    """Returns the signals that killed ranks without their launcher's knowledge, by rank."""
    paths = {rank: job.killed_path(rank) for rank in range(job.world_size)}
    return {rank: int(path.read_bytes()) for rank, path in paths.items() if path.exists()}


def timed_out(job: Job) -> Outcome:
    """Returns the outcome of a job that the launcher stopped at its time limit."""
    phases = "; ".join(f"rank {r}: {ranks_phase(job, r)}" for r in range(job.world_size))
    message = f"not finished after {job.timeout_s:g} s ({phases}); stacks are in the logs"
    return Outcome.of("timeout", message)


def launcher_names() -> list[str]:
    """Returns the names of all launchers."""
    return sorted(_launchers())


def launcher_options(name: str, options: Mapping[str, Any]) -> Any:
    """Converts untyped values to the launcher's options.

    Raises:
        UserError: the launcher or an option is unknown, or a value is invalid.
    """
    if name not in _launchers():
        raise unknown("launcher", name, launcher_names())
    return build_options(_launchers()[name].Options, options, f"{name} launcher option")


def administrative(name: str) -> set[str]:
    """Returns the options of a launcher that change no measurement, such as a time in a queue."""
    options = dataclasses.fields(_launchers()[name].Options) if name in _launchers() else ()
    return {option.name for option in options if option.metadata.get("administrative")}


def make_launcher(
    name: str,
    *,
    hosts: Sequence[Host] | None,
    world_size: int,
    preload: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
) -> Launcher:
    """Returns a launcher; it starts nothing before `check` or `run`.

    Args:
        hosts, preload: as for `Launcher`.
        world_size: largest world size of the jobs.
        options: options of the launcher that differ from the defaults.

    Raises:
        UserError: the launcher or an option is unknown, there are too few slots, or the launcher
            cannot run here or on these hosts.
    """
    typed_options = launcher_options(name, options or {})
    if hosts is not None:
        if not hosts:
            raise UserError(f"launcher {name}: the list of hosts is empty")
        require_slots(hosts, world_size, "the hosts have")
    return _launchers()[name](hosts=hosts, preload=preload, options=typed_options)


@functools.cache
def _launchers() -> dict[str, type[Launcher]]:
    launchers = {}
    for module in pkgutil.iter_modules(common.launch.__path__):
        members = vars(importlib.import_module(f"common.launch.{module.name}"))
        kind = members.get(f"{module.name.capitalize()}Launcher")
        if kind is not None:
            launchers[module.name] = kind
    return launchers
