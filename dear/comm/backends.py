"""Backends of torch.distributed, by the names that users choose."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import runpy
import sys
from pathlib import Path
from types import ModuleType

from dear.comm.environment import RankFacts
from dear.errors import Unavailable, UserError, unknown
from dear.lazy import dist

log = logging.getLogger("dear")

MPI = "comm_core_mpi"
"""Name in torch.distributed of this project's process group over MPI."""


def default_backend(facts: RankFacts, own_gpus: bool) -> str:
    """Returns `comm_core`, with `nccl` for CUDA tensors if every rank has its own GPU.

    If ranks share a GPU, `comm_core` moves CUDA tensors, too, since NCCL refuses two ranks on one
    GPU. If the comm core is not built, `gloo` replaces it, and rank 0 logs a warning.
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
    return "mpi" if name == MPI else name


def backend_for(backend: str, device: str) -> str:
    """Returns the backend for a type of device; `backend` is a result of `backend_of`."""
    pairs = dict(pair.split(":") for pair in backend.split(",") if ":" in pair)
    return pairs.get(device, "") if pairs else backend


def prepare(backend: str) -> str:
    """Registers a backend with torch.distributed and returns its name there.

    Args:
        backend: `comm_core`, `mpi`, a name that torch knows, or pairs (`cpu:comm_core,cuda:nccl`).

    Raises:
        Unavailable: the backend is not built.
        UserError: `mpi` is part of pairs, or this torch lacks the backend.
    """
    if "comm_core" in backend:
        _imported("comm_core")
    if backend == "mpi":
        # torch's own "mpi" needs a torch built with MPI, and its name cannot be registered again.
        try:
            name: str = _imported("comm_core.mpi").register()
            return name
        except ImportError as error:
            raise Unavailable(str(error)) from None
    if ":mpi" in backend:
        raise UserError(f"backend {backend!r}: mpi cannot be part of pairs; use 'mpi' alone")
    known = [name for name in dist.Backend.backend_list if name != "undefined" and _built(name)]
    for name in (pair.rpartition(":")[2] for pair in backend.split(",")):
        if name not in known:
            raise unknown("backend of this torch", name, {*known, "comm_core", "mpi"})
    return backend


def _built(name: str) -> bool:
    return bool(getattr(dist, f"is_{name}_available", lambda: True)())


def mismatch_errors() -> tuple[type[Exception], ...]:
    """Returns the exceptions that say that two ranks called different operations."""
    core = sys.modules.get("comm_core")
    return () if core is None else (core.MismatchError,)


def comm_core_folder() -> Path | None:
    """Returns the folder of the package `comm_core`; None if it is not installed."""
    spec = importlib.util.find_spec("comm_core")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def missing_comm_core() -> str | None:
    """Returns why this process cannot use the comm core, or None if it can; needs no torch."""
    folder = comm_core_folder()
    if folder is None:
        return "the comm core is not installed"
    # Not imported: the package's __init__ imports torch.
    built = runpy.run_path(str(folder / "built.py"))
    reason: str | None = built["problem"](folder, torch_version())
    return reason


def torch_version() -> str:
    """Returns `torch.__version__` without an import of torch, which takes a second.

    The version of the package is not enough: it may lack the part that names CUDA's version.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return "not installed"
    facts = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    return str(facts["__version__"])


def core_module() -> ModuleType:
    """Returns the module `comm_core`; raises `Unavailable` if it is not built."""
    try:
        return _imported("comm_core")
    except Unavailable as error:
        raise Unavailable(f"neighbour averaging needs the comm core: {error}") from None


def _imported(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "comm_core"
        hint = "the comm core is not installed: build it with `make core`"
        raise Unavailable(hint if missing else str(error)) from None
