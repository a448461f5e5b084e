"""Job functions with the names that older systems use, and copies of process groups."""

from __future__ import annotations

import os
from collections import Counter
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed import distributed_c10d

_copies: Counter[str] = Counter()


def init(backend: str | None = None) -> None:
    """Joins the job that torchrun or mpirun started; without either, a job of one process.

    Does nothing if torch.distributed is already initialised.

    Args:
        backend: as in `init_process_group`. Default: comm_core for CPU tensors if it is built,
            else gloo; NCCL for CUDA tensors if CUDA and NCCL are available.

    Raises:
        RuntimeError: the job has several ranks, but MASTER_ADDR or MASTER_PORT is not set.
    """
    if dist.is_initialized():
        return
    rank = int(_first_set("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", default="0"))
    size = int(_first_set("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", default="1"))
    has_address = "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ
    if size > 1 and not has_address:
        raise RuntimeError(
            f"rank {rank} of {size} cannot find the other ranks: set MASTER_ADDR to the first host "
            "and MASTER_PORT to a free port there (mpirun: -x MASTER_ADDR -x MASTER_PORT)"
        )
    dist.init_process_group(
        backend or _default_backend(),
        store=None if has_address else HashStore(),  # without a store, torch reads the variables
        rank=rank,
        world_size=size,
    )


def _first_set(*names: str, default: str) -> str:
    return next((os.environ[name] for name in names if name in os.environ), default)


def _default_backend() -> str:
    host = "comm_core" if "comm_core" in dist.Backend.backend_list else "gloo"
    if torch.cuda.is_available() and dist.is_nccl_available():
        return f"cpu:{host},cuda:nccl"
    return host


def _check() -> None:
    if not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialised: call comm_core.init() first")


def rank() -> int:
    """Returns the rank of this process in the job, 0 .. size()-1."""
    _check()
    return dist.get_rank()


def size() -> int:
    """Returns the number of processes in the job."""
    _check()
    return dist.get_world_size()


def barrier() -> None:
    """Returns once every rank of the job has called it."""
    _check()
    dist.barrier()


barriar = barrier
"""Alias with the spelling of the older systems."""


def backends_of(group: dist.ProcessGroup) -> dict[str, str]:
    """Returns device type -> name of the backend for it."""
    return dict(part.split(":") for part in str(dist.get_backend_config(group)).split(","))


def copy_of(group: dist.ProcessGroup, timeout: timedelta | None) -> dist.ProcessGroup:
    """Returns a new process group of the same ranks. A collective call of the ranks of `group`."""
    copy: dist.ProcessGroup
    if group is dist.group.WORLD:
        copy = dist.new_group(timeout=timeout)
        return copy
    # new_group cannot be used for some of the ranks only. It names a group by a count of the calls
    # of all ranks of the job, or (use_local_synchronization) by the number of groups of this
    # process, which differs between ranks and repeats after a group is destroyed. Both lead to the
    # wrong keys of the Store. So this function makes the name and uses private functions of torch.
    name = f"comm_core-{group.group_name}-{_copies[group.group_name]}"
    _copies[group.group_name] += 1
    ranks = dist.get_process_group_ranks(group)
    copy, _ = distributed_c10d._new_process_group_helper(
        len(ranks),
        dist.get_rank(group),
        ranks,
        str(dist.get_backend_config(group)),
        distributed_c10d._get_default_store(),
        name,  # type: ignore[arg-type]  # its NewType does not exist in torch 2.11
        timeout=timeout or distributed_c10d.default_pg_timeout,
    )
    group_ranks = {job_rank: rank for rank, job_rank in enumerate(ranks)}
    distributed_c10d._world.pg_group_ranks[copy] = group_ranks
    if "gloo" in backends_of(copy).values():
        # Gloo fails on a rank that still connects when another one has destroyed its copy.
        dist.barrier(copy)
    return copy
