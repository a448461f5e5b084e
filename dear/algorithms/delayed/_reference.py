"""Delayed training, all ranks written out in one process; what `ranks` is: see `synchronous`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any


def dadt(ranks: Any, options: Any) -> Iterator[None]:
    """x <- x - update(mean of the g of `delay` steps before); `close` applies what is left."""
    held: deque[Any] = deque()
    try:
        while True:
            held.append(ranks.g.mean(0) if options.average else ranks.g.sum(0))
            if len(held) > options.delay:
                ranks.g = held.popleft()
                ranks.update()
            yield
    finally:
        for ranks.g in held:
            ranks.update()
