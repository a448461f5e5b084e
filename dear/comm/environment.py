"""Rank, world size and place on the host, from the variables of the process's launcher."""

from __future__ import annotations

import contextlib
import os
import random
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dear.errors import UserError

_TEMPORARY_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
# Launcher, and its variables of rank, world size, local rank and local size (on this host). If a
# launcher also sets the variables of another, or runs inside the other's job, it stands first.
_VARIABLES = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    *(
        (launcher, *(f"{prefix}_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")))
        for launcher, prefix in (
            ("Open MPI", "OMPI_COMM_WORLD"),
            ("MVAPICH2", "MV2_COMM_WORLD"),
            ("MVAPICH", "MVP_COMM_WORLD"),
            ("jsrun", "JSM_NAMESPACE"),
            ("horovodrun", "HOROVOD"),
        )
    ),
    ("Flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", ""),
    ("PALS", "PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    ("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
)
# Variables of one process among several. _STARTED: launchers without a row above, for any value.
# _RANK and _SIZE: names that read like a rank (if above 0) or a size (if above 1).
_STARTED = re.compile("PMIX_RANK|PMI_ID|ALPS_APP_PE|MP_CHILD|PBS_VNODENUM")
_RANK = re.compile(r"(?:\w*_)?(?<!LORA_)(?:RANK|RANK_?ID|PROC_?ID)|DMLC_WORKER_ID")
_SIZE = re.compile(
    r"(?:\w*_)?(?:(?:WORLD|COMM|JOB|NAMESPACE|LOCAL)_SIZE|N(?:UM_)?(?:TASKS|RANKS))"
    "|(?:PMIX?|MPI|PALS|HOROVOD)_SIZE|DMLC_NUM_WORKER"
)
_SPECIAL_STEP = 4294967290
"""First of the numbers that Slurm gives to steps without srun (interactive, batch, external)."""
ALONE = "RANK=0 WORLD_SIZE=1 runs alone on purpose"


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """One process's position in the job, as its launcher reported it."""

    launcher: str
    """Name in `_VARIABLES`; `torch.distributed` for a process group that the script made; `none`
    for a process that was started alone."""
    rank: int
    world_size: int
    local_rank: int
    """-1: neither the launcher nor the other ranks have given it yet."""
    local_world_size: int
    """0: neither the launcher nor the other ranks have given it yet."""

    @property
    def one_host(self) -> bool:
        """True if every rank of the job runs on this host."""
        return self.local_world_size == self.world_size

    @property
    def place(self) -> str:
        """Host and local rank (-1: not known), which `placed` reads on the other ranks."""
        return f"{host_identity()} {self.local_rank}"


def rank_facts(env: Mapping[str, str] = os.environ) -> RankFacts:
    """Returns this process's facts; without a launcher, rank 0 of a world of 1.

    Raises:
        UserError: a variable is missing, is not a number, or contradicts another; or there is one
            process, but the environment describes several.
    """
    facts = launcher_facts(env)
    if facts is None:
        _refuse_to_be_alone(env)
        return RankFacts(launcher="none", rank=0, world_size=1, local_rank=0, local_world_size=1)
    return facts


def launcher_facts(env: Mapping[str, str] = os.environ) -> RankFacts | None:
    """Returns the launcher's facts, or None without a known launcher; raises like `rank_facts`."""
    step = env.get("SLURM_STEP_ID", "")
    in_step = step != "" and not (step.isdecimal() and int(step) >= _SPECIAL_STEP)
    for launcher, rank, size, local_rank, local_size in _VARIABLES:
        if rank not in env:
            continue
        # Slurm sets SLURM_PROCID=0 in batch scripts, too; only a step (srun) starts ranks.
        if launcher == "Slurm" and not in_step:
            continue
        # srun's PMI gives the rank but not the local rank; Slurm's variables give both.
        if launcher == "MPICH" and local_rank not in env and in_step:
            continue
        # SLURM_NTASKS and SLURM_NTASKS_PER_NODE may describe the whole allocation; the step's own
        # variables take precedence.
        if launcher == "Slurm":
            if env.get("SLURM_STEP_NUM_TASKS", env.get(size)) == "1":
                _refuse_tasks(env)
            env = {**env, size: env.get("SLURM_STEP_NUM_TASKS", env.get(size, ""))}
            if local_size not in env or "SLURM_STEP_TASKS_PER_NODE" in env:
                env = {**env, local_size: _tasks_on_this_node(env)}
        facts = RankFacts(
            launcher=launcher,
            rank=_number(env, rank, launcher),
            world_size=_number(env, size, launcher),
            local_rank=_number(env, local_rank, launcher, default=-1),
            local_world_size=_number(env, local_size, launcher, default=0),
        )
        if not 0 <= facts.rank < facts.world_size:
            raise UserError(
                f"{launcher} reports rank {facts.rank} of {facts.world_size}: {rank} must lie in "
                f"0..{size}-1"
            )
        if facts.world_size == 1:
            return replace(facts, local_rank=0, local_world_size=1)
        known = local_rank in env and local_size in env
        lowest = 0 if local_rank in env else -1
        local = facts.local_world_size if local_size in env else facts.world_size
        if not lowest <= facts.local_rank < local <= facts.world_size:
            names = [name for name in (local_rank, local_size, size) if name in env]
            raise UserError(
                f"{launcher} reports {', '.join(f'{name}={env[name]}' for name in names)}: each "
                "must be less than the next (the last two may be equal)"
            )
        return facts if known else replace(facts, local_world_size=0)
    return None


def placed(facts: RankFacts, places: Sequence[str]) -> RankFacts:
    """Returns the facts with the place on the host; `places` has each rank's `RankFacts.place`.

    The launcher's local ranks are used if they are 0, 1, ... on this host; else the ranks' order.
    """
    hosts, numbers = zip(*(place.rsplit(" ", 1) for place in places), strict=True)
    here = [rank for rank, host in enumerate(hosts) if host == hosts[facts.rank]]
    if sorted(int(numbers[rank]) for rank in here) == list(range(len(here))):
        here.sort(key=lambda rank: int(numbers[rank]))
    return replace(facts, local_rank=here.index(facts.rank), local_world_size=len(here))


def host_identity() -> str:
    """Returns a text that only processes on this host share; the comm core uses the same."""
    if "COMM_CORE_HOST_ID" in os.environ:
        return os.environ["COMM_CORE_HOST_ID"]
    boot, net = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    machine = boot.read_text(encoding="utf-8").strip() if boot.exists() else "?"
    return f"{socket.gethostname()} {machine} {net.stat().st_ino if net.exists() else '?'}"


def _refuse_to_be_alone(env: Mapping[str, str]) -> None:
    """Raises `UserError` if the environment describes several processes but gives no rank."""
    _refuse_tasks(env)
    size = env.get("WORLD_SIZE", "1")
    if size.isdecimal() and int(size) > 1:
        raise UserError(
            f"WORLD_SIZE={size}, but RANK is not set: start the script with torchrun or mpirun "
            f"({ALONE})"
        )
    for name, text in sorted(env.items()):
        number = int(text) if text.isdecimal() else 0
        if name == "LOCAL_RANK" and env.get("WORLD_SIZE") == "1":
            continue  # a leftover
        number_of_rank = number > 0 and _RANK.fullmatch(name)
        if _STARTED.fullmatch(name) or number_of_rank or (number > 1 and _SIZE.fullmatch(name)):
            raise UserError(
                f"{name}={text}: a launcher started several processes, but not with the variables "
                "of a known launcher. Set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each "
                f"process, or start the script with torchrun or mpirun ({ALONE})"
            )


def _refuse_tasks(env: Mapping[str, str]) -> None:
    """Raises `UserError` if Slurm has several tasks but srun did not start this process."""
    tasks = env.get("SLURM_NTASKS", "1")
    if tasks.isdecimal() and int(tasks) > 1:
        raise UserError(
            f"Slurm gave this job {tasks} tasks, but this process was started once, without srun: "
            f"start it with srun, or with torchrun or mpirun ({ALONE})"
        )


def _tasks_on_this_node(env: Mapping[str, str]) -> str:
    """Returns this node's number of tasks in the step's list, e.g. `4(x2),3` for 4, 4 and 3."""
    entries = re.findall(r"(\d+)(?:\(x(\d+)\))?", env.get("SLURM_STEP_TASKS_PER_NODE", ""))
    counts: list[str] = [count for count, times in entries for _ in range(int(times or 1))]
    node = env.get("SLURM_NODEID", "0")
    if node.isdecimal() and int(node) < len(counts):
        return counts[int(node)]
    return env.get("SLURM_NTASKS", "")


def _number(env: Mapping[str, str], name: str, launcher: str, default: int | None = None) -> int:
    text = env.get(name, "" if default is None else str(default))
    try:
        return int(text)
    except ValueError:
        raise UserError(
            f"{launcher} environment: {name}={text!r} is not a number; start the script with "
            "torchrun or mpirun, or unset the variable to run alone"
        ) from None


def assign_ranks(client: Any) -> list[int]:
    """Gives each engine of an ipyparallel cluster its rank in one job, for `dear.init` there.

    Sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the engines'
    environments; the engines must be able to import `dear`. On one host, engine i becomes rank i.
    On several hosts, the ranks of each host are consecutive.

    Args:
        client: an `ipyparallel.Client`.

    Returns:
        The engines' numbers in the order of their ranks: `client[assign_ranks(client)]` is a view
        of all ranks in order.

    Raises:
        UserError: there is no engine, or an engine has already joined a job.
    """
    places = {number: client[number].apply_sync(_place) for number in client.ids}
    if not places:
        raise UserError("the cluster has no engines: start some and call wait_for_engines()")
    joined = [number for number, (_, in_job) in places.items() if in_job]
    if joined:
        raise UserError(
            f"engine {joined[0]} has already joined a job: call shutdown() on all engines first"
        )
    hosts = list(dict.fromkeys(host for host, _ in places.values()))
    order = sorted(places, key=lambda number: hosts.index(places[number][0]))
    shared = {
        "WORLD_SIZE": len(order),
        "MASTER_ADDR": hosts[0] if len(hosts) > 1 else "127.0.0.1",
        "MASTER_PORT": client[order[0]].apply_sync(free_port),
    }
    for rank, number in enumerate(order):
        local = [other for other in order if places[other][0] == places[number][0]]
        ranks = {"RANK": rank, "LOCAL_RANK": local.index(number), "LOCAL_WORLD_SIZE": len(local)}
        variables = {name: str(value) for name, value in (ranks | shared).items()}
        client[number].apply_sync(_enter, variables)
    return order


def _place() -> tuple[str, bool]:
    runtime = sys.modules.get("dear.comm.runtime")
    return socket.gethostname(), runtime is not None and runtime.is_initialized()


def free_port() -> int:
    """Draws a free port of this host, for a store that rank 0 opens later.

    The system gives ports of a range to whoever asks for any port, such as the daemons of mpirun;
    a free one of these could be taken by then.
    """
    first, last = map(int, _TEMPORARY_PORTS.read_text(encoding="utf-8").split())
    others = [port for port in range(10_000, 1 << 16) if not first <= port <= last]
    draw = random.SystemRandom()
    for port in draw.sample(others, len(others)) or [0]:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            chosen: int = probe.getsockname()[1]
            return chosen
    raise UserError("no port of this host is free from 10000 on; end what uses them")


def _enter(variables: dict[str, str]) -> None:
    os.environ.pop("DEAR_STORE", None)  # it belongs to the notebook's own job, if there is one
    os.environ.update(variables)
