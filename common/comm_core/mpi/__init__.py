"""Process groups of torch.distributed over MPI, through mpi4py, for `backend: mpi`.

torch's own backend "mpi" must be compiled into torch, and the wheels do not contain it. Its name
cannot be reused without patching torch, so this backend has another name.
"""

from __future__ import annotations

import torch.distributed as dist

from .engine import library
from .group import NAME
from .process_group import MpiGroup

__all__ = ["NAME", "MpiGroup", "library_version", "register", "unavailable"]


def register() -> str:
    """Registers the backend with torch.distributed; returns its name for `init_process_group`.

    Raises:
        ImportError: mpi4py or an MPI library is missing; the message says what to install.
    """
    library()
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, MpiGroup, extended_api=True, devices=["cpu"])
    return NAME


def unavailable() -> str | None:
    """Returns the reason why the backend is unavailable, in one sentence; None if it works."""
    try:
        library()
    except ImportError as error:
        return str(error)
    return None


def library_version() -> str:
    """Returns the MPI library's description of itself, with its version. The build prints it."""
    text: str = library().Get_library_version()
    return text.split("\0")[0].strip()
