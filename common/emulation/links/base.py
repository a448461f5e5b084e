"""Interface of the links between virtual hosts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from common.emulation.hosts import network
from common.emulation.links.profile import NetworkProfile


class Links(ABC):
    """Links of one cluster, from `connect` to `close`. `kind` is the name in the key
    `cluster.links`. `pids` has the PID of a process on each host, as /proc shows it."""

    kind: str
    profile: NetworkProfile
    devices = (network.BRIDGE,)
    """Devices of `commands` that must be removed explicitly. Ends of hosts' links are not listed,
    nor devices that the kernel removes together with these."""

    def __init__(self) -> None:
        self.pids: list[int] = []
        self.time_scale = 1.0

    @abstractmethod
    def commands(self, holders: Sequence[int]) -> list[str]:
        """Returns the lines for `ip -batch` that create the links, run in the sandbox's network.
        `holders` has the PID of a process on each host, for system calls."""

    def connect(self, pids: Sequence[int]) -> None:
        """Stores a PID per host, as /proc shows it. The lines of `commands` must have run."""
        self.pids = list(pids)

    def set_profile(self, profile: NetworkProfile, time_scale: float) -> None:
        """Applies this profile to all links, slowed down by the factor `time_scale`."""
        self.profile, self.time_scale = profile, time_scale
        self.shape()

    @abstractmethod
    def shape(self) -> None:
        """Configures the links according to the profile and the time scale."""

    @abstractmethod
    def set_rate(self, host: int, gbps: float) -> None:
        """Sets the rate of one host's link, in both directions, in emulated Gb/s."""

    @abstractmethod
    def set_delay(self, host: int, latency_us: float) -> None:
        """Sets the latency between one host and all others, in emulated microseconds. Raises
        `RuntimeError` if `refusal` gives a reason."""

    def left_out(self) -> str | None:
        """Returns a sentence on the parts of the profile that are not applied, or None."""
        return None

    @staticmethod
    def refusal(profile: NetworkProfile, latency_us: float) -> str | None:
        """Returns why `set_delay` cannot set this latency under `profile`, or None if it can."""
        return None

    def burst_bytes(self) -> int:
        """Bytes of frames that a link passes at full machine speed after an idle period."""
        return 0

    @property
    def pid(self) -> int | None:
        """PID of the switch program, as /proc shows it; None if the kernel shapes the links."""
        return None

    def counters(self) -> dict[str, Any] | None:
        """Returns what the links have counted so far; None for links without counters.

        `packets`, `frames` and `bytes`: delivered. `lost`: frames lost as the profile demands.
        `overflows`: frames dropped because a queue was full. `missed`: packets that the switch did
        not read in time. `unsendable`: packets for a cut link. `astray`: packets with an unknown
        destination. `late_us`: delay between due time and delivery since the last call (median,
        p99, max; microseconds of this machine). `cpu_s`: CPU seconds. `priority`: real-time,
        raised or ordinary.
        """
        return None

    def cpu_s(self) -> float:
        """CPU seconds used so far by the switch program; 0 if the kernel shapes the links."""
        counted = self.counters()
        return 0.0 if counted is None else counted["cpu_s"]

    def broken(self) -> str | None:
        """Returns why the links no longer carry packets, or None if they work. `set_profile`
        repairs broken links."""
        return None

    def close(self) -> None:
        """Stops what `connect` and `shape` started; the links' devices remain."""
        self.pids = []

    def _on_all(self, tool: str, sandbox_lines: Sequence[str], host_lines: Sequence[str]) -> None:
        parts = [(sandbox_lines, None)] if sandbox_lines else []
        if host_lines:
            parts += [(host_lines, pid) for pid in self.pids]
        network.batches(tool, parts)
