"""Costs from logs of nccl-tests: each form of them, what is wrong with one, what is written."""

from __future__ import annotations

import json
import re

import pytest

from common.emulation.links.profile import network_file
from common.harness.cli import main
from common.profiling import nccl_tests
from common.profiling.calibration import from_nccl_tests
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


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (CUT, "line 29: the row has 12 columns instead of 13: the log is cut off"),
        (log()[: log().rindex("float")], "line 29: the log is cut off in this row"),
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


def test_the_network_file_comes_back_as_it_was_and_is_shown(tmp_path, capsys):
    logs = []
    for operation in ("all_reduce", "all_gather"):
        logs.append(tmp_path / f"{operation}.log")
        logs[-1].write_text(log(operation))
    path = tmp_path / "mine.yaml"
    for _ in range(2):  # what `calibrate` wrote, it may write again
        assert main(["calibrate", "--from-nccl-tests", *map(str, logs), "-o", str(path)]) == 0
    printed = capsys.readouterr().out
    assert printed.endswith(f"wrote {path}\n")
    network = network_file(path)
    assert network.costs == from_nccl_tests(list(map(str, logs)))
    assert network.gbps == pytest.approx(8 * 1.5 * 1000 / BANDWIDTH[1], rel=0.02)
    assert network.latency_us == pytest.approx(LATENCY[0] / 6, rel=0.02)
    assert network.summary.endswith("on each host; costs of all_reduce, all_gather")
    assert main(["show", str(path)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == f"mine: {network.summary}"
    assert shown[1:] == printed.splitlines()[: len(shown) - 1]
    assert shown[3].split()[:3] == ["all_reduce", "4", "KiB"]
    assert main(["show", str(path), "--json"]) == 2


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
