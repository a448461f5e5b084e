"""Run in a sandbox by test_faults.py: real faults between two hosts that talk all the time."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from common.emulation.cluster import EmulatedCluster
from common.emulation.config import Fault, network_profile
from common.emulation.faults import FaultInjector

LIMIT_S = 20.0
FOR_S = 2.0
ECHO = """
import socket, sys
server = socket.create_server((sys.argv[1], 4000))
line, _ = server.accept()
while data := line.recv(1):
    line.sendall(data)
"""
CALL = """
import socket, sys, time
deadline = time.monotonic() + 20
while True:
    try:
        line = socket.create_connection((sys.argv[1], 4000), timeout=20)
        break
    except ConnectionRefusedError:
        assert time.monotonic() < deadline
        time.sleep(0.05)
line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
for _ in sys.stdin:
    line.sendall(b"x")
    line.recv(1)
    print("answered", flush=True)
"""


def main(folder: Path) -> None:
    with EmulatedCluster(hosts=2, profile=network_profile("100mbit")) as cluster:
        link_down(cluster, folder)
        rates(cluster, folder)


def start(cluster: EmulatedCluster, folder: Path, fault: Fault) -> FaultInjector:
    (folder / "phase-0-rank0").write_text("2 measuring")
    injector = FaultInjector(fault, cluster, folder, 0, 1.0, 2, 1)
    injector.start()
    return injector


def link_down(cluster: EmulatedCluster, folder: Path) -> None:
    near, far = cluster.hosts
    python = [sys.executable, "-c"]
    echo = subprocess.Popen(far.command([*python, ECHO, far.address]))
    pipe = subprocess.PIPE
    caller = subprocess.Popen(
        near.command([*python, CALL, far.address]), stdin=pipe, stdout=pipe, text=True
    )
    ask(caller)
    fault = Fault(kind="link_down", host=1, for_s=FOR_S)
    injector = start(cluster, folder, fault)
    began = time.monotonic()
    # Round trips take far less than a millisecond; the one that meets the cut waits for its end.
    longest = 0.0
    while time.monotonic() - began < LIMIT_S and longest < FOR_S / 2:
        asked = time.monotonic()
        ask(caller)
        longest = time.monotonic() - asked
        time.sleep(0.01)
    assert longest >= FOR_S / 2, f"no exchange took longer than {longest:.3f} s"
    events = injector.stop()
    assert [event["what"] for event in events] == ["link cut", "link restored"], events
    assert all(event["ok"] for event in events), events
    caller.communicate(timeout=LIMIT_S)
    assert echo.wait(LIMIT_S) == 0


def ask(caller: subprocess.Popen[str]) -> None:
    assert caller.stdin is not None and caller.stdout is not None
    caller.stdin.write("\n")
    caller.stdin.flush()
    assert caller.stdout.readline() == "answered\n"


def rates(cluster: EmulatedCluster, folder: Path) -> None:
    injector = start(cluster, folder, Fault(kind="link_rate", host=1, rate="10mbit"))
    deadline = time.monotonic() + LIMIT_S
    # Far apart on purpose: the machine may be busy.
    while cluster.measure(0.3)[1]["up_gbps"] > 0.03:
        assert time.monotonic() < deadline, cluster.measure(0.3)
    (event,) = injector.stop()
    assert event["what"] == "link changed to 10mbit" and event["ok"], event
    while cluster.measure(0.3)[1]["up_gbps"] < 0.05:
        assert time.monotonic() < deadline, cluster.measure(0.3)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
