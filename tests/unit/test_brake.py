"""Real compute made slower: by how much, and that waiting for others does not count."""

from __future__ import annotations

import struct
import time

import pytest

from common.models import pace
from common.models.pace import Brake, Pace
from dear.errors import UserError


def compute(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def slowed(tmp_path, factor: float, crowd: float = 1.0) -> Brake:
    path = tmp_path / "pace-h0"
    path.write_bytes(struct.pack("<d", factor))
    return Brake(Pace(1.0, path), crowd)


def waited(monkeypatch) -> list[float]:
    """What `time.sleep` was asked for in the brake."""
    asked: list[float] = []
    monkeypatch.setattr(pace.time, "sleep", asked.append)
    return asked


def test_compute_is_followed_by_a_wait(tmp_path, monkeypatch):
    asked = waited(monkeypatch)
    with slowed(tmp_path, 5.0):
        compute(0.05)
    # Less where the thread has waited for its core, too.
    assert len(asked) == 1 and asked[0] <= 4.1 * 0.05


@pytest.mark.parametrize(
    ("crowd", "ran_ms", "waited_ms", "sleeps_ms"),
    [(1, 20, 0, 80), (2, 20, 0, 180), (2, 20, 20, 160), (1, 20, 90, 0), (0.5, 20, 0, 80)],
)
def test_it_takes_as_long_whoever_computes_at_the_same_time(
    tmp_path, monkeypatch, crowd, ran_ms, waited_ms, sleeps_ms
):
    asked = waited(monkeypatch)
    times = iter([(1.0, 2.0), (1.0 + ran_ms / 1e3, 2.0 + waited_ms / 1e3)])
    monkeypatch.setattr(pace, "_ran_and_waited_s", lambda: next(times))
    with slowed(tmp_path, 5.0, crowd):
        pass
    assert asked == [pytest.approx(sleeps_ms / 1e3, abs=1e-9)]


def test_time_blocked_is_not_compute(tmp_path, monkeypatch):
    sleep = time.sleep
    asked = waited(monkeypatch)
    with slowed(tmp_path, 3.0):
        sleep(0.3)
    assert sum(asked) < 0.3


@pytest.mark.parametrize("factor", [1.0, None])
def test_at_full_speed_nothing_waits(tmp_path, monkeypatch, factor):
    asked = waited(monkeypatch)
    with slowed(tmp_path, factor) if factor else Brake(None):
        compute(0.01)
    with Brake(Pace(1.0, tmp_path / "nothing")):
        compute(0.01)
    assert asked == []


def test_a_kernel_that_does_not_tell_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(pace, "_SCHEDSTAT", tmp_path / "schedstat")
    with pytest.raises(UserError, match="slow_host: this kernel has no"), slowed(tmp_path, 2.0):
        compute(0.01)
