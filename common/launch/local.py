"""Launcher of ranks on this machine, forked from a server that has already imported torch.

It also supports virtual hosts, which are namespaces of this machine: each process first moves to
its host. A sweep starts dozens of jobs. With the fork server, torch is imported once, not in each
of them.
"""

from __future__ import annotations

import importlib
import shlex
import signal
from pathlib import Path
from typing import Any

from common.launch.hosts import Block, Host, NetworkOptions, are_virtual, blocks, network_env
from common.launch.job import Job, Launcher, LeftBehind, Outcome, outcome_of, timed_out
from common.launch.ranks import Ranks, rank_env
from common.machine.processes import preload_in_fork_server
from dear.errors import UserError

STACKS_S = 0.5


class LocalLauncher(Launcher):
    """Launcher that starts one process per rank, on this machine or on virtual hosts.

    The fork server imports `preload`, which should contain the worker's module, before the first
    job.
    """

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        if self._hosts is not None and not are_virtual(self._hosts):
            raise UserError(
                "launcher local runs on this machine only and does not support a hostfile; use "
                "ssh, torchrun or mpirun"
            )
        preload_in_fork_server(self._preload)

    def command(self, job: Job) -> str:
        worker = f"-m {job.worker_module} {shlex.quote(str(job.folder))} {job.repeat}"
        if job.world_size == 1:
            return f"python {worker}"
        return f"torchrun --standalone --nproc-per-node {job.world_size} {worker}"

    def run(self, job: Job) -> Outcome:
        store = job.folder / f"store-{job.repeat}"
        store.unlink(missing_ok=True)  # a driver that was killed has left it
        hosts = self._hosts or [Host(name="localhost", slots=job.world_size)]
        try:
            with Ranks() as ranks:
                for block in blocks(hosts, job.world_size):
                    for rank in block.ranks:
                        ranks.function(
                            _work,
                            job.worker_module,
                            job.folder,
                            job.repeat,
                            env=_env(job, block, rank, store),
                            log=job.log_path(rank),
                            before=block.host.virtual and block.host.virtual.enter,
                        )
                in_time = ranks.wait(
                    job.timeout_s,
                    # If the job may lose ranks, the others continue without a killed rank.
                    matters=lambda code: code > 0 or (code < 0 and not job.may_lose_ranks),
                    left_behind=LeftBehind(job) if job.may_lose_ranks else None,
                )
                if not in_time:
                    ranks.signal(signal.SIGUSR1)
                    ranks.wait(STACKS_S)
        finally:
            store.unlink(missing_ok=True)
        if not in_time:
            return timed_out(job)
        return outcome_of(job, {rank: ranks.codes.get(rank) for rank in range(job.world_size)})


def _work(module: str, folder: Path, repeat: int) -> int:
    return importlib.import_module(module).main(folder, repeat)


def _env(job: Job, block: Block, rank: int, store: Path) -> dict[str, str]:
    env = rank_env(rank, job.world_size, store=store, first=block.first, local_size=block.count)
    virtual = block.host.virtual
    if virtual is not None:
        env["COMM_CORE_HOST_ID"] = block.host.name
        if block.count < job.world_size:
            env |= network_env(NetworkOptions(), virtual.ifname)
    return {**env, **job.env}
