"""Links of virtual hosts: what kernel and switch are told of them, and where hosts stand."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.emulation import probe
from common.emulation.hosts import network, rsh
from common.emulation.hosts.namespaces import SWITCH
from common.emulation.links import base, choice, choose, switched
from common.emulation.links.profile import Distance, NetworkProfile, Site, network_profile
from common.emulation.links.switched import SwitchedLinks
from common.emulation.links.tc import KernelLinks, bucket_command, queue_commands
from dear.errors import UserError
from dear.options import build_options

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def any_program(monkeypatch):
    """Stand-in for the built switch program, which no test of this file starts."""
    monkeypatch.setattr(switched, "PROGRAM", Path(__file__))


def test_the_switch_does_with_packets_what_it_should():
    program = ROOT / "build/link_switch/fabric_test"
    assert program.exists(), "the C++ tests are not built: make core-tests"
    ran = subprocess.run([program], capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stdout + ran.stderr


FAR = NetworkProfile(name="far", gbps=1, latency_us=100, jitter_us=5, loss_percent=0.5)


def test_a_delay_is_put_before_the_bucket_and_stretched_with_time():
    delay, bucket = queue_commands("p0", FAR, 10, netem=True)
    # 0.1 Gb/s x 1.05 ms are 8.7 frames, with as many again to spare.
    words = "qdisc replace dev p0 root handle 2: netem limit 1018 delay 1000us 50us loss 0.5%"
    assert delay == words
    begin = "qdisc replace dev p0 parent 2:1 handle 3: tbf rate 100000000bit burst 71072b limit "
    assert bucket.startswith(begin)
    alone = queue_commands("p0", FAR, 10, netem=False)
    assert alone == [bucket.replace("parent 2:1 handle 3:", "root handle 1:")]
    assert bucket_command("p0", FAR, 10, netem=True) == bucket


@pytest.mark.parametrize("gbps", [0.001, 0.1, 1, 10, 100])
def test_the_bucket_holds_the_largest_packet_of_tcp_and_is_small(gbps):
    (line,) = queue_commands("p0", NetworkProfile(name="x", gbps=gbps), 1, netem=False)
    words = line.split()
    burst, limit = (int(words[words.index(key) + 1].rstrip("b")) for key in ("burst", "limit"))
    assert burst >= 65536 + 46 * 66
    assert burst <= max(131072, gbps * 1e9 / 8 * 1e-3)
    assert limit == burst + 4_000_000


def two_sites(**changes):
    values = {
        "name": "far",
        "gbps": 10,
        "latency_us": 5,
        "sites": (Site(name="a", hosts=2), Site(name="b", hosts=1), Site(name="c", hosts=1)),
        "between": (
            Distance(sites=("a", "b"), latency_us=100, gbps=1, jitter_us=2, loss_percent=0.5),
            Distance(sites=("c", "a"), latency_us=200, gbps=2),
            Distance(sites=("b", "c"), latency_us=300),
        ),
    }
    return NetworkProfile(**{**values, **changes})


def test_a_pair_of_hosts_has_what_is_between_their_sites():
    profile = two_sites()
    near = profile.connection(0, 1, 4)
    assert (near.latency_us, near.jitter_us, near.loss_percent, near.trunk) == (5, 0, 0, None)
    far = profile.connection(1, 2, 4)
    assert (far.latency_us, far.jitter_us, far.loss_percent, far.gbps) == (100, 2, 0.5, 1)
    # Each direction has a line of its own, which all hosts of the two sites share.
    numbers = {pair: profile.connection(*pair, 4).trunk for pair in [(1, 2), (0, 2), (2, 1)]}
    assert numbers == {(1, 2): 0, (0, 2): 0, (2, 1): 1}
    assert profile.connection(3, 0, 4).trunk == 2 and profile.connection(0, 3, 4).trunk == 3
    assert profile.connection(2, 3, 4).trunk is None and profile.farthest_us == 300
    assert [gbps for gbps, _ in profile.trunks()] == [1, 1, 2, 2, None, None]


def test_sites_without_a_number_of_hosts_share_them():
    halves = two_sites(
        sites=(Site(name="a"), Site(name="b")), between=(Distance(sites=("a", "b"), latency_us=9),)
    )
    far = [host for host in range(5) if halves.connection(0, host, 5).latency_us == 9]
    assert far == [3, 4]
    halves.check_hosts(2)
    with pytest.raises(UserError, match="network 'far': no host is in site 'b'"):
        halves.check_hosts(1)
    with pytest.raises(UserError, match="sites have 4 hosts, the cluster has 8"):
        two_sites().check_hosts(8)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"latency_us": -1}, "latency_us must be at least 0"),
        ({"latency_us": 1, "jitter_us": 2}, "jitter_us must not exceed latency_us"),
        ({"loss_percent": 101}, "loss_percent must be below 100"),
        ({"queue_kb": 10}, "queue_kb must be at least 150"),
        ({"sites": [{"name": "a"}, {"name": "a"}]}, "two have the same name: a, a"),
        ({"sites": [{"name": "a", "hosts": 0}]}, "site 'a': hosts must be at least 1"),
        ({"sites": [{"name": "a", "hosts": 1}, {"name": "b"}]}, "for every site or for no site"),
        ({"sites": [{"name": "a"}, {"name": "b"}]}, "needs one entry for each pair of sites"),
        (
            {
                "sites": [{"name": "a"}, {"name": "b"}],
                "between": [{"sites": ["a", "d"], "latency_us": 1}],
            },
            "between: site 'd'",
        ),
        ({"between": [{"sites": ["a"], "latency_us": 1}]}, "needs two different sites, got a"),
        (
            {"between": [{"sites": ["a", "b"], "latency_us": -1}]},
            "between a and b: latency_us must be at least 0",
        ),
        (
            {"between": [{"sites": ["a", "b"], "latency_us": 1, "gbps": 0}]},
            "between a and b: bandwidth must be from 1mbit to 100000gbit",
        ),
    ],
)
def test_a_network_that_cannot_be_is_one_clear_line(given, words):
    with pytest.raises(UserError, match=words) as error:
        build_options(NetworkProfile, {"name": "n", "gbps": 1, **given}, "key of n.yaml")
    assert "\n" not in str(error.value)


def test_a_queue_holds_what_is_under_way_on_the_longest_line():
    assert network_profile("1gbit").queue_bytes == 4_000_000
    assert NetworkProfile(name="n", gbps=10, latency_us=20_000).queue_bytes == 100_000_000
    wan = network_profile("wan")
    # 1 Gb/s and 40 ms between the sites, of which each has fast lines of its own.
    assert wan.trunks() == [(1, 10_000_000)] * 2 and wan.queue_bytes == 4_000_000
    assert wan.under_way_bytes == 5_000_000
    assert NetworkProfile(name="n", gbps=10, queue_kb=500).queue_bytes == 500_000


def test_the_kernel_shapes_where_it_can_do_all_that_is_asked_for(monkeypatch):
    for asked, netem, sites, kind in (
        ("auto", True, False, "tc"),
        ("auto", False, False, "switch"),
        ("auto", True, True, "switch"),
        ("tc", False, False, "tc"),
        ("switch", True, False, "switch"),
    ):
        monkeypatch.setattr(choice, "has_netem", lambda netem=netem: netem)
        profiles = [network_profile("10gbe"), *([two_sites()] if sites else [])]
        assert choose(asked, profiles).kind == kind
    with pytest.raises(UserError, match="tc does not support sites, which network 'far' has"):
        choose("tc", [two_sites()])
    shaky = NetworkProfile(name="shaky", gbps=1, latency_us=100, jitter_us=5)
    monkeypatch.setattr(choice, "has_netem", lambda: True)
    assert choose("auto", [shaky]).kind == "switch"
    with pytest.raises(UserError, match="tc reorders packets by the jitter of network 'shaky'"):
        choose("tc", [shaky])
    monkeypatch.setattr(choice, "has_netem", lambda: False)
    monkeypatch.setattr(switched, "PROGRAM", Path("/no/such/program"))
    with pytest.raises(UserError, match=r"the switch is not built.*make core"):
        choose("auto", [network_profile("10gbe")])


class RecordedLinks(SwitchedLinks):
    """Links that record the switch's commands and the hosts' queues, without a program."""

    def __init__(self, profile, time_scale, hosts, monkeypatch):
        super().__init__()
        self.lines, self.queues = [], []
        program = SimpleNamespace(apply=self.lines.extend)
        monkeypatch.setattr(switched, "SwitchProgram", lambda ports: program)
        monkeypatch.setattr(self, "_on_all", lambda tool, here, there: self.queues.extend(there))
        monkeypatch.setattr(network, "batch", lambda tool, lines, pid: self.queues.extend(lines))
        self.connect(list(range(hosts)))
        self.set_profile(profile, time_scale)


def test_the_switch_is_told_every_line_and_path_in_this_machines_time(monkeypatch):
    links = RecordedLinks(two_sites(), 10, 4, monkeypatch)
    assert "line up 3 1000000000 9223372036854775808" in links.lines
    assert "line down 0 1000000000 4000000" in links.lines
    assert "line trunk 1 100000000 4000000" in links.lines
    assert "line trunk 4 0 4000000" in links.lines, "no limit"
    assert "path 0 1 50000 0 0.000000000000 -1" in links.lines
    assert "path 1 2 1000000 20000 0.005000000000 0" in links.lines
    assert sum(line.startswith("path ") for line in links.lines) == 4 * 3
    # A host may send a little faster than its link: the switch says what the rate is.
    (queue,) = links.queues
    assert "root handle 1: tbf rate 1050000000bit" in queue

    links.lines.clear()
    links.set_rate(2, 5)
    assert links.lines == [
        "line up 2 500000000 9223372036854775808",
        "line down 2 500000000 4000000",
    ]
    links.lines.clear()
    links.set_delay(2, 700)
    assert set(links.lines) >= {
        "path 2 3 7000000 0 0.000000000000 -1",
        "path 3 2 7000000 0 0.000000000000 -1",
        "path 1 2 7000000 0 0.005000000000 0",
    }
    assert sum(line.startswith("path ") for line in links.lines) == 6, "to and from each other host"


def test_the_switch_looks_as_often_as_the_shortest_way_asks_for(monkeypatch):
    def patience(lines):
        (line,) = [line for line in lines if line.startswith("patience ")]
        return int(line.split()[1])

    links = RecordedLinks(two_sites(latency_us=60), 10, 4, monkeypatch)
    assert patience(links.lines) == 600_000 - 50_000
    links.lines.clear()
    links.set_delay(2, 20)  # below all others
    assert patience(links.lines) == 200_000 - 50_000
    links.lines.clear()
    links.set_delay(2, 700)
    assert patience(links.lines) == 600_000 - 50_000
    assert patience(RecordedLinks(two_sites(), 1, 4, monkeypatch).lines) == 0
    for counted, cpu_s in ((None, 0.0), ({"cpu_s": 1.5}, 1.5)):
        monkeypatch.setattr(links, "counters", lambda counted=counted: counted)
        assert links.cpu_s() == cpu_s, "only a switch program uses CPU time"


def test_without_netem_the_kernel_says_what_it_leaves_out(monkeypatch):
    monkeypatch.setattr("common.emulation.links.tc.has_netem", lambda: False)
    kernel = KernelLinks()
    kernel.profile = FAR
    assert kernel.left_out() == (
        "only bandwidth is shaped: this kernel has no netem for the latency of 100 us, jitter of "
        "5 us, loss of 0.5 %"
    )
    with pytest.raises(RuntimeError, match="no netem to delay a link"):
        kernel.set_delay(0, 500)
    kernel.profile = network_profile("1gbit")
    assert kernel.left_out() is None


def test_with_netem_a_link_is_delayed_both_ways(monkeypatch):
    monkeypatch.setattr("common.emulation.links.tc.has_netem", lambda: True)
    calls = []
    monkeypatch.setattr(network, "batch", lambda tool, lines, pid=None: calls.append((pid, lines)))
    kernel = KernelLinks()
    kernel.pids, kernel.time_scale = [11, 12], 2.0
    kernel.profile = NetworkProfile(name="far", gbps=1, latency_us=100)
    kernel.set_delay(1, 500)
    (_, down), (pid, up) = calls
    assert re.match("qdisc replace dev p1 root handle 2: netem limit .* delay 1000us$", down[0])
    # What it sends has 100 us at the other end.
    assert pid == 12 and re.search("dev eth0 root handle 2: netem limit .* delay 800us$", up[0])

    refused = "cannot make the latency of one host less than the 100 us of its network"
    with pytest.raises(RuntimeError, match=refused):
        kernel.set_delay(1, 50)
    assert SwitchedLinks.refusal(kernel.profile, 50) is None


def test_every_command_on_the_links_is_waited_for(monkeypatch):
    waits = []
    job = SimpleNamespace(returncode=0, communicate=lambda: waits.append(0) or ("", ""))
    monkeypatch.setattr(network.subprocess, "Popen", lambda *_, **__: job)
    base.Links._on_all(SimpleNamespace(pids=[1, 2]), "tc", ["a"], ["b"])
    assert len(waits) == 3


def test_names_of_hosts_resolve_until_the_cluster_ends(tmp_path, monkeypatch):
    names, table = tmp_path / "hosts", tmp_path / "table.json"
    monkeypatch.setattr(network, "_HOSTS", names)
    monkeypatch.setattr(network, "_table", lambda: table)
    monkeypatch.setattr(network, "resolvable", lambda: True)
    monkeypatch.setattr(network, "proc_pid", lambda: 1)
    monkeypatch.setenv(network.TABLE, "")  # restores the variable after the test
    network.publish({"h0": ("10.78.0.1", 7)})
    assert "10.78.0.1 h0\n" in names.read_text() and table.exists()
    network.withdraw()
    lines = names.read_text().splitlines()
    assert lines[-1] == f"127.0.0.1 {SWITCH}" and not any("10.78" in line for line in lines)
    assert not table.exists() and network.TABLE not in os.environ


@pytest.mark.parametrize(
    "options", [[], ["-x"], ["-xT", "-p", "22"], ["-p22", "-o", "BatchMode=yes"], ["-x", "--"]]
)
def test_options_of_ssh_are_skipped_with_their_values(monkeypatch, options):
    calls = []
    monkeypatch.setattr(rsh, "published", lambda: {"h1": 7})
    monkeypatch.setattr(rsh, "enter", calls.append)
    monkeypatch.setattr(rsh.os, "execv", lambda *command: calls.append(command))
    rsh.main([*options, "root@h1", "echo", "a b"])
    assert calls == [7, ("/bin/sh", ["sh", "-c", "echo a b"])]


def test_a_packets_delay_counts_from_the_time_that_it_carries(monkeypatch):
    def send(port, flush):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
            for number, sent_ns in [(0, 0), (1, 10**18), (-1, 0)]:
                end.sendto(probe._NUMBERS.pack(number, sent_ns), ("127.0.0.1", port))

    monkeypatch.setattr("builtins.print", send)
    since_1970_ns, since_2001_ns = probe._listen("127.0.0.1")
    assert since_1970_ns > since_2001_ns > 0
