"""What an experiment file may say about an emulated cluster, its network and its faults."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import math
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
# Two super-packets must fit, or TCP never gets going; and what switches with deep buffers have.
_MIN_QUEUE_KB, _QUEUE_BYTES = 150, 4_000_000
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
    min_time_scale: float = 1.0
    """The smallest time scale that is chosen. A larger one has a smaller systematic error, and room
    for algorithms that are measured in a later run, which keeps the scale of the earlier one."""
    max_time_scale: float = 40.0
    """The largest time scale that is chosen; a trial that needs more is `unsupported`, as too heavy
    for this machine."""
    links: Literal["auto", "switch", "tc"] = "auto"
    """What gives the links their rate, delay, jitter and loss: the kernel (`tc`: tbf and netem), or
    a switch of our own. auto: the kernel where it can do all that the networks ask for."""
    congestion: str = "reno"
    """TCP congestion control of all connections, such as cubic or bbr. Reno's window grows by round
    trips, which a time scale makes longer as it does all else; CUBIC's grows by the wall clock."""

    def __post_init__(self) -> None:
        at_least("cluster.hosts", self.hosts, 1)
        if self.hosts > MAX_HOSTS:
            raise UserError(f"cluster.hosts must be at most {MAX_HOSTS}, got {self.hosts}")
        at_least("cluster.ranks_per_host", self.ranks_per_host, 1)
        if self.time_scale is not None:
            positive("cluster.time_scale", self.time_scale)
        at_least("cluster.min_time_scale", self.min_time_scale, 1)
        at_least("cluster.max_time_scale", self.max_time_scale, self.min_time_scale)

    def links_digest(self, network: str) -> str:
        """Of all that decides how the links of this network behave."""
        text = f"{network_profile(network).digest} {self.links} {self.congestion}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Site:
    """Some hosts of a cluster that are near each other; one entry of `sites:`."""

    name: str
    hosts: int | None = None
    """How many, in the order of the sites; None, for all of them: as many as the others have."""

    def __post_init__(self) -> None:
        if self.hosts is not None:
            at_least(f"site {self.name!r}: hosts", self.hosts, 1)


@dataclass(frozen=True, kw_only=True)
class Distance:
    """What joins two sites, in both directions alike; one entry of `between:`."""

    sites: tuple[str, str]
    latency_us: float
    """One way from a host of the one to a host of the other, in place of the network's own."""
    gbps: float | None = None
    """Of the one line that all their hosts share in each direction; None: without a limit."""
    jitter_us: float = 0
    loss_percent: float = 0

    def __post_init__(self) -> None:
        if len(self.sites) != 2 or self.sites[0] == self.sites[1]:
            raise UserError(f"between: needs two different sites, got {', '.join(self.sites)}")
        what = f"between {' and '.join(self.sites)}"
        if self.gbps is not None:
            _check_rate(what, self.gbps)
        _check_path(what, self.latency_us, self.jitter_us, self.loss_percent)


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Some time at some rate; one entry of `trace:`."""

    gbps: float
    for_s: float
    """Emulated seconds."""

    def __post_init__(self) -> None:
        _check_rate("trace", self.gbps)
        positive("trace: for_s", self.for_s)


@dataclass(frozen=True, kw_only=True)
class Connection:
    """What a packet meets on its way from one host to another, beside the links of the two."""

    latency_us: float
    jitter_us: float
    loss_percent: float
    gbps: float | None = None
    trunk: int | None = None
    """Number of the line between two sites, as `NetworkProfile.trunks` counts."""


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
    """Of frames, each by itself."""
    queue_kb: float | None = None
    """What may wait in the switch for one link, in units of 1000 bytes; more is lost. None: enough
    for two round trips at full rate, and at least 4 MB."""
    sites: tuple[Site, ...] = ()
    """Where the hosts stand; none: all at one place."""
    between: tuple[Distance, ...] = ()
    """What joins each pair of sites."""
    trace: tuple[Stretch, ...] = ()
    """The rates of all links while a trial is measured, one after the other and from the first
    again; before that, and without a trace, it is `gbps`."""
    stands_for: str = ""
    """The real network that this is meant to behave like."""
    source: str = ""
    """Where the numbers come from."""
    rdma: bool = False
    """The real network moves data without the kernel; the emulation uses TCP all the same."""

    def __post_init__(self) -> None:
        what = f"network {self.name!r}"
        _check_rate(what, self.gbps)
        _check_path(what, self.latency_us, self.jitter_us, self.loss_percent)
        if self.queue_kb is not None and self.queue_kb < _MIN_QUEUE_KB:
            raise UserError(
                f"{what}: queue_kb must be at least {_MIN_QUEUE_KB}, one large packet of TCP, "
                f"got {self.queue_kb:g}"
            )
        names = [site.name for site in self.sites]
        if len(set(names)) < len(names):
            raise UserError(f"{what}: sites: two have the same name: {', '.join(names)}")
        counted = [site.hosts is not None for site in self.sites]
        if any(counted) and not all(counted):
            raise UserError(f"{what}: sites: give `hosts:` for each of them, or for none")
        wanted = {frozenset(pair) for pair in itertools.combinations(names, 2)}
        given = [frozenset(distance.sites) for distance in self.between]
        for distance in self.between:
            for name in distance.sites:
                if name not in names:
                    raise unknown(f"{what}: between: site", name, names)
        if len(set(given)) < len(given) or set(given) != wanted:
            raise UserError(f"{what}: between: needs one entry for each pair of sites")

    @property
    def digest(self) -> str:
        """Of all that the links follow; `stands_for` and `source` are for people."""
        values = asdict(self)
        del values["stands_for"], values["source"]
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def queue_bytes(self) -> int:
        """See `queue_kb`."""
        return self._queue_bytes(self.gbps, self.latency_us)

    @property
    def under_way_bytes(self) -> int:
        """The most that one round trip holds, between any two hosts."""
        ways = [(self.gbps, self.latency_us)]
        ways += [(min(self.gbps, far.gbps or self.gbps), far.latency_us) for far in self.between]
        return max(_under_way_bytes(*way) for way in ways)

    @property
    def farthest_us(self) -> float:
        """The largest latency between two hosts."""
        return max([self.latency_us, *(far.latency_us for far in self.between)])

    @property
    def narrowest_gbps(self) -> float:
        """Of the lines on the way from one host to the next and back to the first: what a ring of
        all hosts can have."""
        return min([self.gbps, *(far.gbps for far in self.between if far.gbps is not None)])

    @property
    def nearest_us(self) -> float:
        """What every packet is on its way at least, from one host to another."""
        ways = [(self.latency_us, self.jitter_us)]
        ways += [(far.latency_us, far.jitter_us) for far in self.between]
        return min(latency_us - jitter_us for latency_us, jitter_us in ways)

    def check_hosts(self, hosts: int) -> None:
        """Raises `UserError` unless the sites have just the hosts of a cluster of so many."""
        self._site_of(0, hosts)

    def connection(self, source: int, target: int, hosts: int) -> Connection:
        """From one host to another, of a cluster of `hosts`."""
        if self.sites:
            here, there = (self.sites[self._site_of(host, hosts)].name for host in (source, target))
            for number, distance in enumerate(self.between):
                if {here, there} == set(distance.sites):
                    way = int(distance.sites[0] != here)
                    trunk = None if distance.gbps is None else 2 * number + way
                    return Connection(
                        latency_us=distance.latency_us,
                        jitter_us=distance.jitter_us,
                        loss_percent=distance.loss_percent,
                        gbps=distance.gbps,
                        trunk=trunk,
                    )
        return Connection(
            latency_us=self.latency_us, jitter_us=self.jitter_us, loss_percent=self.loss_percent
        )

    def trunks(self) -> list[tuple[float | None, int]]:
        """Of each line between sites, one for each direction: Gb/s (None: without a limit), and
        the bytes that may wait for it."""
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
        """The number of the site that this host is in."""
        counts = [site.hosts for site in self.sites]
        if None in counts:
            share, left = divmod(hosts, len(counts))
            counts = [share + (number < left) for number in range(len(counts))]
        if self.sites and sum(counts) != hosts:
            raise UserError(
                f"network {self.name!r}: its sites have {sum(counts)} hosts, the cluster {hosts}"
            )
        for site, count in zip(self.sites, counts, strict=True):
            if not count:
                raise UserError(f"network {self.name!r}: no host is in site {site.name!r}")
        return bisect.bisect_right(list(itertools.accumulate(counts)), host)


def _under_way_bytes(gbps: float, latency_us: float) -> int:
    return math.ceil(gbps * 1e9 / 8 * 2 * latency_us * 1e-6)


def _check_rate(what: str, gbps: float) -> None:
    if not _MIN_GBPS <= gbps <= _MAX_GBPS:
        raise UserError(f"{what}: bandwidth must be from 1mbit to 1000gbit, got {gbps} Gb/s")


def _check_path(what: str, latency_us: float, jitter_us: float, loss_percent: float) -> None:
    for key, value in (
        ("latency_us", latency_us),
        ("jitter_us", jitter_us),
        ("loss_percent", loss_percent),
    ):
        at_least(f"{what}: {key}", value, 0)
    if jitter_us > latency_us:
        raise UserError(f"{what}: jitter_us must not exceed latency_us")
    if loss_percent >= 100:
        raise UserError(f"{what}: loss_percent must be below 100")


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
    "link_delay": {"host", "delay_us"},
    "slow_host": {"host", "factor"},
    "kill_rank": {"rank"},
}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that happens to the cluster during a trial; one entry of `faults:`."""

    kind: Literal["link_down", "link_rate", "link_delay", "slow_host", "kill_rank"]
    host: int | None = None
    rank: int | None = None
    at_s: float = 0.0
    """Emulated seconds after the measurement has begun."""
    for_s: float | None = None
    """Emulated seconds that it lasts; None: for good."""
    rate: str | None = None
    """link_rate: a bandwidth such as 1gbit, or a profile's name."""
    delay_us: float | None = None
    """link_delay: one way between this host and each other, in place of the network's latency."""
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
        """A few words for tables, such as `link_down h1 at 2 s for 1 s`."""
        where = f"rank {self.rank}" if self.host is None else f"h{self.host}"
        how = self.rate or (f"x{self.factor:g}" if self.factor is not None else None)
        how = how or (f"{self.delay_us:g} us" if self.delay_us is not None else None)
        words = [self.kind, where, *([how] if how else []), f"at {self.at_s:g} s"]
        return " ".join(words + ([f"for {self.for_s:g} s"] if self.for_s is not None else []))
