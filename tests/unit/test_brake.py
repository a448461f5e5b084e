"""Brake: real compute made slower."""

from __future__ import annotations

import os
import struct
import threading
import time

import pytest

from common.emulation.faults import phase_of
from common.models.replay import brake as brake_module
from common.models.replay import pace, threads
from common.models.replay.brake import Brake
from common.models.replay.pace import Pace
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
    """Seconds that the brake asks `time.sleep` for."""
    asked: list[float] = []
    monkeypatch.setattr(brake_module.time, "sleep", asked.append)
    return asked


def test_compute_is_followed_by_a_wait(tmp_path, monkeypatch):
    asked, read, plain = waited(monkeypatch), [], brake_module.ran_and_waited_s

    def noted() -> tuple[float, float]:
        read.append(plain())
        return read[-1]

    monkeypatch.setattr(brake_module, "ran_and_waited_s", noted)
    with slowed(tmp_path, 5.0):
        compute(0.05)
    ran_s, waited_s = (end - begin for begin, end in zip(*read, strict=True))
    assert ran_s >= 0.05 and waited_s >= 0
    # Less by what the thread has waited for its core, which may be all of it.
    assert sum(asked) == pytest.approx(
        max(0.0, 4 * ran_s - waited_s), abs=brake_module.SHORTEST_SLEEP_S
    )


@pytest.mark.parametrize(
    ("crowd", "ran_ms", "waited_ms", "sleeps_ms"),
    [(1, 20, 0, 80), (2, 20, 0, 180), (2, 20, 20, 160), (1, 20, 90, 0), (0.5, 20, 0, 80)],
)
def test_it_takes_as_long_whoever_computes_at_the_same_time(
    tmp_path, monkeypatch, crowd, ran_ms, waited_ms, sleeps_ms
):
    asked = waited(monkeypatch)
    times = iter([(1.0, 2.0), (1.0 + ran_ms / 1e3, 2.0 + waited_ms / 1e3)])
    monkeypatch.setattr(brake_module, "ran_and_waited_s", lambda: next(times))
    with slowed(tmp_path, 5.0, crowd):
        pass
    assert sum(asked) == pytest.approx(sleeps_ms / 1e3, abs=1e-9)


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
    monkeypatch.setattr(threads, "SCHEDSTAT", tmp_path / "schedstat")
    monkeypatch.setattr(threads, "_local", threading.local())
    with pytest.raises(UserError, match="this kernel has no"), slowed(tmp_path, 2.0):
        compute(0.01)


class Host:
    """A thread that runs, waits for a core, and sleeps, as a test says."""

    def __init__(self, monkeypatch, brake: Brake) -> None:
        self.brake, self.ran, self.waited, self.slept = brake, 3.0, 7.0, []
        monkeypatch.setattr(brake_module, "ran_and_waited_s", lambda: (self.ran, self.waited))
        monkeypatch.setattr(brake_module.time, "sleep", self.slept.append)

    def work(self, ran_s: float, waited_s: float = 0.0) -> None:
        self.ran, self.waited = self.ran + ran_s, self.waited + waited_s

    def piece(self, ran_s: float, waited_s: float = 0.0) -> None:
        with self.brake:
            self.work(ran_s, waited_s)

    def asked(self) -> list[float]:
        """Returns the seconds that it was asked to sleep since the last call."""
        result, self.slept[:] = list(self.slept), []
        return [pytest.approx(seconds, abs=1e-9) for seconds in result]


def test_a_time_scale_slows_compute_whoever_else_needs_the_core(tmp_path, monkeypatch):
    path = tmp_path / "pace-h0"
    host = Host(monkeypatch, Brake(Pace(4.0, path), crowd=2.0))
    host.piece(0.01)
    host.piece(0.01, waited_s=0.02)
    assert host.asked() == [0.03, 0.01]
    # A slowed host is slowed on top of that; the crowd is in the time scale already.
    path.write_bytes(struct.pack("<d", 3.0))
    monkeypatch.setattr(pace, "SLOWDOWN_PERIOD_S", 0.0)
    host.brake._pace._read_again = 0.0
    host.piece(0.01)
    assert host.asked() == [0.11]


def test_what_it_waited_for_a_core_when_it_woke_makes_the_next_piece_shorter(monkeypatch):
    host = Host(monkeypatch, Brake(Pace(4.0, None)))
    host.piece(0.01)
    host.work(0.0, waited_s=0.004)
    host.piece(0.01, waited_s=0.001)
    assert host.asked() == [0.03, 0.025]
    assert host.brake.absorbed_s == pytest.approx(0.005)
    # Only what a piece had room for is absorbed.
    host = Host(monkeypatch, Brake(Pace(2.0, None)))
    host.piece(0.01, waited_s=0.05)
    assert host.asked() == [] and host.brake.absorbed_s == pytest.approx(0.01)
    host.piece(0.01)  # and what it was too late by is not made up for
    assert host.asked() == [0.01]


def test_within_a_piece_results_are_held_back_until_their_time(monkeypatch):
    host = Host(monkeypatch, Brake(Pace(4.0, None)))
    with host.brake:
        host.work(0.01)
        host.brake.catch_up()
        host.work(0.02, waited_s=0.01)
        host.brake.catch_up()
        host.work(0.01)
    assert host.asked() == [0.03, 0.05, 0.03]
    host.brake.catch_up()  # outside of a piece it says nothing
    assert host.asked() == []


def test_this_threads_own_time_is_told_also_after_a_fork():
    before = threads.host_s()
    compute(0.02)
    assert 0.02 <= threads.host_s() - before < 10
    child = os.fork()
    if not child:
        # The parent's file would tell of the parent's waiting.
        mine = threads.SCHEDSTAT.read_text().split()[1]
        threads.host_s()
        os._exit(abs(int(os.pread(threads._local.file, 64, 0).split()[1]) - int(mine)) > 50e6)
    assert os.waitpid(child, 0)[1] == 0


def test_a_phase_without_a_process_id_has_none(tmp_path):
    (tmp_path / "phase-0-rank1").write_text("? measuring")
    assert phase_of(tmp_path, 0, 1) == (0, "measuring")
    assert phase_of(tmp_path, 0, 0) == (0, "")
