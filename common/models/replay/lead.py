"""Lead of a replayed backward pass over its device, so that collectives start on time.

The replayed device is the GPU whose times the model waits for; the host is this machine's CPU.
Before the collective of a gradient starts, hooks copy the gradient into a bucket, or update the
parameter. The host needs much longer for this than the device would, so collectives would start
late. To prevent this, each stretch (part) of the pass ends earlier on the host than on the device:
earlier by the host's time in the hooks minus the device's. This time is taken from the last two
passes. The smaller value counts, because another program may have delayed one pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from common.models.replay.pace import Pace

# No host copies faster. Hooks that took less time did not copy the gradients.
_HOST_BYTES_PER_S = 40e9


@dataclass
class _Stretch:
    """Part of a backward pass, and the hooks after it; times are real seconds."""

    device_s: float
    """Device time of the compute and of the work in the hooks."""
    hooks_s: float = 0.0
    """Time for which the thread ran or waited for a core in hooks."""
    hooks_device_s: float = 0.0
    """Time that the device would need for the work in the hooks."""


class Lead:
    """Leads of one model's backward passes, learned from the previous ones.

    Args:
        memory_bytes_per_s: memory bandwidth of the device.
    """

    def __init__(self, memory_bytes_per_s: float) -> None:
        self._memory_bytes_per_s = memory_bytes_per_s
        self._excess_s: list[float] = []
        """Host time minus device time of each stretch's hooks, in the last pass."""
        self.leads_s: list[float] = []
        """Time by which the host ends each stretch earlier than the device."""

    def begin(self, pace: Pace) -> Pass:
        """Starts a backward pass."""
        return Pass(lead=self, pace=pace, leads_s=self.leads_s)

    def copy_s(self, nbytes: int, host_s: float) -> float:
        """Returns the seconds that the device needs to copy `nbytes` of gradients.

        Returns 0 if the hooks took too little time (`host_s`) to have copied the gradients.
        """
        return 2 * nbytes / self._memory_bytes_per_s * (host_s >= 2 * nbytes / _HOST_BYTES_PER_S)

    def learn(self, stretches: list[_Stretch]) -> None:
        """Computes the leads of the next pass from the stretches of the last pass."""
        before_s = self._excess_s
        self._excess_s = [stretch.hooks_s - stretch.hooks_device_s for stretch in stretches]
        excess_s = self._excess_s
        if len(before_s) == len(excess_s):
            excess_s = [min(pair) for pair in zip(before_s, excess_s, strict=True)]
        self.leads_s = leads_s(excess_s, [stretch.device_s for stretch in stretches])


def leads_s(excess_s: list[float], device_s: list[float]) -> list[float]:
    """Returns the smallest leads with which no stretch's hooks end later than on the device.

    Args:
        excess_s: host time minus device time of each stretch's hooks.
        device_s: device time of each stretch without its hooks; the host can catch up in it.
    """
    leads: list[float] = []
    following_s = 0.0
    for excess, device in zip(reversed(excess_s), reversed(device_s), strict=True):
        lead = max(0.0, excess + following_s)
        leads.append(lead)
        following_s = max(0.0, lead - device)
    return leads[::-1]


@dataclass
class Pass:
    """One backward pass."""

    lead: Lead
    pace: Pace
    leads_s: list[float]
    _stretches: list[_Stretch] = field(default_factory=list)
    _nbytes: int = 0
    """Bytes of gradients that no hook has copied yet."""
    _host_s: float = 0.0
    _queued_s: float = 0.0

    def next(self, seconds: float) -> None:
        """Starts a stretch of `seconds` emulated seconds; see `Pace.begin`."""
        index = len(self._stretches)
        lead_s = self.leads_s[index] if index < len(self.leads_s) else 0.0
        before_s = self.pace.queued_s
        self.pace.begin(seconds, lead_s)
        device_s = self.pace.queued_s - before_s
        self._end_hooks(before_s)
        self._stretches.append(_Stretch(device_s=device_s))

    def left(self, nbytes: int) -> None:
        """Ends a stretch that has made `nbytes` bytes of gradients; its hooks run next."""
        self._nbytes += nbytes
        self._host_s, self._queued_s = self.pace.host_s, self.pace.queued_s

    def end(self) -> None:
        """Ends the pass."""
        before_s = self.pace.queued_s
        self.pace.begin(0.0)
        self._end_hooks(before_s)
        self.pace.finish()
        self.lead.learn(self._stretches)

    def _end_hooks(self, queued_s: float) -> None:
        """Records the hooks that ran after the last stretch.

        Args:
            queued_s: seconds of work that the device had got in total when the hooks ended.
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
