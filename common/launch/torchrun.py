"""Ranks started by torchrun: one on this machine, or one per host of a hostfile."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from common.launch.hosts import Block
from common.launch.job import Job, Outcome, outcome_of
from common.launch.per_host import Fleet, PerHostLauncher


class TorchrunLauncher(PerHostLauncher):
    """Runs `torchrun ... -m WORKER` on every host, with fixed places of the hosts.

    A host's torchrun, and all that it has started, ends when the connection to it does.
    """

    def _argv(
        self, job: Job, place: int, placed: Sequence[Block], meet: Mapping[str, str], tied: bool
    ) -> list[str]:
        python = self._envs.python
        start = [python, "-m", "common.launch.node", "--tied", "--", python] if tied else [python]
        nodes = ["--standalone"]
        if len(placed) > 1:
            nodes = ["--nnodes", str(len(placed)), "--node-rank", str(place)]
            nodes += ["--master-addr", meet["MASTER_ADDR"], "--master-port", meet["MASTER_PORT"]]
        nodes += ["--nproc-per-node", str(placed[place].count)]
        return [*start, "-m", "torch.distributed.run", *nodes, *job.worker]

    def _log(self, job: Job, block: Block) -> Path:
        return job.log_path(block.first)

    def _outcome(self, job: Job, fleet: Fleet) -> Outcome:
        killed: dict[int, int] = {}
        for command in fleet.commands:
            killed |= _killed(command.log.read_text(errors="replace"))
        return outcome_of(job, killed, otherwise=fleet.failure())


def _killed(log: str) -> dict[int, int]:
    """Exit status by rank, from torchrun's report of processes that a signal ended."""
    found = re.findall(r"rank\s*: (\d+) \(local_rank: \d+\)\s+exitcode\s*: (-\d+)", log)
    # SIGTERM is torchrun's own, for those whose neighbour failed.
    return {int(rank): int(code) for rank, code in found if code != "-15"}
