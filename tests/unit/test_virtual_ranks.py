"""Virtual ranks that differ: threads that take turns on one virtual clock."""

import contextlib
import dataclasses
import json
import subprocess
import sys
import threading

import pytest
import torch

from common.emulation.config import Fault
from common.harness.cli import main
from common.models.registry import profile_of
from common.virtual.costs.engines import costs_of
from common.virtual.costs.faults import Disturbance, disturbances
from common.virtual.costs.networks import platform_of
from common.virtual.costs.parts import Shape
from common.virtual.training.run import RANK_0, predicted
from common.virtual.world.cluster import Cluster, Rank
from common.virtual.world.marks import LAST, carried
from common.virtual.world.network import Group
from dear.cost.event_model.step import settled
from dear.cost.fit import AlphaBeta
from dear.errors import UserError
from tests.unit.test_virtual_world import TINY, one_line, setting

FOUR = Shape(hosts=4)
ONE_PEER = {"topology": "one-peer-exp"}


def of_ranks(name, *disturbed, shape=FOUR, budget_s=None, costs="10gbe", **options):
    """Returns the prediction of a small model in which each rank runs by itself."""
    point = setting(*TINY, name, shape, costs, **options)
    return predicted(
        dataclasses.replace(point, together=False, disturbances=disturbed, budget_s=budget_s)
    )


SLOW = Disturbance(host=3, compute=5)


@pytest.mark.parametrize("shape", [FOUR, Shape(hosts=2, ranks_per_host=2)])
@pytest.mark.parametrize(
    "name", ["ddp", "wfbp", "dear", "bytescheduler", "hierarchical", "fsdp", "dadt"]
)
def test_ranks_that_do_the_same_take_the_step_of_one(name, shape):
    """Groups of `hierarchical` across hosts share the links of these hosts."""
    together = predicted(setting(*TINY, name, shape, "10gbe"))
    apart = of_ranks(name, shape=shape)
    assert together.several is None and len(apart.several.steps) == 4
    assert apart.step_s == pytest.approx(together.step_s, rel=1e-9)
    assert apart.messages == together.messages


@pytest.mark.parametrize(
    ("name", "options"),
    [("decentralized", ONE_PEER), ("neighbor", {"topology": "ring"}), ("gradient-tracking", {})],
)
def test_equal_neighbours_take_the_step_of_one(name, options):
    together = predicted(setting(*TINY, name, FOUR, "10gbe", **options))
    apart = of_ranks(name, **options)
    assert apart.step_s == pytest.approx(together.step_s, rel=1e-9)


def test_ranks_wait_for_a_slow_one_only_if_they_exchange_in_step():
    alone = of_ranks("asyncddp", SLOW)
    usual = of_ranks("asyncddp")
    assert alone.several.steps[0].step_s == pytest.approx(usual.step_s, rel=0.02)
    assert alone.several.slowest_s == pytest.approx(5 * usual.step_s, rel=0.02)
    for name, options in [("allreduce", {}), ("decentralized", ONE_PEER)]:
        step = of_ranks(name, SLOW, **options)
        assert step.several.slowest_s == pytest.approx(step.step_s, rel=1e-6)
        assert step.step_s > 4.9 * setting(*TINY, name, FOUR, "10gbe").profile.step_s


def test_staleness_grows_with_the_steps_that_the_slow_rank_is_behind():
    several = of_ranks("asyncddp", SLOW).several
    fast, slow = several.statistics[0]["staleness"], several.statistics[3]["staleness"]
    # After 100 steps the slow rank has made 20; on average it was half of these 80 steps behind.
    mean, most = several.staleness
    assert 0.9 * 40 < mean < 1.1 * 40 and 0.9 * 80 < most < 1.1 * 80
    assert max(age["mean"] for age in slow.values()) < 0  # its neighbours are ahead of it
    assert set(fast) == {"2", "3"} and several.statistics[0]["lost"] == []


def test_a_bound_on_staleness_holds_the_others_back():
    several = of_ranks("asyncddp", SLOW, max_staleness=2).several
    assert several.staleness[1] <= 2 + 1
    assert several.steps[0].step_s == pytest.approx(several.slowest_s, rel=0.05)


def test_messages_carry_the_weights_of_push_sum():
    several = of_ranks("push-sum", barrier=True, topology="star").several
    weights = zip(*(counters["p"] for counters in several.statistics), strict=True)
    for bucket in weights:
        assert sum(bucket) == pytest.approx(4) and max(bucket) > 1.1


def twice():
    return [
        of_ranks("asyncddp", SLOW, costs="1gbe", budget_s=0.02),
        of_ranks("dear", Disturbance(host=1, compute=1.7)),
    ]


def bits(steps):
    return [(s.step_s, s.exposed_s, s.several.statistics, s.several.slowest_s) for s in steps]


def test_the_same_input_gives_the_same_bits_also_on_busy_cores():
    quiet = bits(twice())
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            spin = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(spin.kill)
        assert bits(twice()) == quiet


def exchange(cluster, *pairs):
    """Returns when each message of a million bytes between a pair of ranks ends, in seconds."""
    ranks = [Rank(cluster, rank) for rank in range(cluster.shape.ranks)]
    sent = [ranks[a].reach(a, b, 10**6, lambda: torch.zeros(0), id) for a, b in pairs]
    ranks[0].wait(sent)
    return [transfer.finished_s for transfer in sent]


def cluster_of(shape, *disturbed):
    cost = {"exchange": AlphaBeta(alpha_s=0.0, beta_s_per_byte=1e-9)}
    return Cluster(shape, lambda *_: cost, disturbed, engine="comm_core", priorities=True)


def test_ranks_of_a_host_share_its_link():
    shape = Shape(hosts=3, ranks_per_host=2)
    both_ways = exchange(cluster_of(shape), (0, 2), (2, 0), (4, 1))
    assert both_ways == pytest.approx([1e-3, 1e-3, 2e-3])  # host 0 receives two
    assert exchange(cluster_of(shape), (0, 2), (1, 4)) == pytest.approx([1e-3, 2e-3])
    assert exchange(cluster_of(shape), (0, 1), (1, 0)) == pytest.approx([1e-3, 1e-3])


def test_a_changed_link_counts_for_messages_that_start_meanwhile():
    slow = {"exchange": AlphaBeta(alpha_s=0.0, beta_s_per_byte=4e-9)}
    change = Disturbance(host=1, costs=lambda *_: slow, from_s=0.001, until_s=0.004)
    cluster = cluster_of(Shape(hosts=3), change)
    times = []
    for _ in range(4):
        before = cluster.events.now_s
        times += [end - before for end in exchange(cluster, (0, 1))]
    assert times == pytest.approx([1e-3, 4e-3, 1e-3, 1e-3])


def test_faults_become_changes():
    platform = platform_of("10gbe", None)
    slow, rate, delay = (
        disturbances(Fault(host=1, **fault), "comm_core", 4, platform)[0]
        for fault in (
            {"kind": "slow_host", "factor": 3.0, "at_s": 1.0, "for_s": 2.0},
            {"kind": "link_rate", "rate": "1gbe"},
            {"kind": "link_delay", "delay_us": 5000.0},
        )
    )
    assert (slow.compute, slow.from_s, slow.until_s) == (3.0, 1.0, 3.0)
    usual = costs_of("comm_core", platform, Shape(hosts=2))["exchange"]
    wire = platform.wire("between")
    assert rate.costs(2, 1)["exchange"](1e8) == pytest.approx(10 * usual(1e8), rel=0.01)
    late_s = delay.costs(2, 1)["exchange"](1e6) - usual(1e6)
    assert late_s == pytest.approx(5e-3 - wire.latency_s)


def faulty(engine, operation, nbytes, hosts, **fault):
    """Returns the seconds of a collective without and with a fault of one host's link."""
    platform = platform_of("10gbe", "pcie4" if engine == "nccl" else None)
    (change,) = disturbances(Fault(host=1, **fault), engine, hosts, platform)
    usual = costs_of(engine, platform, Shape(hosts=hosts))
    return usual[operation](nbytes), change.costs(hosts, 1)[operation](nbytes)


DELAY = {"kind": "link_delay", "delay_us": 5000.0}


@pytest.mark.parametrize(
    ("engine", "operation", "nbytes", "hosts", "passes"),
    [
        ("comm_core", "all_reduce", 4e6, 16, 4),  # a ring: in and out, in each half
        ("comm_core", "all_gather", 4e6, 16, 2),
        ("comm_core", "all_reduce", 1024, 4, 1),  # all at once
        ("comm_core", "all_reduce", 1024, 16, 4),  # every host takes part in each of 4 rounds
        ("gloo", "reduce_scatter", 4e6, 16, 4),  # an all-reduce
        ("gloo", "all_gather", 1024, 2, 1),
        ("nccl", "all_gather", 4e6, 16, 2),
        ("mpi", "broadcast", 4e6, 16, 2),  # a chain
        ("mpi", "all_reduce", 4e6, 2, 2),
    ],
)
def test_a_delay_counts_as_often_as_a_block_passes_the_link(
    engine, operation, nbytes, hosts, passes
):
    usual_s, late_s = faulty(engine, operation, nbytes, hosts, **DELAY)
    assert late_s - usual_s == pytest.approx(passes * 5e-3, rel=0.05)


@pytest.mark.parametrize(
    ("engine", "operation", "fault"),
    [
        ("mpi", "all_reduce", DELAY),
        ("mpi", "all_reduce", {"kind": "link_rate", "rate": "1gbe"}),
        ("gloo", "broadcast", DELAY),
        ("nccl", "all_reduce", DELAY),
    ],
)
def test_the_place_of_a_slow_host_in_a_tree_is_not_known(engine, operation, fault):
    with pytest.raises(UserError, match="a tree pass the link of one host depends on its place"):
        faulty(engine, operation, 1024, 16, **fault)


def test_a_slow_link_sets_the_pace_of_a_ring_but_not_of_a_root():
    slow = {"kind": "link_rate", "rate": "1gbe"}
    usual_s, slow_s = faulty("gloo", "all_reduce", 100e6, 8, **slow)
    assert slow_s == pytest.approx(10 * usual_s, rel=0.02)
    with pytest.raises(UserError, match="one root"):
        faulty("mpi", "broadcast", 1e6, 4, **slow)


def test_a_fault_that_cannot_be_predicted_is_a_row(capsys):
    models = f"models=[{{name: {TINY[0]}, batch_size: {TINY[1]}}}]"
    given = ["--set", models, "--set", "learn=null", "-k", "allreduce", "--json"]
    fault = ["--set", "faults=[{kind: link_delay, host: 3, delay_us: 5000}]", "-k", "link_delay"]
    assert main(["predict", "slow_host", *given, *fault, "--engine", "mpi"]) == 1
    (row,) = json.loads(capsys.readouterr().out)
    assert row["status"] == "unsupported" and "depends on its place" in row["reason"]
    series = ["--engine", "comm_core", "--over", "workers=2,4"]
    assert main(["predict", "slow_host", *given, *fault, *series]) == 0
    small, whole = json.loads(capsys.readouterr().out)
    assert small["status"] == "unsupported" and whole["step_s"] > 0
    assert small["reason"].endswith("host 3 is not one of 2 hosts")


def test_a_fault_in_time_changes_the_steps_meanwhile():
    step_s = setting(*TINY, "ddp", FOUR, "10gbe").profile.step_s
    faults = [(0.0, 0.5), (0.25, 0.5), (0.0, 0.25)]
    usual, late, early = (
        of_ranks("wfbp", Disturbance(host=0, compute=f, from_s=a, until_s=b), budget_s=0.5).step_s
        for f, (a, b) in zip((1.0, 5.0, 5.0), faults, strict=True)
    )
    slow = of_ranks("wfbp", Disturbance(host=0, compute=5.0)).step_s
    both = 2 / (1 / usual + 1 / slow)  # half of the time at each rate
    assert late == pytest.approx(both, rel=0.03) and early == pytest.approx(both, rel=0.03)
    assert usual > step_s


def test_unlike_neighbours_run_one_by_one():
    """A rank in the middle of a grid has more neighbours than one in a corner."""
    grid = setting(*TINY, "neighbor", Shape(hosts=9), "1gbe", topology="mesh")
    ring = dataclasses.replace(grid, options=dataclasses.replace(grid.options, topology="ring"))
    step = predicted(grid)
    assert step.several is not None and predicted(ring).several is None
    larger = dataclasses.replace(grid, shape=Shape(hosts=25))
    assert predicted(larger).note == RANK_0 and step.note is None
    counts = [each.messages for each in step.several.steps]
    assert len(set(counts)) == 1 and step.step_s > predicted(ring).step_s


def test_agreed_objects_are_copies_and_wait_for_the_last():
    cluster = cluster_of(Shape(hosts=2))
    ranks, world, results = [Rank(cluster, rank) for rank in (0, 1)], Group("w", (0, 1)), {}

    def run(rank):
        ranks[rank].pause(float(rank))
        values = ranks[rank].agree(world, [rank], "gather_objects")
        values[0].append("mine")
        results[rank] = cluster.events.now_s, values

    for rank in (0, 1):
        cluster.events.start(lambda rank=rank: run(rank))
    cluster.events.run_until(lambda: len(results) == 2)
    expected = (1.0, [[0, "mine"], [1]])
    assert results == {0: expected, 1: expected}


def test_a_rank_that_fails_ends_the_others():
    cluster = cluster_of(Shape(hosts=2))
    ranks, world = [Rank(cluster, rank) for rank in (0, 1)], Group("w", (0, 1))

    def fails():
        raise UserError("no such option")

    before = set(threading.enumerate())
    cluster.events.start(lambda: ranks[0].agree(world, None, "barrier"))
    cluster.events.start(fails)
    cluster.events.start(lambda: ranks[1].agree(world, None, "barrier"))
    with pytest.raises(UserError, match="no such option"):
        cluster.events.run_until(lambda: False)
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive()


def test_large_messages_carry_their_last_values():
    large, small = torch.arange(10_000.0), torch.arange(10.0)
    assert carried(small, small, 2).tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert carried(large, large).tolist() == [large[-LAST:].tolist()]
    assert carried(large[:5000], large).numel() == 0 == carried(large, large, 2).numel()
    assert carried(large.long(), large.long()).numel() == 10_000  # integers decide


def test_equal_step_times_are_not_steady_while_a_queue_grows():
    growing = [(1.0, *(0.5 + age for age in range(step))) for step in range(8)]
    assert settled(growing, 1) is None
    assert settled([*growing, growing[-1], growing[-1]], 1) == 1


@pytest.mark.parametrize("every", [1, 2])
def test_push_sum_is_the_mean_of_its_steps_with_and_without_messages(every):
    """Ranks leave messages out while the last one travels: every eighth step or so sends."""
    point = setting(*TINY, "push-sum", FOUR, "10gbe", every=every)
    long = dataclasses.replace(point, budget_s=400 * point.profile.step_s)
    assert predicted(point).step_s == pytest.approx(predicted(long).step_s, rel=2e-3)


@pytest.mark.full
def test_ranks_with_unequal_batches(capsys):
    """Ranks in step wait for the longest pass; at its own pace, each rank has its own rate."""
    given = ["--set", "faults=[]", "--set", "learn.batch_sizes=[16, 16, 16, 128]", "--json"]
    given += ["--set", "learn.budget_s=2"]
    engine = ["--engine", "comm_core", "-k", "allreduce|asyncddp"]
    assert main(["predict", "slow_host", *engine, *given]) == 0
    rows = {row["algorithm"]: row for row in json.loads(capsys.readouterr().out)}
    small, large = (profile_of("resnet50@rtx2080ti-modelled", size).step_s for size in (16, 128))
    in_step, apart = rows["allreduce"], rows["asyncddp"]
    assert in_step["batch"] == "16,16,16,128" and in_step["samples"] == pytest.approx(176)
    assert in_step["slowest_s"] == pytest.approx(in_step["step_s"]) and in_step["step_s"] > large
    rate = apart["samples"] / apart["step_s"]
    assert rate == pytest.approx(3 * 16 / small + 128 / large, rel=0.06)  # updates take the rest
    assert apart["slowest_s"] == pytest.approx(large, rel=0.03)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--set", "learn.batch_sizes=[64, 64, 64, 20]"], "has no profile for 20; allowed: "),
        (["--set", "learn.batch_sizes=[64, 64]"], "one number for each of 4 workers, got 2"),
        (["--set", "learn.batch_sizes=[64, 64, 64, 16]", "--over", "workers"], "--over workers"),
        (["--set", "learn.batch_sizes=[64, 64, 64, 16]", "-k", "horovod"], "ranks that differ"),
    ],
)
def test_wrong_batches_are_one_line(given, message, capsys):
    algorithms = ["--set", "algorithms=[allreduce, horovod]", "--set", "faults=[]"]
    assert main(["predict", "slow_host", *algorithms, *given, "--json"]) != 0
    output = capsys.readouterr()
    assert one_line(output.err, message) or message in output.out


def test_predict_prints_staleness_and_the_slow_host(capsys):
    models = f"models=[{{name: {TINY[0]}, batch_size: {TINY[1]}}}]"
    given = ["--set", models, "--set", "learn.budget_s=0.05", "--set", "learn.eval_every_s=0.05"]
    arguments = ["predict", "slow_host", *given, "--engine", "comm_core", "-k", "asyncddp"]
    assert main([*arguments, "--json"]) == 0
    usual, slow = json.loads(capsys.readouterr().out)
    assert (usual["fault"], slow["fault"]) == (None, "slow_host h3 x5 at 0 s")
    assert slow["slowest_s"] == pytest.approx(5 * usual["slowest_s"], rel=0.02)
    assert slow["staleness"][0] > usual["staleness"][0] and slow["staleness"][1] > 50


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ("[{kind: link_down, host: 1}]", "but not link_down"),
        ("[{kind: kill_rank, rank: 1}]", "but not kill_rank"),
        ("[{kind: slow_host, host: 1, factor: 2, at_s: 1}]", "needs `learn.budget_s:`"),
    ],
)
def test_faults_that_are_not_modelled_are_one_line(faults, message, capsys):
    given = ["--set", f"faults={faults}", "--set", "learn=null"]
    assert main(["predict", "slow_host", "-k", "dear", *given]) == 2
    assert one_line(capsys.readouterr().err, message)


def test_horovods_library_does_not_run_on_ranks_that_differ():
    with pytest.raises(UserError, match="cannot run on ranks that differ"):
        of_ranks("horovod", SLOW)
