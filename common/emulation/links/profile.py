"""Network profiles: speed, delay and loss of the links of a cluster, and bandwidth traces."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import math
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from common.machine.yaml_files import read_mapping
from common.paths import CONFIGS
from dear.cost.calibrated import NetworkCosts
from dear.errors import UserError, unknown
from dear.options import at_least, build_options, positive

FOLDER = CONFIGS / "networks"
"""Folder of the network files that are chosen by name, such as `--network 10gbe`."""
_BANDWIDTH = re.compile(r"(\d+(?:\.\d+)?)(k|m|g)bit", re.IGNORECASE)
_GBPS = {"k": 1e-6, "m": 1e-3, "g": 1.0}
# The links inside a host and of several adapters together exceed 1000 Gb/s.
_MIN_GBPS, _MAX_GBPS = 1e-3, 100_000.0
# TCP never speeds up if fewer than two super-packets fit. The default suits deep-buffer switches.
_MIN_QUEUE_KB, _QUEUE_BYTES = 150, 4_000_000
# Sizes of a full TCP segment on Ethernet with an MTU of 1500 bytes: the bytes that count towards
# a virtual link's rate (network.py explains them), and the payload within them.
FRAME_BYTES, PAYLOAD_BYTES = 1514, 1448


@dataclass(frozen=True, kw_only=True)
class Site:
    """Entry of the key `sites:`: hosts of a cluster that are near each other."""

    name: str
    hosts: int | None = None
    """Number of hosts; the first site has the first hosts. None at all sites: divided evenly."""

    def __post_init__(self) -> None:
        if self.hosts is not None:
            at_least(f"site {self.name!r}: hosts", self.hosts, 1)


@dataclass(frozen=True, kw_only=True)
class Distance:
    """Entry of the key `between:`: connection of two sites, the same in both directions."""

    sites: tuple[str, str]
    latency_us: float
    """One-way latency between hosts of the two sites; replaces the network's `latency_us`."""
    gbps: float | None = None
    """Rate per direction of the line that all hosts of the two sites share; None: no limit."""
    jitter_us: float = 0
    loss_percent: float = 0

    def __post_init__(self) -> None:
        if len(self.sites) != 2 or self.sites[0] == self.sites[1]:
            raise UserError(f"between: needs two different sites, got {', '.join(self.sites)}")
        subject = f"between {' and '.join(self.sites)}"
        if self.gbps is not None:
            _check_rate(subject, self.gbps)
        _check_path(subject, self)


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Entry of the key `trace:`: a period with a constant rate."""

    gbps: float
    for_s: float
    """Duration in emulated seconds."""

    def __post_init__(self) -> None:
        _check_rate("trace", self.gbps)
        positive("trace: for_s", self.for_s)


@dataclass(frozen=True, kw_only=True)
class Connection:
    """Properties of the path between two hosts, without the links of the hosts themselves."""

    latency_us: float
    jitter_us: float
    loss_percent: float
    gbps: float | None = None
    trunk: int | None = None
    """Index of the line between the two sites in `NetworkProfile.trunks`; None: no such line."""


@dataclass(frozen=True, kw_only=True)
class NetworkProfile:
    """Links of a cluster: one from each host to the switch, the same in both directions."""

    name: str
    gbps: float
    """Rate in Gb/s on the wire, Ethernet headers included."""
    latency_us: float = 0
    """One-way latency between hosts in microseconds, in addition to the kernel's own delay."""
    jitter_us: float = 0
    """Largest deviation from the latency, uniformly distributed, in microseconds."""
    loss_percent: float = 0
    """Percentage of frames that are lost, independently of each other."""
    queue_kb: float | None = None
    """Queue of one link in the switch, in units of 1000 bytes; packets beyond it are dropped.
    None: two round trips at full rate, and at least 4 MB."""
    sites: tuple[Site, ...] = ()
    """Sites that the hosts are divided among; empty: all hosts are in one location."""
    between: tuple[Distance, ...] = ()
    """Connections, one for each pair of sites."""
    trace: tuple[Stretch, ...] = ()
    """Rates of all links while a trial is measured, played in order and repeated. Before that, and
    without a trace, the rate is `gbps`."""
    stands_for: str = ""
    """Name of the real network that this profile imitates."""
    source: str = ""
    """Source of the numbers."""
    rdma: bool = False
    """True if the real network bypasses the kernel (RDMA); the emulation still uses TCP."""
    inside: Literal["nvlink", "pcie"] | None = None
    """Kind of link inside a host, per GPU; None: a network between hosts. Predictions use it."""
    overhead_us: float = 0
    """Microseconds per message, at both ends together, in which nothing else is sent on the link.
    Predictions use it; emulated hosts spend their own time."""
    core_gb_per_s: float | None = None
    """Rate in GB/s at which a core of a host receives and adds messages, for predictions.
    None: that of `common.virtual.costs.networks.CORE_GB_PER_S`."""
    costs: NetworkCosts | None = None
    """Costs of collectives that `calibrate` has measured; the emulation does not use them."""

    def __post_init__(self) -> None:
        subject = f"network {self.name!r}"
        _check_rate(subject, self.gbps)
        _check_path(subject, self)
        at_least(f"{subject}: overhead_us", self.overhead_us, 0)
        positive(f"{subject}: core_gb_per_s", self.core_gb_per_s)
        at_least(f"{subject}: queue_kb", self.queue_kb, 0)
        if self.queue_kb is not None and self.queue_kb < _MIN_QUEUE_KB:
            raise UserError(
                f"{subject}: queue_kb must be at least {_MIN_QUEUE_KB}, one large packet of TCP, "
                f"got {self.queue_kb:g}"
            )
        names = [site.name for site in self.sites]
        if len(set(names)) < len(names):
            raise UserError(f"{subject}: sites: two have the same name: {', '.join(names)}")
        counted = [site.hosts is not None for site in self.sites]
        if any(counted) and not all(counted):
            raise UserError(f"{subject}: sites: give `hosts:` for every site or for no site")
        expected_pairs = {frozenset(pair) for pair in itertools.combinations(names, 2)}
        given_pairs = [frozenset(distance.sites) for distance in self.between]
        for distance in self.between:
            for name in distance.sites:
                if name not in names:
                    raise unknown(f"{subject}: between: site", name, names)
        if len(set(given_pairs)) < len(given_pairs) or set(given_pairs) != expected_pairs:
            raise UserError(f"{subject}: between: needs one entry for each pair of sites")

    @property
    def digest(self) -> str:
        """Hash of all values that affect the links; `stands_for` and `source` do not, nor do the
        values that only predictions use."""
        values = asdict(self)
        for key in ("inside", "overhead_us", "core_gb_per_s", "stands_for", "source", "costs"):
            del values[key]
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def summary(self) -> str:
        """One line about the links, and about the costs if they were measured."""
        costs = "" if self.costs is None else f"; costs of {', '.join(self.costs.by_operation())}"
        return f"{self.gbps:g} Gb/s, {self.latency_us:g} us: {self.stands_for}{costs}"

    @property
    def queue_bytes(self) -> int:
        """Queue size of a host's link in bytes; see `queue_kb`."""
        return self._queue_bytes(self.gbps, self.latency_us)

    @property
    def under_way_bytes(self) -> int:
        """Most bytes in flight in one round trip between any two hosts."""
        paths = [(self.gbps, self.latency_us)]
        paths += [(min(self.gbps, far.gbps or self.gbps), far.latency_us) for far in self.between]
        return max(_under_way_bytes(*path) for path in paths)

    @property
    def farthest_us(self) -> float:
        """Largest latency between two hosts, in microseconds."""
        return max([self.latency_us, *(far.latency_us for far in self.between)])

    @property
    def narrowest_gbps(self) -> float:
        """Rate of the slowest line on a ring through all hosts, in Gb/s."""
        return min([self.gbps, *(far.gbps for far in self.between if far.gbps is not None)])

    @property
    def nearest_us(self) -> float:
        """Smallest delay of a packet between two hosts (latency minus jitter), in microseconds."""
        paths = [(self.latency_us, self.jitter_us)]
        paths += [(far.latency_us, far.jitter_us) for far in self.between]
        return min(latency_us - jitter_us for latency_us, jitter_us in paths)

    def check_hosts(self, hosts: int) -> None:
        """Raises `UserError` unless the sites have exactly `hosts` hosts in total."""
        self._site_of(0, hosts)

    def connection(self, source: int, target: int, hosts: int) -> Connection:
        """Returns the connection from one host to another in a cluster of `hosts` hosts."""
        path: NetworkProfile | Distance = self
        gbps = trunk = None
        if self.sites:
            ends = [self.sites[self._site_of(host, hosts)].name for host in (source, target)]
            for number, distance in enumerate(self.between):
                if set(ends) == set(distance.sites):
                    path, gbps = distance, distance.gbps
                    if gbps is not None:
                        trunk = 2 * number + (distance.sites[0] != ends[0])
        return Connection(
            latency_us=path.latency_us,
            jitter_us=path.jitter_us,
            loss_percent=path.loss_percent,
            gbps=gbps,
            trunk=trunk,
        )

    def trunks(self) -> list[tuple[float | None, int]]:
        """Rate in Gb/s (None: no limit) and queue size in bytes of each line between sites, one
        line per direction."""
        return [
            (far.gbps, self._queue_bytes(far.gbps or self.gbps, far.latency_us))
            for far in self.between
            for _ in range(2)
        ]

    def _queue_bytes(self, gbps: float, latency_us: float) -> int:
        if self.queue_kb is not None:
            return math.ceil(1000 * self.queue_kb)
        return max(_QUEUE_BYTES, 2 * _under_way_bytes(gbps, latency_us))

    def _site_of(self, host: int, hosts: int) -> int:
        counts = [site.hosts for site in self.sites]
        if None in counts:
            hosts_per_site, remainder = divmod(hosts, len(counts))
            counts = [hosts_per_site + (number < remainder) for number in range(len(counts))]
        if self.sites and sum(counts) != hosts:
            raise UserError(
                f"network {self.name!r}: sites have {sum(counts)} hosts, the cluster has {hosts}"
            )
        for site, count in zip(self.sites, counts, strict=True):
            if not count:
                raise UserError(f"network {self.name!r}: no host is in site {site.name!r}")
        return bisect.bisect_right(list(itertools.accumulate(counts)), host)


def _under_way_bytes(gbps: float, latency_us: float) -> int:
    return math.ceil(gbps * 1e9 / 8 * 2 * latency_us * 1e-6)


def _check_rate(subject: str, gbps: float) -> None:
    if not _MIN_GBPS <= gbps <= _MAX_GBPS:
        raise UserError(f"{subject}: bandwidth must be from 1mbit to 100000gbit, got {gbps} Gb/s")


def _check_path(subject: str, path: NetworkProfile | Distance) -> None:
    for key in ("latency_us", "jitter_us", "loss_percent"):
        at_least(f"{subject}: {key}", getattr(path, key), 0)
    if path.jitter_us > path.latency_us:
        raise UserError(f"{subject}: jitter_us must not exceed latency_us")
    if path.loss_percent >= 100:
        raise UserError(f"{subject}: loss_percent must be below 100")


def payload_bytes_per_s(gbps: float) -> float:
    """Highest TCP payload rate, without headers, of a virtual link of `gbps` Gb/s."""
    return gbps * 1e9 / 8 * PAYLOAD_BYTES / FRAME_BYTES


def network_profile(name: str) -> NetworkProfile:
    """Returns the profile of that name, or a profile for a bandwidth such as `2.5gbit`. Raises
    `UserError` if the profile does not exist, or its file is invalid."""
    bandwidth = _BANDWIDTH.fullmatch(name)
    if bandwidth:
        gbps = float(bandwidth[1]) * _GBPS[bandwidth[2].lower()]
        return NetworkProfile(name=name, gbps=gbps, stands_for="links of this bandwidth")
    names = network_names()
    if name not in names:
        raise unknown("network", name, [*names, "a bandwidth such as 2.5gbit"])
    return network_file(FOLDER / f"{name}.yaml")


def network_names() -> list[str]:
    """Returns the names of the profiles in configs/networks."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def network_file(path: Path) -> NetworkProfile:
    """Returns the profile of a network file; raises `UserError` if it is missing or invalid."""
    values = read_mapping(path, "network")
    if str(values.get("name", path.stem)) != path.stem:
        raise UserError(f"{path}: name: must be the file's name, {path.stem!r}, or left out")
    return build_options(NetworkProfile, {"name": path.stem, **values}, f"key of {path.name}")
