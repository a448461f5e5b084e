"""How fast a link is: one TCP connection, both directions after another.

The far end runs on the host: `flow.py ADDRESS PORT SECONDS SKIP_S` sends, then receives, and
prints {"payload_bytes_per_s": ...} of what it has received. Standard library only.
"""

from __future__ import annotations

import json
import socket
import statistics
import subprocess
import sys
import time
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

_FRAME_BYTES = 1514  # of a full TCP segment, as tbf counts it
_CHUNK_BYTES = 256 * 1024
# On very fast links a direction ends by bytes before it ends by time.
MAX_BYTES = 256 * 1024 * 1024
_PARTS = 5
_TIMEOUT_S = 10.0


class OnHost(Protocol):
    """What is needed of a virtual host."""

    name: str

    def command(self, argv: Sequence[str]) -> list[str]: ...


def send(line: socket.socket, seconds: float) -> None:
    """Sends for so long, at most MAX_BYTES, then closes this direction."""
    line.settimeout(_TIMEOUT_S)
    chunk = memoryview(bytes(_CHUNK_BYTES))
    deadline = time.monotonic() + seconds
    left = MAX_BYTES
    while left > 0 and time.monotonic() < deadline:
        left -= line.send(chunk)
    line.shutdown(socket.SHUT_WR)


def receive(line: socket.socket, skip_s: float) -> float:
    """Payload in bytes per second; what comes in the first `skip_s` seconds does not count.

    The rest is cut into parts, whose median is not moved by a moment in which the machine was busy.
    """
    line.settimeout(_TIMEOUT_S)
    space = memoryview(bytearray(_CHUNK_BYTES))
    times: list[float] = []
    totals: list[int] = []
    total = 0
    while count := line.recv_into(space):
        total += count
        times.append(time.monotonic())
        totals.append(total)
    return _speed(times, totals, skip_s)


def _speed(times: list[float], totals: list[int], skip_s: float) -> float:
    if len(times) < 2 * _PARTS:
        raise RuntimeError(f"too little data came to measure by: {totals[-1:] or 0} bytes")
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
    return statistics.median(speeds)


def measure_link(host: OnHost, address: str, seconds: float, skip_s: float) -> tuple[float, float]:
    """What the link of `host` carries from and to it: Gb/s of Ethernet frames (see links.py).

    Args:
        host: where the far end runs.
        address: of this end.
        seconds: for each direction.
        skip_s: of these, at the beginning, do not count.

    Raises:
        RuntimeError: nothing, or next to nothing, comes through.
    """
    with socket.create_server((address, 0)) as server:
        server.settimeout(_TIMEOUT_S)
        where = [address, str(server.getsockname()[1]), str(seconds), str(skip_s)]
        command = host.command([sys.executable, "-I", "-S", __file__, *where])
        pipe = subprocess.PIPE
        far = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)
        try:
            with server.accept()[0] as line:
                payload_bytes = line.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
                up = receive(line, skip_s)
                send(line, seconds)
                down = json.loads(far.communicate(timeout=_TIMEOUT_S)[0])
        except (OSError, ValueError, RuntimeError, subprocess.TimeoutExpired) as error:
            far.kill()
            words = far.communicate()[1].strip().splitlines()[-1:] or [str(error)]
            raise RuntimeError(f"the link of {host.name} carries no data: {words[0]}") from error
        finally:
            far.kill()
            far.wait()
    factor = _FRAME_BYTES / payload_bytes * 8e-9
    return up * factor, down["payload_bytes_per_s"] * factor


def main(argv: list[str]) -> int:
    address, port, seconds, skip_s = argv[0], int(argv[1]), float(argv[2]), float(argv[3])
    with socket.create_connection((address, port), timeout=_TIMEOUT_S) as line:
        send(line, seconds)
        print(json.dumps({"payload_bytes_per_s": receive(line, skip_s)}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
