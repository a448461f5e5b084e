"""Pace: waits that add up whatever the machine does, and real compute made slower."""

from __future__ import annotations

import struct
import time

import pytest

from common.models import pace
from common.models.pace import Brake, Pace
from dear.errors import UserError


class FakeTime:
    """A clock that moves when told, and sleeps that end late."""

    def __init__(self, late_s: float) -> None:
        self.now = 100.0
        self.late_s = late_s
        self.blocked = 0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + self.late_s
        self.blocked += 1

    def work(self, seconds: float) -> None:
        """The thread computes."""
        self.now += seconds

    def block(self, seconds: float) -> None:
        """The thread waits for something."""
        self.now += seconds
        self.blocked += 1


@pytest.fixture
def clock(monkeypatch):
    made = FakeTime(late_s=0.003)
    monkeypatch.setattr(pace, "time", made)
    monkeypatch.setattr(pace, "_times_blocked", lambda: made.blocked)
    return made


def started(clock, time_scale=1.0, slowdown=None):
    made = Pace(time_scale, slowdown)
    made.restart()
    return made, clock.now


def test_late_wake_ups_and_overhead_do_not_add_up(clock):
    it, began = started(clock)
    for _ in range(100):
        it.wait(0.01)
        clock.work(0.002)
    assert clock.now - began == pytest.approx(1.0, abs=0.006)


def test_waits_too_short_to_sleep_add_up(clock):
    it, began = started(clock)
    for _ in range(10_000):
        it.wait(1e-5)
    assert clock.now - began == pytest.approx(0.1, abs=0.004)


def test_a_layer_takes_its_full_time_after_a_wait_for_communication(clock):
    it, _ = started(clock)
    for _ in range(10):
        it.wait(0.001)  # every sleep ends late: the replay is behind
    clock.block(0.5)
    began = clock.now
    it.wait(0.01)
    assert clock.now - began >= 0.01


def test_the_slowdown_may_come_change_and_go(clock, tmp_path):
    path = tmp_path / "pace-h0"
    it, _ = started(clock, slowdown=path)

    def taken():
        it.restart()
        began = clock.now
        it.wait(0.1)
        return clock.now - began

    assert taken() == pytest.approx(0.103)
    path.write_bytes(struct.pack("<d", 3.0))
    assert taken() == pytest.approx(0.303)
    path.write_bytes(struct.pack("<d", 0.5))
    assert taken() == pytest.approx(0.053)
    path.unlink()
    assert taken() == pytest.approx(0.103)


@pytest.mark.parametrize("content", [struct.pack("<d", 0.0), struct.pack("<d", float("nan"))])
def test_a_slowdown_that_is_no_factor_is_an_error(tmp_path, content):
    path = tmp_path / "pace-h0"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="pace-h0: not a positive"):
        Pace(1.0, path).wait(0.001)


def test_real_computing_is_made_up_for():
    it = Pace(1.0, None)
    for _ in range(20):  # an attempt may be spoilt by a page that must be read from disk
        it.wait(0.001)
        it.restart()
        began = time.perf_counter()
        it.wait(0.001)
        while time.perf_counter() - began < 0.05:
            pass
        it.wait(0.06)
        if time.perf_counter() - began < 0.1:  # 0.061, not 0.11
            return
    pytest.fail("a wait after some computing was never shortened by it")


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
    assert len(asked) == 1 and asked[0] <= 5 * 0.05


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
