"""One TCP transfer over a link: how fast it goes, and what a byte of it costs the processors.

The ends on hosts are this file run as a script, which prints as JSON what it has received:

    flow.py listen ADDRESS SKIP_S                             prints its port first, receives
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

FRAME_BYTES, PAYLOAD_BYTES = 1514, 1448  # as in config.py; this file imports nothing of it
_CHUNK_BYTES = 256 * 1024
# On very fast links a direction ends by bytes before it ends by time.
_MAX_BYTES = 256 * 1024 * 1024
_PARTS = 5
_TIMEOUT_S = 10.0
_TRANSFER_S = 1.0
_LIMIT_S = 60.0
_SCRIPT = [sys.executable, "-I", "-S", __file__]


class OnHost(Protocol):
    """What is needed of a virtual host."""

    name: str
    address: str

    def command(self, argv: Sequence[str]) -> list[str]: ...


def measure_link(host: OnHost, address: str, seconds: float, skip_s: float) -> tuple[float, float]:
    """What the link of `host` carries from and to it: Gb/s of Ethernet frames (see network.py).

    Args:
        address: of this end.
        seconds: for each direction, of which the first `skip_s` do not count.

    Raises:
        RuntimeError: nothing, or next to nothing, comes through.
    """
    with socket.create_server((address, 0)) as server:
        server.settimeout(_TIMEOUT_S)
        numbers = (server.getsockname()[1], seconds, skip_s, _MAX_BYTES)
        with _started(host, "connect", address, *map(str, numbers)) as far:
            try:
                with server.accept()[0] as line:
                    line.settimeout(_TIMEOUT_S)
                    payload_bytes = line.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
                    up = _receive(line, skip_s)["bytes_per_s"]
                    _send(line, seconds, _MAX_BYTES)
                    down = json.loads(far.communicate(timeout=_TIMEOUT_S)[0])["bytes_per_s"]
                    if up is None or down is None:
                        raise RuntimeError("too little data came to measure by")
            except (OSError, ValueError, RuntimeError, subprocess.TimeoutExpired) as error:
                far.kill()
                words = far.communicate()[1].strip().splitlines()[-1:] or [str(error)]
                reason = f"the link of {host.name} carries no data: {words[0]}"
                raise RuntimeError(reason) from error
    factor = FRAME_BYTES / payload_bytes * 8e-9
    return up * factor, down * factor


def ring(hosts: Sequence[OnHost], seconds: float, skip_s: float) -> list[float]:
    """What each host receives from the one before it, all sending at once: Gb/s of frames.

    Args:
        seconds: of which the first `skip_s` do not count.

    Raises:
        RuntimeError: nothing, or next to nothing, comes through.
    """
    with ExitStack() as stack:
        receiving = [
            stack.enter_context(_started(host, "listen", host.address, str(skip_s)))
            for host in hosts
        ]
        ports = [_port(process) for process in receiving]
        senders = [hosts[-1], *hosts[:-1]]
        for sender, receiver, port in zip(senders, hosts, ports, strict=True):
            words = map(str, (port, seconds, 0.0, math.inf))
            stack.enter_context(_started(sender, "connect", receiver.address, *words))
        found = [_answer(process)["bytes_per_s"] for process in receiving]
    if None in found:
        raise RuntimeError("too little data came to measure all links at once by")
    return [rate * FRAME_BYTES / PAYLOAD_BYTES * 8e-9 for rate in found]


def transfer_cost(
    sender: OnHost, receiver: OnHost, links_s: Callable[[], float] = lambda: 0.0
) -> float:
    """CPU seconds per byte moved: of both ends, of the kernel, and of what is between them.

    Args:
        links_s: CPU seconds so far of a program that is the links.

    Raises:
        RuntimeError: the hosts cannot talk to each other.
    """
    with _started(receiver, "listen", receiver.address, "0") as receiving:
        numbers = (_port(receiving), _TRANSFER_S, 0.0, math.inf)
        before_s = links_s()
        with _started(sender, "connect", receiver.address, *map(str, numbers)) as sending:
            sent, received = _answer(sending), _answer(receiving)
    # The kernel's part between the ends is charged to whoever is running: it shows in the
    # softirq time, some of it also in that of the ends. All busy time bounds it from above.
    between = links_s() - before_s
    spent = sent["cpu_s"] + received["cpu_s"] + sent["softirq_s"] + between
    return min(spent, max(sent["busy_s"], received["cpu_s"])) / received["bytes"]


@contextmanager
def _started(host: OnHost, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    how = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(host.command([*_SCRIPT, *arguments]), text=True, **how)
    try:
        yield process
    finally:
        process.kill()  # without effect after a normal end
        process.communicate()


def _port(receiving: subprocess.Popen[str]) -> str:
    """Where it listens, from then on."""
    port = receiving.stdout.readline().strip()
    if not port:
        _answer(receiving)  # raises with its last words
    return port


def _answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    try:
        output, errors = process.communicate(timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"no transfer in {_LIMIT_S:.0f} s") from None
    if process.returncode:
        raise RuntimeError(f"no transfer: {(errors.strip().splitlines() or ['no reason'])[-1]}")
    return json.loads(output)


def _send(line: socket.socket, seconds: float, max_bytes: float) -> None:
    """Sends for so long, at most so much, then closes this direction."""
    chunk = memoryview(bytes(_CHUNK_BYTES))
    deadline = time.monotonic() + seconds
    while max_bytes > 0 and time.monotonic() < deadline:
        max_bytes -= line.send(chunk)
    line.shutdown(socket.SHUT_WR)


def _receive(line: socket.socket, skip_s: float) -> dict[str, Any]:
    """`bytes` and `bytes_per_s` of payload; what comes in the first `skip_s` does not count there.

    The speed is None of too little. The rest is cut into parts, whose median is not moved by a
    moment in which the machine was busy.
    """
    space = memoryview(bytearray(_CHUNK_BYTES))
    times: list[float] = []
    totals: list[int] = []
    total = 0
    while count := line.recv_into(space):
        total += count
        times.append(time.monotonic())
        totals.append(total)
    if len(times) < 2 * _PARTS:
        return {"bytes": total, "bytes_per_s": None}
    # Where the sender ran out of bytes before the time was over, at least half must count.
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
    """CPU time of this process, all busy time of its cores, and that of interrupts."""
    ticks = _ticks().values()
    per_s = os.sysconf("SC_CLK_TCK")
    busy = sum(busy for busy, _, _ in ticks)
    return time.process_time(), busy / per_s, sum(irq for _, irq, _ in ticks) / per_s


def cores_s() -> dict[int, tuple[float, float]]:
    """By core that this process may use: seconds that it was busy, and that another virtual
    machine had it."""
    per_s = os.sysconf("SC_CLK_TCK")
    return {core: (busy / per_s, steal / per_s) for core, (busy, _, steal) in _ticks().items()}


def _ticks() -> dict[int, tuple[int, int, int]]:
    """By core that this process may use, in clock ticks: busy, with interrupts, and stolen."""
    ours = os.sched_getaffinity(0)
    found = {}
    for line in Path("/proc/stat").read_text().splitlines():
        name, *values = line.split()
        if name.startswith("cpu") and name != "cpu" and int(name[3:]) in ours:
            user, nice, system, _, _, irq, softirq, steal = map(int, values[:8])
            found[int(name[3:])] = user + nice + system + irq + softirq, irq + softirq, steal
    return found


def main(role: str, address: str, *numbers: str) -> None:
    """One end on a host."""
    if role == "listen":
        with socket.create_server((address, 0)) as server:
            server.settimeout(_LIMIT_S)
            print(server.getsockname()[1], flush=True)
            line, _ = server.accept()
        seconds, skip_s, max_bytes = 0.0, float(numbers[0]), 0.0
    else:
        line = socket.create_connection((address, int(numbers[0])), timeout=_TIMEOUT_S)
        seconds, skip_s, max_bytes = map(float, numbers[1:])
    with line:
        line.settimeout(_LIMIT_S)
        before = cpu_s()
        if seconds:
            _send(line, seconds, max_bytes)
        # Who only sends waits here until the other end has taken everything and hung up.
        received = _receive(line, skip_s)
        spent = (now - then for now, then in zip(cpu_s(), before, strict=True))
    names = ("cpu_s", "busy_s", "softirq_s")
    print(json.dumps({**received, **dict(zip(names, spent, strict=True))}))


if __name__ == "__main__":
    main(*sys.argv[1:])
