"""TCP transfer over a link: its rate, and its CPU cost per byte.

The ends on hosts run this file as a script, which prints as JSON what it has received:

    flow.py listen ADDRESS SKIP_S                             prints its port, then receives
    flow.py connect ADDRESS PORT SECONDS SKIP_S MAX_BYTES     sends, then receives
"""

from __future__ import annotations

import json
import math
import os
import socket
import statistics
import subprocess
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

FRAME_BYTES, PAYLOAD_BYTES = 1514, 1448  # as in links/profile.py, which a bare script cannot import
_CHUNK_BYTES = 256 * 1024
# On very fast links this limit, not the time, ends a direction.
_MAX_BYTES = 256 * 1024 * 1024
_PARTS = 5
_TIMEOUT_S = 10.0
_TRANSFER_S = 1.0
_LIMIT_S = 60.0
_SCRIPT = [sys.executable, "-I", "-S", __file__]


class OnHost(Protocol):
    """Attributes of a virtual host that this module needs."""

    name: str
    address: str

    def command(self, argv: Sequence[str]) -> list[str]: ...


def measure_link(host: OnHost, address: str, seconds: float, skip_s: float) -> tuple[float, float]:
    """Returns the rates from and to `host` over its link, in Gb/s of Ethernet frames. See
    network.py for the counted bytes. `address` is the IP address of this end. `seconds` are
    duration per direction; the first `skip_s` seconds do not count. Raises `RuntimeError` if no
    data, or too little data to measure, arrives."""
    with socket.create_server((address, 0)) as server:
        server.settimeout(_TIMEOUT_S)
        numbers = (server.getsockname()[1], seconds, skip_s, _MAX_BYTES)
        with started(host, *_SCRIPT, "connect", address, *map(str, numbers)) as remote:
            try:
                with server.accept()[0] as connection:
                    connection.settimeout(_TIMEOUT_S)
                    payload_bytes = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
                    up = _receive(connection, skip_s)["bytes_per_s"]
                    _send(connection, seconds, _MAX_BYTES)
                    down = json.loads(remote.communicate(timeout=_TIMEOUT_S)[0])["bytes_per_s"]
                    if up is None or down is None:
                        raise RuntimeError("too little data arrived to measure the rate")
            except (OSError, ValueError, RuntimeError, subprocess.TimeoutExpired) as error:
                remote.kill()
                last_line = remote.communicate()[1].strip().splitlines()[-1:] or [str(error)]
                reason = f"the link of {host.name} carries no data: {last_line[0]}"
                raise RuntimeError(reason) from error
    factor = FRAME_BYTES / payload_bytes * 8e-9
    return up * factor, down * factor


def ring(hosts: Sequence[OnHost], seconds: float, skip_s: float) -> list[float]:
    """Returns the rate that each host receives from the previous one while all send at once. Rates
    are in Gb/s of Ethernet frames. `seconds` is the duration; the first `skip_s` seconds do not
    count. Raises `RuntimeError` if no data, or too little data to measure, arrives."""
    with ExitStack() as stack:
        receiving = [
            stack.enter_context(started(host, *_SCRIPT, "listen", host.address, str(skip_s)))
            for host in hosts
        ]
        ports = [_port(process) for process in receiving]
        senders = [hosts[-1], *hosts[:-1]]
        for sender, receiver, port in zip(senders, hosts, ports, strict=True):
            numbers = map(str, (port, seconds, 0.0, math.inf))
            stack.enter_context(started(sender, *_SCRIPT, "connect", receiver.address, *numbers))
        rates = [_answer(process)["bytes_per_s"] for process in receiving]
    if None in rates:
        raise RuntimeError("too little data arrived to measure all links at once")
    return [rate * FRAME_BYTES / PAYLOAD_BYTES * 8e-9 for rate in rates]


def transfer_cost(
    sender: OnHost, receiver: OnHost, links_s: Callable[[], float] = lambda: 0.0
) -> float:
    """Returns the CPU seconds per byte moved, at both ends, in the kernel and in the switch.
    `links_s` returns the CPU seconds used so far by the switch program. Raises `RuntimeError` if
    the hosts cannot reach each other."""
    with started(receiver, *_SCRIPT, "listen", receiver.address, "0") as receiving:
        numbers = (_port(receiving), _TRANSFER_S, 0.0, math.inf)
        before_s = links_s()
        with started(sender, *_SCRIPT, "connect", receiver.address, *map(str, numbers)) as sending:
            sent, received = _answer(sending), _answer(receiving)
    # The kernel's work between the ends is charged to whichever process is running. It appears in
    # the softirq time, and partly in that of the ends. All busy time is an upper bound.
    between = links_s() - before_s
    spent = sent["cpu_s"] + received["cpu_s"] + sent["softirq_s"] + between
    return min(spent, max(sent["busy_s"], received["cpu_s"])) / received["bytes"]


@contextmanager
def started(host: OnHost, *words: str) -> Iterator[subprocess.Popen[str]]:
    """Runs a command on a host, with pipes for its output, and ends it by force if need be."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(host.command(words), text=True, **pipes)
    try:
        yield process
    finally:
        process.kill()  # no effect after a normal end
        process.communicate()


def _port(receiving: subprocess.Popen[str]) -> str:
    port = receiving.stdout.readline().strip()
    if not port:
        _answer(receiving)  # raises with the last line of its stderr
    return port


def _answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    try:
        output, errors = process.communicate(timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"no transfer in {_LIMIT_S:.0f} s") from None
    if process.returncode:
        raise RuntimeError(f"no transfer: {(errors.strip().splitlines() or ['no reason'])[-1]}")
    return json.loads(output)


def _send(connection: socket.socket, seconds: float, max_bytes: float) -> None:
    chunk = memoryview(bytes(_CHUNK_BYTES))
    deadline = time.monotonic() + seconds
    while max_bytes > 0 and time.monotonic() < deadline:
        max_bytes -= connection.send(chunk)
    connection.shutdown(socket.SHUT_WR)


def _receive(connection: socket.socket, skip_s: float) -> dict[str, Any]:
    """Returns `bytes`, and `bytes_per_s` of payload without the first `skip_s` seconds. The rate is
    None if too little data arrived. It is the median over parts of the time, so that a short busy
    period of the machine does not change it."""
    space = memoryview(bytearray(_CHUNK_BYTES))
    times: list[float] = []
    totals: list[int] = []
    total = 0
    while count := connection.recv_into(space):
        total += count
        times.append(time.monotonic())
        totals.append(total)
    if len(times) < 2 * _PARTS:
        return {"bytes": total, "bytes_per_s": None}
    # If the sender reached its byte limit early, at least half of the time counts.
    first = min(times[0] + skip_s, (times[0] + times[-1]) / 2)
    step = (times[-1] - first) / _PARTS
    edges = [bisect_left(times, first + step * part) for part in range(_PARTS)]
    edges.append(len(times) - 1)
    speeds = [
        (totals[b] - totals[a]) / (times[b] - times[a])
        for a, b in pairwise(edges)
        if times[b] > times[a]
    ]
    return {"bytes": total, "bytes_per_s": statistics.median(speeds)}


def cpu_s() -> tuple[float, float, float]:
    """CPU seconds of this process, busy seconds of its cores, and seconds of interrupts."""
    busy, irq, _ = map(sum, zip(*_core_s().values(), strict=True))
    return time.process_time(), busy, irq


def cores_s() -> dict[int, tuple[float, float]]:
    """Busy seconds, and seconds stolen by other virtual machines, of each core that this process
    may use."""
    return {core: (busy, steal) for core, (busy, _, steal) in _core_s().items()}


def _core_s() -> dict[int, tuple[float, float, float]]:
    """Busy (with interrupts), interrupt and stolen seconds of each core of this process."""
    ours, per_s = os.sched_getaffinity(0), os.sysconf("SC_CLK_TCK")
    seconds = {}
    for line in Path("/proc/stat").read_text(encoding="utf-8").splitlines():
        name, *values = line.split()
        if name.startswith("cpu") and name != "cpu" and int(name[3:]) in ours:
            ticks = [int(value) / per_s for value in values[:8]]
            user, nice, system, _, _, irq, softirq, steal = ticks
            seconds[int(name[3:])] = user + nice + system + irq + softirq, irq + softirq, steal
    return seconds


def main(role: str, address: str, *numbers: str) -> None:
    """Runs one end of a transfer on a host."""
    if role == "listen":
        with socket.create_server((address, 0)) as server:
            server.settimeout(_LIMIT_S)
            print(server.getsockname()[1], flush=True)
            connection, _ = server.accept()
        seconds, skip_s, max_bytes = 0.0, float(numbers[0]), 0.0
    else:
        connection = socket.create_connection((address, int(numbers[0])), timeout=_TIMEOUT_S)
        seconds, skip_s, max_bytes = map(float, numbers[1:])
    with connection:
        connection.settimeout(_LIMIT_S)
        before = cpu_s()
        if seconds:
            _send(connection, seconds, max_bytes)
        # A sender waits here until the other end has received everything and closed.
        received = _receive(connection, skip_s)
        spent = (now - then for now, then in zip(cpu_s(), before, strict=True))
    names = ("cpu_s", "busy_s", "softirq_s")
    print(json.dumps({**received, **dict(zip(names, spent, strict=True))}))


if __name__ == "__main__":
    main(*sys.argv[1:])
