"""Parts that a collective's cost is composed of: wires, the shape of a cluster, and timings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from dear.cost.fit import Cost
from dear.errors import UserError, unknown
from dear.options import at_least, positive

Kind = Literal["inside", "between", "slow", "sites"]
"""Place of a wire: inside a host, from a host to the switch, from the one host whose link a fault
changes, or between two sites."""
Medium = Literal["tcp", "rdma", "nvlink", "pcie", "memory"]

COSTS, COMPUTE = 0.1, 0.02
"""Assumed relative errors of composed costs and of compute, for the range of a prediction."""
CostsOf = Callable[[int, int], Mapping[str, Cost]]
"""Function from the hosts of a group, and its ranks per host, to the cost of each operation."""


@dataclass(frozen=True, kw_only=True)
class Wire:
    """Link of one kind, the same in both directions.

    Inside a host, each rank has its own wire. Between hosts, the ranks of a host share one. Between
    two sites, the hosts of a site share one.
    """

    kind: Kind
    latency_s: float
    """Seconds from the end of sending a message to its arrival; other messages overlap them."""
    bytes_per_s: float
    """Rate of the payload, per direction."""
    overhead_s: float = 0.0
    """Seconds per message, at both ends together, in which the wire carries nothing else."""
    medium: Medium = "tcp"

    def __post_init__(self) -> None:
        at_least(f"wire {self.kind}: latency_s", self.latency_s, 0)
        at_least(f"wire {self.kind}: overhead_s", self.overhead_s, 0)
        if not self.bytes_per_s > 0:
            raise UserError(
                f"wire {self.kind}: bytes_per_s must be above 0, got {self.bytes_per_s}"
            )


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Number of ranks, and their distribution; rank r is on host r // ranks_per_host."""

    hosts: int
    ranks_per_host: int = 1
    sites: int = 1
    """Places that the hosts are divided among evenly, in order."""

    def __post_init__(self) -> None:
        at_least("hosts", self.hosts, 1)
        at_least("ranks_per_host", self.ranks_per_host, 1)
        at_least("sites", self.sites, 1, self.hosts)

    @property
    def ranks(self) -> int:
        return self.hosts * self.ranks_per_host


@dataclass(frozen=True, kw_only=True)
class Platform:
    """Wires of a cluster by kind, and its processors."""

    wires: Mapping[Kind, Wire]
    core_bytes_per_s: float = math.inf
    """Rate at which a core receives a message and adds it to another; engines on GPUs ignore it."""

    @property
    def usual(self) -> Platform:
        """The platform without a slow host."""
        wires = {kind: wire for kind, wire in self.wires.items() if kind != "slow"}
        return replace(self, wires=wires)

    def __post_init__(self) -> None:
        if self.core_bytes_per_s != math.inf:
            positive("core_bytes_per_s", self.core_bytes_per_s)

    def wire(self, kind: Kind) -> Wire:
        """Returns the wire of a kind; raises `UserError` if the platform has none."""
        if kind not in self.wires:
            raise unknown("kind of wire", kind, self.wires)
        return self.wires[kind]


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of one collective, by cause; the parts come one after another."""

    latency_s: float = 0.0
    """Wires are idle, the data is on its way."""
    link_s: float = 0.0
    """The slowest wire is occupied, by bytes or by the overhead of messages."""
    core_s: float = 0.0
    """A core works on the last bytes, and all wires are idle."""

    def __add__(self, other: Timing) -> Timing:
        return Timing(
            latency_s=self.latency_s + other.latency_s,
            link_s=self.link_s + other.link_s,
            core_s=self.core_s + other.core_s,
        )

    @property
    def alone_s(self) -> float:
        return self.latency_s + self.link_s + self.core_s


@dataclass(frozen=True, kw_only=True)
class Composed:
    """Cost of a collective in seconds by bytes of the full buffer, for the event model's link."""

    timing: Callable[[float], Timing]
    """Function from bytes above 0 to the timing of a single collective."""
    in_flight: float
    """Number of queued collectives of a channel that the engine advances at once."""

    def __call__(self, nbytes: float) -> float:
        return self.timing(nbytes).alone_s if nbytes else 0.0

    def occupancy_s(self, nbytes: float) -> float:
        """Returns the seconds for which a message delays the next message of its channel.

        An engine that runs the messages of a channel one by one overlaps nothing but the work of
        the cores; one that advances all at once overlaps everything but the link.
        """
        if not nbytes:
            return 0.0
        timing = self.timing(nbytes)
        return max(timing.link_s, (timing.latency_s + timing.link_s) / self.in_flight)
