"""Lazy imports of `torch` and other slow packages.

The command line lists algorithms, checks their options and prints plans in a fraction of a second;
`import torch` takes seconds. Modules that these commands import therefore take torch from here;
the first access to an attribute imports it. Annotations may still name torch, since they are
strings (`from __future__ import annotations`).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING


class LazyModule:
    """Proxy of a module; the first access to an attribute imports the module.

    From then on the proxy shares the module's namespace, as training loops look up many attributes.
    """

    __slots__ = ("__dict__", "_name")

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> object:
        module = importlib.import_module(self._name)
        self.__dict__ = module.__dict__
        return getattr(module, attribute)  # the module may have a `__getattr__` of its own


if TYPE_CHECKING:
    import networkx as nx
    import numpy as np
    import torch
    import torch.distributed as dist

    import comm_core
else:
    comm_core = LazyModule("comm_core")  # other backends do not need it
    dist = LazyModule("torch.distributed")
    np = LazyModule("numpy")
    nx = LazyModule("networkx")
    torch = LazyModule("torch")

__all__ = ["LazyModule", "comm_core", "dist", "np", "nx", "torch"]
