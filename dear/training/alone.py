"""A world of one rank: the algorithm has nothing to do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from dear.training.engine import Engine


class AloneEngine(Engine):
    """Trains like the plain optimizer, without hooks."""

    def step(self, update: Callable[[], Any]) -> Any:
        return update()

    def synchronize(self) -> None:
        return

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()
