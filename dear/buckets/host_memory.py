"""Memory of the host that a process has freed."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable


def give_back() -> None:
    """Returns freed memory to the system, where the C library can (glibc); elsewhere nothing.

    Tensors of some megabytes come from malloc's heap once one of that size has been freed, and the
    heap keeps what is freed within it: a model that has moved would count twice for ever.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
