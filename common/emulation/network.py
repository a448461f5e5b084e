"""Virtual hosts in a network: addresses and names, a bridge that joins them, and shaped links.

What a rate means. The token bucket (tbf) counts Ethernet frames without preamble, checksum and
gap: a full segment of TCP carries 1448 bytes of payload in 1514 counted bytes (14 Ethernet, 20 IP,
32 TCP with timestamps), also when many segments travel as one large packet, because the kernel
counts the headers of each. So TCP payload flows at 1448/1514 = 95.6 % of the rate. On a real
Ethernet of that rate, where preamble, checksum and gap cost 24 bytes more, it is 94.1 %.
"""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from common.emulation.config import FRAME_BYTES, NetworkProfile
from common.emulation.namespaces import enter, proc_pid
from common.emulation.sandbox import LOCALHOST, SWITCH
from dear.errors import unknown

BRIDGE, IFNAME, PREFIX_LENGTH = "br0", "eth0", 16
BRIDGE_ADDRESS = "10.78.255.254"
_SUBNET = f"10.78.0.0/{PREFIX_LENGTH}"
_TCP = Path("/proc/sys/net/ipv4")
_PER_BLOCK = 250  # of the 256 values of the last byte
# One large packet of TCP, 64 KiB in 46 segments with headers, as the bucket counts it: what exceeds
# the bucket is cut up, slowly. And tokens for the time that a timer may be late: with them four
# hosts that all send at once keep 10 Gb/s at time scales from 6 to 16.
_LARGEST_BYTES, _LATE_S = 64 * 1024 + 46 * 66, 200e-6
# Linux's least time before TCP sends again what was not acknowledged (TCP_RTO_MIN).
_RTO_MIN_MS = 200
# A switch with deep buffers: in seconds of this machine, and never less than a few bursts.
_QUEUE_S, _MIN_QUEUE_BYTES = 0.05, 1024 * 1024
# Handles of the queues: of different kinds they must differ, or the kernel refuses to replace one.
_TBF_ALONE, _NETEM, _TBF_BELOW = "1:", "2:", "3:"

TABLE = "DEAR_VIRTUAL_HOSTS"  # the environment variable that names the file of hosts, for rsh.py
_HOSTS = Path("/etc/hosts")


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


def delays(profile: NetworkProfile) -> bool:
    """Whether the profile asks for more than a bandwidth."""
    return profile.latency_us > 0 or profile.loss_percent > 0


@functools.cache
def has_netem() -> bool:
    """Whether the kernel can delay and lose packets; asked of it, in a sandbox."""
    try:
        batch("tc", ["qdisc add dev lo root netem delay 1us", "qdisc del dev lo root"])
    except RuntimeError:
        return False
    return True


def shape(device: str, profile: NetworkProfile, time_scale: float, netem: bool) -> list[str]:
    """Gives `device` its queues, or changes those it has from an earlier call.

    Args:
        time_scale: the link is this many times slower, and its delay longer, than the profile's.
        netem: also delay and lose packets.
    """
    delay = [_delay(device, profile, time_scale)] if netem else []
    return delay + reshape(device, profile.gbps, time_scale, netem)


def burst_bytes(gbps: float, time_scale: float) -> int:
    """What a link passes at once after a rest, as fast as this machine can."""
    return _LARGEST_BYTES + math.ceil(gbps * 1e9 / time_scale / 8 * _LATE_S)


def reshape(device: str, gbps: float, time_scale: float, netem: bool) -> list[str]:
    """Changes the rate alone; what is queued stays queued."""
    where = f"parent {_NETEM}1 handle {_TBF_BELOW}" if netem else f"root handle {_TBF_ALONE}"
    bits_per_s = gbps * 1e9 / time_scale
    burst = burst_bytes(gbps, time_scale)
    limit = burst + max(_MIN_QUEUE_BYTES, math.ceil(bits_per_s / 8 * _QUEUE_S))
    return [
        f"qdisc replace dev {device} {where} "
        f"tbf rate {round(bits_per_s)}bit burst {burst}b limit {limit}b"
    ]


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


def _no_ipv6() -> str:
    # Else the kernel chatters over the links to find IPv6 neighbours.
    return "addrgenmode none" if Path("/proc/sys/net/ipv6").exists() else ""


def _delay(device: str, profile: NetworkProfile, time_scale: float) -> str:
    delay_us, jitter_us = profile.latency_us * time_scale, profile.jitter_us * time_scale
    under_way = profile.gbps * 1e9 / time_scale / 8 / FRAME_BYTES * (delay_us + jitter_us) * 1e-6
    words = f"limit {1000 + math.ceil(2 * under_way)} delay {delay_us:g}us"
    if jitter_us:
        words += f" {jitter_us:g}us"
    if profile.loss_percent:
        words += f" loss {profile.loss_percent:g}%"
    return f"qdisc replace dev {device} root handle {_NETEM} netem {words}"


def _table() -> Path:
    return Path("/dev/shm", f"virtual-hosts-{os.getpid()}.json")


def _write_hosts(lines: list[str]) -> None:
    if resolvable():
        _HOSTS.write_text(LOCALHOST + "".join(f"{line}\n" for line in lines))
