"""Launcher of ranks by Slurm: `srun` inside an allocation, else a batch job per repeat."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.launch.hosts import (
    Host,
    NetworkOptions,
    are_virtual,
    elsewhere,
    interface,
    network_env,
    read_envs,
)
from common.launch.job import ADMINISTRATIVE, Job, Launcher, Outcome, outcome_of, timed_out
from common.launch.per_host import STACKS_S, Fleet, HostCommand
from dear.errors import UserError
from dear.options import positive

POLL_S = 0.5
_SPARE_MIN = 5
_FIRST_SPECIAL_STEP = 4294967290
"""Least number of the steps that Slurm makes itself, such as that of a batch script."""
# Ends when the job has left the queue, so that none of its ranks remains.
_CANCEL = (
    'scancel --quiet --name "$0"; '
    'while [ -n "$(squeue --noheader --name "$0")" ]; do sleep 0.2; done'
)


class SlurmLauncher(Launcher):
    """Launcher that runs `srun python -m WORKER`, in `sbatch --wait` if there is no allocation.

    The time limit of a batch job begins when the job starts to run. The job is cancelled if this
    process ends first.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(NetworkOptions):
        """Options of Slurm and of the network."""

        partition: str | None = None
        """Partition; None: Slurm's default."""
        tasks_per_node: int | None = None
        """Ranks per node; needed for more than one worker. A smaller world uses fewer nodes."""
        gpus_per_node: int | None = None
        """GPUs per node, visible to all ranks of the node; None: no GPUs are requested."""
        sbatch_args: tuple[str, ...] = ()
        """Further arguments of sbatch, e.g. --account=NAME."""
        srun_args: tuple[str, ...] = ()
        """Further arguments of srun, e.g. --mpi=none."""
        queue_s: float = field(default=86400.0, metadata=ADMINISTRATIVE)
        """Longest time in the queue, in seconds."""

        def __post_init__(self) -> None:
            positive("queue_s", self.queue_s)
            for words in ((self.partition or "",), self.sbatch_args, self.srun_args):
                for word in words:
                    if any(character in word for character in "\n\r\0"):
                        raise UserError(f"an argument of Slurm must be one line, got {word!r}")
            for name in ("tasks_per_node", "gpus_per_node"):
                value = getattr(self, name)
                if value is not None and value < 1:
                    raise UserError(f"{name} must be at least 1, got {value}")

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        if are_virtual(self._hosts):
            raise UserError(
                "launcher slurm does not run on virtual hosts; use local, ssh or mpirun"
            )
        if self._hosts is not None:
            raise UserError(
                "launcher slurm does not support a hostfile: Slurm chooses the hosts (options "
                "partition, tasks_per_node, sbatch_args)"
            )
        self._envs = read_envs()
        self._interface = interface(self._options, self._envs, None)

    def check(self) -> None:
        """Checks that Slurm is installed; its commands can be printed without it."""
        if shutil.which("srun") is None:
            raise UserError("launcher slurm: no srun on the PATH; use launcher=ssh or mpirun")
        step = os.environ.get("SLURM_STEP_ID", "")
        shared = "--overlap" in self._options.srun_args
        if step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP and not shared:
            raise UserError(
                f"launcher slurm: this process is step {step} of job {os.environ['SLURM_JOB_ID']} "
                "and has all of its resources, so its own srun would wait for ever; start the "
                "sweep by salloc or sbatch, or set srun_args: [--overlap]"
            )

    def batch_script(self, command: Sequence[str], name: str, world_size: int) -> str:
        """Returns a script for sbatch that runs a whole sweep in one allocation.

        In the allocation the sweep starts ranks by srun.
        """
        options = self._options
        words = ["--job-name", f"dear-bench-{name}", "--ntasks", str(world_size)]
        words += self._size(world_size)
        if options.partition is not None:
            words += ["--partition", options.partition]
        flags = [f"{flag}={value}" for flag, value in zip(words[::2], words[1::2], strict=True)]
        flags = [shlex.quote(flag) for flag in [*flags, *options.sbatch_args]]
        lines = ["#!/bin/bash", *(f"#SBATCH {flag}" for flag in flags)]
        lines += ["set -euo pipefail", f"cd {shlex.quote(str(Path.cwd()))}"]
        return "\n".join([*lines, f"exec {shlex.join(command)}"])

    def _size(self, world_size: int) -> list[str]:
        """Returns the arguments for the number of nodes, and for ranks and GPUs per node.

        Raises:
            UserError: there are several ranks, and it is not known how many a node gets.
        """
        options = self._options
        args = []
        if world_size > 1:
            tasks = options.tasks_per_node
            if tasks is None:
                raise UserError(
                    "launcher slurm: set the option tasks_per_node; without it, Slurm may place "
                    "the ranks on other nodes in each repeat"
                )
            args += ["--nodes", str(math.ceil(world_size / tasks))]
            args += ["--ntasks-per-node", str(min(tasks, world_size))]
        if options.gpus_per_node is not None:
            args += ["--gpus-per-node", str(options.gpus_per_node)]
        return args

    @property
    def _allocated(self) -> bool:
        return "SLURM_JOB_ID" in os.environ

    def command(self, job: Job) -> str:
        return shlex.join(self._srun(job) if self._allocated else self._sbatch(job, "dear"))

    def run(self, job: Job) -> Outcome:
        began, ended = _marks(job)
        for mark in (began, ended):
            mark.unlink(missing_ok=True)
        if self._allocated:
            with Fleet([self._tied(job, self._srun(job), [])]) as fleet:
                in_time = fleet.ends_within(job.timeout_s)
            return self._outcome(job, fleet) if in_time else timed_out(job)
        name = f"dear-{uuid.uuid4().hex[:12]}"
        undo = ["sh", "-c", _CANCEL, name]
        with Fleet([self._tied(job, self._sbatch(job, name), undo)]) as fleet:
            outcome = self._await(job, fleet, name)
        return outcome or self._outcome(job, fleet)

    def _await(self, job: Job, fleet: Fleet, name: str) -> Outcome | None:
        """Waits for the batch job; returns None if it ended by itself, else the outcome."""
        began, ended = _marks(job)
        running = False
        deadline = time.monotonic() + self._options.queue_s
        # `sbatch --wait` itself polls only every half minute.
        while not fleet.wait(POLL_S) and not ended.exists():
            if not running and began.exists():
                running = True
                deadline = time.monotonic() + job.timeout_s
            if time.monotonic() > deadline:
                if running:
                    subprocess.run(["scancel", "--quiet", "--signal=USR1", "--name", name])
                    fleet.wait(STACKS_S)
                    return timed_out(job)
                queue_s = self._options.queue_s
                return Outcome.of("timeout", f"still in Slurm's queue after {queue_s:g} s")
        return None

    def _outcome(self, job: Job, fleet: Fleet) -> Outcome:
        log = job.folder / f"log-{job.repeat}-srun.txt"
        output = log.read_text(errors="replace", encoding="utf-8") if log.exists() else ""
        _, ended = _marks(job)
        code = int(ended.read_bytes()) if ended.exists() else next(iter(fleet.codes.values()), 0)
        otherwise = fleet.failure()
        if code:
            lines = output.strip().splitlines()
            otherwise = f"srun ended with status {code}: {lines[-1]}" if lines else otherwise
        return outcome_of(job, _failures(output), otherwise=otherwise)

    def _srun(self, job: Job) -> list[str]:
        options = self._options
        command = ["srun", "--ntasks", str(job.world_size), "--kill-on-bad-exit=1"]
        command += ["--cpu-bind=none", "--output", _pattern(job.log_path(0))]
        command += self._size(job.world_size)
        # Not by srun's own environment, which --export may leave out.
        env = {**elsewhere(), **network_env(options, self._interface), **self._envs.rank_env}
        words = ["env", *(f"{name}={value}" for name, value in (env | dict(job.env)).items())]
        return [*command, *options.srun_args, *words, *self._envs.python, *job.worker]

    def _sbatch(self, job: Job, name: str) -> list[str]:
        options = self._options
        began, ended = (shlex.quote(str(mark)) for mark in _marks(job))
        script = f": > {began}; {shlex.join(self._srun(job))}; code=$?; echo $code > {ended}.new; "
        script += f"mv {ended}.new {ended}; exit $code"
        command = ["sbatch", "--wait", "--job-name", name, "--ntasks", str(job.world_size)]
        command += ["--time", str(math.ceil(job.timeout_s / 60) + _SPARE_MIN)]
        command += ["--output", _pattern(job.folder / f"log-{job.repeat}-srun.txt")]
        if options.partition is not None:
            command += ["--partition", options.partition]
        command += self._size(job.world_size)
        return [*command, *options.sbatch_args, "--wrap", script]

    def _tied(self, job: Job, command: list[str], undo: list[str]) -> HostCommand:
        here = Host(name="slurm", slots=job.world_size)
        node = [*self._envs.python, "-m", "common.launch.node", "--tied"]
        node += ["--undo", json.dumps(undo)] if undo else []
        name = "srun" if self._allocated else "sbatch"
        return HostCommand(
            host=here,
            argv=[*node, "--", *command],
            log=job.folder / f"log-{job.repeat}-{name}.txt",
        )


def _pattern(path: Path) -> str:
    """Returns Slurm's pattern of exactly this path."""
    return str(path.resolve()).replace("%", "%%")


def _marks(job: Job) -> tuple[Path, Path]:
    """Returns the files that the batch script creates when it starts and when it ends."""
    folder = job.folder.resolve()
    return folder / f"slurm-began-{job.repeat}", folder / f"slurm-ended-{job.repeat}"


def _failures(output: str) -> dict[int, int]:
    """Returns the exit status of failed ranks, from srun's messages about tasks; of a message for
    several tasks only the first counts."""
    numbers = {signal.strsignal(number): -number for number in signal.valid_signals()}
    pattern = r"srun: error: \S+ tasks? (\d+)\S*: (.+?)(?: \(core dumped\))?\n"
    failures = {}
    for task, cause in re.findall(pattern, output):
        exited = re.fullmatch(r"Exited with exit code (\d+)", cause)
        code = int(exited[1]) if exited else numbers.get(cause, 0)
        # Slurm sends SIGTERM to the other ranks when one fails.
        if code not in (0, -signal.SIGTERM):
            failures[int(task)] = code
    return failures
