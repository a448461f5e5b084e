"""Virtual hosts: what an experiment may say, how much slower they run, and whether they fit."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from common import machine as memory
from common.emulation import dilation
from common.emulation.cluster import EmulatedCluster
from common.emulation.config import ClusterConfig, Fault
from common.emulation.dilation import (
    Calibration,
    Load,
    Seen,
    at_hand,
    check_scale,
    choose_time_scale,
    foreign_cores,
    needed_scale,
    readable_scales,
)
from common.emulation.hosts import network
from common.emulation.links.profile import (
    NetworkProfile,
    Stretch,
    network_profile,
    payload_bytes_per_s,
)
from common.emulation.measured import counted_between, counter_notes, network_record, rates_together
from common.harness.running import fabric
from common.machine import cgroups
from dear.errors import UserError
from dear.options import build_options
from tests.system.made import make_trial

ROOT = Path(__file__).parents[2]


def test_every_network_profile_says_what_it_stands_for_and_whence():
    wanted = {"1gbe": 1, "10gbe": 10, "25gbe": 25, "100gbe": 100, "100gbib": 100, "wan": 10}
    wanted |= {"5gbe": 5, "2.5gbe": 2.5, "200gbib": 200, "400gbib": 400}
    wanted |= {"nvlink3": 1920, "nvlink4": 2966.4, "pcie3": 96, "pcie4": 192}
    assert {path.stem for path in (ROOT / "configs/networks").glob("*.yaml")} == set(wanted)
    for name, gbps in wanted.items():
        profile = network_profile(name)
        assert (profile.name, profile.gbps) == (name, gbps)
        profile.check_hosts(4)
        assert profile.latency_us > 0
        assert profile.stands_for and profile.source
        if profile.inside is None:
            assert profile.overhead_us > 0 and profile.core_gb_per_s
            assert "overhead_us" in profile.source and "core_gb_per_s" in profile.source
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
        *((name, f"unknown network '{name}'") for name in ("fast", "../networks/10gbe")),
        *((name, "from 1mbit to 100000gbit") for name in ("0mbit", "200000gbit")),
    ],
)
def test_an_unknown_network_is_one_clear_line(name, words):
    with pytest.raises(UserError, match=words) as error:
        network_profile(name)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("kind", "given", "words"),
    [
        (ClusterConfig, {"hosts": 0}, "cluster.hosts must be at least 1, got 0"),
        (ClusterConfig, {"hosts": 5000}, "cluster.hosts must be at most 4096"),
        (ClusterConfig, {"ranks_per_host": 0}, "cluster.ranks_per_host must be at least 1"),
        (ClusterConfig, {"time_scale": 0}, "cluster.time_scale must be greater than 0"),
        (ClusterConfig, {"max_time_scale": 0.5}, "cluster.max_time_scale must be at least 1"),
        (ClusterConfig, {"min_time_scale": 0.5}, "cluster.min_time_scale must be at least 1"),
        (ClusterConfig, {"min_time_scale": 50}, "cluster.max_time_scale must be at least 50 and"),
        (ClusterConfig, {"kind": "real"}, "key of cluster 'kind': unknown value 'real'"),
        (Fault, {"kind": "link_down"}, "needs `host:`"),
        (Fault, {"kind": "link_down", "host": 1, "rank": 1}, "does not use `rank:`"),
        (Fault, {"kind": "link_rate", "host": 1}, "needs `rate:`"),
        (Fault, {"kind": "link_rate", "host": 1, "rate": "slow"}, "unknown network 'slow'"),
        (Fault, {"kind": "slow_host", "host": 1}, "needs `factor:`"),
        (Fault, {"kind": "slow_host", "host": 1, "factor": 0}, "factor must be greater than 0"),
        (Fault, {"kind": "kill_rank", "host": 1}, "fault kill_rank: does not use `host:`"),
        (Fault, {"kind": "kill_rank", "rank": 1, "for_s": 1}, "does not use `for_s:`"),
        (Fault, {"kind": "link_down", "host": -1}, "host must be at least 0"),
        (Fault, {"kind": "kill_rank", "rank": -1}, "rank must be at least 0"),
        (Fault, {"kind": "link_down", "host": 0, "at_s": -1}, "at_s must be at least 0"),
        (Fault, {"kind": "link_down", "host": 0, "for_s": 0}, "for_s must be greater than 0"),
        (Fault, {"kind": "link_delay", "host": 1}, "needs `delay_us:`"),
        (Fault, {"kind": "link_delay", "host": 1, "delay_us": -1}, "delay_us must be at least 0"),
        (ClusterConfig, {"links": "cables"}, "key of cluster 'links': unknown value 'cables'"),
        (Fault, {"kind": "earthquake"}, "unknown kind of fault"),
        (Stretch, {"gbps": 0.0, "for_s": 1.0}, "trace"),
    ],
)
def test_a_wrong_cluster_or_fault_is_one_clear_line(kind, given, words):
    with pytest.raises(UserError, match=words):
        kind(**given) if kind is not ClusterConfig else build_options(kind, given, "key of cluster")


def test_lost_packets_are_waited_for_in_emulated_time():
    command = network.route_command("eth0", "10.78.0.2", "cubic", 8)
    assert command == (
        "route replace 10.78.0.0/16 dev eth0 proto kernel scope link src 10.78.0.2 "
        "congctl cubic rto_min 1600ms"
    )
    assert network.route_command("eth0", "10.78.0.2", "cubic", 1).endswith(" rto_min 200ms")


@pytest.fixture
def left(tmp_path, monkeypatch):
    """`left(*pids)` writes host tables of these processes, and returns the folder."""

    def write(*pids: int) -> Path:
        for pid in pids:
            (tmp_path / f"virtual-hosts-{pid}.json").write_text("{}")
        return tmp_path

    monkeypatch.setattr(network, "_TABLES", tmp_path)
    monkeypatch.setattr(network, "time", SimpleNamespace(sleep=lambda _: None))
    return write


DEAD = (1 << 22) + 1  # Linux gives no process a higher number than 1 << 22


@pytest.mark.parametrize("refusals", [0, 2, 1000])
def test_what_a_killed_program_left_is_cleared_or_the_last_try_raises(left, refusals, monkeypatch):
    tables, tries = left(DEAD), []

    def remove(devices):
        tries.append(devices)
        if len(tries) <= refusals:
            raise RuntimeError("ip -batch: Cannot find device")

    monkeypatch.setattr(network, "remove", remove)
    with pytest.raises(RuntimeError, match="find device") if refusals > 2 else nullcontext():
        network.clear(["br0", "p0"])
    assert tries == [["br0", "p0"]] * (network._TRIES if refusals > 2 else refusals + 1)
    assert not list(tables.iterdir())


def test_devices_of_another_cluster_that_exists_are_not_cleared(left, monkeypatch):
    monkeypatch.setattr(network, "remove", lambda devices: pytest.fail(f"removed {devices}"))
    tables = left(DEAD, os.getpid())
    network.clear(["br0", "p0"])
    assert [path.name for path in tables.iterdir()] == [f"virtual-hosts-{os.getpid()}.json"]


def test_a_link_carries_less_payload_than_its_rate_and_less_of_it_where_it_is_scaled():
    assert payload_bytes_per_s(8) == pytest.approx(1e9 * 1448 / 1514)
    cluster = EmulatedCluster(hosts=2, profile=linked(8), time_scale=4)
    assert cluster.wire_bytes_per_s == pytest.approx(250e6 * 1448 / 1514)
    lossy = dataclasses.replace(linked(8), loss_percent=1)
    assert EmulatedCluster(hosts=2, profile=lossy).wire_bytes_per_s is None


# About what a core of a small virtual machine does.
MACHINE = Calibration(cpu_s_per_byte=0.8e-9, memory_bytes_per_s=12e9)
BERT = Load(world_size=4, hosts=4, parameter_bytes=438_000_000, update_passes=3, step_s=0.3)
RESNET = dataclasses.replace(BERT, parameter_bytes=102_000_000, step_s=0.253)


def linked(gbps: float) -> NetworkProfile:
    return NetworkProfile(name=f"{gbps}", gbps=gbps)


def scale(load: Load, gbps: float = 10, machine: Calibration = MACHINE, cores: int = 2) -> float:
    return choose_time_scale(load, linked(gbps), machine, cores).time_scale


def test_scales_are_readable_and_grow_for_ever_and_those_of_known_cases():
    first = list(itertools.islice(readable_scales(), 40))
    assert first[:12] == [1, 1.5, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20]
    assert first == sorted(set(first)) and first[-1] > 1000
    assert 5 <= scale(BERT) <= 20, "two cores, 10 GbE"
    assert 2 <= scale(RESNET) < scale(BERT), "fewer bytes per second of compute"
    assert scale(BERT, gbps=0.1, cores=16) == 1, "slow links and many cores"
    far = network_profile("wan")
    near = dataclasses.replace(far, sites=(), between=())
    apart, together = (choose_time_scale(BERT, item, MACHINE, 2).time_scale for item in (far, near))
    assert together / 2 < apart <= together, "within a site bursts are as fast as without others"
    alone = dataclasses.replace(BERT, world_size=1, hosts=1)
    assert 1 <= scale(alone) <= scale(BERT), "no links to wait for"


def test_the_scale_grows_with_the_load_and_shrinks_with_the_machine():
    base = scale(BERT)
    assert scale(dataclasses.replace(BERT, hosts=16, world_size=16)) > base
    assert scale(dataclasses.replace(BERT, world_size=16)) > base
    assert scale(BERT, gbps=100) > base
    alone = dataclasses.replace(BERT, world_size=1, hosts=1)
    assert scale(dataclasses.replace(alone, update_passes=7)) > scale(alone)
    assert scale(BERT, cores=8) < base
    slow = Calibration(cpu_s_per_byte=5e-9, memory_bytes_per_s=4e9)
    assert scale(BERT, machine=slow) > base


HEAVY = Seen(time_scale=5, step_s=1.3, cpu_s_per_s=1.85, core_wait=None)
"""Horovod and BERT-Base on 2 cores, which it keeps busy all the time."""


def need(seen: Seen, load: Load = BERT) -> float:
    return needed_scale(seen, load, linked(10), 2).time_scale


def test_the_scale_that_a_trial_needs_follows_from_what_it_took():
    """CPU seconds per step stay the same; the step was too long, for it lacked cores."""
    assert HEAVY.cpu_s_per_step == pytest.approx(12, rel=0.01)
    assert need(HEAVY) == 16
    easy = Seen(time_scale=16, step_s=0.73, cpu_s_per_s=1.0, core_wait=None)
    assert need(easy) <= 16
    # Of a step that had its cores, its own time counts: 12 / (1.2 x 0.6).
    short = Seen(time_scale=20, step_s=0.6, cpu_s_per_s=1.0, core_wait=None)
    assert need(short) == 20


def test_ranks_that_wait_for_cores_need_a_larger_scale_however_idle_the_machine_is():
    idle = Seen(time_scale=4, step_s=0.6, cpu_s_per_s=0.3, core_wait=0.59)
    assert need(idle) <= 4
    # Some engines look all the time whether there is something to do, which takes nothing away.
    assert need(dataclasses.replace(idle, cpu_s_per_s=1.9)) <= 4
    assert need(dataclasses.replace(HEAVY, core_wait=3.0)) == 16
    assert need(dataclasses.replace(idle, core_wait=0.8)) == 6
    # How fast waits shrink is not known: no more than twice the scale at once.
    assert need(dataclasses.replace(idle, core_wait=3.0)) == 8


def test_the_reason_for_a_scale_has_the_numbers():
    choice = choose_time_scale(BERT, linked(10), MACHINE, 2)
    assert choice.reason == (
        "3.8 CPU seconds a step must fit into 60% of 2 cores in 0.53 s, on this machine: "
        "at least 6.0 times slower than real time"
    )
    fits = choose_time_scale(BERT, linked(0.1), MACHINE, 16).reason
    assert fits.endswith("CPU seconds a step fit into 53 s of 16 cores")
    choice = needed_scale(HEAVY, BERT, linked(10), 2)
    assert choice.reason == "12 CPU seconds a step must fit into 60% of 2 cores in 0.83 s"
    waiting = Seen(time_scale=4, step_s=0.6, cpu_s_per_s=0.3, core_wait=0.9)
    choice = needed_scale(waiting, BERT, linked(10), 2)
    assert choice.reason == (
        "at 4 a rank's threads waited 0.90 s per second for a core; at most 0.6 s are allowed"
    )


def test_hosts_that_leave_their_devices_need_a_larger_scale_in_both_directions():
    kept = Seen(time_scale=4, step_s=0.6, cpu_s_per_s=0.3, core_wait=0.1, fell_behind=0.014)
    assert need(kept) == 4
    for off in (0.021, -0.021):
        assert need(dataclasses.replace(kept, fell_behind=off)) == 6
    assert need(dataclasses.replace(kept, fell_behind=0.2)) == 8, "no more than twice at once"
    choice = needed_scale(dataclasses.replace(kept, fell_behind=-0.021), BERT, linked(10), 2)
    assert choice.reason == (
        "at 4 hosts caught up with their devices by 2.1% of the time; at most 1.5% are allowed"
    )


def test_the_largest_scale_is_enough_where_a_record_may_have_it():
    """A first round asks for more than that: what cannot be had is not missed."""
    seen = Seen(time_scale=20, step_s=0.6, cpu_s_per_s=0.3, core_wait=0.1, fell_behind=0.05)

    def most(most: float, **changed: float) -> float:
        return needed_scale(dataclasses.replace(seen, **changed), BERT, linked(10), 2, most)

    assert most(40).time_scale == 40
    assert most(26).time_scale == 26, "0.05 x 20 / 26 is below 4 %"
    assert most(24).time_scale == 40, "it is not: too heavy"
    assert most(25, fell_behind=0.0, core_wait=0.8).time_scale == 25
    assert most(21, fell_behind=0.0, core_wait=0.8).time_scale == 30


def test_a_model_that_hardly_computes_makes_up_for_nothing():
    """Hosts would fall behind by the time of an update on this machine's CPU."""
    sends = dataclasses.replace(RESNET, step_s=0.0006)
    wire_s = 2 * (sends.hosts - 1) / sends.hosts * sends.parameter_bytes * 8 / 10e9
    update_s = sends.world_size * sends.parameter_bytes * sends.update_passes
    serial_s = (update_s / MACHINE.memory_bytes_per_s + sends.world_size * 0.02) / 2
    choice = choose_time_scale(sends, linked(10), MACHINE, 2)
    assert choice.time_scale >= serial_s / (0.0006 + 0.015 * wire_s) > scale(RESNET)
    assert "of replayed compute must make up for" in choice.reason


def test_others_leave_a_fair_share_of_the_cores_at_least():
    assert [at_hand(2, foreign, 2) for foreign in (0.0, 0.2)] == [2, 2], "that is nobody"
    assert [at_hand(2, foreign, 2) for foreign in (0.5, 1.0, 2.0)] == [1.6, 4 / 3, 1]
    assert at_hand(16, 2.0, 4) == 14
    assert scale(BERT, cores=1) > scale(BERT, cores=2)


def test_cores_of_others_are_all_busy_ones_but_ours(monkeypatch):
    assert min(dilation._own_and_busy_s()) > 0, "of this kernel"
    spent = iter([(1.0, 10.0), (1.2, 11.7)])
    monkeypatch.setattr(dilation, "_own_and_busy_s", lambda: next(spent))
    clock = iter([100.0, 101.0])
    monkeypatch.setattr(dilation.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(dilation.time, "sleep", lambda seconds: None)
    assert foreign_cores() == pytest.approx(1.5)


def test_a_model_that_computes_is_dilated_only_where_it_learns():
    for replayed, given in ((True, None), (True, 10.0), (False, None), (False, 1.0)):
        for learns in (True, False):
            check_scale(replayed, learns, given)
    check_scale(False, True, 4)
    with pytest.raises(UserError, match=r"time_scale: 4 slows the links, but not a model"):
        check_scale(False, False, 4)
    with pytest.raises(UserError, match=r"at least 1 for models that compute for real, got 0\.5"):
        check_scale(False, True, 0.5)


def measured(*rates: tuple[float, float]) -> list[dict]:
    return [
        {"host": f"h{i}", "up_gbps": up, "down_gbps": down} for i, (up, down) in enumerate(rates)
    ]


def test_links_are_recorded_and_the_worst_is_named_where_it_is_far_off():
    block = network_record(linked(10), measured((9.9, 10.1), (9.7, 10.0)))
    assert block["requested"]["gbps"] == 10
    assert block["measured"][1] == {"host": "h1", "up_gbps": 9.7, "down_gbps": 10.0}
    assert (block["off_percent"], block["flagged"], block["notes"]) == (-3.0, False, [])
    assert json.loads(json.dumps(block)) == block
    block = network_record(linked(1), measured((1.0, 0.99), (1.02, 0.8)))
    assert (block["off_percent"], block["flagged"]) == (-20.0, True)
    assert block["notes"] == [
        "links differ from the request: h1 down 0.8 Gb/s instead of 1 (-20.0 %)"
    ]
    assert network_record(linked(1), measured((1.2, 1.0)))["flagged"]
    # Where frames are lost, or on a line that others share, TCP sets the speed.
    slow = {"host": "h0", "gbps": 0.2, "requested_gbps": None}
    assert not network_record(linked(1), measured((1.0, 1.0)), [slow])["flagged"]
    busy = {"host": "h0", "gbps": 0.9, "requested_gbps": 1}
    block = network_record(linked(1), measured((1.0, 1.0)), [busy])
    assert block["together"] == [busy]
    (note,) = block["notes"]
    assert "h0 down with all links busy 0.9 Gb/s instead of 1 (-10.0 %)" in note
    result = {"source": "h0", "target": "h1", "requested_us": 100.0, "delay_us": 108.0}
    assert not network_record(linked(1), [], [], [result], slack_us=10)["flagged"]
    block = network_record(linked(1), [], [], [result], slack_us=7)
    assert (block["flagged"], block["delays"]) == (True, [result])
    words = "links differ from the request: from h0 to h1 packets take 108 us instead of 100"
    assert block["notes"] == [words]
    block = network_record(linked(1), [])
    assert (block["off_percent"], block["flagged"], block["measured"]) == (None, False, [])


def test_links_that_are_all_busy_are_measured_after_tcp_has_its_rate(monkeypatch):
    calls = []

    def ring(hosts, seconds, skip_s):
        calls.append((seconds, skip_s))
        return [0.5, 0.4] if len(calls) == 1 else [0.1, 0.5]

    monkeypatch.setattr("common.emulation.flow.ring", ring)
    hosts = (SimpleNamespace(name="h0"), SimpleNamespace(name="h1"))
    cluster = SimpleNamespace(hosts=hosts, profile=linked(1), time_scale=2, gbps=[1, 1])
    rows = rates_together(cluster)
    assert [row["gbps"] for row in rows] == [1, 1], "the best of two measurements"
    assert len(calls) == 2
    for seconds, skip_s in calls:
        assert skip_s > 0 and seconds - skip_s >= 0.5


def test_what_a_switch_has_dropped_is_told():
    before = dict.fromkeys(("packets", "frames", "bytes", "lost", "overflows", "missed"), 100)
    before |= {"unsendable": 0, "late_us": {"median": 1.0}, "priority": "real-time"}
    after = before | {"frames": 1090, "lost": 110, "late_us": {"median": 2.0}}
    counted = counted_between(before, after)
    assert (counted["frames"], counted["lost"], counted["loss_percent"]) == (990, 10, 1.0)
    assert counted["late_us"] == {"median": 2.0} and counter_notes(counted) == []
    assert counted_between(None, after) is counted_between(before, None) is None
    assert counter_notes(None) == []
    full, late = counter_notes(counted_between(before, after | {"overflows": 150, "missed": 103}))
    assert full == "50 of 1050 frames found a queue of the switch full: TCP sends them again"
    assert late == "the switch came too late for 3 packets: this machine is too busy"


GIB = 1 << 30


def test_what_does_not_fit_is_refused_with_what_would():
    """A rank needs several copies of its parameters."""
    small, large = memory.required_bytes(0, 2), memory.required_bytes(GIB, 2)
    assert small < 0.5 * GIB
    assert 5 * GIB <= large - small <= 8 * GIB
    assert memory.required_bytes(GIB, 2, optimizer_copies=2) == large + 2 * GIB
    words = r"^.*64 hosts of 2 x 5\..*30\.0 GiB are available.*; 2 would fit$"
    with pytest.raises(UserError, match=words):
        memory.check_memory(GIB, hosts=64, ranks_per_host=2, available=30 * GIB)
    memory.check_memory(GIB, hosts=2, ranks_per_host=2, available=30 * GIB)
    with pytest.raises(UserError):
        memory.check_memory(GIB, hosts=3, ranks_per_host=2, available=30 * GIB)
    with pytest.raises(UserError, match="not even 1 would fit"):
        memory.check_memory(GIB, hosts=1, ranks_per_host=1, available=GIB)


@pytest.mark.parametrize(
    ("limit", "files", "rest"),
    [
        ("max", {"max": "1000", "current": "700", "stat": "anon 5\ninactive_file 200\n"}, 500),
        ("max", {"max": "max", "current": "700", "stat": "inactive_file 200\n"}, None),
        ("max", {"max": "1000", "current": "1300", "stat": "inactive_file 0\n"}, 0),
        ("max", {}, None),
        (
            "limit_in_bytes",  # version 1
            {
                "limit_in_bytes": "1000\n",
                "usage_in_bytes": "900\n",
                "stat": "inactive_file 20\ntotal_inactive_file 100\n",
            },
            200,
        ),
    ],
)
def test_a_control_group_limits(tmp_path, limit, files, rest):
    for name, text in files.items():
        (tmp_path / f"memory.{name}").write_text(text)
    assert cgroups.group_rest(tmp_path, limit) == rest


def test_every_trial_on_virtual_hosts_must_fit(monkeypatch):
    asked = []
    monkeypatch.setattr(fabric, "check_memory", lambda size, **how: asked.append((size, how)))
    real = make_trial("ddp")
    virtual = make_trial("dadt", ranks_per_host=1, network="10gbe")
    replayed = make_trial(
        "ddp", model="resnet50@rtx2080ti-modelled", batch_size=64, ranks_per_host=2, network="10gbe"
    )
    fabric.check_fit([real, virtual, replayed])
    assert [size > 100e6 for size, _ in asked] == [False, True] and asked[0][0] == 0
    assert [(how["hosts"], how["ranks_per_host"]) for _, how in asked] == [(4, 1), (2, 2)]
    copies = [how["optimizer_copies"] for _, how in asked[:2]]
    assert copies[0] == copies[1] + 1, "a delayed algorithm holds gradients of a step more"
