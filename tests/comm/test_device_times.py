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
        self.streams: dict[str, float] = {"main": 0.0, "aside": 0.0}
        self.current = "main"

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

    def record(self) -> None:
        self.ms = self._device.streams[self._device.current]

    def synchronize(self) -> None:
        assert self.ms is not None

    def elapsed_time(self, later: Event) -> float:
        return later.ms - self.ms


@pytest.fixture
def device(monkeypatch):
    gpu = Device()
    cuda = SimpleNamespace(Stream=lambda: "aside", Event=gpu.event, stream=gpu.stream)
    monkeypatch.setattr(handles, "torch", SimpleNamespace(cuda=cuda))
    return gpu


def transfer(device: Device, ends_ms: float) -> SimpleNamespace:
    """One that the present stream waits for until then."""

    def wait() -> None:
        device.streams[device.current] = max(device.streams[device.current], ends_ms)

    return SimpleNamespace(wait=wait)


def test_transfers_have_the_lengths_that_they_had_on_the_device(device):
    clock = DeviceClock(lambda: 100.0)
    device.streams["main"] = 5.0  # its input is there then
    first = clock.follow(transfer(device, 30.0), 0, enqueued_s=100.001)
    device.streams["main"] = 10.0
    second = clock.follow(transfer(device, 70.0), 0, enqueued_s=100.002)
    other = clock.follow(transfer(device, 80.0), 1, enqueued_s=100.003)
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


def test_nothing_starts_before_it_is_asked_for(device):
    clock = DeviceClock(lambda: 100.0)
    times = clock.follow(transfer(device, 1.0), 0, enqueued_s=100.5)()
    assert times.started_s == 100.5
