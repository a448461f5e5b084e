"""Run in a sandbox by test_emulation.py: `emulation_program.py NAME`. Needs no torch."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from common.emulation.cluster import EmulatedCluster, VirtualHost
from common.emulation.config import NetworkProfile, network_profile
from common.emulation.dilation import calibrate

LIMIT_S = 30.0
SERVE = """
import os, socket, sys
server = socket.create_server((socket.gethostname(), 4000))
print("serving", flush=True)
while True:
    line, peer = server.accept()
    line.sendall(peer[0].encode())
    line.close()
"""
ASK = """
import socket, sys
line = socket.create_connection((sys.argv[1], 4000), timeout=float(sys.argv[2]))
print(line.recv(100).decode())
print(line.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).strip(b"\\0").decode())
"""
IDENTITY = """
import json, os, socket
names = ["h0", "h1", "h2", "switch", "localhost", socket.gethostname()]
print(json.dumps({
    "name": socket.gethostname(),
    "addresses": [socket.gethostbyname(name) for name in names],
    "links": [name for _, name in socket.if_nameindex()],
    "shared": os.listdir("/dev/shm"),
    "folder": os.getcwd(),
}))
open("/dev/shm/mine", "w").close()
"""


def python(program: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", program, *arguments]


def serve(host: VirtualHost) -> subprocess.Popen[str]:
    server = subprocess.Popen(host.command(python(SERVE)), stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None and server.stdout.readline() == "serving\n"
    return server


def output(host: VirtualHost, command: list[str]) -> str:
    done = subprocess.run(
        host.command(command), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def hosts_have_names_addresses_and_memory_of_their_own() -> None:
    before = Path("/etc/hosts").read_text()
    with EmulatedCluster(hosts=3, profile=network_profile("100mbit")) as cluster:
        addresses = ["10.78.0.1", "10.78.0.2", "10.78.0.3"]
        assert [host.address for host in cluster.hosts] == addresses
        for index, host in enumerate(cluster.hosts):
            seen = json.loads(output(host, python(IDENTITY)))
            assert seen["name"] == host.name == f"h{index}"
            wanted = [*addresses, "10.78.255.254", "127.0.0.1", host.address]
            assert seen["addresses"] == wanted
            assert seen["links"] == ["lo", "eth0"]
            assert seen["shared"] == []
            assert seen["folder"] == str(Path.cwd())
        server = serve(cluster.hosts[1])
        peer, congestion = output(cluster.hosts[0], python(ASK, "h1", "20")).split()
        assert peer == "10.78.0.1"
        assert congestion != "bbr"
        here = subprocess.run(python(ASK, "h1", "20"), capture_output=True, text=True)
        assert here.stdout.split()[0] == "10.78.255.254", here.stderr
        remote_shell(cluster)
    # What still ran on a host has been killed.
    assert server.wait(LIMIT_S) == -9
    assert Path("/etc/hosts").read_text() == before
    assert links() == ["lo"]
    with EmulatedCluster(hosts=1, profile=network_profile("100mbit"), congestion="reno") as again:
        text = "import socket; print(socket.gethostbyname('h0'))"
        assert output(again.hosts[0], python(text)) == "10.78.0.1\n"
        routes = output(again.hosts[0], ["ip", "route"])
        assert "congctl reno" in routes and "rto_min lock 200ms" in routes
        again.set_profile(network_profile("100mbit"), 4.0)
        assert "rto_min lock 800ms" in output(again.hosts[0], ["ip", "route"])


def remote_shell(cluster: EmulatedCluster) -> None:
    shell = [sys.executable, "-m", "common.emulation.rsh"]
    words = ["-o", "BatchMode=yes", "-x", "10.78.0.3", "hostname;", "echo", "$((6*7))"]
    # From a host as well as from the sandbox: mpirun's daemons start each other.
    assert output(cluster.hosts[0], [*shell, *words]) == "h2\n42\n"
    done = subprocess.run([*shell, "user@h1", "hostname; exit 5"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (5, "h1\n")
    done = subprocess.run([*shell, "h9", "hostname"], capture_output=True, text=True)
    assert done.returncode == 255
    assert done.stderr == "error: rsh: h9: no such virtual host\n"


def links() -> list[str]:
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return [line.partition(":")[0].strip() for line in lines]


def links_have_the_speed_asked_for() -> None:
    # 5 Gb/s 50 times slower: what is really on the wire are 100 Mb/s.
    with EmulatedCluster(hosts=2, profile=network_profile("5gbit"), time_scale=50) as cluster:
        assert cluster.notes == []
        near(cluster.measure(0.2), [5, 5])
        for host in cluster.measure_together(0.3):
            assert 0.8 * 5 < host["gbps"] < 1.1 * 5, host
        cluster.set_rate(1, 0.5)
        near(cluster.measure(0.2), [5, 0.5])
        cluster.restore()
        near(cluster.measure(0.2), [5, 5])
        cluster.set_profile(network_profile("200mbit"), 1)
        assert (cluster.profile.name, cluster.time_scale) == ("200mbit", 1)
        near(cluster.measure(0.2), [0.2, 0.2])


def near(measured: list[dict[str, object]], wanted: list[float]) -> None:
    assert [row["host"] for row in measured] == [f"h{i}" for i in range(len(wanted))]
    for row, gbps in zip(measured, wanted, strict=True):
        for direction in ("up_gbps", "down_gbps"):
            value = row[direction]
            # A busy machine makes a link slower, nothing makes it much faster.
            assert isinstance(value, float) and gbps / 3 < value < gbps * 1.3, (row, gbps)


def a_cut_link_carries_nothing_until_it_is_restored() -> None:
    with EmulatedCluster(hosts=2, profile=network_profile("100mbit")) as cluster:
        serve(cluster.hosts[1])
        assert output(cluster.hosts[0], python(ASK, "h1", "20"))
        cluster.set_link(1, False)
        command = cluster.hosts[0].command(python(ASK, "h1", "1"))
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode != 0 and "timed out" in done.stderr
        try:
            cluster.measure(0.1)
        except RuntimeError as error:
            assert "link of h1" in str(error)
        else:
            raise AssertionError("a cut link was measured")
        cluster.restore()
        assert output(cluster.hosts[0], python(ASK, "h1", "20"))


def delay() -> None:
    profile = NetworkProfile(
        name="far", gbps=0.1, latency_us=20000, jitter_us=100, loss_percent=0.01, rdma=True
    )
    with EmulatedCluster(hosts=2, profile=profile, time_scale=2) as cluster:
        print(json.dumps(cluster.notes), flush=True)
        serve(cluster.hosts[1])
        timed = (
            "import socket, sys, time; began = time.monotonic(); "
            "socket.create_connection(('h1', 4000)); print(time.monotonic() - began)"
        )
        round_trip_s = float(output(cluster.hosts[0], python(timed)))
        if not any("netem" in note for note in cluster.notes):
            assert round_trip_s > 0.075  # 2 x 20 ms x 2, less the jitter
        cluster.measure(0.2)
        cluster.set_rate(0, 0.05)
        cluster.set_profile(network_profile("100mbit"), 1)
        assert cluster.notes == []
        near(cluster.measure(0.2), [0.1, 0.1])


def a_transfer_tells_what_a_byte_costs() -> None:
    with EmulatedCluster(hosts=2, profile=network_profile("1gbit")) as cluster:
        found = calibrate(cluster.hosts)
    # A byte costs more than copying it twice, less than a microsecond on any machine in use.
    assert 1e-11 < found.cpu_s_per_byte < 1e-6
    assert 1e8 < found.memory_bytes_per_s < 1e12


def there_may_be_65_hosts() -> None:
    with EmulatedCluster(hosts=65, profile=network_profile("10mbit")) as cluster:
        assert len(cluster.hosts) == 65
        last = cluster.hosts[-1]
        assert json.loads(output(last, python(IDENTITY)))["name"] == "h64"


def wait() -> None:
    """Builds a cluster, has something run on a host, and waits to be killed."""
    with EmulatedCluster(hosts=2, profile=network_profile("100mbit")) as cluster:
        subprocess.Popen(cluster.hosts[0].command(["sleep", "1000"]))
        print("ready", flush=True)
        time.sleep(LIMIT_S)


def fail() -> None:
    with EmulatedCluster(hosts=2, profile=network_profile("100mbit")) as cluster:
        subprocess.Popen(cluster.hosts[0].command(["sleep", "1000"]))
        raise ZeroDivisionError


if __name__ == "__main__":
    globals()[sys.argv[1]]()
