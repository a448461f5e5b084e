"""The arithmetic of the benchmarks, and how they print what they measured."""

from __future__ import annotations

import argparse
import json
import types

import pytest
from bench.rig.limits import Limits

from bench import (
    collectives,
    decentralized_peer,
    links,
    overlap,
    preempt,
    wrappers,
)
from bench.rig import cases, session, table, team
from bench.rig.output import Output
from common.emulation import sandbox
from common.emulation.cluster import VirtualHost
from common.launch.mpirun import Mpirun
from dear.errors import UserError


def test_sizes_are_decimal_unless_they_say_i():
    sizes = {"4096": 4096, "4K": 4000, "4Ki": 4096, "25M": 25_000_000, "1.5GB": 1_500_000_000}
    assert {text: table.parse_size(text) for text in sizes} == sizes
    for text in ("", "M", "-4K", "4X", "0", "four"):
        with pytest.raises(UserError, match="is not a number of bytes"):
            table.parse_size(text)


def test_arithmetic_of_a_table():
    whole_items = [table.bucket_bytes(n, world) for n, world in ((25_000_001, 4), (1, 3))]
    assert whole_items == [25_000_016, 12]
    factors = {"reduce_scatter": 0.75, "all_gather": 0.75, "all_reduce": 1.5, "rs_ag": 1.5}
    assert {op: table.bus_factor(op, 4) for op in factors} == factors  # those of nccl-tests
    assert table.slowest([[1.0, 5.0], [2.0, 4.0]]) == [2.0, 5.0]
    values = [float(i) for i in range(1, 101)]
    assert [table.percentile(values, percent) for percent in (0, 50, 99)] == [1, 50, 99]


def test_ratios_pair_the_rounds_that_both_have_and_give_their_range():
    ratio = table.Ratio.of({0: 2.0, 1: 6.0, 2: 4.0, 3: 9.0}, {0: 1.0, 1: 2.0, 2: 2.0})
    assert f"{ratio.text()} {ratio.spread()}" == "2.00x (2.00..3.00, 3 rounds)"
    assert table.Ratio.of({0: 1.0}, {1: 1.0}) is None


def sample(engine: str, op: str, number: int, times_s: list[list[float]]) -> collectives.Sample:
    return collectives.Sample(
        engine=engine,
        op=op,
        nbytes=25_000_000,
        round=number,
        times_s=times_s,
        cpu_s=[0.1 for _ in times_s],
        wrong=0,
    )


def test_the_report_compares_engines_round_by_round_and_names_who_is_missing():
    samples = [
        sample("a", "all_gather", 0, [[0.1, 0.1], [0.1, 0.1]]),
        sample("b", "all_gather", 0, [[0.2, 0.2], [0.1, 0.1]]),
        sample("b", "all_gather", 1, [[9.0], [9.0]]),  # a has no such round
    ]
    no_limit = Limits("memory", [("all_gather", 25_000_000)])
    failures = {"c": "unavailable: no c"}
    lines = collectives.report(samples, 2, ["a", "b", "c"], no_limit, failures)
    text = "\n".join(lines)
    assert "all_gather 25 MB n=2: a 2.00x b (2.00..2.00, 1 rounds)" in lines
    assert "all_gather 25 MB n=2: a 1.00x the CPU of b (1.00..1.00, 1 rounds)" in lines
    assert [line.split(maxsplit=3)[3] for line in text.splitlines() if " c " in line] == [
        "unavailable: no c"
    ]
    assert samples[0].cpu_s_per_gb() == pytest.approx(0.2 / 2 / 0.025)


def test_time_above_the_wire_is_in_the_networks_time_and_by_rounds():
    case = ("all_gather", 25_000_000)
    limits = Limits("wire", [case], wire_bytes_per_s=25e7)
    args = argparse.Namespace(world=2, transport="auto")
    for index in range(3):  # half of the bytes leave each rank: 50 ms
        limits.measure(types.SimpleNamespace(args=args, hosts=[None, None]), index)
    assert limits.bound_s[case] == pytest.approx({0: 0.05, 1: 0.05, 2: 0.05})
    assert limits.lines() == ["# wire, by the profile, headers left out: 2.000 Gb/s in real time"]
    slowest_ms = {"a": (50.4, 54, 51), "b": (50, 50.2)}
    samples = [
        sample(engine, "all_gather", index, [[0.01], [ms / 1e3]])
        for engine, times in slowest_ms.items()
        for index, ms in enumerate(times)
    ]
    near = [
        line for line in collectives.report(samples, 2, ["a", "b"], limits, {}) if "wire" in line
    ]
    assert "all_gather 25 MB n=2: b 1.00 of the wire (1.00..1.00, 2 rounds)" in near
    lines = collectives.above_wire(samples, ["a", "b"], limits, 10.0).splitlines()
    assert lines[1] == "Time above the wire, in microseconds of the network:"
    assert [line.split() for line in lines[3:]] == [
        ["all_gather", "a", "25000000", "5000", "100", "40..400", "3"],
        ["all_gather", "b", "25000000", "5000", "10", "0..20", "2"],
    ]


def test_a_small_operation_has_a_bound_on_a_profiles_wire_only():
    case = ("all_reduce", 8192)
    running = types.SimpleNamespace(
        args=argparse.Namespace(world=4, transport="auto"), hosts=[None] * 4
    )
    limits = Limits("wire", [case], wire_bytes_per_s=8192.0)
    limits.measure(running, 0)
    assert limits.bound_s[case] == {0: 1.5}
    assert limits.record()["wire_bytes_per_s"] == 8192.0


@pytest.mark.parametrize(("kind", "median"), [("wire", 0.5), ("memory", 2.0)])
def test_nearness_is_a_fraction_of_the_wire_and_a_multiple_of_the_memory_bound(kind, median):
    limits = Limits(kind, [("all_gather", 25_000_000)])
    limits.bound_s["all_gather", 25_000_000][0] = 0.1
    near = limits.nearness(("all_gather", 25_000_000), {0: 0.2, 1: 7.0})
    assert (near.median, near.rounds) == (pytest.approx(median), 1)


def test_overlap_is_how_much_longer_the_slowest_ranks_compute_takes():
    keys = ("alone_s", "comm_s", "comm_cpu_s", "submit_s", "compute_s", "total_s")
    ranks = [dict(zip(keys, times, strict=True)) for times in ((1, 2, 3, 0, 1.1, 3), [1] * 6)]
    lines = overlap.rendered({"a": [ranks], "b": [ranks]}, {}).splitlines()
    assert lines[1].split()[:4] == ["a", "+10.0", "%", "+10.0..+10.0"]
    assert lines[1].split()[-1] == "4.00"  # CPU seconds are those of all ranks
    assert lines[3] == "a 1.00x the overlapped compute time with b (1.00..1.00, 1 rounds)"


def test_preempt_counts_the_rounds_in_which_every_rank_overtook():
    keys = ("urgent_s", "alone_s", "large_s", "large_alone_s", "overtook", "wrong")
    ranks = [
        dict(zip(keys, times, strict=True)) for times in ((1, 1, 1, 1, 1, 0), (2, 1, 1, 1, 0, 3))
    ]
    row = preempt.rendered({"a": [ranks, ranks[:1]]}, {}).splitlines()[1].split()
    assert row[1:3] == ["1500", "1000..2000"]
    assert row[-2:] == ["1/2", "3"]


def test_differences_are_taken_in_each_round_and_beside_the_first():
    place = {"ranks": 1, "tensors": 10}
    rows = [
        {"algorithm": "plain", **place, "seconds_per_step": [1e-4, 2e-4, 1e-4]},
        {"algorithm": "ddp", **place, "seconds_per_step": [2e-4, 3e-4, 9e-4]},
    ]
    wanted = ["ddp", "1", "10", "300", "100", "100..800", "10.0"]
    assert wrappers.overhead_table(rows).splitlines()[2].split() == wanted
    ranks = [{"before_bytes": 0, "peak_bytes": n << 20, "parameter_bytes": 1 << 20} for n in (2, 4)]
    rows = [{"algorithm": "ddp", "ranks": ranks}, {"algorithm": "dear", "ranks": ranks[:1]}]
    assert wrappers.memory_table(rows).splitlines()[2].split() == ["dear", "2", "2.00", "0.500"]
    curves = [
        {"task": task, "algorithm": name, "losses": [first, 1.0]}
        for task, name, first in (("m", "ddp", 2.0), ("b", "ddp", 9.0), ("m", "dear", 2.5))
    ]
    wanted = ["m", "dear", "2", "2.50000", "1.00000", "5.00e-01", "2.50e-01"]
    assert wrappers.loss_table(curves).splitlines()[3].split() == wanted


def test_an_algorithm_is_named_with_its_options():
    name, options = wrappers.parsed_algorithm("dear:fusion=none,update=replicated")
    assert (name, options.fusion, options.update) == ("dear", "none", "replicated")
    with pytest.raises(UserError, match="fusoin"):
        wrappers.parsed_algorithm("dear:fusoin=none")


@pytest.mark.parametrize(
    ("ups", "off", "verdict"),
    [
        ([1.019], 1.9, "ok"),
        ([0.981], -1.9, "ok"),
        ([1.021], 2.1, "MISSED"),
        ([0.979], -2.1, "MISSED"),
        ([0.5, 0.99, 0.97, 0.985, 1.0], -1.5, "ok"),  # by the median
    ],
)
def test_a_link_may_be_off_by_two_percent_in_both_directions(ups, off, verdict):
    together = [[1.0, 1.0]] * len(ups)
    case = links.Rate(
        hosts=2, gbps=1.0, time_scale=1, alone=[[up, 1.0] for up in ups], together=together
    )
    assert (case.off_percent, case.verdict) == (pytest.approx(off), verdict)
    assert cases.table(links.Rate, [case]).splitlines()[1].split()[-1] == verdict


@pytest.mark.parametrize(
    ("script", "arguments", "said"),
    [
        (collectives, "--engines glo", "unknown engine 'glo'; did you mean 'gloo'?"),
        (collectives, "--engines gloo gloo", "--engines names one twice: gloo gloo"),
        (collectives, "--ops all_redce", "unknown operation 'all_redce'; did you mean"),
        (collectives, "--sizes 4X", "size '4X' is not a number of bytes"),
        (collectives, "-n 1", "-n 1: collectives need 2 to 64 ranks"),
        (collectives, "--congestion cubik", "unknown congestion control 'cubik'"),
        (collectives, "--hosts netns --rate fast", "--rate 'fast' is not none or a speed"),
        (collectives, "--hosts netns -n 4 --ranks-per-host 3", "-n 4 is not a multiple"),
        (collectives, "--hosts netns --network 10gb", "unknown network '10gb'; did you mean"),
        (collectives, "--network 10gbe", "--network 10gbe needs --hosts netns"),
        (collectives, "--hosts netns --time-scale 10", "--time-scale 10 needs --network"),
        (collectives, "--hosts netns --network 10gbe --time-scale 0.5", "--time-scale 0.5: must"),
        (overlap, "--calls 0", "--flights, --calls and --repeats must be at least 1"),
        (preempt, "--hosts local --engines mpi", "--engines can be comm_core and gloo here"),
        (
            decentralized_peer,
            "-n 3 --topologies ring",
            "topology ring needs an even number of ranks",
        ),
        (
            decentralized_peer,
            "-n 6 --topologies one-peer-exp",
            "topology one-peer-exp needs 2^k ranks",
        ),
        (decentralized_peer, "--topologies rnig", "unknown topology 'rnig'; did you mean 'ring'"),
        (decentralized_peer, "--repeats 0", "--repeats must be at least 1"),
        (wrappers, "overhead --steps 0", "--steps must be at least 1"),
        (wrappers, "overhead --ranks 0", "--ranks must be at least 1"),
        (wrappers, "overhead --tensors -1", "--tensors must be at least 1"),
        (wrappers, "overhead --algorithms wfb", "unknown algorithm 'wfb'; did you mean 'wfbp'"),
        (wrappers, "memory --batch-size 0", "--batch-size must be at least 1"),
        (wrappers, "loss_curves --tasks mnits", "unknown task 'mnits'; did you mean 'mnist'"),
    ],
)
def test_a_mistake_is_named_in_one_line_before_anything_starts(script, arguments, said):
    with pytest.raises(UserError) as caught:
        script.main(arguments.split())
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


def test_virtual_hosts_where_none_can_be_made_are_a_users_mistake(monkeypatch):
    monkeypatch.setattr(sandbox, "unable", lambda: "namespaces are forbidden here")
    parser = session.parser_of("", ["gloo"], world=2)
    assert session.parse(parser, []).num_hosts == 0
    with pytest.raises(UserError, match="forbidden here; or use --hosts local"):
        session.parse(parser, ["--hosts", "netns"])
    with pytest.raises(RuntimeError, match="sandbox"), team.built(0, "none", "reno"):
        pass


def test_mpi_reaches_virtual_hosts_by_the_stand_in_of_ssh(monkeypatch):
    monkeypatch.setattr(team.shutil, "which", lambda name: name)
    monkeypatch.setattr(team, "find_mpirun", lambda: Mpirun(path="mpirun", major=4))
    hosts = [
        VirtualHost(name=f"h{i}", address=f"10.78.0.{i}", ifname="eth0", pid=i) for i in (1, 2)
    ]
    made = object.__new__(team.Team)
    made.name, made._layout = "mpi", team.Layout(hosts=hosts, per_host=1)
    words = made._mpirun()
    assert words[words.index("-H") + 1] == "10.78.0.1:1,10.78.0.2:1"
    assert words[words.index("plm_rsh_agent") + 1].endswith("-m common.emulation.hosts.rsh")


def test_results_are_never_overwritten_and_a_name_is_given_back(tmp_path):
    path = tmp_path / "out.json"
    with Output(path):
        assert path.exists()
    assert not path.exists()
    with Output(path) as output:
        output.save({"precious": 1})
    with pytest.raises(UserError, match=r"out\.json exists; results are never"), Output(path):
        pass
    assert json.loads(path.read_text()) == {"precious": 1}
