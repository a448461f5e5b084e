"""Process groups of torch.distributed over MPI by way of mpi4py, for `backend: mpi`.

torch's own "mpi" is compiled into torch or absent, as it is from the wheels, and its name cannot be
taken over without patching torch; this backend therefore has a name of its own.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from .engine import library
from .group import NAME, MpiGroup


def register() -> str:
    """Makes the backend known to torch.distributed; returns the name for `init_process_group`.

    Raises:
        ImportError: there is no mpi4py, or no MPI for it; the sentence says what to install.
    """
    library()
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, create_backend, extended_api=True, devices=["cpu"])
    return NAME


def unavailable() -> str | None:
    """Why the backend cannot be used here, in one sentence; None if it can."""
    try:
        library()
    except ImportError as error:
        return str(error)
    return None


def library_version() -> str:
    """The MPI library and its version, as it describes itself."""
    return library().Get_library_version().split("\0")[0].strip()


def create_backend(options: Any, process_group_options: Any = None) -> MpiGroup:
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
    return MpiGroup(options)
