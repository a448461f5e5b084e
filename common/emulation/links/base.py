"""What every kind of link between virtual hosts can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from common.emulation import network
from common.emulation.config import NetworkProfile


class Links(ABC):
    """The links of one cluster, from `connect` to `close`.

    Attributes:
        kind: as `cluster.links:` calls it.
        pids: a process on each host, as /proc shows it.
    """

    kind: str

    def __init__(self) -> None:
        self.pids: list[int] = []
        self.profile: NetworkProfile | None = None
        self.time_scale = 1.0

    @abstractmethod
    def commands(self, holders: Sequence[int]) -> list[str]:
        """Lines for ip that lay the cables, in the network of the sandbox.

        Args:
            holders: a process on each host, for system calls.
        """

    @property
    @abstractmethod
    def devices(self) -> tuple[str, ...]:
        """What `commands` makes beside the ends of the hosts' cables."""

    def connect(self, pids: Sequence[int]) -> None:
        """The cables are there; the hosts are those of these processes, as /proc shows them."""
        self.pids = list(pids)

    def set_profile(self, profile: NetworkProfile, time_scale: float) -> None:
        """Gives all links this profile, `time_scale` times slower."""
        self.profile, self.time_scale = profile, time_scale
        self.shape()

    @abstractmethod
    def shape(self) -> None:
        """Makes the links what the profile and the time scale say."""

    @abstractmethod
    def set_rate(self, host: int, gbps: float) -> None:
        """Changes both directions of one host's link, to so many emulated Gb/s."""

    @abstractmethod
    def set_delay(self, host: int, latency_us: float) -> None:
        """Changes the latency between one host and all others, to so many emulated microseconds.

        Raises:
            RuntimeError: `refusal` says why not.
        """

    @abstractmethod
    def left_out(self) -> str | None:
        """A sentence on what of the profile the links do not do, or None."""

    @staticmethod
    @abstractmethod
    def refusal(profile: NetworkProfile, latency_us: float) -> str | None:
        """A sentence on why `set_delay` cannot do this where the profile is in force, or None."""

    def burst_bytes(self) -> int:
        """Frames that a link passes at once after a rest, as fast as this machine can."""
        return 0

    @property
    def pid(self) -> int | None:
        """Of the program that is the links, if there is one."""
        return None

    def counters(self) -> dict[str, Any] | None:
        """What the links have done so far; None: nobody counts."""
        return None

    def broken(self) -> str | None:
        """A sentence on why nothing is carried any more, or None."""
        return None

    def close(self) -> None:
        """Ends what `connect` has begun; the cables stay."""
        self.pids = []

    def _on_all(self, tool: str, here: Sequence[str], every_host: Sequence[str]) -> None:
        jobs = [network.start(tool, here)] if here else []
        if every_host:
            jobs += [network.start(tool, every_host, pid) for pid in self.pids]
        for job in jobs:
            network.finish(job)
