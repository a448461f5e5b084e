"""Launcher of ranks on the hosts of a hostfile by one remote shell command per host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from common.launch.hosts import Block
from common.launch.job import Job, Outcome, outcome_of
from common.launch.per_host import Fleet, PerHostLauncher
from dear.errors import UserError


class SshLauncher(PerHostLauncher):
    """Launcher that runs `ssh HOST python -m common.launch.node ...` for every host.

    Ranks get the same variables as from torchrun. Remote ranks end with the connection to their
    host.
    """

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        if self._hosts is None:
            raise UserError("launcher ssh needs hosts; give hostfile=FILE with lines HOST slots=N")

    def run(self, job: Job) -> Outcome:
        for rank in range(job.world_size):
            job.exit_path(rank).unlink(missing_ok=True)
        return super().run(job)

    def _argv(
        self, job: Job, index: int, used: Sequence[Block], meet: Mapping[str, str], tied: bool
    ) -> list[str]:
        block = used[index]
        numbers = (job.repeat, block.first, block.count, job.world_size)
        command = [*self._envs.python, "-m", "common.launch.node", *(["--tied"] if tied else [])]
        command += ["--ranks", str(job.folder.resolve()), *map(str, numbers)]
        return [*command, "--", *self._envs.python, *job.worker]

    def _env(self, meet: Mapping[str, str]) -> Mapping[str, str]:
        return meet

    def _outcome(self, job: Job, fleet: Fleet) -> Outcome:
        paths = {rank: job.exit_path(rank) for rank in range(job.world_size)}
        codes = {rank: int(path.read_bytes()) for rank, path in paths.items() if path.exists()}
        return outcome_of(job, codes, otherwise=fleet.failure())
