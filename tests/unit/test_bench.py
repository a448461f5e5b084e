"""Arithmetic of the benchmarks, and the tables that they print."""

from __future__ import annotations

import argparse
import json
import math

import numpy as np
import pytest
import torch

from bench import collectives, links, peers, wrappers
from bench.rig import session, table, team
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
    whole_items = [table.bucket_bytes(text, world) for text, world in (("25000001", 4), ("1", 3))]
    assert whole_items == [25_000_016, 12]
    factors = {"reduce_scatter": 0.75, "all_gather": 0.75, "all_reduce": 1.5, "rs_ag": 1.5}
    assert {op: table.bus_factor(op, 4) for op in factors} == factors  # those of nccl-tests
    assert table.slowest([[1.0, 5.0], [2.0, 4.0]]) == [2.0, 5.0]


def test_ratios_pair_the_rounds_that_both_have_and_give_their_range():
    ratio = table.Ratio.of({0: 2.0, 1: 6.0, 2: 4.0, 3: 9.0}, {0: 1.0, 1: 2.0, 2: 2.0})
    assert ratio.text() == "2.00x (2.00..3.00, 3 rounds)"
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


CASE = ("all_gather", 25_000_000)


def asked(engines: str, **options: object) -> argparse.Namespace:
    args = session.parser("", engines.split(), world=2).parse_args([])
    return argparse.Namespace(**{**vars(args), "num_hosts": 2, **options})


def test_the_report_compares_engines_round_by_round_and_names_the_missing_one():
    samples = [
        sample("a", "all_gather", 0, [[0.1, 0.1], [0.1, 0.1]]),
        sample("b", "all_gather", 0, [[0.2, 0.2], [0.1, 0.1]]),
        sample("b", "all_gather", 1, [[9.0], [9.0]]),  # a has no such round
    ]
    failures = {"c": "unavailable: no c"}
    lines = collectives.report(samples, asked("a b c"), {CASE: None}, failures)
    text = "\n".join(lines)
    assert "all_gather 25 MB n=2: a 2.00x b (2.00..2.00, 1 rounds)" in lines
    assert "all_gather 25 MB n=2: a 1.00x the CPU of b (1.00..1.00, 1 rounds)" in lines
    assert [line.split(maxsplit=3)[3] for line in text.splitlines() if " c " in line] == [
        "unavailable: no c"
    ]
    assert samples[0].cpu_s_per_gb() == pytest.approx(0.2 / 2 / 0.025)


def test_the_share_of_the_wire_and_the_time_above_it_are_in_the_networks_time():
    args = asked("a b", network="10gbe", time_scale=10.0)
    ((_, bound_s),) = collectives.bounds_s([CASE], args).items()
    # Half of the bytes leave each rank; 1448 of 1514 bytes of a packet are payload.
    assert bound_s == pytest.approx(10 * 12.5e6 * 8 / 10e9 * 1514 / 1448)
    samples = [
        sample(engine, "all_gather", index, [[0.01], [1e-3 * ms]])
        for engine, times in {"a": (50.4, 54, 51), "b": (50, 50.2)}.items()
        for index, ms in enumerate(times)
    ]
    lines = collectives.report(samples, args, {CASE: 0.05}, {})
    assert [line.split()[-2:] for line in lines[0].splitlines()[1:]] == [
        ["0.980", "100"],
        ["0.998", "10"],
    ]


@pytest.mark.parametrize(
    ("options", "small", "large"),
    [
        ({"rate": "1gbit"}, False, True),  # a bucket of tokens holds the whole small message
        ({"network": "10gbe"}, True, True),
        ({"rate": "none"}, False, False),
        ({"num_hosts": 0}, False, False),
    ],
)
def test_operations_have_a_bound_where_the_link_limits_them(options, small, large):
    bounds = collectives.bounds_s([("all_reduce", 8192), CASE], asked("a", **options))
    assert [bound is not None for bound in bounds.values()] == [small, large]


def test_differences_are_taken_in_each_round_and_relative_to_the_first():
    setting = {"ranks": 1, "tensors": 10}
    rows = [
        {"algorithm": "plain", **setting, "seconds_per_step": [1e-4, 2e-4, 1e-4]},
        {"algorithm": "ddp", **setting, "seconds_per_step": [2e-4, 3e-4, 9e-4]},
    ]
    for row in rows:
        row["cpu_seconds_per_step"] = [second / 2 for second in row["seconds_per_step"]]
    wanted = ["ddp", "1", "10", "300", "10.0", "10.0..80.0", "5.0", "5.0..40.0"]
    assert wrappers.overhead_table(rows).splitlines()[2].split() == wanted
    ranks = [{"before_bytes": 0, "peak_bytes": n << 20, "parameter_bytes": 1 << 20} for n in (2, 4)]
    rows = [{"algorithm": "ddp", "ranks": ranks}, {"algorithm": "dear", "ranks": ranks[:1]}]
    assert wrappers.memory_table(rows).splitlines()[2].split() == ["dear", "2", "2.00", "0.500"]


def test_an_algorithm_is_named_with_its_options():
    name, options = wrappers.parsed_algorithm("dear:fusion=none,update=replicated")
    assert (name, options.fusion, options.update) == ("dear", "none", "replicated")
    with pytest.raises(UserError, match="fusoin"):
        wrappers.parsed_algorithm("dear:fusoin=none")


@pytest.mark.parametrize(
    ("rounds", "worst", "verdict"),
    [
        ([1.019], 1.019, "ok"),
        ([0.981], 0.981, "ok"),
        ([1.021], 1.021, "MISSED"),
        ([0.979], 0.979, "MISSED"),
        ([0.5, 0.99, 0.97, 0.985, 1.0], 0.985, "ok"),  # the median counts
    ],
)
def test_a_link_may_be_off_by_two_percent_in_both_directions(rounds, worst, verdict):
    case = links.Case.within(2, 4, "alone", wanted=1.0)
    case.samples.extend([rate, 1.0] for rate in rounds)
    assert (case.value, case.verdict) == (pytest.approx(worst), verdict)
    assert case.cells()[:3] == ["4", "alone", "1"] and case.cells()[-1] == verdict
    unlimited = links.Case(name=(), wanted=1.0, limits=None, samples=[[9.0]])
    assert unlimited.verdict == "not judged"


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        (collectives, "--engines glo", "unknown engine 'glo'; did you mean 'gloo'?"),
        (collectives, "--engines gloo gloo", "--engines has a duplicate name: gloo gloo"),
        (collectives, "--ops all_redce", "unknown operation 'all_redce'; did you mean"),
        (collectives, "--sizes 4X", "size '4X' is not a number of bytes"),
        (collectives, "-n 1", "-n 1: collectives need 2 to 64 ranks"),
        (collectives, "--repeats 0", "--repeats must be at least 1"),
        (collectives, "--congestion cubik", "unknown congestion control 'cubik'"),
        (collectives, "--hosts netns --rate fast", "--rate 'fast' is not none or a speed"),
        (collectives, "--hosts netns --network 10gb", "unknown network '10gb'; did you mean"),
        (collectives, "--network 10gbe", "--network 10gbe needs --hosts netns"),
        (collectives, "--hosts netns --time-scale 10", "--time-scale 10 needs --network"),
        (collectives, "--hosts netns --network 10gbe --time-scale 0.5", "--time-scale 0.5: must"),
        (peers, "-n 3 --topologies ring", "topology ring needs an even number"),
        (peers, "-n 6", "topology one-peer-exp needs 2^k"),
        (peers, "--topologies rnig", "unknown topology 'rnig'; did you mean 'ring'"),
        (peers, "--systems torch-dpp", "unknown system 'torch-dpp'; did you mean 'torch-ddp'?"),
        (peers, "--systems plain dear", "--systems: dear is compared with torch-ddp; name both"),
        (peers, "--systems plain plain", "--systems has a duplicate name: plain plain"),
        (peers, "--topologies ring ring", "--topologies has a duplicate name: ring ring"),
        (peers, "--systems plain --topologies ring", "--topologies: no system of --systems has"),
        (peers, "--steps 0", "--steps must be at least 1"),
        (links, "delays --repeats 0", "--repeats must be at least 1"),
        (wrappers, "overhead --steps 0", "--steps must be at least 1"),
        (wrappers, "overhead --ranks 0", "--ranks must be at least 1"),
        (wrappers, "overhead --algorithms wfb", "unknown algorithm 'wfb'; did you mean 'wfbp'"),
        (wrappers, "memory --batch-size 0", "--batch-size must be at least 1"),
    ],
)
def test_a_mistake_is_named_in_one_line_before_anything_starts(script, arguments, message):
    with pytest.raises(UserError) as caught:
        script.main(arguments.split())
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_peers_are_compared_by_round_and_what_failed_says_why():
    cases = [
        peers.Case(system="plain", step_s=[0.1, 0.1], cpu_s=[0.1, 0.1], peak_bytes=[2**20] * 2),
        peers.Case(system="torch-ddp", step_s=[0.4, 0.6], cpu_s=[0.2, 0.2], peak_bytes=[2**21] * 2),
        peers.Case(system="dear", step_s=[0.2, 0.2], cpu_s=[0.1, 0.3], peak_bytes=[2**20, 2**22]),
        peers.Case(system="horovod", failure="unavailable: no mpirun on the PATH"),
    ]
    cases[2].difference = peers.difference([np.ones(4), 1.5 * np.ones(4)], [np.ones(4)] * 2)
    assert math.isnan(peers.difference([np.ones(4), np.full(4, np.nan)], [np.ones(4)] * 2))
    _, plain, _, dear, horovod = peers.rendered(cases, tensors=100).splitlines()
    assert plain.split() == ["plain", "100", "100..100", "-", "100", "1", "-", "-"]
    cells = ["dear", "200", "200..200", "1000", "200", "4", "5.0e-01", "2.50x", "(2.00..3.00,"]
    assert dear.split() == [*cells, "2", "rounds)", "over", "torch-ddp"]
    assert horovod.split(maxsplit=2)[2] == "unavailable: no mpirun on the PATH"


def test_the_comparison_of_peers_sees_a_rank_whose_gradients_are_missing():
    def change(ranks: list[int], world: int) -> np.ndarray:
        model = peers._model(width=64, layers=48)
        start, optimizer = peers._flat(model.parameters()), peers.sgd(model.parameters())
        data = [torch.Generator().manual_seed(rank) for rank in ranks]
        for _ in range(9):
            optimizer.zero_grad()
            for batch in data:
                (model(torch.randn(32, 64, generator=batch)).square().mean() / world).backward()
            optimizer.step()
        return (peers._flat(model.parameters()) - start).numpy()

    right = change([0, 1, 2, 3], 4)
    assert peers.difference([change([3, 2, 1, 0], 4)], [right]) < peers.TOLERANCE / 10
    for world in (3, 4):
        assert peers.difference([change([0, 1, 2], world)], [right]) > 5 * peers.TOLERANCE


def test_virtual_hosts_that_cannot_be_made_are_a_user_error(monkeypatch):
    monkeypatch.setattr(sandbox, "unable", lambda: "namespaces are forbidden here")
    parser = session.parser("", ["gloo"], world=2)
    local = session.parse(parser, [])
    assert local.num_hosts == 0
    with pytest.raises(UserError, match="forbidden here; or use --hosts local"):
        session.parse(parser, ["--hosts", "netns"])
    local.congestion = "reno"
    with pytest.raises(RuntimeError, match="sandbox"), team.built(local):
        pass


def test_mpi_reaches_virtual_hosts_without_ssh(monkeypatch):
    monkeypatch.setattr(team.shutil, "which", lambda name: name)
    monkeypatch.setattr(team, "find_mpirun", lambda: Mpirun(path="mpirun", major=4))
    hosts = [
        VirtualHost(name=f"h{i}", address=f"10.78.0.{i}", ifname="eth0", pid=i) for i in (1, 2)
    ]
    engine = object.__new__(team.Team)
    engine.name, engine._layout = "mpi", team.Layout(hosts=hosts, per_host=1)
    words = engine._mpirun()
    assert words[words.index("-H") + 1] == "10.78.0.1:1,10.78.0.2:1"
    assert words[words.index("plm_rsh_agent") + 1].endswith("-m common.emulation.hosts.rsh")


def test_results_are_never_overwritten_and_a_file_without_results_is_removed(tmp_path):
    path = tmp_path / "out.json"
    with Output(path):
        assert path.exists()
    assert not path.exists()
    with Output(path) as output:
        output.save("bench/it", {"precious": 1})
    with pytest.raises(UserError, match=r"out\.json exists; results are never"), Output(path):
        pass
    kept = json.loads(path.read_text())
    assert (kept["precious"], kept["tool"]) == (1, "bench/it")
