"""The job as the seed systems' scripts see it: `init`, `rank`, `size`, `barrier`."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist


def init(backend: str | None = None) -> None:
    """Joins the job that torchrun or mpirun started, or a job of one process if nobody did.

    Does nothing if torch.distributed is initialised already.

    Args:
        backend: as in `init_process_group`; default: comm_core for CPU tensors where it is built,
            else gloo; NCCL for CUDA tensors where there is CUDA.

    Raises:
        RuntimeError: several ranks, but no MASTER_ADDR and MASTER_PORT to meet at.
    """
    if dist.is_initialized():
        return
    rank = int(_first_set("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", default="0"))
    size = int(_first_set("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", default="1"))
    where: dict[str, object] = {"rank": rank, "world_size": size}
    if "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
        where["init_method"] = "env://"
    elif size == 1:
        where["store"] = dist.HashStore()
    else:
        raise RuntimeError(
            f"rank {rank} of {size} has no place to meet the others: set MASTER_ADDR to the first "
            "host and MASTER_PORT to a free port there (mpirun: -x MASTER_ADDR -x MASTER_PORT)"
        )
    dist.init_process_group(backend or _default_backend(), **where)


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
    """This process's number in the job, 0 .. size()-1."""
    _check()
    return dist.get_rank()


def size() -> int:
    """Number of processes in the job."""
    _check()
    return dist.get_world_size()


def barrier() -> None:
    """Returns once every rank of the job has called it."""
    _check()
    dist.barrier()


barriar = barrier
"""The seeds' spelling."""
