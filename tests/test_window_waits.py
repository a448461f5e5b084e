"""Waiting for a neighbour that is too far behind goes by the communicator's clock alone."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest

from dear.algorithms.asynchronous._window_mixing import DEFAULT_PATIENCE_S, POLL_S, WindowMixing


class Clock:
    """Time that passes only in pauses."""

    def __init__(self) -> None:
        self.now = 100.0
        self.pauses: list[float] = []

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


def waiting(clock: Clock, timeout: timedelta | None) -> WindowMixing:
    """A rank with 8 steps whose neighbour may be 2 behind."""
    mixing = WindowMixing.__new__(WindowMixing)
    mixing.communicator = SimpleNamespace(
        clock=lambda: clock.now, pause=clock.pause, timeout=timeout, blocked_s=0.0
    )
    mixing.buckets = [None]
    mixing.steps, mixing._max_staleness = 8, 2
    mixing._farewell = SimpleNamespace(gone=lambda rank: False)
    return mixing


def neighbour(steps_in) -> SimpleNamespace:
    return SimpleNamespace(rank=1, lost=False, steps_in=lambda index, bucket: steps_in())


def test_it_pauses_longer_and_longer_until_the_neighbour_has_come():
    clock = Clock()
    mixing = waiting(clock, timedelta(seconds=30))
    mixing._catch_up(neighbour(lambda: 5 if clock.now >= 100.1 else 3), 5)
    assert clock.pauses[:3] == [POLL_S[0], 2 * POLL_S[0], 4 * POLL_S[0]]
    assert max(clock.pauses) == POLL_S[1]
    assert mixing.communicator.blocked_s == pytest.approx(sum(clock.pauses))
    assert 0.1 <= sum(clock.pauses) < 0.1 + POLL_S[1]


@pytest.mark.parametrize(
    ("timeout", "limit_s"), [(timedelta(seconds=7), 7.0), (None, DEFAULT_PATIENCE_S)]
)
def test_patience_ends_by_the_same_clock(timeout, limit_s):
    clock = Clock()
    mixing = waiting(clock, timeout)
    with pytest.raises(RuntimeError, match="rank 1 is 4 steps behind, more than max_staleness=2"):
        mixing._catch_up(neighbour(lambda: 3), 5)
    assert sum(clock.pauses) == pytest.approx(limit_s, abs=2 * POLL_S[1])
