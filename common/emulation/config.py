"""Keys of an experiment file for an emulated cluster and its faults."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from typing import Literal

from common.emulation.links.profile import network_profile
from common.paths import COMMAND
from dear.errors import UserError, unknown
from dear.options import at_least, positive

# Two bytes of the address number the hosts; no machine has memory for this many.
MAX_HOSTS = 4096
MOST_TIME_SCALE = 10_000
"""Largest accepted time scale; with a larger one, the shortest sweep would last for days."""


EMULATED_ONLY = ("time_scale", "min_time_scale", "max_time_scale", "links", "congestion")
"""Keys of `ClusterConfig` that have no meaning for a predicted cluster."""


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Key `cluster:` of an experiment: virtual hosts on this machine, connected by a switch; or a
    cluster of any size whose steps are predicted."""

    kind: Literal["emulated", "predicted"] = "emulated"
    """`predicted`: the steps are computed on a virtual clock, and nothing is trained."""
    hosts: int = 4
    """Number of virtual hosts."""
    ranks_per_host: int = 1
    """Ranks on each host."""
    network: str = "10gbe"
    """Name of a profile in configs/networks, or a bandwidth such as 100mbit or 2.5gbit."""
    engine: Literal["comm_core", "gloo", "mpi", "nccl"] | None = None
    """Library whose collectives are predicted; null: nccl. Only for predicted clusters."""
    inside: str | None = None
    """Links between the GPUs of a host, with nccl: a profile in configs/networks (pcie4, nvlink3,
    ...). null: pcie4 with nccl, TCP with gloo, else shared memory. Only for predicted clusters."""
    time_scale: float | None = None
    """Real seconds per emulated second; null: chosen to suit this machine."""
    min_time_scale: float = 1.0
    """Smallest time scale that is chosen automatically for replayed models; models that compute
    run at 1. A larger one has a smaller systematic error. Later runs of the same sweep keep their
    scale, so a larger one also leaves room for heavier algorithms that you add later."""
    max_time_scale: float = 40.0
    """Largest time scale that is chosen automatically. A trial that needs a larger one is
    `unsupported`: too heavy for this machine. If only a later repeat shows this, its result is kept
    and may be flagged."""
    links: Literal["auto", "switch", "tc"] = "auto"
    """Implementation of the links' rate, delay, jitter and loss: the kernel (`tc`: tbf and netem)
    or our own switch program. auto: `tc` if there is netem and no network has sites or jitter."""
    congestion: str = "reno"
    """TCP congestion control of all connections, such as cubic or bbr. Above time scale 1, use
    reno: its window grows once per round trip, and round trips are slowed like everything else.
    CUBIC's window grows with real time: too fast in emulated time."""

    def __post_init__(self) -> None:
        at_least("cluster.hosts", self.hosts, 1)
        if self.kind == "emulated" and self.hosts > MAX_HOSTS:
            raise UserError(
                f"cluster.hosts must be at most {MAX_HOSTS}, got {self.hosts}; "
                f"`{COMMAND} predict` takes more"
            )
        at_least("cluster.ranks_per_host", self.ranks_per_host, 1)
        for key in ("engine", "inside"):
            if self.kind == "emulated" and getattr(self, key) is not None:
                raise UserError(f"cluster.{key}: needs cluster.kind=predicted")
        for field in fields(self):
            is_set = getattr(self, field.name) != field.default
            if self.kind == "predicted" and field.name in EMULATED_ONLY and is_set:
                raise UserError(f"cluster.{field.name}: needs cluster.kind=emulated")
        if self.time_scale is not None:
            positive("cluster.time_scale", self.time_scale)
        at_least("cluster.time_scale", self.time_scale, 0, MOST_TIME_SCALE)
        at_least("cluster.min_time_scale", self.min_time_scale, 1)
        most = self.max_time_scale
        at_least("cluster.max_time_scale", most, self.min_time_scale, MOST_TIME_SCALE)

    def links_digest(self, network: str) -> str:
        """Hash of everything that decides how the links of this network behave."""
        text = f"{network_profile(network).digest} {self.links} {self.congestion}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]


_NEEDS = {
    "link_down": {"host"},
    "link_rate": {"host", "rate"},
    "link_delay": {"host", "delay_us"},
    "slow_host": {"host", "factor"},
    "kill_rank": {"rank"},
}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Entry of the key `faults:`: a fault that is injected into the cluster during a trial."""

    kind: Literal["link_down", "link_rate", "link_delay", "slow_host", "kill_rank"]
    """Kind of disturbance."""
    host: int | None = None
    """Index of the host, for all kinds but kill_rank."""
    rank: int | None = None
    """Index of the rank, for kill_rank."""
    at_s: float = 0.0
    """Start, in emulated seconds after the measurement has begun."""
    for_s: float | None = None
    """Duration in emulated seconds; null: until the trial ends."""
    rate: str | None = None
    """New rate for link_rate: a bandwidth such as 1gbit, or a profile's name."""
    delay_us: float | None = None
    """New one-way latency for link_delay, between this host and all others."""
    factor: float | None = None
    """Factor for slow_host by which compute takes longer."""

    def __post_init__(self) -> None:
        if self.kind not in _NEEDS:
            raise unknown("kind of fault", self.kind, _NEEDS)
        needs = _NEEDS[self.kind]
        allowed = {"kind", "at_s", *needs, *({"for_s"} if self.kind != "kill_rank" else ())}
        for field in fields(self):
            is_set = getattr(self, field.name) is not None
            if field.name in needs and not is_set:
                raise UserError(f"fault {self.kind}: needs `{field.name}:`")
            if is_set and field.name not in allowed:
                raise UserError(f"fault {self.kind}: does not use `{field.name}:`")
        for key in ("host", "rank", "at_s", "delay_us"):
            if getattr(self, key) is not None:
                at_least(f"fault {self.kind}: {key}", getattr(self, key), 0)
        for key in ("for_s", "factor"):
            if getattr(self, key) is not None:
                positive(f"fault {self.kind}: {key}", getattr(self, key))
        if self.rate is not None:
            network_profile(self.rate)

    @property
    def title(self) -> str:
        """Short description for tables, such as `link_down h1 at 2 s for 1 s`."""
        target = f"rank {self.rank}" if self.host is None else f"h{self.host}"
        texts = {"rate": "{}", "factor": "x{:g}", "delay_us": "{:g} us"}
        values = ((form, getattr(self, key)) for key, form in texts.items())
        details = [form.format(value) for form, value in values if value is not None]
        lasting = [] if self.for_s is None else [f"for {self.for_s:g} s"]
        return " ".join([self.kind, target, *details[:1], f"at {self.at_s:g} s", *lasting])
