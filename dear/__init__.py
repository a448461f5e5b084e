"""Data-parallel training algorithms behind one optimizer call.

    import dear
    dear.init()
    optimizer = dear.DistributedOptimizer(optimizer, model, algorithm="dear")
    dear.broadcast_parameters(model.state_dict(), root_rank=0)

Importing this package does not import torch; the first access to one of its names does.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

__version__ = "0.2.0"

_HOME = {
    "init": "dear.comm.runtime",
    "shutdown": "dear.comm.runtime",
    "is_initialized": "dear.comm.runtime",
    "rank": "dear.comm.runtime",
    "size": "dear.comm.runtime",
    "device": "dear.comm.runtime",
    "local_rank": "dear.comm.runtime",
    "local_size": "dear.comm.runtime",
    "DistributedOptimizer": "dear.optimizer",
    "broadcast_parameters": "dear.optimizer",
    "broadcast_optimizer_state": "dear.optimizer",
    "allreduce": "dear.optimizer",
    "UserError": "dear.errors",
    "Unavailable": "dear.errors",
}

_MODULES = {
    "dear.mixing": "dear.topology",
    "dear.budget": "dear.training.pace",
    "dear.sampling": "dear.training.pace",
    "dear.consensus": "dear.comm.neighbors",
    "dear.interactive": "dear.comm.environment",
    "dear.bluefog.topology_util": "dear.bluefog",
}
"""Short module name in the documentation -> module that defines it."""

__all__ = sorted(_HOME)


class _ShortNames(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import hook that maps short names to their modules, as in `from dear.mixing import x`."""

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self) if name in _MODULES else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(_MODULES[spec.name])
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restores the module's own spec; the module was executed under its own name already."""
        assert module.__spec__ is not None, "create_module has set it"
        module.__spec__ = module.__spec__.loader_state


sys.meta_path.append(_ShortNames())


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'dear' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
