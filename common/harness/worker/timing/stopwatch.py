"""When steps end: on the host's clock, or on a GPU without waiting for it.

A GPU is behind its host, and an algorithm's collectives may still run when the next step begins
(DeAR's all-gathers). To wait for the device in each step would forbid that. So an event in the
stream says when each step has ended, and the host waits only before and after all of them.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from common.models.replay import pace

_MS_PER_S = 1e3


class Stopwatch:
    """Moments in seconds of `time.perf_counter`, the same clock in all processes of a machine.

    Of a replayed model those of the device that it plays (`Pace.clock`): what the CPU is late by at
    the end of a step is not the device's, and is made up for in the next.
    """

    def start(self) -> None:
        """Forgets all moments, and what a replayed device and its host were apart; nothing is to be
        under way."""
        pace.current().settle()
        self._marks: list[float] = []

    def mark(self) -> None:
        """A moment, as the one at which the work issued so far ends; never waits."""
        self._marks.append(pace.current().clock())

    def read(self) -> list[float]:
        """All moments since `start`."""
        return self._marks


class DeviceStopwatch(Stopwatch):
    """The same on the current stream of a GPU.

    Args:
        cuda: what of `torch.cuda` is needed: `Event` and `synchronize`.
    """

    def __init__(self, cuda: Any = torch.cuda) -> None:
        self._cuda = cuda

    def start(self) -> None:
        """Waits for the device."""
        self._events: list[Any] = []
        self._cuda.synchronize()
        self._first = self._event()
        self._cuda.synchronize()
        self._began_s = time.perf_counter()

    def mark(self) -> None:
        self._events.append(self._event())

    def read(self) -> list[float]:
        """Waits for the device."""
        self._cuda.synchronize()
        spans_ms = (self._first.elapsed_time(event) for event in self._events)
        return [self._began_s + span_ms / _MS_PER_S for span_ms in spans_ms]

    def _event(self) -> Any:
        event = self._cuda.Event(enable_timing=True)
        event.record()
        return event


def stopwatch(device: str) -> Stopwatch:
    """For `cpu` or `cuda`."""
    return DeviceStopwatch() if device == "cuda" else Stopwatch()
