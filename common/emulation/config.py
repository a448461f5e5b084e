"""What an experiment file may say about an emulated cluster, its network and its faults."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import yaml

from dear.errors import UserError, unknown
from dear.options import at_least, build_options, positive

_FOLDER = Path(__file__).parents[2] / "configs/networks"
_BANDWIDTH = re.compile(r"(\d+(?:\.\d+)?)(k|m|g)bit", re.IGNORECASE)
_GBPS = {"k": 1e-6, "m": 1e-3, "g": 1.0}
_MIN_GBPS, _MAX_GBPS = 1e-3, 1000.0
# Of a full segment of TCP on Ethernet with packets of 1500 bytes: what the limit on a virtual link
# counts (network.py says how), and what of it is payload.
FRAME_BYTES, PAYLOAD_BYTES = 1514, 1448
# Two bytes of the address count the hosts; far beyond what one machine has memory for.
MAX_HOSTS = 4096


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Virtual hosts on this machine, joined by one switch; the key `cluster:`."""

    kind: Literal["emulated"] = "emulated"
    hosts: int = 4
    ranks_per_host: int = 1
    network: str = "10gbe"
    """A profile of configs/networks or a bandwidth such as 100mbit or 2.5gbit."""
    time_scale: float | None = None
    """One emulated second takes this many real ones; None: chosen by what this machine can do."""
    max_time_scale: float = 40.0
    """The largest time scale that is chosen; a trial that needs more is `unsupported`, as too heavy
    for this machine."""

    def __post_init__(self) -> None:
        at_least("cluster.hosts", self.hosts, 1)
        if self.hosts > MAX_HOSTS:
            raise UserError(f"cluster.hosts must be at most {MAX_HOSTS}, got {self.hosts}")
        at_least("cluster.ranks_per_host", self.ranks_per_host, 1)
        if self.time_scale is not None:
            positive("cluster.time_scale", self.time_scale)
        at_least("cluster.max_time_scale", self.max_time_scale, 1)


@dataclass(frozen=True, kw_only=True)
class NetworkProfile:
    """The links of a cluster: each host has one to the switch, the same in both directions."""

    name: str
    gbps: float
    """Gb/s on the wire, Ethernet headers counted."""
    latency_us: float = 0
    """One way from host to host, in microseconds, on top of what the kernel itself takes."""
    jitter_us: float = 0
    """The latency varies evenly by up to this, in microseconds."""
    loss_percent: float = 0
    stands_for: str = ""
    """The real network that this is meant to behave like."""
    source: str = ""
    """Where the numbers come from."""
    rdma: bool = False
    """The real network moves data without the kernel; the emulation uses TCP all the same."""

    def __post_init__(self) -> None:
        if not _MIN_GBPS <= self.gbps <= _MAX_GBPS:
            raise UserError(
                f"network {self.name!r}: bandwidth must be from 1mbit to 1000gbit, "
                f"got {self.gbps} Gb/s"
            )
        for key in ("latency_us", "jitter_us", "loss_percent"):
            at_least(f"network {self.name!r}: {key}", getattr(self, key), 0)
        if self.jitter_us > self.latency_us:
            raise UserError(f"network {self.name!r}: jitter_us must not exceed latency_us")
        if self.loss_percent >= 100:
            raise UserError(f"network {self.name!r}: loss_percent must be below 100")

    @property
    def digest(self) -> str:
        """Of all that the links follow; `stands_for` and `source` are for people."""
        values = asdict(self)
        del values["stands_for"], values["source"]
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def payload_bytes_per_s(gbps: float) -> float:
    """What TCP carries at most over a virtual link of so many Gb/s, headers left out."""
    return gbps * 1e9 / 8 * PAYLOAD_BYTES / FRAME_BYTES


def network_profile(name: str) -> NetworkProfile:
    """The profile of that name, or one for a bare bandwidth such as `2.5gbit`.

    Raises:
        UserError: there is no such profile, or its file is wrong.
    """
    bandwidth = _BANDWIDTH.fullmatch(name)
    if bandwidth:
        gbps = float(bandwidth[1]) * _GBPS[bandwidth[2].lower()]
        return NetworkProfile(name=name, gbps=gbps, stands_for="links of this bandwidth")
    names = [path.stem for path in _FOLDER.glob("*.yaml")]
    if name not in names:
        raise unknown("network", name, [*names, "a bandwidth such as 2.5gbit"])
    path = _FOLDER / f"{name}.yaml"
    try:
        given: Any = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(given, dict):
        raise UserError(f"{path}: must be a mapping of keys to values")
    return build_options(NetworkProfile, {"name": name, **given}, f"key of {path.name}")


_NEEDS = {
    "link_down": {"host"},
    "link_rate": {"host", "rate"},
    "slow_host": {"host", "factor"},
    "kill_rank": {"rank"},
}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that happens to the cluster during a trial; one entry of `faults:`."""

    kind: Literal["link_down", "link_rate", "slow_host", "kill_rank"]
    host: int | None = None
    rank: int | None = None
    at_s: float = 0.0
    """Emulated seconds after the measurement has begun."""
    for_s: float | None = None
    """Emulated seconds that it lasts; None: for good."""
    rate: str | None = None
    """link_rate: a bandwidth such as 1gbit, or a profile's name."""
    factor: float | None = None
    """slow_host: compute takes this many times longer."""

    def __post_init__(self) -> None:
        if self.kind not in _NEEDS:
            raise unknown("kind of fault", self.kind, _NEEDS)
        needs = _NEEDS[self.kind]
        for field in fields(self):
            if field.name in ("kind", "at_s"):
                continue
            given = getattr(self, field.name) is not None
            if field.name in needs and not given:
                raise UserError(f"fault {self.kind}: needs `{field.name}:`")
            allowed = needs | ({"for_s"} if self.kind != "kill_rank" else set())
            if given and field.name not in allowed:
                raise UserError(f"fault {self.kind}: has no `{field.name}:`")
        for key in ("host", "rank", "at_s"):
            if getattr(self, key) is not None:
                at_least(f"fault {self.kind}: {key}", getattr(self, key), 0)
        for key in ("for_s", "factor"):
            if getattr(self, key) is not None:
                positive(f"fault {self.kind}: {key}", getattr(self, key))
        if self.rate is not None:
            network_profile(self.rate)

    @property
    def title(self) -> str:
        """A few words for tables, such as `link_down h1 at 2 s for 1 s`."""
        where = f"rank {self.rank}" if self.host is None else f"h{self.host}"
        how = self.rate or (f"x{self.factor:g}" if self.factor is not None else None)
        words = [self.kind, where, *([how] if how else []), f"at {self.at_s:g} s"]
        return " ".join(words + ([f"for {self.for_s:g} s"] if self.for_s is not None else []))
