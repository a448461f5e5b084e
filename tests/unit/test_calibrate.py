"""Costs from logs of nccl-tests: each form of them, what is wrong with one, what is written."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from types import SimpleNamespace

import pytest

from common.emulation.links import profile
from common.emulation.links.profile import network_file
from common.harness.cli import main
from common.harness.experiment_file import CommandLine, find_experiment, load
from common.harness.verbs import predict
from common.profiling import nccl_tests, network
from common.profiling.calibration import fitted, from_nccl_tests, write
from common.virtual.costs.engines import OPERATIONS, costs_of
from common.virtual.costs.known import links_of
from common.virtual.costs.networks import CORE_GB_PER_S, payload_rate, platform_of, wire_inside
from common.virtual.costs.parts import Platform, Shape, Wire
from common.virtual.over import Point
from dear.cost.calibrated import OperationCosts
from dear.cost.fit import AlphaBeta
from dear.cost.measurement import MEASURABLE, Measurement
from dear.errors import UserError

RANKS = 4
SIZES = [4096 << power for power in range(17)]
BUS = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "broadcast": None, "sendrecv": None}
"""Bus bandwidth per bandwidth of the buffer: x (P - 1) / P; None: 1."""
LATENCY, BANDWIDTH = (30.0, 100.0), (90.0, 40.0)
"""Start-up in us, and us per MB, of messages below and above 1 MB, where the lines meet."""


def time_us(nbytes):
    alpha, beta = LATENCY if nbytes < 1_000_000 else BANDWIDTH
    return alpha + 1e-6 * beta * nbytes


def rows(operation="all_reduce", sizes=SIZES, form="new", ranks=RANKS, dtype="float"):
    """Rows as versions of nccl-tests print them; in-place takes a little longer."""
    shard = operation in ("reduce_scatter", "all_gather")
    for size in sizes:
        blocks = []
        for place, late in enumerate((0.999, 1.001)):
            took = time_us(size) * late
            rate = size / took / 1e3
            wrong = {"old": "5e-07", "new": "0"}.get(form, "0")
            if operation == "sendrecv" and place:
                wrong = "N/A"
            bus = rate if BUS[operation] is None else BUS[operation] * rate * (ranks - 1) / ranks
            blocks += [f"{took:.2f}", f"{rate:.2f}", f"{bus:.2f}", wrong]
            blocks += ["1.0", "9.0", "8.0", "2.5"] if form == "iterations" else []
        redop = "none" if operation in ("all_gather", "broadcast") else "sum"
        lead = [redop, "-1"]
        if form == "old":
            lead = [] if redop == "none" else [redop]
        count = size // 4 // (ranks if shard else 1)
        yield "  ".join([f"{size:12}", f"{count:12}", dtype, *lead, *blocks])


def log(operation="all_reduce", form="new", hosts=2, ranks=RANKS, **more):
    """Log of a version of nccl-tests: old (before 2.11), middle (no names), new, iterations."""
    each = ["time", "algbw", "busbw", "error" if form == "old" else "#wrong"]
    each += ["i_min", "i_max", "i_p99", "i_cv%"] if form == "iterations" else []
    body = list(rows(operation, form=form, ranks=ranks, **more))
    lead = ["redop", "root"]
    if form == "old":
        lead = ["redop"] if len(body[0].split()) % 2 == 0 else []
    names = [
        "# nccl-tests version 2.18.2 nccl-headers=23007 nccl-library=23007",
        f"# Collective test starting: {operation}_perf",
    ]
    group = "" if form == "old" else "Group  0 "
    lines = [
        *(names if form in ("new", "iterations") else []),
        "# nThread 1 nGpus 1 minBytes 4096 maxBytes 268435456 step: 2(factor) warmup iters: 5",
        "# Using devices",
        *(
            f"#  Rank {r:2} {group}Pid 10{r} on node{r * hosts // ranks} device 0 [0x00] NVIDIA"
            for r in range(ranks)
        ),
        "#",
        "#                     out-of-place            in-place",
        "#  " + "  ".join(["size", "count", "type", *lead, *each, *each]),
        "#  (B) (elements)     (us)  (GB/s)  (GB/s)         (us)  (GB/s)  (GB/s)",
        *body,
        "# Out of bounds values : 0 OK",
        "# Avg bus bandwidth    : 12.3",
    ]
    return "\n".join(lines) + "\n"


def as_json(operation="all_reduce", each=1, **change):
    results = []
    for size in SIZES:
        block = {"alg_bw": 1.0, "bus_bw": 1.5, "nwrong": 0.0}
        results.append(
            {"size": size, "count": size // 4, "type": "float", "redop": "sum", "root": "    -1"}
            | {"out_of_place": {"time": time_us(size), **block}, "in_place": None}
            | {"experiment_name": "AllReduce"}
        )
    devices = [
        {"rank": rank, "group": 0, "hostname": f"node{rank // each}"}
        for rank in range(0, RANKS, each)
    ]
    config = {"nthreads": 1, "ngpus": each, "devices": devices}
    data = {"version": 2, "start_time": "2026-03-04 05:06:07", "nccl_version": 23007}
    data |= {"args": [f"./build/{operation}_perf", "-J", "x"], "config": config, "results": results}
    return json.dumps(data | change)


def tagged(text, prefix="[1,0]<stdout>:"):
    lines = text.splitlines()
    lines.insert(-8, "node1:104:180 [3] NCCL INFO Channel 00/0 : 3[3] -> 2[2] via P2P/CUMEM")
    return "".join(f"{prefix}{line}\n" for line in lines)


def bare(text):
    return "".join(f"{line}\n" for line in text.splitlines() if "#" not in line)


def stamped(text):
    return re.sub(r"(?m)^( +\d.*)$", r"\1  2026-01-02 03:04:05", text)


def check(costs, operation="all_reduce"):
    """Checks that the two lines and their bend are those of `time_us`, to 2 %."""
    small, large = costs.by_operation()[operation].regimes
    assert (small.alpha_us, small.beta_us_per_mb) == pytest.approx(LATENCY, rel=0.02)
    assert (large.alpha_us, large.beta_us_per_mb) == pytest.approx(BANDWIDTH, rel=0.02)
    assert small.below_bytes == pytest.approx(1e6, rel=0.05)
    cost = costs.collective_costs()[operation]
    for size in SIZES:
        assert cost(size) == pytest.approx(1e-6 * time_us(size), rel=0.02)


@pytest.mark.parametrize(
    ("text", "per_host"),
    [
        (log(), 2),
        (log(form="middle", hosts=1), 4),
        (log(form="old", hosts=4), 1),
        (log(form="iterations"), 2),
        (log(dtype="int32"), 2),
        (tagged(log(form="middle")), 2),
        (tagged(log(), " 0: "), 2),
        (tagged(bare(log()), "[0] "), None),
        (stamped(log()), 2),
        (log().replace("# ", ""), 2),
        (bare(log()), None),
        (bare(log(form="old")), None),
        (as_json(), 1),
        (as_json(each=2), 2),
    ],
)
def test_every_form_of_a_log_gives_the_same_two_regimes(text, per_host, tmp_path):
    path = tmp_path / "job.log"
    path.write_text(text)
    costs = from_nccl_tests([str(path)])
    assert (costs.engine, costs.world_size, costs.ranks_per_host) == ("nccl", RANKS, per_host)
    assert costs.source.startswith("job.log (nccl-tests")
    check(costs)


@pytest.mark.parametrize("form", ["new", "old"])
@pytest.mark.parametrize("operation", list(BUS))
def test_every_collective_counts_the_full_buffer(operation, form, tmp_path):
    path = tmp_path / "x.log"
    path.write_text(log(operation, form))
    given = str(path) if form == "new" else f"{operation}={path}"
    check(from_nccl_tests([given]), operation)


def test_a_file_may_have_several_collectives_and_a_collective_several_files(tmp_path):
    (tmp_path / "all.log").write_text(log(form="middle") + bare(log("all_gather")))
    both = tmp_path / "both.log"
    both.write_text(log("all_gather") + "srun sendrecv_perf\n" + log("sendrecv", sizes=SIZES[:9]))
    rest = tmp_path / "rest.log"
    rest.write_text(log("sendrecv", sizes=SIZES[9:]))
    costs = from_nccl_tests([str(both), str(rest)])
    assert set(costs.by_operation()) == {"all_gather", "sendrecv"}
    check(costs, "sendrecv")
    assert costs.source.count("NCCL 2.30.7") == 3
    assert costs.source.count("ends before 268435456 bytes") == 1, "a log may end between rows"


@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter"])
def test_a_log_without_a_header_is_told_by_its_columns(operation, tmp_path):
    path = tmp_path / "x.log"
    path.write_text(bare(log(operation)))
    (table,) = nccl_tests.tables(str(path))
    assert (table.operation, table.world_size, table.hosts) == (operation, RANKS, None)


CUT = log()[: log().index("  0\n# Out")]
UNCHECKED = f"{CUT}  N/A"
TO_COUNT = log()[: log().rindex("float")]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (CUT, "line 29: the row has 12 columns instead of 13: the log is cut off"),
        (log()[: log().rindex("float")], "line 29: the log is cut off in this row"),
        (UNCHECKED[:-2], "line 29: #wrong must be a number or N/A: the log is cut off"),
        ("[0] ".join(["", *TO_COUNT.splitlines(keepends=True)]), "the log is cut off in this row"),
        (as_json()[:-200], "not JSON, or cut off"),
        ('{"a": 1}', "not in the JSON form of nccl-tests: KeyError('results')"),
        (as_json(results=[]), "has no rows of nccl-tests"),
        ("", "has no rows of nccl-tests"),
        (log().split("   4096")[0], "has no rows of nccl-tests"),
        (log().replace("all_reduce_perf", "alltoall_perf"), "unknown collective of"),
        (bare(log("all_gather")), "does not name its collective; give NAME="),
        (bare(log("sendrecv")), "does not name its collective; give NAME="),
        (log(sizes=SIZES[:2]), "all_reduce: 2 sizes, but a fit needs 3"),
        (log().replace(" 30.38 ", " -30.38 "), "a time must be above 0, got -30.38 us"),
        (log().replace(" 30.38 ", " 0.00 "), "a time must be above 0, got 0.00 us"),
        (log().replace(" 30.38 ", " none "), "must be numbers"),
        (log().replace("time  algbw", "cputime  algbw"), "times of the CPU"),
        (log().replace("  0\n", "  7\n", 1), "7 values of the result are wrong"),
        (log(ranks=1, hosts=1), "each rank ran alone"),
        (log("sendrecv", ranks=1, hosts=1), "each rank ran alone"),
    ],
)
def test_what_is_wrong_with_a_log_is_one_clear_line(text, words, tmp_path, capsys):
    path = tmp_path / "x.log"
    path.write_text(text)
    assert main(["calibrate", "--from-nccl-tests", str(path)]) == 2
    error = capsys.readouterr().err
    assert words in error and error.startswith("error: ") and error.count("\n") == 1
    assert "x.log" in error or "sizes" in words


@pytest.mark.parametrize(
    ("files", "flags", "words"),
    [
        (["a", "b"], [], "all files must have the same number of ranks, got 4 (a), 8 (b)"),
        (["a"], ["--ranks", "8"], "the same number of ranks, got 4 (a), 8 (--ranks)"),
        (["a", "one"], [], "the same number of hosts, got [1, 2]"),
        (["nameless"], [], "does not say how many ranks took part; add --ranks N"),
        (["no"], [], "no: there is no such file"),
        (["all_gather=a"], [], "a: has times of all_reduce, not of all_gather"),
        (["a"], ["-o", "no/x.yaml"], "there is no folder"),
        (["a"], ["-o", "x.yml"], "must end in .yaml"),
        (["a"], ["-o", "10gbe.yaml"], "exists, and `calibrate` did not write it"),
        (["a"], ["--backend", "gloo"], "--backend: no effect with"),
        (["a"], ["--time-scale", "2"], "--time-scale: no effect with"),
        (["a"], ["--ranks", "1"], "--ranks must be at least 2"),
        ([], ["--ranks", "2", "--hosts", "2"], "virtual hosts have --hosts x"),
        ([], ["--largest", "5"], "--largest must be at least 16384"),
        ([], ["--seconds", "0"], "--seconds must be greater than 0"),
    ],
)
def test_what_is_wrong_with_the_command_is_one_clear_line(
    files, flags, words, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").write_text(log())
    (tmp_path / "b").write_text(log(ranks=8, hosts=4))
    (tmp_path / "one").write_text(log("all_gather", hosts=1))
    (tmp_path / "nameless").write_text("sendrecv_perf\n" + bare(log("sendrecv")))
    (tmp_path / "10gbe.yaml").write_text("gbps: 10\n")
    assert main(["calibrate", *(["--from-nccl-tests", *files] if files else []), *flags]) == 2
    error = capsys.readouterr().err
    assert words in error and error.startswith("error: ") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gbps: 1\ngbps: 2\n", "'gbps' stands twice"),
        ("name: other\ngbps: 1\n", "name: must be the file's name, 'here'"),
        ("gbps: 1\nsince: 2026-13-40\n", "not valid YAML"),
        ("[" * 5000, "too many nested brackets"),
        ("- 1\n", "must be a mapping"),
    ],
)
def test_a_network_file_that_is_not_clear_is_one_line(text, words, tmp_path):
    path = tmp_path / "here.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        network_file(path)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_the_network_file_comes_back_as_it_was_and_is_shown(tmp_path, capsys):
    logs = []
    for operation in ("all_reduce", "all_gather"):
        logs.append(tmp_path / f"{operation}.log")
        logs[-1].write_text(log(operation))
    path = tmp_path / "mine.yaml"
    for _ in range(2):  # what `calibrate` wrote, it may write again
        assert main(["calibrate", "--from-nccl-tests", *map(str, logs), "-o", str(path)]) == 0
    printed = capsys.readouterr().out
    assert f"wrote {path}\n" in printed
    assert printed.endswith(f"to use it by --network mine, put it into {profile.FOLDER}\n")
    network = network_file(path)
    assert network.costs == from_nccl_tests(list(map(str, logs)))
    assert "inside nvlink3" in network.source, "faster than PCIe"
    shape = Shape(hosts=2, ranks_per_host=2)
    composed = costs_of("nccl", on_hosts(network, "nvlink3"), shape)["all_reduce"]
    assert composed(SIZES[-1]) == pytest.approx(1e-6 * time_us(SIZES[-1]), rel=0.02)
    assert network.summary.endswith("on each host; costs of all_reduce, all_gather")
    assert main(["show", str(path)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == f"mine: {network.summary}"
    assert shown[1:] == printed.splitlines()[: len(shown) - 1]
    assert shown[3].split()[:3] == ["all_reduce", "4", "KiB"]
    assert main(["show", str(path), "--json"]) == 2
    path.write_text(path.read_text() + "rdma: true\noverhead_us: 1.5\n")
    assert main(["calibrate", "--from-nccl-tests", *map(str, logs), "-o", str(path)]) == 0
    again = network_file(path)
    assert (again.rdma, again.overhead_us) == (True, 1.5), "the user knows the hardware"


def on_hosts(network, inside):
    """Returns the platform of a network that is in no folder."""
    medium = "rdma" if network.rdma else "tcp"
    between = Wire(
        kind="between",
        latency_s=1e-6 * network.latency_us,
        bytes_per_s=payload_rate(network.gbps, medium),
        overhead_s=1e-6 * network.overhead_us,
        medium=medium,
    )
    core = 1e9 * (network.core_gb_per_s or CORE_GB_PER_S)
    wires = {"inside": wire_inside(inside), "between": between}
    return Platform(wires=wires, core_bytes_per_s=core)


def measured(true, operations=("all_reduce", "all_gather"), **where):
    """Returns costs fitted to the times of composed ones."""
    return fitted(
        [
            Measurement(operation=name, nbytes=SIZES, seconds=[[true[name](n)] * 3 for n in SIZES])
            for name in operations
        ],
        source="made",
        **where,
    )


@pytest.mark.parametrize(
    ("engine", "network", "hosts", "local"),
    [
        ("comm_core", "10gbe", 8, 1),
        ("gloo", "10gbe", 8, 1),
        ("gloo", "2.5gbe", 4, 2),
        ("mpi", "10gbe", 8, 1),
        ("nccl", "10gbe", 8, 1),
        ("nccl", "10gbe", 16, 4),
        ("nccl", "100gbib", 8, 1),
    ],
)
def test_costs_composed_of_the_written_link_are_the_measured_ones(
    engine, network, hosts, local, tmp_path
):
    shape = Shape(hosts=hosts, ranks_per_host=local)
    inside = "pcie4" if engine == "nccl" else None
    true = costs_of(engine, platform_of(network, inside), shape)
    costs = measured(true, engine=engine, world_size=shape.ranks, ranks_per_host=local)
    write(tmp_path / "here.yaml", costs)
    platform = on_hosts(network_file(tmp_path / "here.yaml"), inside)
    back = costs_of(engine, platform, shape)["all_reduce"]
    fit = costs.collective_costs()["all_reduce"]
    for size in (SIZES[0], SIZES[-1]):
        assert back(size) == pytest.approx(fit(size), rel=0.03)
    assert back(1e8) == pytest.approx(true["all_reduce"](1e8), rel=0.03)


def test_a_core_that_would_be_too_slow_is_faster_and_one_host_is_a_ring(tmp_path):
    shape, path = Shape(hosts=4), tmp_path / "here.yaml"
    fast = dataclasses.replace(platform_of("200gbib"), core_bytes_per_s=2e10)
    true = costs_of("gloo", fast, shape)
    where = {"engine": "gloo", "world_size": 4}
    write(path, measured(true, **where, ranks_per_host=1))
    network = network_file(path)
    assert network.core_gb_per_s > CORE_GB_PER_S
    back = costs_of("gloo", on_hosts(network, None), shape)["all_reduce"]
    assert back(SIZES[-1]) == pytest.approx(true["all_reduce"](SIZES[-1]), rel=0.03)
    write(path, measured(true, **where, ranks_per_host=4))
    network = network_file(path)
    assert "though only one host took part" in network.source and network.gbps < 400


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Writes a network of 4 hosts with 2 GPUs whose all-reduce was measured."""
    shutil.copytree(profile.FOLDER, tmp_path / "networks")
    monkeypatch.setattr(profile, "FOLDER", tmp_path / "networks")
    costs = measured(
        {"all_reduce": AlphaBeta(alpha_s=1e-4, beta_s_per_byte=1e-9)},
        ["all_reduce"],
        engine="nccl",
        world_size=8,
        ranks_per_host=2,
    )
    error = dataclasses.replace(costs.operations.all_reduce, residual_rms=0.03)
    costs = dataclasses.replace(costs, operations=OperationCosts(all_reduce=error))
    write(tmp_path / "networks" / "here.yaml", costs)
    return "here"


MEASURED, HALF = Shape(hosts=4, ranks_per_host=2), Shape(hosts=2, ranks_per_host=2)


def test_each_operation_has_the_error_of_its_own_cost(here):
    links = links_of(here, MEASURED, "nccl", None)
    middle, high = (links.within(sign)(4, 2) for sign in (0, 1))
    factors = {name: high[name](1e6) / middle[name](1e6) for name in OPERATIONS}
    assert factors.pop("all_reduce") == pytest.approx(1.03)
    assert list(factors.values()) == pytest.approx([1.1] * 5)
    assert middle["all_reduce"](1e6) == pytest.approx(1.1e-3, rel=1e-3)
    of_groups = links.within(-1)(4, 1)["all_reduce"]
    assert of_groups(1e6) == pytest.approx(0.9 * links.costs(4, 1)["all_reduce"](1e6))
    assert links.note == (
        "network here: its measured costs are of nccl with 8 ranks, 2 per host; those of "
        "reduce_scatter, all_gather, broadcast, reduce, exchange are composed"
    )


def test_a_slowed_network_is_calibrated_in_its_own_seconds(monkeypatch):
    """Seconds of the network decide whether ranks are distant; the budget is in real ones."""
    link = SimpleNamespace(backend="gloo", size=2, rank=0, gather_objects=lambda value: [value])
    monkeypatch.setattr(network, "rank_facts", lambda: SimpleNamespace(world_size=2))
    monkeypatch.setattr("dear.init", lambda **_: None)
    monkeypatch.setattr("dear.shutdown", lambda: None)
    monkeypatch.setattr("dear.comm.runtime.communicator", lambda: link)
    monkeypatch.setattr("dear.comm.runtime.local_size", lambda: 1)
    calls = []

    def measure(communicator, name, device, *, sizes, budget_s):
        calls.append((communicator.time_scale, communicator.time_scale * budget_s))

    monkeypatch.setattr(network, "measure_collective", measure)
    monkeypatch.setattr(network, "fitted", lambda results, **_: None)
    network.measure(network.Plan(backend="gloo", time_scale=20.0, seconds=10.0))
    assert calls == [(20.0, pytest.approx(10.0 / len(MEASURABLE)))] * len(MEASURABLE)


def test_measured_costs_count_where_they_were_measured(here):
    plain = links_of(here, MEASURED, "nccl", None).costs(4, 2)["all_reduce"]
    same = links_of(here, MEASURED, "nccl", None, varied=True)
    assert same.costs(4, 2)["all_reduce"] == plain and same.platform is None
    smaller = links_of(here, HALF, "nccl", None, varied=True)
    assert smaller.platform is not None and smaller.note.endswith("elsewhere, costs are composed")
    with pytest.raises(UserError, match="8 ranks, 2 per host, but this is nccl with 4"):
        links_of(here, HALF, "nccl", None)
    faster = links_of(here, MEASURED, "nccl", None, lambda platform: platform)
    assert faster.note.endswith("on changed links, all costs are composed")
    links = links_of(here, MEASURED, "horovod_gloo", None)
    assert links.platform is not None and links.note.endswith("those of horovod_gloo are composed")


def test_a_series_over_workers_keeps_the_measured_costs(here):
    model = CommandLine(models=("mnist_cnn@rtx2080ti-modelled",), batch_size=32)
    cluster = ["cluster.network=here", "networks=[]", "algorithms=[ddp]", "baseline=false"]
    size = ["cluster.hosts=4", "cluster.ranks_per_host=2"]
    experiment = load(find_experiment("predicted-64"), [*cluster, *size], model)
    (trial,) = experiment.trials()
    points = [Point(axis="workers", value=workers) for workers in (4, 8)]
    (note,) = predict.notes_of([trial], experiment.cluster, series=points[:1])
    assert note.endswith("elsewhere, costs are composed")
    whole, plain = (
        predict._setting(trial, experiment.cluster, None, 0, point) for point in (points[1], None)
    )
    here, there = (each.costs(4, 2)["all_reduce"](1e6) for each in (whole, plain))
    assert here == there == pytest.approx(1.1e-3, rel=1e-3)


LINE = "{alpha_us: 1, beta_us_per_mb: 2}"
FIT = "smallest_bytes: 1, largest_bytes: 9, residual_rms: 0, residual_worst: 0"


@pytest.mark.parametrize(
    ("operations", "words"),
    [
        (f"all_reduse: {{regimes: [{LINE}], {FIT}}}", "did you mean 'all_reduce'"),
        (f"all_reduce: {{regimes: [], {FIT}}}", "the last regime has none, got no regime"),
        (f"all_reduce: {{regimes: [{LINE}, {LINE}], {FIT}}}", "below_bytes must ascend"),
        (f"all_reduce: {{regimes: [{LINE.replace('1', '-1')}], {FIT}}}", "must be at least 0"),
        ("", "operations must name a collective"),
    ],
)
def test_a_network_file_with_wrong_costs_is_one_clear_line(operations, words, tmp_path):
    path = tmp_path / "x.yaml"
    costs = f"{{engine: nccl, world_size: 4, source: a, operations: {{{operations}}}}}"
    path.write_text(f"gbps: 10\ncosts: {costs}\n")
    with pytest.raises(UserError, match=words) as error:
        network_file(path)
    assert "\n" not in str(error.value)
