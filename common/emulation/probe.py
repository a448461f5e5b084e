"""One-way delays between virtual hosts, for all pairs at once, by packets with timestamps.

One-way delays can be measured because all hosts share this machine's clock. The ends run this file
as a script, which prints as JSON what it has received:

    probe.py listen ADDRESS                       prints its port first
    probe.py send ADDRESS PORT SECONDS AFTER_S    sends an end mark AFTER_S after the last packet
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

if __name__ != "__main__":
    from common.emulation.flow import OnHost, started

_SCRIPT = [sys.executable, "-I", "-S", __file__]
# Packet number (-1 for the end mark) and ns since the epoch; or the seconds and ns of a timestamp.
_NUMBERS = struct.Struct("<qq")
_SO_TIMESTAMPNS = 35  # from <asm-generic/socket.h>; Python does not define it
_INTERVAL_S = 0.001
_LIMIT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Delays:
    """One-way delays of one pair of hosts, in microseconds of this machine."""

    median_us: float
    p99_us: float
    quantiles_us: list[float]
    """Quantiles 5, 25, 50, 75 and 95 %."""
    sent: int
    lost: int


def all_pairs(
    pairs: Sequence[tuple[OnHost, OnHost]], seconds: float, after_s: float
) -> list[Delays]:
    """Sends a packet with 16 bytes of payload each millisecond, from first to second of each pair.
    `after_s` is the longest time that the last packet may take. Raises `RuntimeError` if fewer than
    two packets of a pair arrive."""
    results = []
    with ExitStack() as stack:

        def start(host: OnHost, *arguments: str) -> subprocess.Popen[str]:
            return stack.enter_context(started(host, *_SCRIPT, *arguments))

        listening = [start(target, "listen", target.address) for _, target in pairs]
        ports = [process.stdout.readline().strip() for process in listening]
        times = (str(seconds), str(after_s + 0.1))
        sending = [
            start(source, "send", target.address, port, *times)
            for (source, target), port in zip(pairs, ports, strict=True)
        ]
        for (source, target), sender, listener in zip(pairs, sending, listening, strict=True):
            errors = sender.communicate(timeout=_LIMIT_S + seconds)[1].strip()
            if sender.returncode:
                raise RuntimeError(f"{source.name} cannot send to {target.name}: {errors[-200:]}")
            delays_ns = json.loads(listener.communicate(timeout=_LIMIT_S)[0] or "[]")
            sent = round(seconds / _INTERVAL_S)
            if len(delays_ns) < 2:
                raise RuntimeError(f"no packet comes from {source.name} to {target.name}")
            cuts = statistics.quantiles(delays_ns, n=100, method="inclusive")
            shares = {share: cuts[share - 1] / 1e3 for share in (5, 25, 50, 75, 95, 99)}
            p99_us = shares.pop(99)
            delays = Delays(
                median_us=shares[50],
                p99_us=p99_us,
                quantiles_us=list(shares.values()),
                sent=sent,
                lost=sent - len(delays_ns),
            )
            results.append(delays)
    return results


def _listen(address: str) -> list[int]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        end.bind((address, 0))
        # The kernel's timestamp excludes the time until this process wakes up.
        end.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        end.settimeout(_LIMIT_S)
        print(end.getsockname()[1], flush=True)
        delays = []
        while True:
            data, control, _, _ = end.recvmsg(64, 64)
            number, sent = _NUMBERS.unpack_from(data)
            if number < 0:
                return delays
            for level, kind, value in control:
                if level == socket.SOL_SOCKET and kind == _SO_TIMESTAMPNS:
                    seconds, ns = _NUMBERS.unpack(value)
                    delays.append(seconds * 1_000_000_000 + ns - sent)


def _send(address: str, port: str, seconds: str, after_s: str) -> None:
    # Otherwise a wait for a core between reading the clock and sending would count as delay.
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    count = round(float(seconds) / _INTERVAL_S)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        end.connect((address, int(port)))
        began = time.monotonic()
        for number in range(count):
            time.sleep(max(0.0, began + number * _INTERVAL_S - time.monotonic()))
            end.send(_NUMBERS.pack(number, time.time_ns()))
        time.sleep(float(after_s))
        with contextlib.suppress(ConnectionRefusedError):  # the other end has received one
            for _ in range(20):
                end.send(_NUMBERS.pack(-1, 0))


if __name__ == "__main__":
    if sys.argv[1] == "listen":
        print(json.dumps(_listen(sys.argv[2])))
    else:
        _send(*sys.argv[2:])
