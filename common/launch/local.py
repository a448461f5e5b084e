"""Ranks as processes of this machine, forked from a server that has imported torch already.

Also on virtual hosts, which are namespaces of this machine: each process moves to its host first.

Importing torch takes seconds and a sweep starts dozens of jobs; the fork server pays once.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess

from common.launch.envs import NetworkOptions, network_env
from common.launch.hosts import Block, Host, are_virtual, blocks
from common.launch.job import GRACE_S, Job, Launcher, Outcome, outcome_of, timed_out
from dear.errors import UserError


class LocalLauncher(Launcher):
    """Starts one process per rank.

    Args:
        hosts: virtual ones, or None for this machine itself.
        preload: modules that the fork server imports before the first job.
    """

    def __init__(
        self,
        *,
        hosts: Sequence[Host] | None = None,
        options: Launcher.Options | None = None,
        preload: Sequence[str] = (),
    ) -> None:
        if hosts is not None and not are_virtual(hosts):
            raise UserError(
                "launcher local runs on this machine only, and reads no hostfile; use ssh, "
                "torchrun or mpirun"
            )
        self._hosts = hosts
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["common.harness.worker", *preload])

    def command(self, job: Job) -> str:
        worker = f"python -m common.harness.worker {job.folder} {job.repeat}"
        if job.world_size == 1:
            return worker
        return (
            f"torchrun --standalone --nproc-per-node {job.world_size} "
            f"-m {worker.removeprefix('python -m ')}"
        )

    def run(self, job: Job) -> Outcome:
        processes = [
            self._context.Process(target=_be_rank, args=(job, rank, block), daemon=True)
            for block in self._blocks(job)
            for rank in block.ranks
        ]
        try:
            for process in processes:
                process.start()
            in_time = self._wait(processes, job)
            if not in_time:
                _dump_stacks(processes)
        finally:
            stopped = _stop(processes)
            (job.folder / _store_name(job)).unlink(missing_ok=True)
        if not in_time:
            return timed_out(job)
        codes = {
            rank: None if rank in stopped else process.exitcode
            for rank, process in enumerate(processes)
        }
        return outcome_of(job, codes)

    def _blocks(self, job: Job) -> list[Block]:
        hosts = self._hosts or [Host(name="localhost", slots=job.world_size)]
        return blocks(hosts, job.world_size)

    @staticmethod
    def _wait(processes: list[ForkServerProcess], job: Job) -> bool:
        """Waits for all to end, or a little longer than the first failure; False if out of time."""
        deadline = time.monotonic() + job.timeout_s
        failed = False
        running = list(processes)
        while running:
            left = deadline - time.monotonic()
            if left <= 0:
                return failed
            wait([process.sentinel for process in running], timeout=left)
            ended = [process for process in running if process.exitcode is not None]
            running = [process for process in running if process not in ended]
            if not failed and any(_matters(process.exitcode, job) for process in ended):
                failed = True
                deadline = min(deadline, time.monotonic() + GRACE_S)
        return True


def _matters(code: int | None, job: Job) -> bool:
    """True for the exit status of a failure that ends the job."""
    killed = code is not None and code < 0
    return bool(code) and not (killed and job.may_lose_ranks)


def _stop(processes: list[ForkServerProcess]) -> set[int]:
    """Kills what still runs, each with its process group; returns those ranks."""
    stopped = set()
    for rank, process in enumerate(processes):
        if process.pid is not None and process.exitcode is None:
            stopped.add(rank)
            _signal_group(process.pid, signal.SIGKILL)
    for process in processes:
        if process.pid is not None:
            process.join()
    return stopped


def _signal_group(pid: int, number: int) -> None:
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        # Not yet the leader of its own group, or gone: the process itself is meant.
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return


def _dump_stacks(processes: list[ForkServerProcess]) -> None:
    for process in processes:
        if process.exitcode is None:
            _signal_group(process.pid, signal.SIGUSR1)
    wait([process.sentinel for process in processes if process.exitcode is None], timeout=0.5)


def _store_name(job: Job) -> str:
    return f"store-{job.repeat}"


def _be_rank(job: Job, rank: int, block: Block) -> None:
    """Runs in the new process."""
    os.setsid()  # a Ctrl-C at the terminal is the driver's to handle
    with job.log_path(rank).open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    if block.host.virtual is not None:
        from common.emulation.enter import enter

        enter(block.host.virtual.pid)  # a process with more than one thread could not
    threading.Thread(target=_die_with_driver, daemon=True).start()
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    sys.stdin = open(os.devnull)  # noqa: SIM115  (for the life of the process)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(job.world_size),
        LOCAL_RANK=str(rank - block.first),
        LOCAL_WORLD_SIZE=str(block.count),
        DEAR_STORE=str(job.folder / _store_name(job)),
    )
    os.environ.update(_host_env(job, block))
    from common.harness import worker

    code = worker.main(job.folder, job.repeat)
    sys.stdout.flush()
    # No interpreter shutdown: libraries' threads may outlive their modules there.
    os._exit(code)


def _host_env(job: Job, block: Block) -> Mapping[str, str]:
    virtual = block.host.virtual
    if virtual is None:
        return job.env
    env = {"COMM_CORE_HOST_ID": block.host.name}
    if block.count < job.world_size:
        env |= network_env(NetworkOptions(), virtual.ifname)
    return {**env, **job.env}


def _die_with_driver() -> None:
    # The fork server outlives a driver killed by SIGKILL as long as it has children.
    wait([multiprocessing.parent_process().sentinel])
    os.kill(os.getpid(), signal.SIGKILL)
