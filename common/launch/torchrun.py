"""Launcher of ranks by torchrun, on this machine or on the hosts of a hostfile."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from common.launch.hosts import Block
from common.launch.job import Job, Outcome, outcome_of
from common.launch.per_host import Fleet, PerHostLauncher


class TorchrunLauncher(PerHostLauncher):
    """Launcher that runs `torchrun ... -m WORKER` on every host, with fixed node ranks.

    A host's torchrun and all its descendants end with the connection to the host.
    """

    def run(self, job: Job) -> Outcome:
        try:
            return super().run(job)
        finally:
            for folder in job.folder.glob(f"torchrun-{job.repeat}-*"):
                shutil.rmtree(folder, ignore_errors=True)

    def _argv(
        self, job: Job, index: int, used: Sequence[Block], meet: Mapping[str, str], tied: bool
    ) -> list[str]:
        python = self._envs.python
        start = [*python, "-m", "common.launch.node", "--tied", "--", *python] if tied else python
        nodes = ["--standalone"]
        if len(used) > 1:
            nodes = ["--nnodes", str(len(used)), "--node-rank", str(index)]
            nodes += ["--master-addr", meet["MASTER_ADDR"], "--master-port", meet["MASTER_PORT"]]
        nodes += ["--nproc-per-node", str(used[index].count)]
        if tied:  # by default, torchrun leaves a folder with temporary files behind
            nodes += ["--log-dir", str(job.folder.resolve() / f"torchrun-{job.repeat}-{index}")]
        # By itself, torchrun would start the ranks with -u, and without the flags of envs.conf.
        nodes += ["--no-python", *python, "-u"]
        return [*start, "-m", "torch.distributed.run", *nodes, *job.worker]

    def _log(self, job: Job, block: Block) -> Path:
        return job.log_path(block.first)

    def _outcome(self, job: Job, fleet: Fleet) -> Outcome:
        killed: dict[int, int] = {}
        for command in fleet.commands:
            killed |= _killed(command.log.read_text(errors="replace", encoding="utf-8"))
        return outcome_of(job, killed, otherwise=fleet.failure())


def _killed(log: str) -> dict[int, int]:
    codes = re.findall(r"rank\s*: (\d+) \(local_rank: \d+\)\s+exitcode\s*: (-\d+)", log)
    # torchrun sends SIGTERM to the other ranks when one fails.
    return {int(rank): int(code) for rank, code in codes if code != "-15"}
