"""Ranks started by Slurm: `srun` inside an allocation, else a batch job per repeat."""

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.launch.hosts import (
    Host,
    NetworkOptions,
    are_virtual,
    interface,
    network_env,
    read_envs,
)
from common.launch.job import Job, Launcher, Outcome, outcome_of, timed_out
from common.launch.per_host import STACKS_S, Fleet, HostCommand, on_host
from dear.errors import UserError
from dear.options import positive

POLL_S = 0.5
_SPARE_MIN = 5
# Returns when the job has left the queue, so that none of its ranks is left.
_CANCEL = (
    'scancel --quiet --name "$0"; '
    'while [ -n "$(squeue --noheader --name "$0")" ]; do sleep 0.2; done'
)


class SlurmLauncher(Launcher):
    """Runs `srun python -m WORKER`, by `sbatch --wait` if there is no allocation.

    A batch job's time limit begins when it has left the queue. It is cancelled when this process
    ends before it does.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(NetworkOptions):
        """Where Slurm shall run the ranks, and the network."""

        partition: str | None = None
        """None: Slurm's default."""
        nodes: int | None = None
        """Number of nodes that the ranks are spread over; None: as few as they fit on."""
        tasks_per_node: int | None = None
        """Ranks on each of them; None: Slurm's choice. A smaller world takes fewer nodes."""
        gpus_per_node: int | None = None
        """GPUs on each of them, all visible to all of its ranks; None: none are asked for."""
        sbatch_args: tuple[str, ...] = ()
        """More arguments of sbatch, e.g. --account=NAME."""
        srun_args: tuple[str, ...] = ()
        """More arguments of srun, e.g. --mpi=none."""
        queue_s: float = 86400.0
        """Longest wait for the batch job to begin, in seconds."""

        def __post_init__(self) -> None:
            positive("queue_s", self.queue_s)
            for name in ("nodes", "tasks_per_node", "gpus_per_node"):
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
                "launcher slurm reads no hostfile: Slurm chooses the hosts (options partition, "
                "nodes, sbatch_args)"
            )
        self._envs = read_envs()
        self._interface = interface(self._options, self._envs, None)

    def check(self) -> None:
        """Whether there is a Slurm: its commands can be printed where there is none."""
        if shutil.which("srun") is None:
            raise UserError("launcher slurm: no srun on the PATH; use launcher=ssh or mpirun")

    def batch_script(self, command: Sequence[str], name: str, world_size: int) -> str:
        """One allocation for a whole sweep: to be given to sbatch, as a file.

        Args:
            command: that runs the sweep; in the allocation it starts ranks by srun.
            name: of the job.
            world_size: the largest of the sweep.
        """
        options = self._options
        wanted = ["--job-name", f"dear-bench-{name}", "--ntasks", str(world_size)]
        wanted += self._place(world_size)
        if options.partition is not None:
            wanted += ["--partition", options.partition]
        pairs = zip(wanted[::2], wanted[1::2], strict=True)
        lines = [f"#SBATCH {flag}={value}" for flag, value in pairs]
        lines += [f"#SBATCH {argument}" for argument in options.sbatch_args]
        here = shlex.quote(str(Path.cwd()))
        return "\n".join(
            [
                "#!/bin/bash",
                *lines,
                "set -euo pipefail",
                f"cd {here}",
                f"exec {shlex.join(command)}",
            ]
        )

    def _place(self, world_size: int) -> list[str]:
        """Arguments that say on how many nodes, with how many ranks and GPUs each.

        Raises:
            UserError: the ranks do not fit.
        """
        options, nodes = self._options, self._options.nodes
        if options.tasks_per_node is not None:
            needed = math.ceil(world_size / options.tasks_per_node)
            if nodes is not None and nodes < needed:
                raise UserError(
                    f"launcher slurm: {nodes} nodes with {options.tasks_per_node} ranks each are "
                    f"too few for {world_size} workers"
                )
            nodes = needed if nodes is None else nodes
        args = [] if nodes is None else ["--nodes", str(min(nodes, world_size))]
        if options.tasks_per_node is not None:
            args += ["--ntasks-per-node", str(min(options.tasks_per_node, world_size))]
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
            return self._judged(job, fleet) if in_time else timed_out(job)
        name = f"dear-{uuid.uuid4().hex[:12]}"
        undo = ["sh", "-c", _CANCEL, name]
        with Fleet([self._tied(job, self._sbatch(job, name), undo)]) as fleet:
            outcome = self._await(job, fleet, name)
        return outcome or self._judged(job, fleet)

    def _await(self, job: Job, fleet: Fleet, name: str) -> Outcome | None:
        """Waits for the batch job; None if it has ended, else the outcome."""
        began, ended = _marks(job)
        running = False
        deadline = time.monotonic() + self._options.queue_s
        # `sbatch --wait` itself asks only every half minute.
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

    def _judged(self, job: Job, fleet: Fleet) -> Outcome:
        log = job.folder / f"log-{job.repeat}-srun.txt"
        said = log.read_text(errors="replace") if log.exists() else ""
        _, ended = _marks(job)
        code = int(ended.read_text()) if ended.exists() else next(iter(fleet.codes.values()), 0)
        otherwise = fleet.failure()
        if code:
            lines = said.strip().splitlines()
            otherwise = f"srun ended with status {code}: {lines[-1]}" if lines else otherwise
        return outcome_of(job, _failures(said), otherwise=otherwise)

    def _srun(self, job: Job) -> list[str]:
        options = self._options
        command = ["srun", "--ntasks", str(job.world_size), "--kill-on-bad-exit=1"]
        command += ["--cpu-bind=none", "--output", str(job.log_path(0).resolve())]
        command += self._place(job.world_size)
        return [*command, *options.srun_args, self._envs.python, *job.worker]

    def _sbatch(self, job: Job, name: str) -> list[str]:
        options = self._options
        began, ended = (shlex.quote(str(mark)) for mark in _marks(job))
        script = f": > {began}; {shlex.join(self._srun(job))}; code=$?; echo $code > {ended}.new; "
        script += f"mv {ended}.new {ended}; exit $code"
        command = ["sbatch", "--wait", "--job-name", name, "--ntasks", str(job.world_size)]
        command += ["--time", str(math.ceil(job.timeout_s / 60) + _SPARE_MIN)]
        command += ["--output", str(job.folder.resolve() / f"log-{job.repeat}-srun.txt")]
        if options.partition is not None:
            command += ["--partition", options.partition]
        command += self._place(job.world_size)
        return [*command, *options.sbatch_args, "--wrap", script]

    def _tied(self, job: Job, command: list[str], undo: list[str]) -> HostCommand:
        here = Host(name="slurm", slots=job.world_size)
        node = [self._envs.python, "-m", "common.launch.node", "--tied"]
        node += ["--undo", json.dumps(undo)] if undo else []
        env = network_env(self._options, self._interface) | self._envs.rank_env | dict(job.env)
        name = "srun" if self._allocated else "sbatch"
        return HostCommand(
            host=here,
            argv=on_host(here, [*node, "--", *command], env, None),
            log=job.folder / f"log-{job.repeat}-{name}.txt",
        )


def _marks(job: Job) -> tuple[Path, Path]:
    """Files that the batch script makes when it begins and when it ends."""
    folder = job.folder.resolve()
    return folder / f"slurm-began-{job.repeat}", folder / f"slurm-ended-{job.repeat}"


def _failures(said: str) -> dict[int, int]:
    """Exit status by rank, from srun's messages about tasks; for several at once of the first."""
    numbers = {signal.strsignal(number): -number for number in signal.valid_signals()}
    found = re.findall(r"srun: error: \S+ tasks? (\d+)\S*: (.+?)(?: \(core dumped\))?\n", said)
    failures = {}
    for task, what in found:
        exited = re.fullmatch(r"Exited with exit code (\d+)", what)
        code = int(exited[1]) if exited else numbers.get(what, 0)
        # SIGTERM is Slurm's own, for those whose neighbour failed.
        if code not in (0, -signal.SIGTERM):
            failures[int(task)] = code
    return failures
