"""Pace: waits that add up whatever the machine does, and what it makes up for."""

from __future__ import annotations

import math
import struct
import time

import pytest
import torch

from common.harness.settings import OptimizerConfig
from common.harness.worker.timing.stopwatch import Stopwatch
from common.models.replay import pace
from common.models.replay.lead import Lead, leads_s
from common.models.replay.pace import Pace, paced
from dear.buckets.updates import PartialUpdate, element_wise


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
    built = FakeTime(late_s=0.003)
    monkeypatch.setattr(pace, "time", built)
    monkeypatch.setattr(pace, "thread_host_s", lambda: built.host_s)
    return built


@pytest.fixture
def exact(clock):
    """The clock, with sleeps that end in time."""
    clock.late_s = 0.0
    return clock


@pytest.fixture
def wired(exact):
    """A pace, its wire, and the time at which it began."""
    it, began = started(exact)
    return it, Wire(exact, it), began


def started(clock, time_scale=1.0, slowdown=None):
    built = Pace(time_scale, slowdown)
    built.wait(0.0)
    return built, clock.now


def test_late_wake_ups_and_overhead_do_not_add_up(clock):
    it, began = started(clock)
    for _ in range(100):
        it.wait(0.01)
        clock.work(0.002)
    assert clock.now - began == pytest.approx(1.0, abs=0.006)
    assert it.queued_s == pytest.approx(1.0)


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
        clock.block(1.0)
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
    with pytest.raises(ValueError, match="pace-h0: the factor must be positive"):
        Pace(1.0, path).wait(0.001)


def test_real_computing_is_made_up_for():
    for _ in range(20):  # an attempt may be spoilt by a page that must be read from disk
        it = Pace(1.0, None)
        it.wait(0.0)
        began = time.perf_counter()
        it.wait(0.001)
        while time.perf_counter() - began < 0.05:
            pass
        it.wait(0.06)
        if time.perf_counter() - began < 0.1:  # 0.061, not 0.11
            return
    pytest.fail("a wait after some computing was never shortened by it")


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


def test_what_is_copied_after_a_wait_is_made_up_for(clock):
    it, _ = started(clock)
    it.awaited_s = lambda: -math.inf  # a library of its own communicates, and tells nothing
    it.wait(0.1)
    clock.block(0.5)
    until = clock.now
    it.held_up_s = lambda: until
    clock.work(0.1)
    began = clock.now
    it.wait(0.2)
    assert clock.now - began == pytest.approx(0.203 - 0.1)
    assert it.idle_s == pytest.approx(0.5 + 0.003)


@pytest.mark.parametrize("tells", [True, False])
def test_only_where_waits_are_known_another_block_costs_no_more_than_its_length(clock, tells):
    it, began = started(clock)
    if tells:
        it.awaited_s = lambda: -math.inf
    cpu_work(clock, it, takes_s=0.2, device_s=0.002)
    clock.block(0.01)  # a page is read, another virtual machine has the core
    if tells:
        assert it.clock() - began == pytest.approx(0.002 + 0.01)
        assert it.idle_s == 0.0
    else:  # it may have been a wait for communication
        assert it.clock() - began == pytest.approx(0.2 + 0.01)
        assert it.idle_s == pytest.approx(0.2 + 0.01 - 0.002)


def test_a_block_of_a_host_that_is_ahead_delays_no_device(exact):
    it, began = started(exact)
    it.awaited_s = lambda: -math.inf
    it.begin(0.2, lead_s=0.05)
    it.finish()
    exact.block(0.02)
    assert it.clock() - began == pytest.approx(0.2)
    exact.block(0.05)
    assert it.clock() - began == pytest.approx(0.2 + 0.02)


def test_host_and_device_leave_a_barrier_together(clock):
    it, _ = started(clock)
    it.awaited_s = lambda: -math.inf
    cpu_work(clock, it, takes_s=0.5, device_s=0.002)  # as of a first step that lays out buckets
    assert it.late_s() > 0.4
    it.settle()
    assert it.late_s() == 0.0
    began = clock.now
    clock.block(0.01)
    assert it.clock() - began == pytest.approx(0.01)


def test_what_was_late_before_a_barrier_does_not_count_behind_it(clock):
    it, _ = started(clock)
    wire = Wire(clock, it)
    cpu_work(clock, it, takes_s=0.2, device_s=0.002)
    wire.wait(wire.launch(0.1))
    assert it.late_s() == pytest.approx(0.198)
    it.settle()
    clock.block(0.1)
    it.awaited_s = lambda: clock.now  # of an operation that began unnoticed
    assert it.late_s() == 0.0


class Wire:
    """Transfers one after the other, as the comm core tells of them."""

    def __init__(self, clock: FakeTime, it: Pace) -> None:
        self._clock = clock
        self._ends = [-math.inf]
        self._lulls_s: list[tuple[float, float]] = []
        self._awaited_s = -math.inf
        it.awaited_s = lambda: self._awaited_s
        it.lulls_s = lambda after: [lull for lull in self._lulls_s if lull[1] > after]

    def launch(self, seconds: float) -> int:
        if self._clock.now > self._ends[-1]:
            self._lulls_s.append((self._ends[-1], self._clock.now))
        self._ends.append(max(self._clock.now, self._ends[-1]) + seconds)
        return len(self._ends) - 1

    def wait(self, number: int) -> None:
        self._clock.block(max(0.0, self._ends[number] - self._clock.now))
        self._awaited_s = max(self._awaited_s, self._ends[number])


def decoupled_step(
    clock, update_s, gather_s=0.05, cycle_s=0.0, layer_s=0.05
) -> tuple[float, float]:
    """The device's time for a step in which all second halves follow the update, and its idle part.

    The host makes up for what it is late.
    """
    it, _ = started(clock)
    wire = Wire(clock, it)
    gathers, ends, idle = [], [], []
    for _ in range(20):
        for number in gathers or [0]:
            wire.wait(number)
            it.wait(layer_s)
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
        idle.append(it.idle_s)
    assert clock.now - it.clock() < 2 * update_s + 0.02  # it does make up for it
    return (ends[-1] - ends[9]) / 10, (idle[-1] - idle[9]) / 10


@pytest.mark.parametrize(
    ("gather_s", "layer_s", "least_s"),
    [
        (0.01, 0.05, 0.2 + 0.01 + 0.1 + 0.001),
        (0.05, 0.05, 0.2 + 2 * 0.05 + 0.05 + 0.001),
        (0.12, 0.05, 0.2 + 2 * 0.12 + 0.05 + 0.001),
        (0.01, 0.001, 0.2 + 2 * 0.01 + 0.002),  # each waits for its turn on the wire
    ],
)
def test_an_update_that_delays_communication_delays_no_device(exact, gather_s, layer_s, least_s):
    found_s, idle_s = decoupled_step(exact, 0.0, gather_s, layer_s=layer_s)
    near = 0.001 if layer_s == 0.001 else 0.002
    assert found_s == pytest.approx(least_s, abs=near) and idle_s > gather_s - 0.001
    for update_s in (0.002, 0.02, 0.04):
        after_s, idle_after_s = decoupled_step(exact, update_s, gather_s, layer_s=layer_s)
        assert after_s == pytest.approx(found_s, abs=near + 0.001)
        assert idle_after_s == pytest.approx(idle_s, abs=0.004)


def test_what_a_hook_computes_before_it_communicates_delays_no_device(exact, wired):
    it, wire, began = wired
    it.wait(0.1)
    exact.work(0.02)
    wire.wait(wire.launch(0.3))
    assert it.clock() - began == pytest.approx(0.1 + 0.3)


def test_what_follows_late_communication_at_once_is_as_late(exact, wired):
    it, wire, began = wired
    cpu_work(exact, it, takes_s=0.2, device_s=0.002)
    first = wire.launch(0.5)
    it.wait(0.4)  # the host catches up
    wire.wait(first)
    exact.work(0.001)
    wire.wait(wire.launch(0.1))
    assert it.clock() - began == pytest.approx(0.002 + 0.5 + 0.1)


def test_what_was_launched_ahead_of_the_device_ends_later_for_it_and_so_does_the_next(exact, wired):
    it, wire, began = wired
    it.begin(0.2, lead_s=0.05)
    it.finish()
    exact.work(0.01)  # less than the lead was for
    wire.wait(wire.launch(0.3))
    assert it.clock() - began == pytest.approx(0.2 + 0.3)
    exact.work(0.002)
    wire.wait(wire.launch(0.1))
    # The first begins 0.04 s ahead of the device; so does the second, but for what was computed.
    assert it.clock() - began == pytest.approx(0.2 + 0.3 + 0.1, abs=0.0021)
    assert it.idle_s == pytest.approx(0.4, abs=0.0021)


def test_what_another_thread_sends_while_the_device_computes_is_not_early(wired):
    it, wire, began = wired
    it.begin(0.2)
    sent = wire.launch(0.3)
    it.finish()
    wire.wait(sent)
    assert it.clock() - began == pytest.approx(0.3)


def test_who_launches_late_on_purpose_is_late(exact):
    at_once_s, _ = decoupled_step(exact, 0.01)
    later_s, _ = decoupled_step(exact, 0.01, cycle_s=0.02)
    assert later_s - at_once_s == pytest.approx(0.02, abs=0.002)


def test_what_waited_for_its_turn_on_the_wire_was_not_late(clock):
    it, _ = started(clock)
    wire = Wire(clock, it)
    wire.launch(0.5)
    cpu_work(clock, it, takes_s=0.2, device_s=0.002)
    behind = wire.launch(0.5)
    wire.wait(behind)
    assert it.clock() == pytest.approx(clock.now)


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


def test_the_clock_never_goes_back_and_where_nothing_is_replayed_is_time_itself(clock):
    it = Pace(1.0, None)
    for _ in range(2):
        assert it.clock() == clock.now
        clock.work(1.0)
    it, _ = started(clock)
    it.wait(0.1)
    clock.block(0.3)
    clock.work(0.0005)
    first = it.clock()
    came = clock.now - 0.1  # it is told late
    it.held_up_s = lambda: came
    clock.work(0.1)
    assert it.clock() >= first
    cpu_work(clock, it, takes_s=0.1, device_s=0.001)
    assert it.clock() == pytest.approx(first + 0.001)


def passes(clock, time_scale, units, hooks_of_passes):
    """Returns the time at which each stretch of the last pass was left and its hooks had ended.

    Times are seconds of this machine since the pass began. The device's memory moves 100 GB/s.

    Args:
        units: emulated seconds and bytes of gradients by stretch.
        hooks_of_passes: by pass, seconds that each stretch's hooks compute; of one: three times.
    """
    it = Pace(time_scale, None)
    lead = Lead(100e9)
    for hooks in hooks_of_passes * (3 if len(hooks_of_passes) == 1 else 1):
        clock.block(1.0)
        began, result = clock.now, []
        item = lead.begin(it)
        for (seconds, nbytes), hook_s in zip(units, hooks, strict=True):
            item.next(seconds)
            it.finish()
            item.left(nbytes)
            left = clock.now - began
            clock.work(hook_s)
            result.append((left, clock.now - began))
        item.end()
    return result


# 50 MB are read and written by the device in 1 ms: 10 ms of this machine.
PACKED = [(0.02, 0), (0.02, 50_000_000), (0.02, 50_000_000)]
HOOKS = [0.0, 0.06, 0.06]
USUAL = [(0.2, 0.2), (0.35, 0.41), (0.56, 0.62)]


@pytest.mark.parametrize(
    ("units", "hooks", "wanted"),
    [
        (PACKED, [HOOKS], USUAL),
        # A pass that was held up teaches nothing.
        (PACKED, [HOOKS, HOOKS, [0.15, 0.06, 0.2], HOOKS], USUAL),
        # Several stretches end earlier where one is too short.
        (
            [(0.02, 0), (0.02, 0), (0.001, 50_000_000)],
            [[0.0, 0.0, 0.06]],
            [None, (0.4 - 0.04, None), (None, 0.41 + 0.01)],
        ),
        # Hooks too fast to have copied cost the device nothing.
        ([(0.02, 500_000_000), (0.02, 0)], [[0.001, 0.0]], [(0.199, 0.2), (0.4, None)]),
    ],
)
def test_gradients_leave_when_the_device_would_have_packed_them(exact, units, hooks, wanted):
    for result, times in zip(passes(exact, 10.0, units, hooks), wanted, strict=True):
        for time_s, wanted_s in zip(result, times or (), strict=bool(times)):
            assert wanted_s is None or time_s == pytest.approx(wanted_s)


def test_what_one_stretch_cannot_make_up_for_the_ones_before_it_share():
    # Hooks take 3 s more than the device's: a second earlier for each stretch of a second.
    assert leads_s([0.0, 0.0, 3.0], [1.0, 1.0, 1.0]) == [1.0, 2.0, 3.0]
    assert leads_s([0.5, -0.75, 1.0], [1.0, 1.0, 0.5]) == [0.5, 0.0, 1.0]
    assert leads_s([0.0, -0.25, 1.0], [1.0, 0.125, 0.5]) == [0.125, 0.25, 1.0]


def test_bytes_are_copied_no_faster_than_any_host_does():
    # 40 MB read and written: at 40 GB/s that is a millisecond, and 0.4 ms on a device of 100 GB/s.
    lead = Lead(100e9)
    assert lead.copy_s(20_000_000, 1.001e-3) == pytest.approx(0.4e-3)
    assert lead.copy_s(20_000_000, 0.999e-3) == 0


def test_an_update_in_a_hook_counts_once(exact):
    it, lead = Pace(10.0, None), Lead(100e9)
    for _ in range(2):
        exact.block(1.0)
        began = exact.now
        item = lead.begin(it)
        item.next(0.02)
        it.finish()
        item.left(0)
        cpu_work(exact, it, takes_s=0.1, device_s=0.003)
        ended = exact.now - began
        item.next(0.02)
        it.finish()
        item.left(0)
        item.end()
    assert ended == pytest.approx(0.2 + 0.03)
    assert exact.now - began == pytest.approx(0.2 + 0.03 + 0.2)


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
