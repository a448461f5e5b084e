"""What an experiment file may say about virtual hosts."""

import subprocess
import sys
from pathlib import Path

import pytest

from common.emulation import network
from common.emulation.config import (
    ClusterConfig,
    Fault,
    NetworkProfile,
    network_profile,
)
from dear.errors import UserError
from dear.options import build_options

ROOT = Path(__file__).parents[2]


def test_every_network_profile_says_what_it_stands_for_and_whence():
    wanted = {"1gbe": 1, "10gbe": 10, "25gbe": 25, "100gbe": 100, "100gbib": 100, "wan": 1}
    assert {path.stem for path in (ROOT / "configs/networks").glob("*.yaml")} == set(wanted)
    for name, gbps in wanted.items():
        profile = network_profile(name)
        assert (profile.name, profile.gbps) == (name, gbps)
        assert profile.latency_us > 0
        assert profile.stands_for and profile.source
    assert network_profile("100gbib").rdma and not network_profile("100gbe").rdma


@pytest.mark.parametrize(
    ("name", "gbps"), [("100mbit", 0.1), ("2.5gbit", 2.5), ("10Gbit", 10), ("5000kbit", 0.005)]
)
def test_a_bare_bandwidth_is_a_network(name, gbps):
    profile = network_profile(name)
    assert profile.gbps == pytest.approx(gbps)
    assert profile.latency_us == profile.loss_percent == 0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("10gb", "did you mean '10gbe'"),
        ("fast", "unknown network 'fast'"),
        ("0mbit", "from 1mbit to 1000gbit"),
        ("2000gbit", "from 1mbit to 1000gbit"),
        ("../networks/10gbe", "unknown network"),
    ],
)
def test_an_unknown_network_is_one_clear_line(name, words):
    with pytest.raises(UserError, match=words) as error:
        network_profile(name)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"hosts": 0}, "cluster.hosts must be at least 1, got 0"),
        ({"hosts": 5000}, "cluster.hosts must be at most 4096"),
        ({"ranks_per_host": 0}, "cluster.ranks_per_host must be at least 1"),
        ({"time_scale": 0}, "cluster.time_scale must be greater than 0"),
        ({"kind": "real"}, "unknown key of cluster 'kind' 'real'"),
    ],
)
def test_a_wrong_cluster_is_one_clear_line(given, words):
    with pytest.raises(UserError, match=words):
        build_options(ClusterConfig, given, "key of cluster")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"kind": "link_down"}, "needs `host:`"),
        ({"kind": "link_down", "host": 1, "rank": 1}, "has no `rank:`"),
        ({"kind": "link_rate", "host": 1}, "needs `rate:`"),
        ({"kind": "link_rate", "host": 1, "rate": "slow"}, "unknown network 'slow'"),
        ({"kind": "slow_host", "host": 1}, "needs `factor:`"),
        ({"kind": "slow_host", "host": 1, "factor": 0}, "factor must be greater than 0"),
        ({"kind": "kill_rank", "host": 1}, "fault kill_rank: has no `host:`"),
        ({"kind": "kill_rank", "rank": 1, "for_s": 1}, "has no `for_s:`"),
        ({"kind": "link_down", "host": -1}, "host must be at least 0"),
        ({"kind": "link_down", "host": 0, "at_s": -1}, "at_s must be at least 0"),
        ({"kind": "link_down", "host": 0, "for_s": 0}, "for_s must be greater than 0"),
        ({"kind": "earthquake"}, "unknown kind of fault"),
    ],
)
def test_a_wrong_fault_is_one_clear_line(given, words):
    with pytest.raises(UserError, match=words):
        Fault(**given)


def test_faults_have_short_titles():
    faults = [
        Fault(kind="link_down", host=1, at_s=2, for_s=0.5),
        Fault(kind="link_rate", host=0, rate="1gbit"),
        Fault(kind="slow_host", host=3, factor=2.5),
        Fault(kind="kill_rank", rank=2, at_s=1),
    ]
    assert [fault.title for fault in faults] == [
        "link_down h1 at 2 s for 0.5 s",
        "link_rate h0 1gbit at 0 s",
        "slow_host h3 x2.5 at 0 s",
        "kill_rank rank 2 at 1 s",
    ]


def test_the_driver_reads_it_without_importing_torch():
    names = "config, sandbox, cluster, dilation, faults, rsh"
    program = (
        f"import sys; from common.emulation import {names}; sys.exit('torch' in sys.modules or "
        "'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0


def test_a_delay_is_put_before_the_bucket_and_stretched_with_time():
    profile = NetworkProfile(name="far", gbps=1, latency_us=100, jitter_us=5, loss_percent=0.5)
    delay, bucket = network.shape("p0", profile, 10, netem=True)
    # 0.1 Gb/s x 1.05 ms are 8.7 frames, with as many again to spare.
    words = "qdisc replace dev p0 root handle 2: netem limit 1018 delay 1000us 50us loss 0.5%"
    assert delay == words
    begin = "qdisc replace dev p0 parent 2:1 handle 3: tbf rate 100000000bit burst 131072b limit "
    assert bucket.startswith(begin)
    alone = network.shape("p0", profile, 10, netem=False)
    assert alone == [bucket.replace("parent 2:1 handle 3:", "root handle 1:")]
    assert network.reshape("p0", 1, 10, netem=True) == [bucket]


@pytest.mark.parametrize("gbps", [0.001, 0.1, 1, 10, 100])
def test_the_bucket_holds_the_largest_packet_of_tcp_and_is_small(gbps):
    (line,) = network.shape("p0", NetworkProfile(name="x", gbps=gbps), 1, netem=False)
    words = line.split()
    burst, limit = (int(words[words.index(key) + 1].rstrip("b")) for key in ("burst", "limit"))
    assert burst >= 65536 + 46 * 66
    assert burst <= max(131072, gbps * 1e9 / 8 * 1e-3)
    assert limit >= 8 * 131072
