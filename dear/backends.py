"""Which torch.distributed backend moves the bytes, and what must be imported for it."""

from __future__ import annotations

import importlib
import logging
from types import ModuleType

import torch

from dear.environment import RankFacts
from dear.errors import Unavailable, UserError

log = logging.getLogger("dear")

_MPI = "comm_core_mpi"


def default_backend(facts: RankFacts) -> str:
    """`nccl` where every rank of this host has a GPU of its own, else `comm_core`.

    Ranks that share GPUs get `comm_core` too, since NCCL refuses two ranks on one GPU. Without a
    built comm core it is `gloo`, and rank 0 says so.
    """
    if facts.local_world_size <= torch.cuda.device_count():
        return "nccl"
    try:
        prepare("comm_core")
    except Unavailable as reason:
        if facts.rank == 0 and facts.world_size > 1:
            log.warning("using gloo: %s", reason)
        return "gloo"
    return "comm_core"


def prepare(backend: str) -> str:
    """Makes a backend known to torch.distributed; returns the name it has there.

    Args:
        backend: `comm_core`, `mpi`, a name that torch knows, or pairs (`cpu:comm_core,cuda:nccl`).

    Raises:
        Unavailable: it is not built.
        UserError: `mpi` within pairs.
    """
    if "comm_core" in backend:
        _imported("comm_core")
    if backend == "mpi":
        # torch's own "mpi" needs a torch that was built with it; the name cannot be taken over.
        return _imported("comm_core.mpi").register()
    if ":mpi" in backend:
        raise UserError(f"backend {backend!r}: mpi stands alone, not in pairs")
    return backend


def shown(backend: str) -> str:
    """The name by which users choose a backend of this torch name."""
    return "mpi" if backend == _MPI else backend


def _imported(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != "comm_core":
            raise Unavailable(str(error)) from None
        raise Unavailable("the comm core is not installed: build it with `make core`") from None
    except ImportError as error:
        raise Unavailable(str(error)) from None
