"""Facts of the cluster from `configs/envs.conf`, and what they mean for the libraries."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common.launch.hosts import Host, are_virtual
from dear.errors import UserError, unknown

ROOT = Path(__file__).parents[2]
ENVS = ROOT / "configs" / "envs.conf"


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

    @property
    def python(self) -> str:
        return self.PY or sys.executable


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

    Raises:
        UserError: a line of another form, or an unknown key.
    """
    known = [field.name for field in dataclasses.fields(Envs)]
    values: dict[str, str] = {}
    if not path.exists():
        return Envs()
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        found = re.fullmatch(r"""(\w+)=(["']?)([^"'\s]*)\2""", text)
        if found is None:
            raise UserError(f"{path} line {number}: must be KEY=VALUE, got {text!r}")
        if found[1] not in known:
            raise unknown(f"key of {path.name}", found[1], known)
        values[found[1]] = found[3]
    return Envs(**values)


def interface(options: NetworkOptions, envs: Envs, hosts: Sequence[Host] | None) -> str:
    """The interface that ranks use towards other hosts; empty if the library shall choose.

    Raises:
        UserError: RDMA on virtual hosts or without an interface, or an interface that this machine,
            being among the hosts, does not have.
    """
    if are_virtual(hosts):
        if options.rdma:
            raise UserError(f"rdma={options.rdma}: virtual hosts have Ethernet only; use rdma=0")
        assert hosts is not None and hosts[0].virtual is not None
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
