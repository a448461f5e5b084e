"""Waiting for a neighbour that is too far behind goes by the communicator's clock alone."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace

import pytest

from dear.algorithms.asynchronous.asyncddp import DEFAULT_PATIENCE_S, POLL_S, AsyncEngine


class Clock:
    """Time that passes only in pauses."""

    def __init__(self) -> None:
        self.now = 100.0
        self.pauses: list[float] = []

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


def waiting(clock: Clock, timeout: timedelta | None, steps_in: Callable[[], int]) -> AsyncEngine:
    """A rank with 8 steps whose neighbour may be 2 behind, and has `steps_in()` in its values."""
    engine = AsyncEngine.__new__(AsyncEngine)
    engine.communicator = SimpleNamespace(
        clock=lambda: clock.now, pause=clock.pause, timeout=timeout, blocked_s=0.0
    )
    engine.windows = {None: SimpleNamespace(steps_in=lambda source: steps_in())}
    engine.steps, engine._max_staleness = 8, 2
    engine.peers = SimpleNamespace(departures=SimpleNamespace(gone=lambda rank: False))
    return engine


@pytest.mark.parametrize(
    ("timeout", "limit_s"), [(timedelta(seconds=7), 7.0), (None, DEFAULT_PATIENCE_S)]
)
def test_patience_ends_by_the_same_clock(timeout, limit_s):
    clock = Clock()
    engine = waiting(clock, timeout, lambda: 3)
    with pytest.raises(RuntimeError, match="rank 1 is 4 steps behind, more than max_staleness=2"):
        engine._catch_up(1, 5)
    assert sum(clock.pauses) == pytest.approx(limit_s, abs=2 * POLL_S[1])
