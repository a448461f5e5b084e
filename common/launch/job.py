"""What a launcher is asked to start, and what it answers."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# After the first rank has failed, the others get this long to say what they saw.
GRACE_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """One repeat of one trial: `world_size` workers on `folder/trial.json`."""

    folder: Path
    repeat: int
    world_size: int
    timeout_s: float
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables that every rank gets besides the launcher's own."""
    may_lose_ranks: bool = False
    """If a rank is killed, the others go on, and may end well. (The launcher `local` lets them; the
    others end the job as soon as a rank has failed.)"""

    @property
    def result_path(self) -> Path:
        return self.folder / f"repeat-{self.repeat}.json"

    def log_path(self, rank: int) -> Path:
        """What rank `rank` printed."""
        return self.folder / f"log-{self.repeat}-rank{rank}.txt"

    def exit_path(self, rank: int) -> Path:
        """Where a launcher's helper on the rank's host writes how the rank's process ended."""
        return self.folder / f"exit-{self.repeat}-rank{rank}"

    @property
    def worker(self) -> list[str]:
        """What every rank runs, after `python`."""
        return ["-m", "common.harness.worker", str(self.folder.resolve()), str(self.repeat)]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a job ended."""

    status: str
    """As in records: ok, failed, timeout, oom, unsupported, interrupted."""
    error: dict[str, Any] | None = None
    """kind, message, rank (None if it is not one rank's), where."""
    result: dict[str, Any] | None = None
    """What rank 0 wrote; with `lost_ranks` where some were killed and the others did well."""


class Launcher(ABC):
    """Starts the workers of a job and returns when none of them is left.

    Made by `launchers.make_launcher` as `cls(hosts=..., preload=..., options=cls.Options(...))`.
    Ranks fill the hosts in their order. Hosts must see the job's folder and this repository under
    the same paths (a shared file system); virtual hosts do.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options:
        """What can be set; every launcher documents its own."""

    def check(self) -> None:
        """Asks the hosts whether they are there, all at once; before the first job at the latest.

        Raises:
            UserError: a host that does not answer, by name.
        """
        return None

    @abstractmethod
    def command(self, job: Job) -> str:
        """The job as a command that a person could type."""

    @abstractmethod
    def run(self, job: Job) -> Outcome:
        """Runs the job to its end, its time limit, or the first failure of a rank.

        On `KeyboardInterrupt` the workers are stopped, then it is raised again.
        """


def ranks_phase(job: Job, rank: int) -> str:
    """What the rank said it was doing last."""
    path = job.folder / f"phase-{job.repeat}-rank{rank}"
    return path.read_text().partition(" ")[2] if path.exists() else "starting"


def rank_errors(job: Job) -> dict[int, dict[str, Any]]:
    """What failing ranks wrote before they left."""
    errors = {}
    for path in sorted(job.folder.glob(f"error-{job.repeat}-rank*.json")):
        error = json.loads(path.read_text())
        errors[error["rank"]] = error
    return errors


def outcome_of(
    job: Job, exit_codes: Mapping[int, int | None], otherwise: str | None = None
) -> Outcome:
    """Judges a job whose processes have all ended.

    Args:
        exit_codes: per rank, as subprocess gives them (minus the signal's number for a signal), or
            None where the launcher stopped the rank itself.
        otherwise: what went wrong, where no rank says so itself.
    """
    errors = rank_errors(job)
    killed = [rank for rank, code in exit_codes.items() if code is not None and code < 0]
    if killed and job.may_lose_ranks and _others_ended_well(job, exit_codes, killed):
        result = json.loads(job.result_path.read_text())
        return Outcome(status="ok", result={**result, "lost_ranks": killed})
    if killed:
        # The others fail because this one is gone; it is the cause even if they were noticed first.
        rank = killed[0]
        message = f"rank {rank} was killed by signal {-exit_codes[rank]}"
        return _failed(job, "failed", message, rank)
    for kind in ("unsupported", "oom", "failed"):
        for error in errors.values():
            if error["kind"] == kind:
                return Outcome(status=kind, error=error)
    for rank, code in exit_codes.items():
        if code:
            return _failed(job, "failed", f"rank {rank} exited with status {code}", rank)
    if otherwise is not None:
        return _failed(job, "failed", otherwise, None)
    if not job.result_path.exists():
        return _failed(job, "failed", "the workers ended without a result", None)
    return Outcome(status="ok", result=json.loads(job.result_path.read_text()))


def _others_ended_well(
    job: Job, exit_codes: Mapping[int, int | None], killed: Sequence[int]
) -> bool:
    others = [code for rank, code in exit_codes.items() if rank not in killed]
    return job.result_path.exists() and others != [] and not any(code != 0 for code in others)


def timed_out(job: Job) -> Outcome:
    """The outcome of a job that the launcher stopped at its time limit."""
    phases = "; ".join(f"rank {r}: {ranks_phase(job, r)}" for r in range(job.world_size))
    message = f"not finished after {job.timeout_s:g} s ({phases}); stacks are in the logs"
    return _failed(job, "timeout", message, None)


def _failed(job: Job, status: str, message: str, rank: int | None) -> Outcome:
    where = None if rank is None else ranks_phase(job, rank)
    error = {"kind": status, "message": message, "rank": rank, "where": where}
    return Outcome(status=status, error=error)
