"""`torch` and other slow imports, for files that must also be readable without them.

The command line lists algorithms, checks their options and prints plans in a fraction of a second,
which an `import torch` (seconds) would spoil. Whatever a listing reads therefore takes torch from
here: it is imported when the first attribute is asked for. Annotations may name it all the same,
since they are strings (`from __future__ import annotations`).
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any


class LazyModule:
    """Stands for a module and imports it at the first use of an attribute."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._module: ModuleType | None = None

    def __getattr__(self, attribute: str) -> Any:
        if self._module is None:  # kept: training loops come here many times per step
            self._module = importlib.import_module(self._name)
        return getattr(self._module, attribute)


if TYPE_CHECKING:
    import networkx as nx
    import numpy as np
    import torch
    import torch.distributed as dist
else:
    dist = LazyModule("torch.distributed")
    np = LazyModule("numpy")
    nx = LazyModule("networkx")
    torch = LazyModule("torch")

__all__ = ["LazyModule", "dist", "np", "nx", "torch"]
