"""What a byte costs this machine's processors: over a virtual link, and in memory.

Run as a program it is one end of a transfer: `receive ADDRESS`, `send ADDRESS PORT SECONDS`.
"""

from __future__ import annotations

import json
import math
import os
import resource
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from common.emulation.cluster import EmulatedCluster

_ROOT = Path(__file__).parents[2]
_TRANSFER_S = 1.0
_LIMIT_S = 60.0
_CHUNK = 1 << 20
_MEMORY = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """CPU costs of one machine."""

    cpu_s_per_byte: float
    """CPU seconds, of both ends and of the kernel between them, per byte moved over a link."""
    memory_bytes_per_s: float
    """Bytes that one core reads and writes per second, in memory that it has used before."""


def calibrate(cluster: EmulatedCluster) -> Calibration:
    """Measures, in about two seconds, one transfer between the first two hosts, and the memory.

    With one host there is nothing to transfer, and a byte costs nothing.

    Raises:
        RuntimeError: the hosts cannot talk to each other.
    """
    per_byte = _transfer_cost(cluster) if len(cluster.hosts) > 1 else 0.0
    return Calibration(cpu_s_per_byte=per_byte, memory_bytes_per_s=_memory_speed())


def _memory_speed() -> float:
    source, target = b"\1" * _MEMORY, bytearray(_MEMORY)
    best = math.inf
    # The first round only makes the kernel hand out the pages.
    for _ in range(4):
        began = time.thread_time()  # not elapsed time: whatever else runs here does not count
        memoryview(target)[:] = source
        best = min(best, time.thread_time() - began)
    return 2 * _MEMORY / best


def _transfer_cost(cluster: EmulatedCluster) -> float:
    sender, receiver = cluster.hosts[0], cluster.hosts[1]
    base = [sys.executable, "-m", "common.emulation.calibration"]
    receiving = _start(receiver.command([*base, "receive", receiver.address]))
    try:
        assert receiving.stdout is not None
        port = receiving.stdout.readline().strip()
        if not port:
            _answer(receiving)  # raises with its last words
        arguments = ["send", receiver.address, port, str(_TRANSFER_S)]
        sending = _start(sender.command([*base, *arguments]))
        try:
            sent, received = _answer(sending), _answer(receiving)
        finally:
            _end(sending)
    finally:
        _end(receiving)
    # The kernel's part between the ends is charged to whoever is running: it shows in the
    # softirq time, some of it also in that of the ends. All busy time bounds it from above.
    spent = sent["cpu_s"] + received["cpu_s"] + sent["softirq_s"]
    return min(spent, max(sent["busy_s"], received["cpu_s"])) / received["bytes"]


def _start(command: list[str]) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=_ROOT, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True
    )


def _answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    try:
        output, errors = process.communicate(timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"calibration: no transfer in {_LIMIT_S:.0f} s") from None
    if process.returncode:
        raise RuntimeError(f"calibration: {(errors.strip().splitlines() or ['no reason'])[-1]}")
    return json.loads(output)


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.kill()
        process.communicate()


def _own_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _machine_cpu_s() -> tuple[float, float]:
    """All busy CPU time of this machine, and that of interrupts and their aftermath."""
    # user, nice, system, idle, iowait, irq, softirq, in clock ticks
    ticks = [int(v) for v in Path("/proc/stat").read_text().split("\n")[0].split()[1:8]]
    per_s = os.sysconf("SC_CLK_TCK")
    return (sum(ticks) - ticks[3] - ticks[4]) / per_s, (ticks[5] + ticks[6]) / per_s


def _receive(address: str) -> dict[str, float]:
    buffer = bytearray(_CHUNK)
    with socket.create_server((address, 0)) as server:
        server.settimeout(_LIMIT_S)
        print(server.getsockname()[1], flush=True)
        line, _ = server.accept()
    with line:
        line.settimeout(_LIMIT_S)
        began, count = _own_cpu_s(), 0
        while size := line.recv_into(buffer):
            count += size
    return {"bytes": count, "cpu_s": _own_cpu_s() - began}


def _send(address: str, port: int, seconds: float) -> dict[str, float]:
    chunk = memoryview(bytes(_CHUNK))
    with socket.create_connection((address, port), timeout=_LIMIT_S) as line:
        began, machine = _own_cpu_s(), _machine_cpu_s()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            line.sendall(chunk)
        line.shutdown(socket.SHUT_WR)
        line.recv(1)  # until the other end has taken everything and hung up
        spent = _own_cpu_s() - began
        busy, softirq = (now - then for now, then in zip(_machine_cpu_s(), machine, strict=True))
    return {"cpu_s": spent, "busy_s": busy, "softirq_s": softirq}


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        answer = _receive(sys.argv[2])
    else:
        answer = _send(sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
    print(json.dumps(answer))
