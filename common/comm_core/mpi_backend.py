"""Process groups of torch.distributed over MPI, for `backend: mpi`.

torch's own "mpi" is compiled into torch or absent, as it is from the wheels, and its name cannot be
taken over without patching torch; this backend therefore has a name of its own.
"""

from __future__ import annotations

import atexit
import importlib
import logging
import os
import sys
from types import ModuleType
from typing import Any

import torch.distributed as dist

log = logging.getLogger("dear")

NAME = "comm_core_mpi"
BUILD = "scripts/build.sh"

_process: int | None = None


def register() -> str:
    """Makes the backend known to torch.distributed; returns the name for `init_process_group`.

    Raises:
        ImportError: the extension was not built; the sentence says how to.
    """
    _module()
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, create_backend, extended_api=True, devices=["cpu"])
    return NAME


def unavailable() -> str | None:
    """Why the backend cannot be used here, in one sentence; None if it can."""
    try:
        _module()
    except ImportError as error:
        return str(error)
    return None


def create_backend(options: Any, process_group_options: Any = None) -> dist.Backend:
    """The creator that torch.distributed calls on every member of a new group.

    Args:
        options: torch's `_DistributedBackendOptions`.
        process_group_options: must be None; there is nothing to choose.

    Raises:
        ValueError: `process_group_options` were given.
        torch.distributed.DistBackendError: torch's ranks are not MPI's, MPI does not start, or a
            member does not come within the group's timeout.
    """
    if process_group_options is not None:
        raise ValueError(f"{NAME} has no process group options")
    backend = _module().create_backend(options)
    _finalize_at_exit()
    return backend


def library_version() -> str:
    """The MPI library and its version, as it describes itself."""
    return _module().library_version().split("\0")[0].strip()


def _module() -> ModuleType:
    try:
        return importlib.import_module("._mpi", __package__)
    except ImportError as error:
        raise ImportError(f"the MPI backend was not built ({error}): run {BUILD}") from error


def _finalize_at_exit() -> None:
    # Registered with the first group, not on import: handlers run in reverse order, so whoever
    # came to use MPI after us (Horovod, mpi4py) is done with it before MPI ends.
    global _process
    if _process is None:
        _process = os.getpid()
        atexit.register(_finalize)


def _finalize() -> None:
    if os.getpid() != _process:
        return  # a fork has neither the thread nor a place in the job
    # MPI_Finalize waits for the other ranks, and they may be waiting for this one, which failed.
    failed = hasattr(sys, "last_type")
    running = _module().finalize(failed=failed, grace_s=0.0 if failed else 2.0)
    if running:
        log.warning("MPI was left running: %d operations had not ended at exit", running)
