"""Stopwatches for the ends of steps: by the host's clock, or on a GPU without waiting for it.

A GPU runs behind its host, and collectives may still run when the next step begins (DeAR's
all-gathers). A wait for the device in each step would forbid that. So events in the stream record
the end of each step, and the host waits only before and after all of them.
"""

from __future__ import annotations

import time

import torch

from common.models.replay import pace

_MS_PER_S = 1e3


class Stopwatch:
    """Moments in seconds of `time.perf_counter`, which all processes of a machine share.

    For a replayed model they are moments of its device (`Pace.clock`): a delay of the CPU at the
    end of a step is not the device's, and the next step makes up for it.
    """

    def start(self) -> None:
        """Discards all moments, and the distance between a replayed device and its host; nothing
        may be under way."""
        pace.current().settle()
        self._marks: list[float] = []

    def mark(self) -> None:
        """Adds the moment at which the work issued so far ends; never waits."""
        self._marks.append(pace.current().clock())

    def read(self) -> list[float]:
        """Returns all moments since `start`; waits for a GPU."""
        return self._marks


class DeviceStopwatch(Stopwatch):
    """Stopwatch of the current stream of a GPU, for which `start` waits, too."""

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
