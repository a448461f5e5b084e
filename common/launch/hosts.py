"""Hosts of a job, the ranks of each host, and settings of the network between them."""

from __future__ import annotations

import dataclasses
import functools
import getpass
import hashlib
import ipaddress
import os
import re
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common.emulation.cluster import VirtualHost
from common.machine import library_variables
from common.paths import CONFIGS
from dear.errors import UserError, unknown

ENVS = CONFIGS / "envs.conf"
_HERE = ("localhost", "127.0.0.1", "::1")
_OF_ONE_HOST = ("CUDA_VISIBLE_DEVICES", "COMM_CORE_HOST_ID")
"""Variables whose value differs between hosts. Instead, envs.conf chooses the GPUs of a host."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """Host, with the number of ranks that it may run."""

    name: str
    slots: int
    user: str | None = None
    """User to log in as; None: the remote shell chooses."""
    address: str | None = None
    """Address by which other hosts reach it; None: its name. The name of a virtual host always
    resolves."""
    virtual: VirtualHost | None = None
    """Host of an emulated cluster; None for a real host."""

    @property
    def reached_at(self) -> str:
        """Name or address by which other hosts reach it."""
        return self.name if self.virtual is not None else self.address or self.name

    @property
    def login(self) -> str:
        """Argument of a remote shell, `HOST` or `USER@HOST`."""
        return f"{self.user}@{self.reached_at}" if self.user else self.reached_at

    @property
    def here(self) -> bool:
        """True if the current process runs on this host, and as the user of the ranks there."""
        if self.virtual is not None:
            return False
        # A user without a name, as in some containers, is asked for only if one is given.
        if self.user is not None and self.user != getpass.getuser():
            return False
        name = socket.gethostname()
        return self.name in (*_HERE, name, name.partition(".")[0])

    @property
    def loopback(self) -> bool:
        """True if other hosts cannot reach this host by its name."""
        return self.virtual is None and self.name in _HERE


@dataclass(frozen=True, kw_only=True)
class Block:
    """Ranks of one job on one host: `count` ranks, starting with `first`."""

    host: Host
    first: int
    count: int

    @property
    def ranks(self) -> range:
        return range(self.first, self.first + self.count)


def blocks(hosts: Sequence[Host], world_size: int) -> list[Block]:
    """Assigns ranks to the slots of the hosts in order, as Open MPI does.

    Raises:
        UserError: there are fewer slots than ranks.
    """
    require_slots(hosts, world_size, "the hosts have")
    assigned: list[Block] = []
    first = 0
    for host in hosts:
        count = min(host.slots, world_size - first)
        if count:
            assigned.append(Block(host=host, first=first, count=count))
        first += count
    return assigned


def require_slots(hosts: Sequence[Host], world_size: int, who_has: str) -> None:
    """Raises `UserError` if the hosts have fewer slots than `world_size`."""
    total = sum(host.slots for host in hosts)
    if total < world_size:
        raise UserError(f"{who_has} {total} slots, fewer than the {world_size} workers")


def are_virtual(hosts: Sequence[Host] | None) -> bool:
    """Returns True if these are hosts of an emulated cluster."""
    return bool(hosts) and hosts[0].virtual is not None


def read_hostfile(path: Path, world_size: int) -> list[Host]:
    """Reads the hosts of a file, which must have at least `world_size` slots in total.

    Each line is `HOST [slots=N]`, with `USER@` before a host to log in as this user. A host is a
    name or an address; an IPv6 address may stand in brackets.

    Raises:
        UserError: the file does not exist, a line has another form, or there are too few slots.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"hostfile {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"hostfile {path}: not UTF-8: {error.reason}") from None
    hosts: list[Host] = []
    for number, line in _lines(text):
        words = line.partition("#")[0].split()
        slots = "1"
        for word in words[1:]:
            key, _, slots = word.partition("=")
            wrong = key != "slots" or not re.fullmatch("[0-9]+", slots) or int(slots) < 1
            if wrong or len(words) > 2:
                raise UserError(
                    f"hostfile {path} line {number}: must be `HOST slots=N`, got {line!r}"
                )
        user, _, name = words[0].rpartition("@")
        name = _host_name(name)
        # ssh would take a user that begins with a dash for an option.
        wrong_user = "@" in words[0] and not re.fullmatch(r"(?!-)[\w.+-]+", user)
        if name is None or wrong_user:
            raise UserError(
                f"hostfile {path} line {number}: {words[0]!r} is no host; must be a name, an IPv4 "
                "or IPv6 address, or USER@ before one of them (a port belongs into ~/.ssh/config)"
            )
        if any(host.name == name for host in hosts):
            raise UserError(
                f"hostfile {path} line {number}: duplicate host {name}; write one line "
                "with the sum of its slots"
            )
        hosts.append(Host(name=name, slots=int(slots), user=user or None))
    if not hosts:
        raise UserError(f"hostfile {path}: no host in it; write lines `HOST slots=N`")
    require_slots(hosts, world_size, f"hostfile {path} has")
    return hosts


def digest_of_hosts(hosts: Sequence[Host]) -> str:
    """Returns a digest of the names, slots and users of hosts, in their order."""
    text = repr([(host.name, host.slots, host.user) for host in hosts])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _host_name(text: str) -> str | None:
    """Returns a name as it is, and an address without brackets; None if it is neither."""
    bare = re.sub(r"^\[(.*)\]$", r"\1", text)
    try:
        return str(ipaddress.ip_address(bare))
    except ValueError:
        return text if re.fullmatch(r"(?!-)[\w.-]+", text) else None


def _lines(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), start=1):
        if line.partition("#")[0].strip():
            yield number, line.strip()


@dataclass(frozen=True, kw_only=True)
class Envs:
    """Keys of `configs/envs.conf`; an empty value lets the library choose."""

    PY: str = ""
    """Python on every host; empty: the Python that runs the driver."""
    ETH_INTERFACE: str = ""
    """Interface of the Ethernet network."""
    IB_INTERFACE: str = ""
    """Interface of the InfiniBand network (IPoIB)."""
    MPIPATH: str = ""
    """Prefix of the Open MPI installation; empty: the mpirun on the PATH."""
    ETH_MPI_BTC_TCP_IF_INCLUDE: str = ""
    """Interfaces or subnets for Open MPI's TCP over Ethernet; empty: ETH_INTERFACE."""
    NVIDIA_VISIBLE_DEVICES: str = ""
    """GPUs that ranks may use on every host, such as 0,1; empty: all."""

    @property
    def python(self) -> list[str]:
        """Python of the ranks, and its flags."""
        path, dash, flags = self.PY.partition(" -")
        return [path or sys.executable, *(dash + flags).split()]

    def used(self, options: object) -> dict[str, str]:
        """Returns the values on which a trial with these options of a launcher depends."""
        unused = set()
        if isinstance(options, NetworkOptions):
            unused = {"ETH_INTERFACE" if options.rdma else "IB_INTERFACE"}
        return {k: v for k, v in dataclasses.asdict(self).items() if v and k not in unused}

    @property
    def rank_env(self) -> dict[str, str]:
        """Variables of every rank, without those of the network."""
        gpus = self.NVIDIA_VISIBLE_DEVICES
        return {"CUDA_VISIBLE_DEVICES": gpus} if gpus else {}


_SERVER_KEYS = (
    "LAUNCHBIN",
    "CODEHOME",
    "ETH_SCHEDULER_IP",
    "IB_SCHEDULER_IP",
    "WORKER_HOST_PREFIX",
)
"""Keys for methods with a parameter server in the files of the reference suites."""


@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    """Choice of the network between the hosts, for launchers of several hosts."""

    rdma: Literal[0, 1, 2] = 0
    """0: TCP over Ethernet; 1: InfiniBand verbs if the library has them (NCCL, Open MPI with UCX),
    else TCP over the InfiniBand interface; 2: TCP over the InfiniBand interface."""
    interface: str | None = None
    """Network interface of every host; None: ETH_INTERFACE or IB_INTERFACE of envs.conf."""


def read_envs(path: Path = ENVS) -> Envs:
    """Reads lines `KEY=VALUE`, which a shell can source too; all keys are empty without a file.

    The files of the reference suites are valid. Their keys for parameter servers, which do not
    exist here, are ignored with one line on stderr.

    Raises:
        UserError: a line has another form, or a key is unknown.
    """
    known = [field.name for field in dataclasses.fields(Envs)]
    values: dict[str, str] = {}
    if not path.exists():
        return Envs()
    for number, line in _lines(path.read_text(encoding="utf-8")):
        match = re.fullmatch(
            r"""(?:export\s+)?(?P<key>\w+)=(?:"(?P<a>[^"]*)"|'(?P<b>[^']*)'|(?P<c>[^"'\s#]*))\s*(?:#.*)?""",
            line,
        )
        if match is None:
            raise UserError(
                f"{path} line {number}: must be KEY=VALUE, a value with spaces in quotes, got "
                f"{line!r}"
            )
        if match[1] not in (*known, *_SERVER_KEYS):
            raise unknown(f"key of {path.name}", match[1], known)
        values[match[1]] = next(filter(None, match.group("a", "b", "c")), "")
    ignored = [name for name in _SERVER_KEYS if values.pop(name, "")]
    if ignored:
        _print_ignored(path, ", ".join(ignored))
    return Envs(**values)


@functools.cache
def _print_ignored(path: Path, names: str) -> None:
    """Prints the line once, however often the file is read."""
    print(f"{path}: ignored keys of parameter servers: {names}", file=sys.stderr)


def interface(options: NetworkOptions, envs: Envs, hosts: Sequence[Host] | None) -> str:
    """Returns the interface that ranks use for other hosts; empty: the library chooses.

    Raises:
        UserError: RDMA is requested on virtual hosts or without an interface, or this machine is
            one of the hosts and does not have the interface.
    """
    if are_virtual(hosts):
        if options.rdma:
            raise UserError(f"rdma={options.rdma}: virtual hosts have Ethernet only; use rdma=0")
        return options.interface or hosts[0].virtual.ifname
    name = options.interface or (envs.IB_INTERFACE if options.rdma else envs.ETH_INTERFACE)
    if options.rdma and not name:
        raise UserError(f"rdma={options.rdma}: set IB_INTERFACE in {ENVS}, it is empty")
    known = sorted(path.name for path in Path("/sys/class/net").iterdir())
    if name and any(host.here for host in hosts or ()) and name not in known:
        raise UserError(
            f"rdma={options.rdma}: this machine has no interface {name!r} (allowed: "
            f"{', '.join(known)}); set it in {ENVS}"
        )
    return name


def elsewhere() -> dict[str, str]:
    """Returns the variables of this process that change the behaviour of libraries, for the ranks
    on other hosts, without those of one host (`_OF_ONE_HOST`)."""
    return {k: v for k, v in library_variables().items() if k not in _OF_ONE_HOST}


def network_env(options: NetworkOptions, name: str, *, virtual: bool = False) -> dict[str, str]:
    """Returns the variables that make the libraries of a rank use the interface `name`.

    Raises:
        UserError: the environment has one of them with another value; not if the hosts are
            `virtual`, where only their own network exists.
    """
    env = {"NCCL_IB_DISABLE": "0" if options.rdma == 1 else "1"}
    if options.rdma == 2:
        # The card is then an ordinary network card, which does not access GPU memory.
        env |= {"NCCL_NET_GDR_LEVEL": "0", "NCCL_NET_GDR_READ": "0", "NCCL_IB_CUDA_SUPPORT": "0"}
    if name:
        env |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "COMM_CORE_IFNAME"), name)
        env["NCCL_SOCKET_IFNAME"] = f"={name}"  # without "=", eth1 would be eth10, too
    for key, value in env.items():
        given = os.environ.get(key)
        if given is not None and given.lstrip("=") != value.lstrip("=") and not virtual:
            raise UserError(
                f"{key}={given}: the launcher's options rdma={options.rdma} and interface="
                f"{name!r} need {value}; unset the variable, or change the options"
            )
    return env
