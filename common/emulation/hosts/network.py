"""Network of the virtual hosts: addresses, names, routes, and the links to a switch.

Meaning of a rate: all kinds of links count Ethernet frames without preamble, checksum and gap. A
full TCP segment has 1448 bytes of payload in 1514 counted bytes (14 Ethernet, 20 IP, 32 TCP with
timestamps). This also holds for segments that travel as one large packet, because the headers of
each count. So TCP payload flows at 1448/1514 = 95.6 % of the rate. On a real Ethernet of the same
rate, with 24 more bytes for preamble, checksum and gap, it is 94.1 %.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from common.emulation.hosts.namespaces import LOCALHOST, SWITCH, enter, proc_pid
from dear.errors import unknown

BRIDGE, IFNAME, PREFIX_LENGTH = "br0", "eth0", 16
BRIDGE_ADDRESS, SWITCH_MAC = "10.78.255.254", "02:00:0a:4e:ff:fe"
_SUBNET = f"10.78.0.0/{PREFIX_LENGTH}"
_TCP = Path("/proc/sys/net/ipv4")
_PER_BLOCK = 250  # addresses used of the 256 values of the last byte
# Linux's minimum retransmission timeout of TCP (TCP_RTO_MIN).
_RTO_MIN_MS = 200

TABLE = "DEAR_VIRTUAL_HOSTS"  # environment variable with the path of the host table, for rsh.py
_HOSTS = Path("/etc/hosts")
_TABLES = Path("/dev/shm")
_TRIES = 100


def address_of(host: int) -> str:
    """Returns 10.78.0.1 for host 0, 10.78.0.2 for host 1, and so on."""
    return f"10.78.{host // _PER_BLOCK}.{host % _PER_BLOCK + 1}"


def number_of(address: str) -> int:
    """Returns the last two bytes of an address as a number, which identifies the host."""
    high, low = address.split(".")[2:]
    return int(high) << 8 | int(low)


def port_of(host: int) -> str:
    """Name of the switch's end of this host's link."""
    return f"p{host}"


def cable_commands(holders: Sequence[int]) -> list[str]:
    """Returns the lines for `ip -batch` that create a link to each host. `holders` has the PID of a
    process on each host, for system calls."""
    lines = []
    for host, pid in enumerate(holders):
        port = port_of(host)
        lines += [
            f"link add name {port} type veth peer name {IFNAME} netns {pid}",
            f"link set dev {port} {no_ipv6()} up",
        ]
    return lines


def switch_commands(hosts: int) -> list[str]:
    """Returns the lines for `ip -batch` that configure the sandbox's own device."""
    return [
        f"link set dev {BRIDGE} {no_ipv6()} up",
        f"addr add {BRIDGE_ADDRESS}/{PREFIX_LENGTH} dev {BRIDGE}",
        *_neighbours(BRIDGE, None, hosts),
    ]


def host_commands(host: int, hosts: int) -> list[str]:
    """Returns the lines for `ip -batch` that configure the host's end of its link."""
    address = address_of(host)
    return [
        "link set dev lo up",
        f"link set dev {IFNAME} address {_mac(address)} {no_ipv6()} up",
        f"addr add {address}/{PREFIX_LENGTH} dev {IFNAME}",
        *_neighbours(IFNAME, host, hosts),
    ]


def remove(devices: Iterable[str]) -> None:
    """Removes those of the devices that exist; the kernel removes the other end of a link too."""
    lines = Path("/proc/self/net/dev").read_text(encoding="utf-8").splitlines()[2:]
    existing = {line.partition(":")[0].strip() for line in lines}
    batch("ip", [f"link del dev {name}" for name in sorted(existing.intersection(devices))])


def clear(devices: Collection[str]) -> None:
    """Removes what a program that was killed in this sandbox has left: its table and devices.

    If another program of this sandbox has a cluster now, the devices are that one's and stay.
    """
    tables = list(_TABLES.glob("virtual-hosts-*.json"))
    dead = [path for path in tables if not Path("/proc", path.stem.rpartition("-")[2]).exists()]
    for path in dead:
        path.unlink(missing_ok=True)
    if len(dead) < len(tables):
        return
    for _ in range(_TRIES - 1):
        with contextlib.suppress(RuntimeError):  # the kernel has removed one meanwhile
            remove(devices)
            return
        time.sleep(0.05)
    remove(devices)


def check_congestion(name: str) -> str:
    """Returns `name` if the kernel has this TCP congestion control, else raises `UserError`."""
    available = (_TCP / "tcp_available_congestion_control").read_text(encoding="utf-8").split()
    if name not in available:
        raise unknown("congestion control", name, available)
    return name


def default_congestion() -> str:
    """Default TCP congestion control of this machine."""
    return (_TCP / "tcp_congestion_control").read_text(encoding="utf-8").strip()


def loopback_commands(congestion: str) -> list[str]:
    """Returns the lines for `ip -batch` that set the congestion control of loopback connections.
    Routes set it: a namespace may select a "restricted" algorithm (cubic) as its default only if
    the whole machine allows it to everybody, and that setting must not be changed."""
    options = f"dev lo table local proto kernel scope host src 127.0.0.1 congctl {congestion}"
    return [f"route replace local {to} {options}" for to in ("127.0.0.0/8", "127.0.0.1")]


def congestion_commands(device: str, address: str, congestion: str) -> list[str]:
    """Returns the lines for `ip -batch` that set the congestion control within the host."""
    options = f"table local proto kernel scope host src {address} congctl {congestion}"
    return [*loopback_commands(congestion), f"route replace local {address} dev {device} {options}"]


def route_command(device: str, address: str, congestion: str, time_scale: float) -> str:
    """Returns the line for `ip -batch` that sets congestion control and minimum retransmission
    timeout of connections over `device`. The timeout is Linux's default, in emulated time."""
    rto_min_ms = max(1, round(_RTO_MIN_MS * time_scale))
    return (
        f"route replace {_SUBNET} dev {device} proto kernel scope link src {address} "
        f"congctl {congestion} rto_min {rto_min_ms}ms"
    )


def raise_buffers(nbytes: int, hosts: Sequence[int]) -> str | None:
    """Raises the limit of TCP buffers on these hosts to at least `nbytes` per connection. `hosts`
    has the PID of a process on each host, as /proc shows it. Returns the reason if the kernel
    refused, else None."""
    lines = []
    for name in ("tcp_rmem", "tcp_wmem"):
        least, first, most = map(int, (_TCP / name).read_text(encoding="utf-8").split())
        if most < nbytes:
            lines.append(f"echo {least} {first} {nbytes} > {_TCP / name}")
    if not lines:
        return None
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    script = ["sh", "-c", " && ".join(lines)]
    jobs = [
        subprocess.Popen(script, preexec_fn=functools.partial(enter, pid, ("net",)), **pipes)
        for pid in hosts
    ]
    errors = [job.communicate()[1].strip() for job in jobs]
    return next((error for error in errors if error), None)


def resolvable() -> bool:
    """Returns True if the sandbox has its own /etc/hosts."""
    return os.path.ismount(_HOSTS)


def publish(hosts: Mapping[str, tuple[str, int]]) -> None:
    """Makes host names resolve, and sets the environment variable that leads to the host table.
    `hosts` has the address, and the PID of a process on the host as /proc shows it, by host
    name."""
    lines = [f"{BRIDGE_ADDRESS} {SWITCH}"]
    lines += [f"{address} {name}" for name, (address, _) in hosts.items()]
    _write_hosts(lines)
    rows = {name: {"address": address, "pid": pid} for name, (address, pid) in hosts.items()}
    _table().write_text(json.dumps(rows), encoding="utf-8")
    # Each host has its own /dev/shm; this path leads to the one of the sandbox.
    os.environ[TABLE] = f"/proc/{proc_pid()}/root{_table()}"


def withdraw() -> None:
    """Undoes `publish`."""
    _write_hosts([f"127.0.0.1 {SWITCH}"])
    _table().unlink(missing_ok=True)
    os.environ.pop(TABLE, None)


def published() -> dict[str, int]:
    """Returns the PID of a process on each host, by name and by address. Raises `KeyError` if there
    is no table, because no parent process has built a cluster."""
    rows = json.loads(Path(os.environ[TABLE]).read_bytes())
    by_address = {row["address"]: row["pid"] for row in rows.values()}
    return {name: row["pid"] for name, row in rows.items()} | by_address


def batch(tool: str, lines: Sequence[str], host: int | None = None) -> None:
    """Runs lines with `ip -batch` or `tc -batch`, in this network or that of process `host`. Raises
    `RuntimeError` if a line was refused; the message contains it."""
    batches(tool, [(lines, host)])


def batches(tool: str, parts: Iterable[tuple[Sequence[str], int | None]]) -> None:
    """Runs several calls of `batch` at once; `parts` has the lines and the host of each."""
    jobs = []
    for lines, host in parts:
        with tempfile.TemporaryFile("w+") as file:
            file.write("".join(f"{line}\n" for line in lines))
            file.seek(0)
            into = None if host is None else functools.partial(enter, host, ("net",))
            pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
            command = [tool, "-batch", "-"]
            jobs.append(subprocess.Popen(command, stdin=file, preexec_fn=into, **pipes))
    # All have ended before the first error is raised.
    for job, stderr in [(job, job.communicate()[1]) for job in jobs]:
        if job.returncode:
            reason = " ".join(stderr.split()) or f"exit status {job.returncode}"
            raise RuntimeError(f"{tool} -batch: {reason}")


def _neighbours(device: str, own_host: int | None, hosts: int) -> list[str]:
    # Static entries, because 64 hosts that resolve 64 addresses overflow the machine's ARP table.
    # They also keep address resolution out of the measured messages.
    addresses = [address_of(host) for host in range(hosts) if host != own_host]
    if own_host is not None:
        addresses.append(BRIDGE_ADDRESS)
    return [f"neigh add {ip} lladdr {_mac(ip)} dev {device} nud permanent" for ip in addresses]


def _mac(address: str) -> str:
    return "02:00:" + ":".join(f"{int(byte):02x}" for byte in address.split("."))


def no_ipv6() -> str:
    """Returns words of `ip` that stop the kernel from looking for IPv6 neighbours on the links."""
    return "addrgenmode none" if Path("/proc/sys/net/ipv6").exists() else ""


def _table() -> Path:
    return _TABLES / f"virtual-hosts-{proc_pid()}.json"


def _write_hosts(lines: list[str]) -> None:
    if resolvable():
        _HOSTS.write_text(LOCALHOST + "".join(f"{line}\n" for line in lines), encoding="utf-8")
