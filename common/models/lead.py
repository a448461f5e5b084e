"""By how much a replayed backward pass runs ahead of its device, so that gradients leave in time.

What hooks do with a gradient before its collective starts, as copying it into a bucket or updating
its parameters, takes this machine's CPU much longer than a device. The next layers make up for it,
but the collective would start late. So each stretch of the pass ends earlier on the host than on
the device, by what the hooks behind it took in the last two passes beyond what the device would
need: the lesser of both, as something else may have held up one of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from common.models.pace import Pace

# No host copies faster: what hooks did in less time than this says was not to copy the gradients.
_HOST_BYTES_PER_S = 40e9


@dataclass
class _Stretch:
    """A part of a backward pass, and the hooks behind it; seconds of this machine."""

    device_s: float
    """What the device computes, copies and updates, hooks included."""
    hooks_s: float = 0.0
    """What the thread ran, or waited for a core, in hooks."""
    hooks_device_s: float = 0.0
    """What the device would need for that."""


class Lead:
    """What the passes of one model have taught.

    Args:
        memory_bytes_per_s: of the device.
    """

    def __init__(self, memory_bytes_per_s: float) -> None:
        self._memory_bytes_per_s = memory_bytes_per_s
        self._excess_s: list[float] = []
        """Of the last pass, by stretch."""
        self.leads_s: list[float] = []
        """By stretch, by how much earlier than the device the host ends it."""

    def begin(self, pace: Pace) -> Pass:
        """A backward pass begins."""
        return Pass(lead=self, pace=pace, leads_s=self.leads_s)

    def copy_s(self, nbytes: int, host_s: float) -> float:
        """Seconds that the device needs to copy `nbytes` of gradients; 0 if hooks that took
        `host_s` cannot have copied so many."""
        return 2 * nbytes / self._memory_bytes_per_s * (host_s >= 2 * nbytes / _HOST_BYTES_PER_S)

    def learn(self, stretches: list[_Stretch]) -> None:
        """Plans the next pass after one that had these stretches."""
        before_s = self._excess_s
        self._excess_s = [stretch.hooks_s - stretch.hooks_device_s for stretch in stretches]
        excess_s = self._excess_s
        if len(before_s) == len(excess_s):
            excess_s = [min(pair) for pair in zip(before_s, excess_s, strict=True)]
        self.leads_s = leads_s(excess_s, [stretch.device_s for stretch in stretches])


def leads_s(excess_s: list[float], device_s: list[float]) -> list[float]:
    """The least by which each stretch must end early, so that no hook ends later than planned.

    Args:
        excess_s: by which the hooks behind each stretch take the host longer than the device.
        device_s: of each stretch, without its hooks: in so much the host can catch up.
    """
    found: list[float] = []
    following_s = 0.0
    for excess, device in zip(reversed(excess_s), reversed(device_s), strict=True):
        lead = max(0.0, excess + following_s)
        found.append(lead)
        following_s = max(0.0, lead - device)
    return found[::-1]


@dataclass
class Pass:
    """One backward pass."""

    lead: Lead
    pace: Pace
    leads_s: list[float]
    _stretches: list[_Stretch] = field(default_factory=list)
    _nbytes: int = 0
    """Of gradients that no hook may have copied yet."""
    _host_s: float = 0.0
    _queued_s: float = 0.0

    def next(self, seconds: float) -> None:
        """A stretch begins that takes so many emulated seconds, as `Pace.begin`."""
        place = len(self._stretches)
        lead_s = self.leads_s[place] if place < len(self.leads_s) else 0.0
        before_s = self.pace.queued_s
        self.pace.begin(seconds, lead_s)
        device_s = self.pace.queued_s - before_s
        self._hooks_end(before_s)
        self._stretches.append(_Stretch(device_s=device_s))

    def left(self, nbytes: int) -> None:
        """The stretch has ended with so many bytes of gradients: hooks run."""
        self._nbytes += nbytes
        self._host_s, self._queued_s = self.pace.host_s, self.pace.queued_s

    def end(self) -> None:
        """The pass has ended."""
        before_s = self.pace.queued_s
        self.pace.begin(0.0)
        self._hooks_end(before_s)
        self.pace.finish()
        self.lead.learn(self._stretches)

    def _hooks_end(self, queued_s: float) -> None:
        """
        Args:
            queued_s: what the device had been given to do when they did.
        """
        if not self._stretches:
            return
        hooks_s = self.pace.host_s - self._host_s
        given_s = queued_s - self._queued_s
        before_s = self.pace.queued_s
        copy_s = self.lead.copy_s(self._nbytes, hooks_s)
        if copy_s:
            self._nbytes = 0
            self.pace.hold(copy_s)
        stretch = self._stretches[-1]
        stretch.hooks_s = hooks_s
        stretch.hooks_device_s = given_s + self.pace.queued_s - before_s
