"""Pace: waits that add up whatever the machine does, and real compute made slower."""

from __future__ import annotations

import math
import os
import struct
import threading
import time

import pytest
import torch

from common.harness.trial import OptimizerConfig
from common.harness.worker.timing.stopwatch import Stopwatch
from common.models import pace
from common.models.lead import Lead
from common.models.pace import Brake, Pace, paced
from dear.buckets.updates import PartialUpdate, element_wise
from dear.errors import UserError


class FakeTime:
    """A clock that moves when told, and sleeps that end late."""

    def __init__(self, late_s: float) -> None:
        self.now = 100.0
        self.late_s = late_s
        self.host_s = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + self.late_s

    def work(self, seconds: float) -> None:
        """The thread computes."""
        self.now += seconds
        self.host_s += seconds

    def block(self, seconds: float) -> None:
        """The thread waits for something."""
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    made = FakeTime(late_s=0.003)
    monkeypatch.setattr(pace, "time", made)
    monkeypatch.setattr(pace, "_host_s", lambda: made.host_s)
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
    asked, read, plain = waited(monkeypatch), [], pace._ran_and_waited_s

    def noted() -> tuple[float, float]:
        read.append(plain())
        return read[-1]

    monkeypatch.setattr(pace, "_ran_and_waited_s", noted)
    with slowed(tmp_path, 5.0):
        compute(0.05)
    ran_s, waited_s = (end - begin for begin, end in zip(*read, strict=True))
    assert ran_s >= 0.05 and waited_s >= 0
    # Less by what the thread has waited for its core, which may be all of it.
    assert sum(asked) == pytest.approx(max(0.0, 4 * ran_s - waited_s), abs=pace.SHORTEST_SLEEP_S)


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
    monkeypatch.setattr(pace, "_SCHEDSTAT", tmp_path / "schedstat")
    monkeypatch.setattr(pace, "_own", threading.local())
    with pytest.raises(UserError, match="this kernel has no"), slowed(tmp_path, 2.0):
        compute(0.01)


class Host:
    """A thread that runs, waits for a core, and sleeps, as a test says."""

    def __init__(self, monkeypatch, brake: Brake) -> None:
        self.brake, self.ran, self.waited, self.slept = brake, 3.0, 7.0, []
        monkeypatch.setattr(pace, "_ran_and_waited_s", lambda: (self.ran, self.waited))
        monkeypatch.setattr(pace.time, "sleep", self.slept.append)

    def work(self, ran_s: float, waited_s: float = 0.0) -> None:
        self.ran, self.waited = self.ran + ran_s, self.waited + waited_s

    def piece(self, ran_s: float, waited_s: float = 0.0) -> None:
        with self.brake:
            self.work(ran_s, waited_s)

    def asked(self) -> list[float]:
        """How long it was asked to sleep since the last time."""
        found, self.slept[:] = list(self.slept), []
        return [pytest.approx(seconds, abs=1e-9) for seconds in found]


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


def test_only_what_a_piece_had_room_for_was_absorbed(monkeypatch):
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


def cpu_work(clock, it, takes_s, device_s):
    it.work(lambda: clock.work(takes_s), lambda: device_s)


def test_what_the_cpu_takes_longer_than_the_device_is_made_up_for(clock):
    it, began = started(clock, time_scale=10.0)
    it.wait(0.05)
    cpu_work(clock, it, takes_s=0.2, device_s=0.002)
    late = clock.now
    assert late - began == pytest.approx(0.703)
    assert it.clock() - began == pytest.approx(0.52)  # when the device is done with it
    it.wait(0.05)
    assert clock.now - began == pytest.approx(0.5 + 0.02 + 0.5 + 0.003)


def test_an_update_lasts_as_long_as_the_device_needs_at_least(clock):
    it, began = started(clock, time_scale=100.0)
    it.wait(0.01)
    cpu_work(clock, it, takes_s=0.05, device_s=0.002)
    assert clock.now - began == pytest.approx(1.0 + 0.2, abs=0.004)


def test_what_was_late_before_a_wait_for_communication_is_not_made_up_for(clock):
    it, _ = started(clock)
    cpu_work(clock, it, takes_s=0.2, device_s=0.002)
    clock.block(0.05)
    began = clock.now
    it.wait(0.1)
    assert clock.now - began == pytest.approx(0.103)


@pytest.mark.parametrize(
    ("copies_s", "ended_before_s", "made_up_s"),
    [
        (0.1, 0.1, 0.1),
        (0.1, 0.04, 0.04),  # another one ended while it copied
        (0.1, 0.3, 0.1),  # it cannot have computed longer than it has
        (0.1, 1000.0, 0.0),  # before the thread was last here: what it waited for is not known
        (0.0005, 0.0005, 0.0),
    ],
)
def test_what_is_copied_after_a_collective_is_made_up_for(
    clock, copies_s, ended_before_s, made_up_s
):
    it, _ = started(clock)
    it.wait(0.1)
    clock.block(0.5)
    clock.work(copies_s)
    it.ended_s = lambda: clock.now - ended_before_s
    began = clock.now
    it.wait(0.2)
    assert clock.now - began == pytest.approx(0.203 - made_up_s)


class Wire:
    """Transfers one after the other, as the comm core tells of them."""

    def __init__(self, clock: FakeTime, it: Pace) -> None:
        self._clock = clock
        self._ends = [-math.inf]
        self._lull_s = (-math.inf, -math.inf)
        self._awaited_s = -math.inf
        it.ended_s = lambda: max(end for end in self._ends if end <= clock.now)
        it.awaited_s = lambda: self._awaited_s
        it.lull_s = lambda: self._lull_s

    def launch(self, seconds: float) -> int:
        if self._clock.now > self._ends[-1]:
            self._lull_s = (self._ends[-1], self._clock.now)
        self._ends.append(max(self._clock.now, self._ends[-1]) + seconds)
        return len(self._ends) - 1

    def wait(self, number: int) -> None:
        self._clock.block(max(0.0, self._ends[number] - self._clock.now))
        self._awaited_s = max(self._awaited_s, self._ends[number])


def decoupled_step_s(clock, update_s, gather_s=0.05, cycle_s=0.0) -> float:
    """What the device needs for a step of which all second halves follow the update."""
    it, _ = started(clock)
    wire = Wire(clock, it)
    gathers, ends = [], []
    for _ in range(20):
        for number in gathers or [0]:
            wire.wait(number)
            it.wait(0.05)
        it.wait(0.1)
        clock.block(cycle_s)
        reduce = wire.launch(0.1)
        it.wait(0.05)
        wire.wait(reduce)
        gathers = []
        for _ in range(2):
            cpu_work(clock, it, takes_s=update_s, device_s=0.001)
            gathers.append(wire.launch(gather_s))
        ends.append(it.clock())
    assert clock.now - it.clock() < 2 * update_s + 0.02  # it does make up for it
    return (ends[-1] - ends[9]) / 10


@pytest.mark.parametrize("gather_s", [0.01, 0.05, 0.12])
def test_an_update_that_delays_communication_delays_no_device(clock, gather_s):
    clock.late_s = 0.0
    least_s = decoupled_step_s(clock, 0.0, gather_s)
    compute_s = max(0.1 + 0.002, 2 * gather_s + 0.05 + 0.001, gather_s + 0.1 + 0.001)
    assert least_s == pytest.approx(0.2 + compute_s, abs=0.002)
    for update_s in (0.002, 0.02, 0.04):
        found_s = decoupled_step_s(clock, update_s, gather_s)
        assert found_s == pytest.approx(least_s, abs=0.003)


def test_who_launches_late_on_purpose_is_late(clock):
    clock.late_s = 0.0
    at_once_s = decoupled_step_s(clock, 0.01)
    later_s = decoupled_step_s(clock, 0.01, cycle_s=0.02)
    assert later_s - at_once_s == pytest.approx(0.02, abs=0.002)


def test_what_waited_for_its_turn_on_the_wire_was_not_late(clock):
    it, _ = started(clock)
    wire = Wire(clock, it)
    wire.launch(0.5)
    cpu_work(clock, it, takes_s=0.2, device_s=0.002)
    behind = wire.launch(0.5)
    wire.wait(behind)
    assert it.clock() == pytest.approx(clock.now)


def test_what_was_launched_ahead_of_the_device_ends_later_for_it(clock):
    clock.late_s = 0.0
    it, began = started(clock)
    wire = Wire(clock, it)
    it.begin(0.2, lead_s=0.05)
    it.finish()
    clock.work(0.01)  # less than the lead was for
    wire.wait(wire.launch(0.3))
    assert it.clock() - began == pytest.approx(0.2 + 0.3)


def test_how_far_the_host_is_behind_its_device_is_told(clock):
    it, _ = started(clock)
    cpu_work(clock, it, takes_s=0.2, device_s=0.002)
    assert it.late_s() == pytest.approx(0.198)
    it.wait(0.5)
    assert it.late_s() == pytest.approx(0.003)


def test_waiting_at_a_lock_is_no_communication(clock):
    it, began = started(clock)
    cpu_work(clock, it, takes_s=0.2, device_s=0.002)
    clock.block(0.5 * pace.BLOCKED_S)
    it.wait(0.5)
    assert clock.now - began == pytest.approx(0.502 + 0.003)


def test_the_clock_never_goes_back(clock):
    it, _ = started(clock)
    it.wait(0.1)
    came = clock.now + 0.3
    it.ended_s = lambda: came
    clock.block(0.3)
    clock.work(0.0005)
    first = it.clock()
    clock.work(0.1)  # that it came before could be told now
    assert it.clock() >= first
    cpu_work(clock, it, takes_s=0.1, device_s=0.001)
    assert it.clock() == pytest.approx(first + 0.001)


def test_the_clock_of_a_process_that_replays_nothing_is_time_itself(clock):
    it = Pace(1.0, None)
    assert it.clock() == clock.now
    clock.work(1.0)
    assert it.clock() == clock.now


def test_this_threads_own_time_is_told_also_after_a_fork():
    before = pace._host_s()
    compute(0.02)
    assert 0.02 <= pace._host_s() - before < 10
    child = os.fork()
    if not child:
        # The parent's file would tell of the parent's waiting.
        mine = pace._SCHEDSTAT.read_text().split()[1]
        pace._host_s()
        os._exit(abs(int(os.pread(pace._own.file, 64, 0).split()[1]) - int(mine)) > 50e6)
    assert os.waitpid(child, 0)[1] == 0


def passes(clock, time_scale, units, hooks, count=3):
    """When each stretch of the last of some passes was left, and its hooks had ended, in seconds of
    this machine from its begin; the device's memory moves 100 GB a second.

    Args:
        units: emulated seconds and bytes of gradients by stretch.
        hooks: seconds that each one's hooks compute.
    """
    it = Pace(time_scale, None)
    lead = Lead(100e9)
    for _ in range(count):
        clock.block(1.0)
        began, found = clock.now, []
        one = lead.begin(it)
        for (seconds, nbytes), hook_s in zip(units, hooks, strict=True):
            one.next(seconds)
            it.finish()
            one.left(nbytes)
            left = clock.now - began
            clock.work(hook_s)
            found.append((left, clock.now - began))
        one.end()
    return found


def test_gradients_leave_when_the_device_would_have_packed_them(clock):
    clock.late_s = 0.0
    # 50 MB are read and written by the device in 1 ms: 10 ms of this machine.
    units = [(0.02, 0), (0.02, 50_000_000), (0.02, 50_000_000)]
    found = passes(clock, 10.0, units, [0.0, 0.06, 0.06])
    assert [left for left, _ in found] == pytest.approx([0.2, 0.35, 0.56])
    assert [ended for _, ended in found] == pytest.approx([0.2, 0.41, 0.62])


def test_several_stretches_end_earlier_where_one_is_too_short(clock):
    clock.late_s = 0.0
    units = [(0.02, 0), (0.02, 0), (0.001, 50_000_000)]
    found = passes(clock, 10.0, units, [0.0, 0.0, 0.06])
    assert found[1][0] == pytest.approx(0.4 - 0.04)
    assert found[2][1] == pytest.approx(0.41 + 0.01)


def test_hooks_too_fast_to_have_copied_cost_the_device_nothing(clock):
    clock.late_s = 0.0
    units = [(0.02, 500_000_000), (0.02, 0)]
    found = passes(clock, 10.0, units, [0.001, 0.0])
    assert found[0] == pytest.approx((0.199, 0.2))
    assert found[1][0] == pytest.approx(0.4)


def test_an_update_in_a_hook_counts_once(clock):
    clock.late_s = 0.0
    it, lead = Pace(10.0, None), Lead(100e9)
    for _ in range(2):
        clock.block(1.0)
        began = clock.now
        one = lead.begin(it)
        one.next(0.02)
        it.finish()
        one.left(0)
        cpu_work(clock, it, takes_s=0.1, device_s=0.003)
        ended = clock.now - began
        one.next(0.02)
        it.finish()
        one.left(0)
        one.end()
    assert ended == pytest.approx(0.2 + 0.03)
    assert clock.now - began == pytest.approx(0.2 + 0.03 + 0.2)


@pytest.mark.parametrize(
    ("make", "config", "tensors"),
    [
        (lambda p: paced(torch.optim.SGD, 1.0)(p, 0.1), {}, 3),
        (lambda p: paced(torch.optim.SGD, 1.0)(p, 0.1, momentum=0.9), {"momentum": 0.9}, 5),
        (lambda p: paced(torch.optim.AdamW, 1.0)(p, 0.1), {"name": "adamw"}, 7),
    ],
)
def test_an_update_touches_what_a_fused_kernel_would(clock, make, config, tensors):
    assert OptimizerConfig(**config).update_passes == tensors, "as the time scale is chosen by"
    params = [torch.nn.Parameter(torch.ones(10)) for _ in range(3)]
    params[0].grad = params[1].grad = torch.ones(10)
    optimizer = make(params)
    it, _ = started(clock)
    pace.set_pace(it)
    try:
        before = it.queued_s
        optimizer.step()
    finally:
        pace.set_pace(Pace(1.0, None))
    assert it.queued_s - before == pytest.approx(2 * 40 * tensors)
    assert params[2].eq(1).all() and not params[0].eq(1).any()


def test_paced_optimizers_are_taken_for_what_they_are():
    optimizer = paced(torch.optim.SGD, 1e9)([torch.nn.Parameter(torch.ones(2))], 0.1)
    assert element_wise(optimizer)
    assert PartialUpdate(optimizer, type(optimizer)).possible()


def test_steps_of_a_replayed_model_end_when_its_device_is_done(clock):
    it, began = started(clock, time_scale=10.0)
    pace.set_pace(it)
    try:
        watch = Stopwatch()
        watch.start()
        for update_s in (0.1, 0.5, 0.02):
            it.wait(0.1)
            cpu_work(clock, it, takes_s=update_s, device_s=0.002)
            watch.mark()
    finally:
        pace.set_pace(Pace(1.0, None))
    # 1 s of compute and 20 ms of update in each step, whatever this CPU takes.
    assert [mark - began for mark in watch.read()] == pytest.approx([1.02, 2.04, 3.06], abs=0.004)
