"""Tests of the costs of collectives that are composed of messages, by engine."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.emulation.links.profile import NetworkProfile
from common.virtual.costs.engines import ENGINES, OPERATIONS, costs_of, ring_of
from common.virtual.costs.networks import platform_of
from common.virtual.costs.parts import Platform, Shape, Wire
from dear.cost.collectives import TABLES, table_costs
from dear.cost.fit import AlphaBeta, Cost
from dear.errors import UserError

RECORDS = Path(__file__).parents[2] / "docs/records"
CONFIGS = Path(__file__).parents[2] / "configs"
CPU_ENGINES = ("comm_core", "gloo", "mpi", "horovod_gloo", "horovod_mpi")
HALVES = ("reduce_scatter", "all_gather")


def wires(engine: str, **values: float) -> Platform:
    """Returns a platform whose wires differ only in their kinds."""
    values = {"latency_s": 0.0, "bytes_per_s": math.inf, **values}
    inside = "nvlink" if "nccl" in engine else "memory"
    return Platform(
        wires={
            "inside": Wire(kind="inside", medium=inside, **values),
            "between": Wire(kind="between", **values),
            "sites": Wire(kind="sites", **values),
        }
    )


def platform_for(engine: str, network: str = "10gbe") -> Platform:
    return platform_of(network, inside="nvlink3" if "nccl" in engine else None)


@given(
    ranks=st.integers(2, 2048),
    nbytes=st.floats(1, 1e9),
    alpha_s=st.floats(0, 1e-2),
    beta=st.floats(1e-12, 1e-6),
    overhead_s=st.floats(0, 1e-3),
)
def test_a_ring_is_the_textbooks(ranks, nbytes, alpha_s, beta, overhead_s):
    wire = Wire(kind="between", latency_s=alpha_s, bytes_per_s=1 / beta, overhead_s=overhead_s)
    costs = costs_of("ring", Platform(wires={"between": wire}), Shape(hosts=ranks))
    half_s = (ranks - 1) * (alpha_s + overhead_s + nbytes / ranks * beta)
    assert costs["all_reduce"](nbytes) == pytest.approx(2 * half_s)
    for half in HALVES:
        assert costs[half](nbytes) == pytest.approx(half_s)


@pytest.mark.parametrize("network", TABLES)
def test_published_tables_are_rings(network):
    for ranks in (*TABLES[network], 24, 128):
        table = table_costs(network, ranks)
        costs = costs_of("ring", ring_of(table, ranks), Shape(hosts=ranks))
        for nbytes in (1.0, 4096.0, 25e6):
            assert costs["all_reduce"](nbytes) == pytest.approx(table(nbytes))


def test_the_worked_example_of_mgwfbp():
    costs = costs_of(
        "ring", ring_of(AlphaBeta(alpha_s=1e-3, beta_s_per_byte=1e-6), 8), Shape(hosts=8)
    )
    taken = [costs["all_reduce"](4 * count) for count in (250, 250, 550, 250)]
    assert taken == pytest.approx([2e-3, 2e-3, 3.2e-3, 2e-3], rel=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_single_rank_costs_nothing_and_nothing_is_free_otherwise(engine):
    for name, cost in costs_of(engine, platform_for(engine), Shape(hosts=1)).items():
        assert (name, cost(1e6), cost.occupancy_s(1e6)) == (name, 0, 0)
    for shape in (Shape(hosts=2), Shape(hosts=1, ranks_per_host=2)):
        costs = costs_of(engine, platform_for(engine), shape)
        assert set(costs) == set(OPERATIONS)
        for cost in costs.values():
            plain: Cost = cost
            assert hasattr(plain, "occupancy_s")
            assert cost(0) == cost.occupancy_s(0) == 0 < cost.occupancy_s(1) <= cost(1)


@settings(deadline=None)
@given(
    engine=st.sampled_from(sorted(set(ENGINES) - {"comm_core", "mpi", "horovod_mpi"})),
    hosts=st.integers(2, 300),
    local=st.integers(1, 8),
    operation=st.sampled_from(OPERATIONS),
    sizes=st.tuples(st.floats(1, 1e9), st.floats(1, 1e9)),
)
def test_more_bytes_take_longer(engine, hosts, local, operation, sizes):
    cost = costs_of(engine, platform_for(engine), Shape(hosts=hosts, ranks_per_host=local))
    few, many = sorted(sizes)
    assert cost[operation](few) <= cost[operation](many) * (1 + 1e-9)
    assert cost[operation].occupancy_s(few) <= cost[operation].occupancy_s(many) * (1 + 1e-9)


@settings(deadline=None)
@given(
    engine=st.sampled_from(("comm_core", "mpi", "horovod_mpi")),
    hosts=st.sampled_from((2, 4, 8, 32)),
    local=st.sampled_from((1, 2, 4)),
    operation=st.sampled_from(OPERATIONS),
    power=st.integers(0, 28),
)
def test_a_doubled_message_costs_more_within_an_algorithm(engine, hosts, local, operation, power):
    # For such numbers of ranks, all sizes at which these engines change their algorithm are powers
    # of two; there, a message may become cheaper.
    cost = costs_of(engine, platform_for(engine), Shape(hosts=hosts, ranks_per_host=local))
    low, high = 2.0**power, 2.0 ** (power + 1) - 1
    assert cost[operation](low) <= cost[operation](high) * (1 + 1e-9)


def counted(engine: str, operation: str, nbytes: float, shape: Shape) -> tuple[float, float]:
    """Returns the messages per rank, and the bytes on the busiest wire per byte of the buffer."""

    def link_s(platform: Platform) -> float:
        return costs_of(engine, platform, shape)[operation].timing(nbytes).link_s

    messages, carried = (
        link_s(wires(engine, overhead_s=1.0)),
        link_s(wires(engine, bytes_per_s=1.0)),
    )
    return round(messages, 6), round(carried / nbytes, 6)


@pytest.mark.parametrize(
    ("operation", "nbytes", "hosts", "messages", "carried"),
    [
        ("all_reduce", 16 << 10, 4, 3, 3),  # direct
        ("all_reduce", 16 << 10, 16, 4, 4),  # doubling
        ("all_reduce", 64 << 10, 4, 6, 1.5),  # two hops
        ("all_reduce", 64 << 10, 2, 2, 1),  # blocks on a ring
        ("all_reduce", 8 << 20, 4, 6, 1.5),  # pipeline
        ("reduce_scatter", 16 << 10, 4, 3, 0.75),
        ("all_gather", 8 << 20, 16, 15, 0.9375),
        ("broadcast", 16 << 10, 16, 4, 4),  # tree
        ("reduce", 16 << 10, 4, 3, 3),
        ("reduce", 8 << 20, 4, 6, 1.5),
        ("exchange", 1 << 20, 4, 1, 1),
    ],
)
def test_the_comm_core_uses_its_own_regimes(operation, nbytes, hosts, messages, carried):
    shape = Shape(hosts=hosts)
    assert counted("comm_core", operation, nbytes, shape) == (messages, carried)


def test_ranks_of_a_host_share_its_wire():
    shape = Shape(hosts=4, ranks_per_host=4)
    ring = costs_of("ring", wires("ring", bytes_per_s=1.0), shape)["all_reduce"]
    assert ring.timing(16.0).link_s == pytest.approx(2 * 15)  # a ring passes each wire once
    # The comm core's four rings of four hosts carry only what a rank per host would.
    assert counted("comm_core", "all_reduce", 8 << 20, shape)[1] == 1.5
    # Direct messages: 12 of each of the 4 ranks.
    assert counted("mpi", "all_gather", 1 << 20, shape)[1] == pytest.approx(4 * 12 / 16)
    assert counted("horovod_mpi", "all_reduce", 1 << 20, shape)[1] >= 2 * 3 / 4
    sites = costs_of("ring", platform_of("wan"), Shape(hosts=4, sites=2))["all_reduce"]
    assert sites(1) == pytest.approx(6 * 9e-6 + 2 * (2 * 20e-3 + 33e-6), rel=1e-3)


def test_ranks_of_a_host_use_shared_memory_or_tcp():
    """Seconds of 25 MB of two ranks on two cores (docs/records/collectives/local-n2.json)."""
    shape, platform = Shape(hosts=1, ranks_per_host=2), platform_of("10gbe")
    gloo, core = (costs_of(name, platform, shape) for name in ("gloo", "comm_core"))
    assert gloo["all_reduce"](25e6) == pytest.approx(20.7e-3, rel=0.05)
    assert core["all_reduce"](25e6) == pytest.approx(3.45e-3, rel=0.1)
    assert core["reduce_scatter"](25e6) == pytest.approx(2.39e-3, rel=0.1)
    assert core["all_gather"](25e6) == pytest.approx(2.86e-3, rel=0.15)


def test_what_queued_messages_overlap_depends_on_the_engine():
    shape, nbytes = Shape(hosts=4), 4096.0
    costs = {name: costs_of(name, platform_for(name), shape) for name in CPU_ENGINES}
    overlapped = {
        name: of["all_gather"](nbytes) - of["all_gather"].occupancy_s(nbytes)
        for name, of in costs.items()
    }
    assert overlapped["mpi"] > 33e-6  # a latency
    assert overlapped["comm_core"] < 2e-6
    gloo, one_by_one = costs["gloo"]["all_reduce"], costs["horovod_gloo"]["all_reduce"]
    assert gloo(nbytes) == one_by_one(nbytes)
    assert gloo.occupancy_s(nbytes) == pytest.approx(one_by_one.occupancy_s(nbytes) / 2)


def test_the_comm_core_costs_what_emulated_hosts_measured():
    costs = costs_of("comm_core", platform_of("10gbe"), Shape(hosts=4))
    errors = []
    for line in (RECORDS / "fidelity/records.jsonl").read_text().splitlines():
        for operation, fit in json.loads(line)["results"][0]["costs"].items():
            if operation == "exchange":  # its queue was not measured
                continue
            parts = [(part, part["below_bytes"]) for part in fit["smaller"]] + [(fit, 16 << 20)]
            for part, below in parts:
                nbytes = below / 2
                measured_s = part["queued_alpha_s"] + part["beta_s_per_byte"] * nbytes
                errors.append(costs[operation].occupancy_s(nbytes) / measured_s - 1)
    assert len(errors) >= 20
    assert abs(sum(errors) / len(errors)) < 0.05
    assert max(map(abs, errors)) < 0.2


@pytest.mark.parametrize(("gpus", "start_up_s"), [(8, 0.34e-3), (16, 0.51e-3)])
def test_nccl_on_10gbe_costs_what_a_published_study_implies(gpus, start_up_s):
    """Bus bandwidth of 1.12 to 1.22 GB/s, and start-up per tensor of ResNet-50 (arXiv 2005.13247).

    The study's start-up includes the time of the host and of Horovod per tensor; what remains for
    them is the same at both sizes.
    """
    costs = costs_of(
        "nccl", platform_of("10gbe", inside="pcie3"), Shape(hosts=gpus // 4, ranks_per_host=4)
    )
    cost = costs["all_reduce"]
    share = 2 * (gpus - 1) / gpus
    sizes = [4 * math.prod(shape) for shape in resnet50_shapes()]
    assert 1.12e9 < share * sum(sizes) / cost(sum(sizes)) < 1.22e9
    start_ups = [cost(nbytes) - share * nbytes / 1.1956e9 for nbytes in sizes]
    host_s = start_up_s - sum(start_ups) / len(sizes)
    assert host_s == pytest.approx(117e-6, rel=0.1)


def resnet50_shapes() -> list[list[int]]:
    path = CONFIGS / "profiles/rtx2080ti-modelled/resnet50-bs64.json"
    modules = json.loads(path.read_bytes())["modules"]
    return [parameter[1] for module in modules for parameter in module[2]]


def test_nccl_chooses_trees_and_protocols_by_size():
    platform = platform_of("100gbib", inside="nvlink3")
    cost = costs_of("nccl", platform, Shape(hosts=64, ranks_per_host=8))["all_reduce"]
    # A ring of 512 ranks has 128 hops between hosts of 6 us at least; a tree has 12.
    assert cost(1024) < 12 * 8.5e-6 + 14 * 1e-6 + 7e-6
    share = 2 * 511 / 512
    assert share * 1e9 / cost(1e9) == pytest.approx(12.4e9, rel=0.1)
    inside = costs_of("nccl", platform, Shape(hosts=1, ranks_per_host=8))["all_reduce"]
    assert 2 * 7 / 8 * 1e9 / inside(1e9) == pytest.approx(240e9, rel=0.02)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: costs_of("ncl", platform_of("10gbe"), Shape(hosts=2)), "did you mean 'nccl'"),
        (lambda: platform_of("20gbe"), "unknown network '20gbe'.*10gbe"),
        (lambda: platform_of("nvlink3"), "nvlink3 is not a network between hosts .*10gbe"),
        (
            lambda: platform_of("10gbe", inside="1gbe"),
            "1gbe is not a network inside a host .*nvlink3",
        ),
        (
            lambda: costs_of("nccl", platform_of("10gbe"), Shape(hosts=1, ranks_per_host=2)),
            "engine nccl cannot use memory inside a host .*nvlink, pcie",
        ),
        (
            lambda: costs_of(
                "gloo", platform_of("10gbe", inside="nvlink3"), Shape(hosts=1, ranks_per_host=2)
            ),
            "engine gloo cannot use nvlink",
        ),
        (
            lambda: costs_of("gloo", platform_of("10gbe"), Shape(hosts=2, sites=2)),
            "unknown kind of wire 'sites'",
        ),
        (
            lambda: replace(platform_of("10gbe").wire("between"), latency_s=-1e-6),
            "wire between: latency_s must be at least 0",
        ),
        (
            lambda: replace(platform_of("10gbe").wire("between"), bytes_per_s=0.0),
            "bytes_per_s must be above 0",
        ),
        (lambda: NetworkProfile(name="x", gbps=1, latency_us=-1), "latency_us must be at least 0"),
        (lambda: NetworkProfile(name="x", gbps=1, overhead_us=-1), "overhead_us must be at least"),
        (lambda: NetworkProfile(name="x", gbps=1, core_gb_per_s=0), "core_gb_per_s must be great"),
        (lambda: Shape(hosts=0), "hosts must be at least 1"),
        (lambda: Shape(hosts=2, sites=3), "sites must be at least 1 and at most 2"),
    ],
)
def test_bad_input_is_one_clear_line(call, words):
    with pytest.raises(UserError, match=words) as error:
        call()
    assert "\n" not in str(error.value)
