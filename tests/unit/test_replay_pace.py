"""Pace: waits that add up, whatever the machine does in between."""

from __future__ import annotations

import struct
import threading
import time

import pytest

from common.models import pace
from common.models.pace import Pace


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


def test_time_scale_multiplies(clock):
    it, began = started(clock, time_scale=7.0)
    for _ in range(10):
        it.wait(0.01)
    assert it.time_scale == 7.0
    assert clock.now - began == pytest.approx(0.7, abs=0.004)


def test_a_layer_takes_its_full_time_after_a_wait_for_communication(clock):
    it, _ = started(clock)
    for _ in range(10):
        it.wait(0.001)  # every sleep ends late: the replay is behind
    clock.block(0.5)
    began = clock.now
    it.wait(0.01)
    assert clock.now - began >= 0.01


def test_restart_forgets_what_was_before(clock):
    it, _ = started(clock)
    it.wait(0.001)
    clock.work(0.5)
    it.restart()
    began = clock.now
    it.wait(0.01)
    assert clock.now - began >= 0.01


def test_hold_delays_what_follows(clock):
    it, began = started(clock)
    clock.work(0.2)
    it.hold(0.2)
    it.wait(0.01)
    assert clock.now - began == pytest.approx(0.213)


def test_what_is_done_meanwhile_is_part_of_the_wait(clock):
    it, began = started(clock)
    it.begin(0.01)
    clock.work(0.009)
    it.finish()
    assert clock.now - began == pytest.approx(0.013)


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


def test_a_slowdown_that_is_being_written_changes_nothing(clock, tmp_path):
    path = tmp_path / "pace-h0"
    path.write_bytes(struct.pack("<d", 2.0))
    it, _ = started(clock, slowdown=path)
    it.wait(0.1)
    path.write_bytes(b"")
    it.restart()
    began = clock.now
    it.wait(0.1)
    assert clock.now - began == pytest.approx(0.203)


def test_real_waiting_is_noticed():
    it = Pace(1.0, None)
    it.restart()
    began = time.perf_counter()
    it.wait(0.005)
    threading.Event().wait(0.05)  # as for communication
    it.wait(0.02)
    assert time.perf_counter() - began >= 0.0749


def test_real_computing_is_made_up_for():
    it = Pace(1.0, None)
    for _ in range(5):  # an attempt may be spoilt by a page that must be read from disk
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


def test_the_current_pace_is_real_time_until_set():
    before = pace.current()
    try:
        mine = Pace(2.0, None)
        pace.set_pace(mine)
        assert pace.current() is mine
    finally:
        pace.set_pace(before)
    assert before.time_scale == 1.0
