"""Data-parallel training algorithms behind one optimizer call.

    import dear
    dear.init()
    optimizer = dear.DistributedOptimizer(optimizer, model, algorithm="dear")
    dear.broadcast_parameters(model.state_dict(), root_rank=0)

Importing this package does not import torch; the first use of a name below does.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "init": "dear.runtime",
    "shutdown": "dear.runtime",
    "is_initialized": "dear.runtime",
    "rank": "dear.runtime",
    "size": "dear.runtime",
    "local_rank": "dear.runtime",
    "local_size": "dear.runtime",
    "DistributedOptimizer": "dear.optimizer",
    "broadcast_parameters": "dear.optimizer",
    "broadcast_optimizer_state": "dear.optimizer",
    "allreduce": "dear.optimizer",
    "UserError": "dear.errors",
    "Unavailable": "dear.errors",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'dear' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
