"""Addresses of virtual hosts, and what `ip` must do to join them by a bridge."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from common.emulation.enter import enter
from dear.errors import unknown

BRIDGE, IFNAME, PREFIX_LENGTH = "br0", "eth0", 16
BRIDGE_ADDRESS = "10.78.255.254"
_SUBNET = f"10.78.0.0/{PREFIX_LENGTH}"
_TCP = Path("/proc/sys/net/ipv4")
_PER_BLOCK = 250  # of the 256 values of the last byte


def address_of(host: int) -> str:
    """10.78.0.1 for host 0, 10.78.0.2 for host 1, and so on."""
    return f"10.78.{host // _PER_BLOCK}.{host % _PER_BLOCK + 1}"


def port_of(host: int) -> str:
    """The switch's end of the link of this host."""
    return f"p{host}"


def switch_commands(holders: Sequence[int]) -> list[str]:
    """Makes the bridge and a link to each host.

    Args:
        holders: a process on each host, for system calls.
    """
    lines = [
        f"link add name {BRIDGE} address {_mac(BRIDGE_ADDRESS)} type bridge",
        f"link set dev {BRIDGE} {_no_ipv6()} up",
        f"addr add {BRIDGE_ADDRESS}/{PREFIX_LENGTH} dev {BRIDGE}",
    ]
    for host, pid in enumerate(holders):
        port = port_of(host)
        lines += [
            f"link add name {port} type veth peer name {IFNAME} netns {pid}",
            f"link set dev {port} master {BRIDGE} {_no_ipv6()} up",
        ]
    return lines + _neighbours(BRIDGE, None, len(holders))


def host_commands(host: int, hosts: int) -> list[str]:
    """Makes the host's end of its link usable."""
    address = address_of(host)
    return [
        "link set dev lo up",
        f"link set dev {IFNAME} address {_mac(address)} {_no_ipv6()} up",
        f"addr add {address}/{PREFIX_LENGTH} dev {IFNAME}",
        *_neighbours(IFNAME, host, hosts),
    ]


def remove(hosts: int) -> None:
    """Undoes `switch_commands`, as far as it came; a link takes its other end with it."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    there = {line.partition(":")[0].strip() for line in lines}
    made = there & {BRIDGE, *map(port_of, range(hosts))}
    batch("ip", [f"link del dev {name}" for name in sorted(made)])


def choose_congestion(asked: str | None) -> str:
    """The TCP congestion control to use; see `EmulatedCluster`.

    Raises:
        UserError: this machine does not know what was asked for.
    """
    known = (_TCP / "tcp_available_congestion_control").read_text().split()
    if asked is not None:
        if asked not in known:
            raise unknown("congestion control", asked, known)
        return asked
    default = default_congestion()
    if default != "bbr":
        return default
    return "cubic" if "cubic" in known else "reno"


def default_congestion() -> str:
    """The TCP congestion control of this machine."""
    return (_TCP / "tcp_congestion_control").read_text().strip()


def loopback_commands(congestion: str) -> list[str]:
    """Has every connection over the loopback use this congestion control.

    By route: a namespace may not make a "restricted" algorithm (cubic) its default unless the
    whole machine allows it to everybody, and that is not ours to change.
    """
    how = f"dev lo table local proto kernel scope host src 127.0.0.1 congctl {congestion}"
    return [f"route replace local {to} {how}" for to in ("127.0.0.0/8", "127.0.0.1")]


def congestion_commands(device: str, address: str, congestion: str) -> list[str]:
    """Has every connection over `device`, or within the host, use this congestion control."""
    own = f"table local proto kernel scope host src {address} congctl {congestion}"
    link = f"proto kernel scope link src {address} congctl {congestion}"
    return [
        *loopback_commands(congestion),
        f"route replace local {address} dev {device} {own}",
        f"route replace {_SUBNET} dev {device} {link}",
    ]


def batch(tool: str, lines: Sequence[str], host: int | None = None) -> None:
    """Runs lines by `ip -batch` or `tc -batch`, in this network or that of process `host`.

    Raises:
        RuntimeError: with the line that was refused.
    """
    finish(start(tool, lines, host))


def start(tool: str, lines: Sequence[str], host: int | None = None) -> subprocess.Popen[str]:
    """Begins what `batch` does, for the many hosts of a cluster at once."""
    process = subprocess.Popen(
        [tool, "-batch", "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=None if host is None else lambda: enter(host, ("net",)),
    )
    assert process.stdin is not None
    try:
        process.stdin.write("".join(f"{line}\n" for line in lines))
        process.stdin.close()
    except BrokenPipeError:
        pass  # it has ended early, and says why on stderr
    process.stdin = None
    return process


def finish(process: subprocess.Popen[str]) -> None:
    """Waits for what `start` has begun."""
    _, stderr = process.communicate()
    if process.returncode:
        assert isinstance(process.args, list)
        reason = " ".join(stderr.split()) or f"exit status {process.returncode}"
        raise RuntimeError(f"{process.args[0]} -batch: {reason}")


def _neighbours(device: str, own: int | None, hosts: int) -> list[str]:
    # Known from the start: 64 hosts that ask for 64 addresses overflow the machine's ARP table,
    # and no measured message waits for an answer.
    known = [address_of(host) for host in range(hosts) if host != own]
    if own is not None:
        known.append(BRIDGE_ADDRESS)
    return [f"neigh add {ip} lladdr {_mac(ip)} dev {device} nud permanent" for ip in known]


def _mac(address: str) -> str:
    return "02:00:" + ":".join(f"{int(byte):02x}" for byte in address.split("."))


def _no_ipv6() -> str:
    # Else the kernel chatters over the links to find IPv6 neighbours.
    return "addrgenmode none" if Path("/proc/sys/net/ipv6").exists() else ""
