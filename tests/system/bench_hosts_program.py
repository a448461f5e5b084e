"""Run in a sandbox by test_bench.py: `bench_hosts_program.py CASE`."""

from __future__ import annotations

import subprocess
import sys

from bench.rig import team

LISTEN = "import socket, sys; socket.create_server((sys.argv[1], 7))"


def succeeds(host: team.Host, command: list[str]) -> bool:
    done = subprocess.run(host.command(command), capture_output=True, text=True, timeout=30)
    return done.returncode == 0


def queues(host: team.Host) -> str:
    command = host.command(["tc", "qdisc", "show", "dev", host.ifname])
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def virtual(rate: str) -> None:
    left = None
    try:
        with team.built(2, rate, "reno") as there:
            assert [host.name for host in there] == ["h0", "h1"]
            first, second = there
            listen = [sys.executable, "-c", LISTEN, first.address]
            assert succeeds(first, listen) and not succeeds(second, listen)
            assert ("tbf" in queues(first)) == (rate != "none")
            sleep = first.command(["sh", "-c", "echo there; exec sleep 60"])
            left = subprocess.Popen(sleep, stdout=subprocess.PIPE, text=True)
            assert left.stdout is not None and left.stdout.readline() == "there\n"
            raise ZeroDivisionError
    except ZeroDivisionError:
        assert left is not None and left.wait(30) == -9


def local() -> None:
    with team.built(0, "none", "reno") as (host,):
        assert (host.name, host.address) == ("local", "127.0.0.1")
        route = subprocess.run(
            host.command(["ip", "route", "get", host.address]), capture_output=True, text=True
        )
        assert "congctl reno" in route.stdout


if __name__ == "__main__":
    case = sys.argv[1]
    if case == "local":
        local()
    else:
        virtual("none" if case == "unlimited" else "10gbit")
