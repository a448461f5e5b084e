"""Run in a sandbox by test_emulation.py: `emulation_program.py NAME ARGUMENTS`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from common.emulation.cluster import EmulatedCluster, VirtualHost
from common.emulation.dilation import calibrate
from common.emulation.flow import transfer_cost
from common.emulation.links.profile import Distance, NetworkProfile, Site, network_profile
from common.emulation.measured import link_rates, measured_network, packet_delays, rates_together

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
URGENT = """
import os, sys, time
os.environ |= {"COMM_CORE_IFNAME": "eth0", "TORCH_CPP_LOG_LEVEL": "ERROR"}
import torch
import torch.distributed as dist
import comm_core
dist.init_process_group(
    "comm_core", init_method=f"tcp://{sys.argv[1]}:29500", rank=int(sys.argv[2]), world_size=2
)
urgent, bulk = dist.new_group(), torch.ones(4 << 20)
parts = torch.ones(20, 1 << 17)
with comm_core.priority(1):
    dist.all_reduce(bulk, group=urgent)
dist.all_reduce(bulk)
shares = []
for _ in range(5):
    dist.barrier()
    began = time.perf_counter()
    large = dist.all_reduce(bulk, async_op=True)
    with comm_core.priority(1):
        works = [dist.all_reduce(part, group=urgent, async_op=True) for part in parts]
    for work in works:
        work.wait()
    first = time.perf_counter() - began
    large.wait()
    shares.append(first / (time.perf_counter() - began))
print(min(shares))  # of five rounds, so that a round without a core does not count
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
    return subprocess.check_output(host.command(command), text=True, timeout=LIMIT_S)


def failure(call: Callable[..., object], *arguments: object) -> str:
    """Returns the RuntimeError that the call must end with."""
    try:
        call(*arguments)
    except RuntimeError as error:
        return str(error)
    raise AssertionError(f"{call.__name__} has done something")


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
        assert congestion == "reno"
        here = subprocess.check_output(python(ASK, "h1", "20"), text=True)
        assert here.split()[0] == "10.78.255.254"
        remote_shell(cluster)
    # What still ran on a host has been killed.
    assert server.wait(LIMIT_S) == -9
    assert Path("/etc/hosts").read_text() == before
    assert links() == ["lo"]
    with EmulatedCluster(hosts=1, profile=network_profile("100mbit"), congestion="cubic") as again:
        text = "import socket; print(socket.gethostbyname('h0'))"
        assert output(again.hosts[0], python(text)) == "10.78.0.1\n"
        routes = output(again.hosts[0], ["ip", "route"])
        assert "congctl cubic" in routes and "rto_min lock 200ms" in routes
        again.set_profile(network_profile("100mbit"), 4.0)
        assert "rto_min lock 800ms" in output(again.hosts[0], ["ip", "route"])


def remote_shell(cluster: EmulatedCluster) -> None:
    shell = [sys.executable, "-m", "common.emulation.hosts.rsh"]
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


def links_have_the_speed_asked_for(kind: str) -> None:
    # 5 Gb/s 50 times slower: what is really on the wire are 100 Mb/s.
    profile = network_profile("5gbit")
    with EmulatedCluster(hosts=2, profile=profile, time_scale=50, links=kind) as cluster:
        assert (cluster.links.kind, cluster.notes) == (kind, [])
        near(link_rates(cluster, 0.2), [5, 5])
        for host in rates_together(cluster, 0.3):
            assert 0.8 * 5 < host["gbps"] < 1.1 * 5, host
        cluster.set_rate(1, 0.5)
        near(link_rates(cluster, 0.2), [5, 0.5])
        cluster.restore()  # as after a cut: the rate may be that of a trace
        near(link_rates(cluster, 0.2), [5, 0.5])
        cluster.set_rate(1, 5)
        near(link_rates(cluster, 0.2), [5, 5])
        cluster.set_profile(network_profile("200mbit"), 1)
        assert (cluster.profile.name, cluster.time_scale) == ("200mbit", 1)
        near(link_rates(cluster, 0.2), [0.2, 0.2])


def near(measured: list[dict[str, object]], wanted: list[float]) -> None:
    assert [row["host"] for row in measured] == [f"h{i}" for i in range(len(wanted))]
    for row, gbps in zip(measured, wanted, strict=True):
        for direction in ("up_gbps", "down_gbps"):
            value = row[direction]
            # A busy machine makes a link slower, nothing makes it much faster.
            assert isinstance(value, float) and gbps / 3 < value < gbps * 1.3, (row, gbps)


def a_cut_link_carries_nothing_until_it_is_restored(kind: str) -> None:
    with EmulatedCluster(hosts=2, profile=network_profile("100mbit"), links=kind) as cluster:
        serve(cluster.hosts[1])
        assert output(cluster.hosts[0], python(ASK, "h1", "20"))
        cluster.set_link(1, False)
        command = cluster.hosts[0].command(python(ASK, "h1", "1"))
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode != 0 and "timed out" in done.stderr
        assert "link of h1" in failure(link_rates, cluster, 0.1)
        cluster.restore()
        assert output(cluster.hosts[0], python(ASK, "h1", "20"))


FAR = {"name": "far", "gbps": 0.1, "latency_us": 20000, "jitter_us": 100, "rdma": True}
CONNECT = (
    "import socket, sys, time; began = time.monotonic(); "
    "socket.create_connection(('h1', 4000)); print(time.monotonic() - began)"
)


def the_kernel_delays_or_says_that_it_cannot() -> None:
    profile = NetworkProfile(**FAR | {"jitter_us": 0}, loss_percent=0.01)
    with EmulatedCluster(hosts=2, profile=profile, time_scale=2, links="tc") as cluster:
        print(json.dumps(cluster.notes), flush=True)
        serve(cluster.hosts[1])
        round_trip_s = float(output(cluster.hosts[0], python(CONNECT)))
        if not any("netem" in note for note in cluster.notes):
            assert round_trip_s > 0.075  # 2 x 20 ms x 2, less the jitter
        link_rates(cluster, 0.2)
        cluster.set_rate(0, 0.05)
        cluster.set_profile(network_profile("100mbit"), 1)
        assert cluster.notes == []
        near(link_rates(cluster, 0.2), [0.1, 0.1])


def the_switch_delays() -> None:
    profile = NetworkProfile(**{**FAR, "latency_us": 4000})
    with EmulatedCluster(hosts=3, profile=profile, time_scale=2, links="switch") as cluster:
        assert cluster.notes == ["RDMA is emulated by TCP"]
        serve(cluster.hosts[1])
        assert float(output(cluster.hosts[0], python(CONNECT))) > 0.0155  # 2 x 4 ms x 2
        delays_are(cluster, {"h0": 4000, "h1": 4000, "h2": 4000})
        cluster.links.set_delay(1, 1000)
        delays_are(cluster, {"h0": 1000, "h1": 1000, "h2": 4000})
        cluster.restore()
        delays_are(cluster, {"h1": 4000})
        network = measured_network(cluster)
        assert network["links"] == "switch" and network["switch"]["frames"] > 100, network
        cluster.set_profile(network_profile("100mbit"), 1)
        assert cluster.notes == []
        delays_are(cluster, {"h0": 0, "h1": 0, "h2": 0})


def delays_are(cluster: EmulatedCluster, wanted_us: dict[str, float]) -> None:
    """Checks delays from these hosts to the next; a busy machine may add to them."""
    rows = {row["source"]: row for row in packet_delays(cluster, 0.2)}
    assert [row["target"] for row in rows.values()] == ["h1", "h2", "h0"]
    for source, us in wanted_us.items():
        # Half of all jitter is downwards.
        assert us - 150 < rows[source]["delay_us"] < us + 5000, rows[source]
        assert rows[source]["sent"] == 200


def the_switch_loses_frames() -> None:
    profile = NetworkProfile(name="lossy", gbps=1, latency_us=100, loss_percent=1)
    with EmulatedCluster(hosts=2, profile=profile, links="switch") as cluster:
        before = cluster.links.counters()
        rates_together(cluster, 1.0)
        after = cluster.links.counters()
        lost, frames = (after[key] - before[key] for key in ("lost", "frames"))
        assert frames > 3000, after
        # Four standard deviations of the mean, and what it is known to.
        assert abs(lost / (lost + frames) - 0.01) < 4 * (0.01 / (lost + frames)) ** 0.5 + 0.0005
        cluster.set_profile(profile, 2.0)
        (note,) = cluster.notes
        assert note.startswith("packets are lost at a time scale other than 1")


def sites_are_far_from_each_other_and_share_a_line() -> None:
    profile = NetworkProfile(
        name="sites",
        gbps=1,
        latency_us=100,
        sites=(Site(name="a", hosts=2), Site(name="b", hosts=2)),
        between=(Distance(sites=("a", "b"), latency_us=20000, gbps=0.1),),
    )
    with EmulatedCluster(hosts=4, profile=profile) as cluster:
        assert cluster.links.kind == "switch"
        rows = packet_delays(cluster, 0.2)
        seen = {(row["source"], row["target"]): row["delay_us"] for row in rows}
        far = {pair for pair, us in seen.items() if us > 19000}
        assert far == {("h1", "h2"), ("h3", "h0")} and len(seen) == 4, seen
        # Of the ring h1 to h2 and h3 to h0 pass the lines between the sites.
        rates = [row["gbps"] for row in rates_together(cluster, 1.0)]
        assert rates[2] < 0.13 and rates[0] < 0.13, rates


DATAGRAMS = """
import socket, sys, time
end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for _ in range(1200):
    for _ in range(30):
        end.sendto(b"small", (sys.argv[1], 4000))
    time.sleep(0.001)
"""


def what_is_on_a_long_way_does_not_stop_what_is_on_a_short_one() -> None:
    profile = NetworkProfile(
        name="sites",
        gbps=1,
        latency_us=100,
        sites=(Site(name="a", hosts=2), Site(name="b", hosts=1)),
        between=(Distance(sites=("a", "b"), latency_us=60_000, gbps=1),),
    )
    with EmulatedCluster(hosts=3, profile=profile) as cluster:
        here, near, far = cluster.hosts
        # Far more small packets than a port has slots, while large ones of the same host are far.
        sending = subprocess.Popen(here.command(python(DATAGRAMS, near.address)))
        cost = transfer_cost(here, far)
        assert sending.wait(LIMIT_S) == 0
        counters = cluster.links.counters()
        assert cost > 0 and counters["packets"] > 10_000 and counters["missed"] == 0, counters


SSHD = "/usr/sbin/sshd"


def a_server_of_ssh_answers_over_the_switch() -> None:
    profile = NetworkProfile(name="near", gbps=1, latency_us=2000)
    with (
        tempfile.TemporaryDirectory() as folder,
        EmulatedCluster(hosts=2, profile=profile, links="switch") as cluster,
    ):
        first, other = cluster.hosts
        Path("/run/sshd").mkdir(exist_ok=True)  # as Debian's start of it does
        key = Path(folder, "key")
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
        settings = {"Port": "2222", "HostKey": key, "AuthorizedKeysFile": f"{key}.pub"}
        settings |= {"StrictModes": "no", "UsePAM": "no", "PidFile": "none"}
        words = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
        server = subprocess.Popen(
            other.command([SSHD, "-D", "-e", "-f", os.devnull, *words]),
            stderr=subprocess.PIPE,
            text=True,
        )
        assert server.stderr is not None
        assert "listening" in server.stderr.readline()
        options = ["-o", "StrictHostKeyChecking=no", "-o", f"UserKnownHostsFile={os.devnull}"]
        options += ["-o", "LogLevel=ERROR", "-o", "BatchMode=yes", "-p", "2222", "-i", str(key)]
        before = cluster.links.counters()
        line = output(first, ["ssh", *options, "h1", "hostname; echo $SSH_CONNECTION"])
        assert line.split()[:2] == ["h1", "10.78.0.1"], line
        assert cluster.links.counters()["frames"] - before["frames"] > 10


def a_dead_switch_is_told_and_replaced() -> None:
    with EmulatedCluster(hosts=2, profile=network_profile("100mbit"), links="switch") as cluster:
        assert cluster.links.broken() is None
        (pid,) = [pid for pid in programs() if pid]
        os.kill(pid, signal.SIGKILL)
        while cluster.links.broken() is None:
            time.sleep(0.01)
        assert cluster.links.broken() == "the switch of the virtual hosts was killed by signal 9"
        assert cluster.links.counters() is None
        assert "carries no data" in failure(link_rates, cluster, 0.1)
        assert "killed by signal 9" in failure(cluster.set_rate, 0, 0.05)
        cluster.set_profile(network_profile("100mbit"), 1.0)
        assert cluster.links.broken() is None
        near(link_rates(cluster, 0.2), [0.1, 0.1])
    assert programs() == []


def programs() -> list[int]:
    """Returns the sandbox's processes that are switches."""
    names = {folder: folder / "comm" for folder in Path("/proc").iterdir() if folder.name.isdigit()}
    return [int(f.name) for f, name in names.items() if name.read_text() == "link_switch\n"]


def a_transfer_tells_what_a_byte_costs() -> None:
    with EmulatedCluster(hosts=2, profile=network_profile("1gbit")) as cluster:
        costs = calibrate(cluster.hosts, cluster.links.cpu_s)
    # A byte costs more than copying it twice, less than a microsecond on any machine in use.
    assert 1e-11 < costs.cpu_s_per_byte < 1e-6
    assert 1e8 < costs.memory_bytes_per_s < 1e12


def what_is_urgent_has_the_link_first() -> None:
    """20 urgent messages of 0.5 MiB beside one of 16 MiB: with equal parts of the link they would
    end with it, or behind it."""
    with EmulatedCluster(hosts=2, profile=network_profile("1gbit")) as cluster:
        first = cluster.hosts[0].address
        ranks = [
            subprocess.Popen(
                host.command(python(URGENT, first, str(rank))), stdout=subprocess.PIPE, text=True
            )
            for rank, host in enumerate(cluster.hosts)
        ]
        for rank in ranks:
            share = float(rank.communicate(timeout=LIMIT_S)[0])
            assert share < 0.75, share


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


def what_a_killed_program_left_is_cleared() -> None:
    # What it starts on a host may find the host gone, and says so.
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen([sys.executable, __file__, "wait"], **pipes) as killed:
        assert killed.stdout is not None and killed.stdout.readline() == "ready\n"
        killed.kill()
    with EmulatedCluster(hosts=2, profile=network_profile("100mbit")) as cluster:
        assert output(cluster.hosts[1], ["hostname"]) == "h1\n"
    assert links() == ["lo"]
    assert not list(Path("/dev/shm").glob("virtual-hosts-*"))


def fail() -> None:
    with EmulatedCluster(hosts=2, profile=network_profile("100mbit")) as cluster:
        subprocess.Popen(cluster.hosts[0].command(["sleep", "1000"]))
        raise ZeroDivisionError


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
