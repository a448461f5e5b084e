"""What moves the bytes: backends of torch.distributed by the names that users choose."""

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
    """`comm_core`; and where every rank has a GPU of its own, `nccl` for what lies there.

    Ranks that share GPUs have `comm_core` for those, too, since NCCL refuses two ranks on one GPU.
    Without a built comm core `gloo` takes its place, and rank 0 says so.
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
    """What moves the bytes: a name, or pairs of device and name where devices differ."""
    config = str(dist.get_backend_config(group))
    names = {pair.partition(":")[2] or pair for pair in config.split(",")}
    (name,) = names if len(names) == 1 else (config,)
    return "mpi" if name == _MPI else name


def prepare(backend: str) -> str:
    """Makes a backend known to torch.distributed; returns the name it has there.

    Args:
        backend: `comm_core`, `mpi`, a name that torch knows, or pairs (`cpu:comm_core,cuda:nccl`).

    Raises `Unavailable` if it is not built, and `UserError` for `mpi` within pairs.
    """
    if "comm_core" in backend:
        _imported("comm_core")
    if backend == "mpi":
        # torch's own "mpi" needs a torch that was built with it; the name cannot be taken over.
        try:
            return _imported("comm_core.mpi").register()
        except ImportError as error:
            raise Unavailable(str(error)) from None
    if ":mpi" in backend:
        raise UserError(f"backend {backend!r}: mpi stands alone, not in pairs")
    return backend


def _imported(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "comm_core"
        how = "the comm core is not installed: build it with `make core`"
        raise Unavailable(how if missing else str(error)) from None
