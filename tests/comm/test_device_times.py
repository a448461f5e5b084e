"""Times of transfers on a GPU come from its events: with events whose device time the test sets."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest

from dear.comm import handles
from dear.comm.handles import DeviceClock


class Device:
    """A GPU of which the test says when streams get where."""

    def __init__(self) -> None:
        self.streams: dict[str, float] = {"main": 0.0}
        self.current = "main"

    def new_stream(self, device: str) -> str:
        name = f"{device} aside {len(self.streams)}"
        self.streams[name] = 0.0
        return name

    def event(self, enable_timing: bool) -> Event:
        assert enable_timing
        return Event(self)

    @contextlib.contextmanager
    def stream(self, stream: str):
        before, self.current = self.current, stream
        yield
        self.current = before


class Event:
    def __init__(self, device: Device) -> None:
        self._device = device
        self.ms: float | None = None

    def record(self, stream: str) -> None:
        self.ms = self._device.streams[stream]

    def synchronize(self) -> None:
        assert self.ms is not None

    def elapsed_time(self, later: Event) -> float:
        return later.ms - self.ms


@pytest.fixture
def device(monkeypatch):
    gpu = Device()
    names = {"Event": gpu.event, "Stream": gpu.new_stream, "stream": gpu.stream}
    cuda = SimpleNamespace(**names, current_stream=lambda device: gpu.current)
    monkeypatch.setattr(handles, "torch", SimpleNamespace(cuda=cuda))
    return gpu


@pytest.fixture
def clock(device):
    return DeviceClock(lambda: 100.0, "gpu")


def transfer(device: Device, ends_ms: float) -> SimpleNamespace:
    """One that the present stream waits for until then."""

    def wait() -> None:
        device.streams[device.current] = max(device.streams[device.current], ends_ms)

    return SimpleNamespace(wait=wait)


class Memory:
    """A tensor whose memory the allocator gives away once these streams have passed its end."""

    def __init__(self) -> None:
        self.used_on: list[str] = []

    def record_stream(self, stream: str) -> None:
        self.used_on.append(stream)


def test_transfers_have_the_lengths_that_they_had_on_the_device(device, clock):
    device.streams["main"] = 5.0  # its input is there then
    first = clock.follow(transfer(device, 30.0), 0, 100.001, [])
    device.streams["main"] = 10.0
    second = clock.follow(transfer(device, 70.0), 0, 100.002, [])
    other = clock.follow(transfer(device, 80.0), 1, 100.003, [])
    spans = [
        (times.enqueued_s, times.started_s, times.finished_s)
        for times in (first(), second(), other())
    ]
    assert spans == [
        pytest.approx((100.001, 100.005, 100.030)),
        pytest.approx((100.002, 100.030, 100.070)),  # behind the first
        pytest.approx((100.003, 100.010, 100.080)),  # on a channel of its own
    ]
    assert device.streams["main"] == 10.0, "the stream that computes does not wait"
    assert clock.follow(transfer(device, 1.0), 2, 100.5, [])().started_s == 100.5


def test_a_short_transfer_behind_a_long_one_of_another_queue_ends_when_it_ends(device, clock):
    long = clock.follow(transfer(device, 90.0), "first group", 100.0, [])
    short = clock.follow(transfer(device, 10.0), "second group", 100.0, [])
    assert (long().finished_s, short().finished_s) == pytest.approx((100.090, 100.010))


def test_memory_of_a_transfer_is_not_given_away_before_its_end(device, clock):
    tensors = [Memory(), Memory()]
    followed = transfer(device, 30.0)
    kept, plain = [], followed.wait

    def wait() -> None:  # it lets go of the tensors, as NCCL's works do
        kept.extend(tuple(tensor.used_on) for tensor in tensors)
        plain()

    followed.wait = wait
    clock.follow(followed, 0, 100.0, tensors)
    assert kept == [("gpu aside 1",)] * 2 and device.streams["gpu aside 1"] == 30.0


def test_a_mark_has_the_time_of_the_device(device, clock):
    device.streams["main"] = 40.0
    assert clock.mark()() == pytest.approx(100.040)
