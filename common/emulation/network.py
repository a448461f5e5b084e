"""Virtual hosts in a network: addresses, names, routes, and the cables to a switch.

What a rate means. Whatever shapes the links (see links) counts Ethernet frames without preamble,
checksum and gap: a full segment of TCP carries 1448 bytes of payload in 1514 counted bytes (14
Ethernet, 20 IP, 32 TCP with timestamps), also when many segments travel as one large packet,
because the headers of each count. So TCP payload flows at 1448/1514 = 95.6 % of the rate. On a real
Ethernet of that rate, where preamble, checksum and gap cost 24 bytes more, it is 94.1 %.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from common.emulation.namespaces import enter, proc_pid
from common.emulation.sandbox import LOCALHOST, SWITCH
from dear.errors import unknown

BRIDGE, IFNAME, PREFIX_LENGTH = "br0", "eth0", 16
BRIDGE_ADDRESS, SWITCH_MAC = "10.78.255.254", "02:00:0a:4e:ff:fe"
_SUBNET = f"10.78.0.0/{PREFIX_LENGTH}"
_TCP = Path("/proc/sys/net/ipv4")
_PER_BLOCK = 250  # of the 256 values of the last byte
# Linux's least time before TCP sends again what was not acknowledged (TCP_RTO_MIN).
_RTO_MIN_MS = 200

TABLE = "DEAR_VIRTUAL_HOSTS"  # the environment variable that names the file of hosts, for rsh.py
_HOSTS = Path("/etc/hosts")


def address_of(host: int) -> str:
    """10.78.0.1 for host 0, 10.78.0.2 for host 1, and so on."""
    return f"10.78.{host // _PER_BLOCK}.{host % _PER_BLOCK + 1}"


def number_of(address: str) -> int:
    """The last two bytes of an address, which tell hosts apart."""
    high, low = address.split(".")[2:]
    return int(high) << 8 | int(low)


def port_of(host: int) -> str:
    """The switch's end of the link of this host."""
    return f"p{host}"


def cable_commands(holders: Sequence[int]) -> list[str]:
    """Lays a cable to each host.

    Args:
        holders: a process on each host, for system calls.
    """
    lines = []
    for host, pid in enumerate(holders):
        port = port_of(host)
        lines += [
            f"link add name {port} type veth peer name {IFNAME} netns {pid}",
            f"link set dev {port} {no_ipv6()} up",
        ]
    return lines


def switch_commands(hosts: int) -> list[str]:
    """Makes the sandbox's own device usable."""
    return [
        f"link set dev {BRIDGE} {no_ipv6()} up",
        f"addr add {BRIDGE_ADDRESS}/{PREFIX_LENGTH} dev {BRIDGE}",
        *_neighbours(BRIDGE, None, hosts),
    ]


def host_commands(host: int, hosts: int) -> list[str]:
    """Makes the host's end of its link usable."""
    address = address_of(host)
    return [
        "link set dev lo up",
        f"link set dev {IFNAME} address {_mac(address)} {no_ipv6()} up",
        f"addr add {address}/{PREFIX_LENGTH} dev {IFNAME}",
        *_neighbours(IFNAME, host, hosts),
    ]


def remove(devices: Iterable[str]) -> None:
    """Removes what is there of these; a link takes its other end with it."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    there = {line.partition(":")[0].strip() for line in lines}
    batch("ip", [f"link del dev {name}" for name in sorted(there.intersection(devices))])


def check_congestion(name: str) -> str:
    """Returns the TCP congestion control `name`, or raises `UserError` if the kernel lacks it."""
    known = (_TCP / "tcp_available_congestion_control").read_text().split()
    if name not in known:
        raise unknown("congestion control", name, known)
    return name


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
    """Has every connection within the host use this congestion control."""
    own = f"table local proto kernel scope host src {address} congctl {congestion}"
    return [*loopback_commands(congestion), f"route replace local {address} dev {device} {own}"]


def route_command(device: str, address: str, congestion: str, time_scale: float) -> str:
    """Has every connection over `device` use this congestion control, and wait for a lost packet
    for as long as on the real network at least, in emulated time."""
    rto_min_ms = max(1, round(_RTO_MIN_MS * time_scale))
    return (
        f"route replace {_SUBNET} dev {device} proto kernel scope link src {address} "
        f"congctl {congestion} rto_min {rto_min_ms}ms"
    )


def raise_buffers(nbytes: int, hosts: Sequence[int]) -> str | None:
    """Lets each connection on these hosts have buffers of so many bytes, if it may not have more.

    Args:
        hosts: a process on each, as /proc shows it.

    Returns:
        Why that was refused, or None.
    """
    lines = []
    for name in ("tcp_rmem", "tcp_wmem"):
        least, first, most = map(int, (_TCP / name).read_text().split())
        if most < nbytes:
            lines.append(f"echo {least} {first} {nbytes} > {_TCP / name}")
    if not lines:
        return None
    how = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    script = ["sh", "-c", " && ".join(lines)]
    jobs = [
        subprocess.Popen(script, preexec_fn=functools.partial(enter, pid, ("net",)), **how)
        for pid in hosts
    ]
    errors = [job.communicate()[1].strip() for job in jobs]
    return next((error for error in errors if error), None)


def resolvable() -> bool:
    """Whether the sandbox has an /etc/hosts of its own."""
    return os.path.ismount(_HOSTS)


def publish(hosts: Mapping[str, tuple[str, int]]) -> None:
    """Makes names resolve, and this process's environment lead its children to the table.

    Args:
        hosts: for each name, the address and a process on the host, as /proc shows it.
    """
    lines = [f"{BRIDGE_ADDRESS} {SWITCH}"]
    lines += [f"{address} {name}" for name, (address, _) in hosts.items()]
    _write_hosts(lines)
    rows = {name: {"address": address, "pid": pid} for name, (address, pid) in hosts.items()}
    _table().write_text(json.dumps(rows))
    # Each host has another /dev/shm; by this path it finds the one of the sandbox.
    os.environ[TABLE] = f"/proc/{proc_pid()}/root{_table()}"


def withdraw() -> None:
    """Undoes `publish`."""
    _write_hosts([f"127.0.0.1 {SWITCH}"])
    _table().unlink(missing_ok=True)
    os.environ.pop(TABLE, None)


def published() -> dict[str, int]:
    """The process on each host, by name and by address.

    Raises:
        KeyError: there is no table: this process was not started by a program with a cluster.
    """
    rows = json.loads(Path(os.environ[TABLE]).read_text())
    by_address = {row["address"]: row["pid"] for row in rows.values()}
    return {name: row["pid"] for name, row in rows.items()} | by_address


def batch(tool: str, lines: Sequence[str], host: int | None = None) -> None:
    """Runs lines by `ip -batch` or `tc -batch`, in this network or that of process `host`.

    Raises:
        RuntimeError: with the line that was refused.
    """
    finish(start(tool, lines, host))


def start(tool: str, lines: Sequence[str], host: int | None = None) -> subprocess.Popen[str]:
    """Begins what `batch` does, for the many hosts of a cluster at once."""
    with tempfile.TemporaryFile("w+") as file:
        file.write("".join(f"{line}\n" for line in lines))
        file.seek(0)
        into = None if host is None else lambda: enter(host, ("net",))
        how = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen([tool, "-batch", "-"], stdin=file, preexec_fn=into, **how)


def finish(process: subprocess.Popen[str]) -> None:
    """Waits for what `start` has begun."""
    _, stderr = process.communicate()
    if process.returncode:
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


def no_ipv6() -> str:
    """Words for ip, without which the kernel looks for IPv6 neighbours over the links."""
    return "addrgenmode none" if Path("/proc/sys/net/ipv6").exists() else ""


def _table() -> Path:
    return Path("/dev/shm", f"virtual-hosts-{os.getpid()}.json")


def _write_hosts(lines: list[str]) -> None:
    if resolvable():
        _HOSTS.write_text(LOCALHOST + "".join(f"{line}\n" for line in lines))
