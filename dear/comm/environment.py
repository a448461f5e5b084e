"""Rank and world size from the variables of torchrun, Open MPI, MPICH (PMI) and Slurm."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dear.errors import UserError

# Launcher; variables of rank, world size, rank on this host and ranks on this host.
_VARIABLES = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("Open MPI", *(f"OMPI_COMM_WORLD_{n}" for n in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    ("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
)


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """One process's position in the job, as its launcher reported it."""

    launcher: str
    """`torchrun`, `Open MPI`, `MPICH`, `Slurm`, or `none` for a process started alone."""
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @property
    def one_host(self) -> bool:
        """True if every rank of the job runs on this host."""
        return self.local_world_size == self.world_size


def rank_facts(env: Mapping[str, str] = os.environ) -> RankFacts:
    """Reads the facts; a process without a launcher is rank 0 of a world of 1.

    Raises:
        UserError: a variable is missing, not a number, or contradicts another; or one process was
            started although the environment describes several.
    """
    for launcher, rank, size, local_rank, local_size in _VARIABLES:
        if rank not in env:
            continue
        # Slurm sets SLURM_PROCID=0 in batch scripts, too; only a step (srun) starts ranks.
        in_step = "SLURM_STEP_ID" in env
        if launcher == "Slurm" and not in_step:
            continue
        # srun's PMI gives the rank but not the local rank; Slurm's variables give both.
        if launcher == "MPICH" and local_rank not in env and in_step:
            continue
        # SLURM_NTASKS_PER_NODE may describe the whole allocation; the step's list takes precedence.
        if launcher == "Slurm" and (local_size not in env or "SLURM_STEP_TASKS_PER_NODE" in env):
            env = {**env, local_size: _tasks_on_this_node(env)}
        facts = RankFacts(
            launcher=launcher,
            rank=_number(env, rank, launcher),
            world_size=_number(env, size, launcher),
            local_rank=_number(env, local_rank, launcher, default=rank),
            local_world_size=_number(env, local_size, launcher, default=size),
        )
        if not 0 <= facts.rank < facts.world_size:
            raise UserError(
                f"{launcher} reports rank {facts.rank} of {facts.world_size}: {rank} must lie in "
                f"0..{size}-1"
            )
        if not 0 <= facts.local_rank < facts.local_world_size <= facts.world_size:
            raise UserError(
                f"{launcher} reports {local_rank}={facts.local_rank}, "
                f"{local_size}={facts.local_world_size}, {size}={facts.world_size}: each must be "
                "less than the next (the last two may be equal)"
            )
        return facts
    _refuse_to_be_alone(env)
    return RankFacts(launcher="none", rank=0, world_size=1, local_rank=0, local_world_size=1)


def _refuse_to_be_alone(env: Mapping[str, str]) -> None:
    """Raises `UserError` if the environment describes several processes but gives no rank."""
    hint = "RANK=0 WORLD_SIZE=1 runs alone on purpose"
    tasks = env.get("SLURM_NTASKS", "1")
    if tasks.isdecimal() and int(tasks) > 1:
        raise UserError(
            f"Slurm gave this job {tasks} tasks, but this process was started once, without srun: "
            f"start it with srun, or with torchrun or mpirun ({hint})"
        )
    size = env.get("WORLD_SIZE", "1")
    if size.isdecimal() and int(size) > 1:
        raise UserError(
            f"WORLD_SIZE={size}, but RANK is not set: start the script with torchrun or mpirun "
            f"({hint})"
        )


def _tasks_on_this_node(env: Mapping[str, str]) -> str:
    """Reads the step's list of tasks per node; e.g. `4(x2),3` stands for 4, 4 and 3 tasks."""
    entries = re.findall(r"(\d+)(?:\(x(\d+)\))?", env.get("SLURM_STEP_TASKS_PER_NODE", ""))
    counts: list[str] = [count for count, times in entries for _ in range(int(times or 1))]
    node = env.get("SLURM_NODEID", "0")
    if node.isdecimal() and int(node) < len(counts):
        return counts[int(node)]
    return env.get("SLURM_NTASKS", "")


def _number(env: Mapping[str, str], name: str, launcher: str, default: str | None = None) -> int:
    # A launcher without local ranks (RANK and WORLD_SIZE set by hand) is taken to use one host.
    text = env.get(name, env.get(default, "") if default else "")
    try:
        return int(text)
    except ValueError:
        raise UserError(
            f"{launcher} environment: {name}={text!r} is not a number; start the script with "
            "torchrun or mpirun, or unset the variable to run alone"
        ) from None


def assign_ranks(client: Any) -> list[int]:
    """Gives each engine its rank in a job of all engines, as torchrun would, for `dear.init`.

    Sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the
    environments of the engines, which must be able to import `dear`. On one host, engine i becomes
    rank i. On several hosts, the ranks of each host are consecutive.

    Args:
        client: an `ipyparallel.Client`.

    Returns:
        The engine numbers in the order of their ranks: `client[assign_ranks(client)]` is a view of
        all ranks in order.

    Raises:
        UserError: there is no engine, or an engine has joined a job already.
    """
    places = {number: client[number].apply_sync(_place) for number in client.ids}
    if not places:
        raise UserError("the cluster has no engines: start some and call wait_for_engines()")
    joined = [number for number, (_, in_job) in places.items() if in_job]
    if joined:
        raise UserError(
            f"engine {joined[0]} has joined a job already: call shutdown() on all engines first"
        )
    hosts = list(dict.fromkeys(host for host, _ in places.values()))
    order = sorted(places, key=lambda number: hosts.index(places[number][0]))
    shared = {
        "WORLD_SIZE": len(order),
        "MASTER_ADDR": hosts[0] if len(hosts) > 1 else "127.0.0.1",
        "MASTER_PORT": client[order[0]].apply_sync(_free_port),
    }
    for rank, number in enumerate(order):
        local = [other for other in order if places[other][0] == places[number][0]]
        ranks = {"RANK": rank, "LOCAL_RANK": local.index(number), "LOCAL_WORLD_SIZE": len(local)}
        variables = {name: str(value) for name, value in (ranks | shared).items()}
        client[number].apply_sync(_enter, variables)
    return order


def _place() -> tuple[str, bool]:
    """Returns an engine's host, and True if it has joined a job; runs on the engine."""
    runtime = sys.modules.get("dear.comm.runtime")
    return socket.gethostname(), runtime is not None and runtime.is_initialized()


def _free_port() -> int:
    """Returns a free port of rank 0's host, where `dear.init` opens it; runs on the engine."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def _enter(variables: dict[str, str]) -> None:
    """Sets environment variables of an engine; runs on the engine."""
    os.environ.pop("DEAR_STORE", None)  # it belongs to the notebook's own job, if there is one
    os.environ.update(variables)
