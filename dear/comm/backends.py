"""Backends of torch.distributed, by the names that users choose."""

from __future__ import annotations

import importlib
import logging
from types import ModuleType

from dear.comm.environment import RankFacts
from dear.errors import Unavailable, UserError
from dear.lazy import dist

log = logging.getLogger("dear")

_MPI = "comm_core_mpi"


def default_backend(facts: RankFacts, own_gpus: bool) -> str:
    """Returns `comm_core`, with `nccl` for CUDA tensors if every rank has its own GPU.

    Ranks that share a GPU use `comm_core` for CUDA tensors, too, since NCCL refuses two ranks on
    one GPU. Without a built comm core, `gloo` replaces it, and rank 0 logs a warning.
    """
    name = "comm_core"
    try:
        prepare(name)
    except Unavailable as reason:
        name = "gloo"
        if facts.rank == 0 and facts.world_size > 1:
            log.warning("using gloo: %s", reason)
    return f"cpu:{name},cuda:nccl" if own_gpus else name


def backend_of(group: dist.ProcessGroup) -> str:
    """Returns the backend's name, or pairs of device and name if devices use different backends."""
    config = str(dist.get_backend_config(group))
    names = {pair.partition(":")[2] or pair for pair in config.split(",")}
    (name,) = names if len(names) == 1 else (config,)
    return "mpi" if name == _MPI else name


def prepare(backend: str) -> str:
    """Registers a backend with torch.distributed and returns its name there.

    Args:
        backend: `comm_core`, `mpi`, a name that torch knows, or pairs (`cpu:comm_core,cuda:nccl`).

    Raises:
        Unavailable: the backend is not built.
        UserError: `mpi` is part of pairs.
    """
    if "comm_core" in backend:
        _imported("comm_core")
    if backend == "mpi":
        # torch's own "mpi" needs a torch built with MPI, and its name cannot be registered again.
        try:
            return _imported("comm_core.mpi").register()
        except ImportError as error:
            raise Unavailable(str(error)) from None
    if ":mpi" in backend:
        raise UserError(f"backend {backend!r}: mpi cannot be part of pairs, use 'mpi' alone")
    return backend


def _imported(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "comm_core"
        hint = "the comm core is not installed: build it with `make core`"
        raise Unavailable(hint if missing else str(error)) from None
