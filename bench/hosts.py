"""Where ranks run: this machine, or virtual hosts joined by shaped links."""

from __future__ import annotations

from dataclasses import dataclass

from common.emulation import network, sandbox
from common.emulation.cluster import EmulatedCluster, VirtualHost
from common.emulation.config import NetworkProfile, network_profile
from common.emulation.sandbox import unable
from dear.errors import UserError

UNLIMITED = "none"


@dataclass(frozen=True, kw_only=True)
class Host:
    """One host that ranks run on.

    Attributes:
        name: what ranks of this host share as host identity.
        address: where the other hosts reach it.
        ifname: the interface of that address.
        virtual: the virtual host it is, or None for the machine itself.
    """

    name: str
    address: str
    ifname: str
    virtual: VirtualHost | None = None

    def command(self, command: list[str]) -> list[str]:
        """`command` as it must be started to run on this host."""
        return command if self.virtual is None else self.virtual.command(command)


class Hosts:
    """`with Hosts(...) as hosts: hosts.all` - built on entry, removed on exit.

    Args:
        count: number of virtual hosts, or 0 for this machine alone.
        rate: speed of every link in both directions, as tc writes it, or "none".
        congestion: TCP congestion control of every connection between ranks; None: the default.
        ifname: interface to use on this machine (virtual hosts have only eth0).

    Virtual hosts, and a congestion control of one's own, need a sandbox: there the setting reaches
    every engine and nothing outside of the benchmark. On this machine it has only a loopback.

    Raises:
        RuntimeError: on entry, outside of a sandbox that would be needed.
    """

    def __init__(
        self,
        count: int,
        rate: str = UNLIMITED,
        congestion: str | None = None,
        ifname: str = "lo",
    ) -> None:
        self.virtual = count > 0
        self.all = [Host(name="local", address="127.0.0.1", ifname=ifname)]
        self._congestion = congestion
        self._unlimited = rate == UNLIMITED
        self._cluster: EmulatedCluster | None = None
        if self.virtual:
            # Also without a choice every engine gets what the machine would give it.
            chosen = congestion or network.default_congestion()
            self._cluster = EmulatedCluster(hosts=count, profile=_profile(rate), congestion=chosen)

    def __enter__(self) -> Hosts:
        if self._cluster is not None:
            self._cluster.__enter__()
            try:
                self._take_hosts(self._cluster)
            except BaseException:
                self.remove()
                raise
        elif self._congestion is not None:
            if not sandbox.inside():
                raise RuntimeError("a congestion control of one's own needs a sandbox")
            network.batch("ip", network.loopback_commands(self._congestion))
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Ends what still runs on the virtual hosts, and removes them."""
        if self._cluster is not None:
            self._cluster.__exit__(None, None, None)

    def _take_hosts(self, cluster: EmulatedCluster) -> None:
        if self._unlimited:
            for index, host in enumerate(cluster.hosts):
                network.batch("tc", [f"qdisc del dev {network.port_of(index)} root"])
                network.batch("tc", [f"qdisc del dev {host.ifname} root"], host.pid)
        self.all = [
            Host(name=host.name, address=host.address, ifname=host.ifname, virtual=host)
            for host in cluster.hosts
        ]


def need_sandbox(count: int, congestion: str | None) -> bool:
    """Whether `Hosts` of these arguments can be built only in a sandbox, and this is none.

    Raises:
        UserError: a sandbox cannot be made here.
    """
    if (count == 0 and congestion is None) or sandbox.inside():
        return False
    reason = unable()
    if reason:
        raise UserError(
            f"--hosts netns and --congestion build network namespaces: {reason}; "
            "or use --hosts local without --congestion"
        )
    return True


def _profile(rate: str) -> NetworkProfile:
    return network_profile("1gbit" if rate == UNLIMITED else rate)
