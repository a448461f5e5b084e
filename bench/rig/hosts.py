"""Where ranks run: this machine, or virtual hosts joined by shaped links."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from common.emulation import network, sandbox
from common.emulation.cluster import EmulatedCluster, VirtualHost
from common.emulation.config import network_profile

UNLIMITED = "none"


@dataclass(frozen=True, kw_only=True)
class ThisMachine:
    """The machine itself, spoken of as a virtual host is."""

    ifname: str
    name: str = "local"
    address: str = "127.0.0.1"

    def command(self, argv: Sequence[str]) -> list[str]:
        return list(argv)


Host = ThisMachine | VirtualHost


@contextlib.contextmanager
def built(
    count: int, rate: str = UNLIMITED, congestion: str | None = None, ifname: str = "lo"
) -> Iterator[list[Host]]:
    """The hosts; on exit virtual ones are removed with whatever still runs on them.

    Args:
        count: number of virtual hosts, or 0 for this machine alone.
        rate: speed of every link in both directions, as tc writes it, or "none".
        congestion: TCP congestion control of every connection between ranks; None: the default.
        ifname: interface to use on this machine (virtual hosts have only eth0).

    Virtual hosts, and a congestion control of one's own, need a sandbox: there the setting reaches
    every engine and nothing outside of the benchmark. On this machine it has only a loopback.

    Raises:
        RuntimeError: outside of a sandbox that would be needed.
    """
    if count == 0:
        if congestion is not None:
            if not sandbox.inside():
                raise RuntimeError("a congestion control of one's own needs a sandbox")
            network.batch("ip", network.loopback_commands(congestion))
        yield [ThisMachine(ifname=ifname)]
        return
    with EmulatedCluster(
        hosts=count,
        profile=network_profile("1gbit" if rate == UNLIMITED else rate),
        # Also without a choice every engine gets what the machine would give it.
        congestion=congestion or network.default_congestion(),
    ) as cluster:
        if rate == UNLIMITED:
            for index, host in enumerate(cluster.hosts):
                network.batch("tc", [f"qdisc del dev {network.port_of(index)} root"])
                network.batch("tc", [f"qdisc del dev {host.ifname} root"], host.pid)
        yield list(cluster.hosts)
