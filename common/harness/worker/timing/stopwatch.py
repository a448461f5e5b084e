"""Stopwatches for the ends of steps: by the host's clock, or by events of a GPU.

A GPU runs behind its host, and collectives of a step (DeAR's all-gathers) may still run in the next
step. To wait for the device in each step would prevent this overlap. So events in the GPU's stream
record the end of each step, and the host waits only before the first and after the last step.
"""

from __future__ import annotations

import time

import torch

from common.models.replay import pace

_MS_PER_S = 1e3


class Stopwatch:
    """Stopwatch by `time.perf_counter`, a clock that all processes of a machine share.

    For a replayed model, times are those of the emulated device (`Pace.clock`): a delay of the CPU
    at the end of a step is no delay of the device.
    """

    def start(self) -> None:
        """Discards all times, and the delay of the host behind a replayed device.

        Nothing may be in flight.
        """
        pace.current().settle()
        self._marks: list[float] = []

    def mark(self) -> None:
        """Adds the time at which all work issued so far ends; never waits."""
        self._marks.append(pace.current().clock())

    def read(self) -> list[float]:
        """Returns all times since `start`; waits for a GPU."""
        return self._marks


class DeviceStopwatch(Stopwatch):
    """Stopwatch by events in the current stream of a GPU; `start` waits for the GPU, too."""

    def start(self) -> None:
        self._events: list[torch.cuda.Event] = []
        torch.cuda.synchronize()
        self._first = self._event()
        torch.cuda.synchronize()
        self._began_s = time.perf_counter()

    def mark(self) -> None:
        self._events.append(self._event())

    def read(self) -> list[float]:
        torch.cuda.synchronize()
        spans_ms = (self._first.elapsed_time(event) for event in self._events)
        return [self._began_s + span_ms / _MS_PER_S for span_ms in spans_ms]

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def stopwatch(device: str) -> Stopwatch:
    """Returns a stopwatch for `cpu` or `cuda`."""
    return DeviceStopwatch() if device == "cuda" else Stopwatch()
