"""Where ranks run: the hosts of a hostfile or virtual ones, which host takes which ranks, and what
the libraries must be told of the network between them (`configs/envs.conf`)."""

from __future__ import annotations

import dataclasses
import functools
import re
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common.emulation.cluster import VirtualHost
from common.paths import CONFIGS
from dear.errors import UserError, unknown

ENVS = CONFIGS / "envs.conf"
_HERE = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, kw_only=True)
class Host:
    """A host and how many ranks it may take."""

    name: str
    slots: int
    address: str | None = None
    """Where the others reach it; None: by its name. Virtual hosts always have a name."""
    virtual: VirtualHost | None = None
    """Set if this is a host of an emulated cluster."""

    @property
    def reached_at(self) -> str:
        """Name or address for the other hosts."""
        return self.name if self.virtual is not None else self.address or self.name

    @property
    def here(self) -> bool:
        """True if this process runs on it."""
        name = socket.gethostname()
        return self.virtual is None and self.name in (*_HERE, name, name.partition(".")[0])

    @property
    def loopback(self) -> bool:
        """True if no other host could reach it by this name."""
        return self.virtual is None and self.reached_at in _HERE


@dataclass(frozen=True, kw_only=True)
class Block:
    """The ranks of one job on one host: `count` of them from `first` on."""

    host: Host
    first: int
    count: int

    @property
    def ranks(self) -> range:
        return range(self.first, self.first + self.count)


def blocks(hosts: Sequence[Host], world_size: int) -> list[Block]:
    """Fills the slots of the hosts in their order, as Open MPI does; hosts without a rank are out.

    Raises:
        UserError: there are fewer slots than ranks.
    """
    require_slots(hosts, world_size, "the hosts have")
    made: list[Block] = []
    first = 0
    for host in hosts:
        count = min(host.slots, world_size - first)
        if count:
            made.append(Block(host=host, first=first, count=count))
        first += count
    return made


def require_slots(hosts: Sequence[Host], world_size: int, who_has: str) -> None:
    """Raises `UserError` if the hosts have fewer slots than `world_size`."""
    total = sum(host.slots for host in hosts)
    if total < world_size:
        raise UserError(f"{who_has} {total} slots, fewer than the {world_size} workers asked for")


def are_virtual(hosts: Sequence[Host] | None) -> bool:
    """True if these are hosts of an emulated cluster."""
    return bool(hosts) and hosts[0].virtual is not None


def read_hostfile(path: Path, world_size: int) -> list[Host]:
    """The hosts of `path`, which must have at least `world_size` slots together.

    Raises:
        UserError: the file does not exist, a line is not `HOST [slots=N]`, or slots are too few.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise UserError(f"hostfile {path}: {error.strerror}") from None
    hosts: list[Host] = []
    for number, line in _lines(text):
        words = line.partition("#")[0].split()
        slots = "1"
        for word in words[1:]:
            key, _, slots = word.partition("=")
            if key != "slots" or not re.fullmatch("[0-9]+", slots) or int(slots) < 1:
                raise UserError(
                    f"hostfile {path} line {number}: must be `HOST slots=N`, got {line!r}"
                )
        if any(host.name == words[0] for host in hosts):
            raise UserError(
                f"hostfile {path} line {number}: host {words[0]} stands twice; write one line with "
                "the sum of its slots"
            )
        hosts.append(Host(name=words[0], slots=int(slots)))
    require_slots(hosts, world_size, f"hostfile {path} has")
    return hosts


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines that are more than a comment, by number."""
    for number, line in enumerate(text.splitlines(), start=1):
        if line.partition("#")[0].strip():
            yield number, line.strip()


@dataclass(frozen=True, kw_only=True)
class Envs:
    """The keys of the file; empty means: let the library choose."""

    PY: str = ""
    """Python on every host; empty: the one that runs the driver."""
    ETH_INTERFACE: str = ""
    """Interface of the Ethernet network."""
    IB_INTERFACE: str = ""
    """Interface of the InfiniBand network (IPoIB)."""
    MPIPATH: str = ""
    """Where Open MPI is installed; empty: the mpirun on the PATH."""
    ETH_MPI_BTC_TCP_IF_INCLUDE: str = ""
    """Interfaces or subnets for Open MPI's TCP over Ethernet; empty: ETH_INTERFACE."""
    NVIDIA_VISIBLE_DEVICES: str = ""
    """GPUs of every host that ranks may use, such as 0,1; empty: all."""

    @property
    def python(self) -> str:
        return self.PY or sys.executable

    @property
    def rank_env(self) -> dict[str, str]:
        """What every rank's environment must hold besides the network's settings."""
        gpus = self.NVIDIA_VISIBLE_DEVICES
        return {"CUDA_VISIBLE_DEVICES": gpus} if gpus else {}


_OF_SERVERS = ("LAUNCHBIN", "CODEHOME", "ETH_SCHEDULER_IP", "IB_SCHEDULER_IP", "WORKER_HOST_PREFIX")
"""Keys that the references' own files have for their methods with a parameter server."""


@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    """Which network between the hosts is used; for launchers that reach several."""

    rdma: Literal[0, 1, 2] = 0
    """0: TCP over Ethernet; 1: InfiniBand verbs where the library has them (NCCL, Open MPI with
    UCX), else TCP over the InfiniBand interface; 2: TCP over the InfiniBand interface."""
    interface: str | None = None
    """Network interface on every host; None: ETH_INTERFACE or IB_INTERFACE of envs.conf."""


def read_envs(path: Path = ENVS) -> Envs:
    """Reads lines `KEY=VALUE` (a shell may source the file, too); no file, no facts.

    The references' own file is understood. What it says of parameter servers, which there are none
    of here, is of no use; a line on stderr says so.

    Raises:
        UserError: a line of another form, or an unknown key.
    """
    known = [field.name for field in dataclasses.fields(Envs)]
    values: dict[str, str] = {}
    if not path.exists():
        return Envs()
    for number, line in _lines(path.read_text()):
        text = line.partition("#")[0].strip()
        found = re.fullmatch(r"""(\w+)=(["']?)([^"'\s]*)\2""", text)
        if found is None:
            raise UserError(f"{path} line {number}: must be KEY=VALUE, got {text!r}")
        if found[1] not in (*known, *_OF_SERVERS):
            raise unknown(f"key of {path.name}", found[1], known)
        values[found[1]] = found[3]
    useless = [name for name in _OF_SERVERS if values.pop(name, "")]
    if useless:
        _say_useless(path, tuple(useless))
    return Envs(**values)


@functools.cache
def _say_useless(path: Path, names: Sequence[str]) -> None:
    """Once, however often the file is read."""
    print(f"{path}: {', '.join(names)}: of parameter servers, not used", file=sys.stderr)


def interface(options: NetworkOptions, envs: Envs, hosts: Sequence[Host] | None) -> str:
    """The interface that ranks use towards other hosts; empty if the library shall choose.

    Raises:
        UserError: RDMA on virtual hosts or without an interface, or an interface that this machine,
            being among the hosts, does not have.
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
            f"rdma={options.rdma}: there is no interface {name!r} here (there are "
            f"{', '.join(known)}); set it in {ENVS}"
        )
    return name


def network_env(options: NetworkOptions, name: str) -> dict[str, str]:
    """What tells the libraries of every rank to use the interface `name` in the way asked for."""
    env = {"NCCL_IB_DISABLE": "0" if options.rdma == 1 else "1"}
    if options.rdma == 2:
        # The card then is a plain network card: no GPU memory is read or written by it.
        env |= {"NCCL_NET_GDR_LEVEL": "0", "NCCL_NET_GDR_READ": "0", "NCCL_IB_CUDA_SUPPORT": "0"}
    if name:
        env |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "COMM_CORE_IFNAME", "NCCL_SOCKET_IFNAME"), name)
    return env
