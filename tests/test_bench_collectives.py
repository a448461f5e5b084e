"""The benchmark of collectives: its arithmetic, its manners, and runs on Gloo."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench import hosts, table
from bench.output import Output
from bench.report import Limits, Report, Sample
from dear.errors import UserError
from tests.system.sandboxes import Outside, in_sandbox, needs_sandbox

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "bench" / "collectives.py"
NO_LIMIT = Limits(kind="memory", bound_s={})


def run(
    *arguments: str, timeout: float = 280, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=env)


def sample(engine: str, op: str, number: int, times_s: list[list[float]]) -> Sample:
    return Sample(
        engine=engine,
        op=op,
        nbytes=25_000_000,
        round=number,
        times_s=times_s,
        cpu_s=[0.1 for _ in times_s],
        wrong=0,
    )


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("4K", 4000), ("4Ki", 4096), ("25M", 25_000_000), ("1.5GB", 1_500_000_000)],
)
def test_sizes_are_decimal_unless_they_say_i(text, size):
    assert table.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "M", "-4K", "4X", "0", "four"])
def test_a_size_that_is_none_is_a_users_mistake(text):
    with pytest.raises(UserError, match="is not a number of bytes"):
        table.parse_size(text)


def test_a_bucket_is_rounded_up_to_whole_items_of_every_rank():
    assert table.bucket_bytes(25_000_000, 4) == 25_000_000
    assert table.bucket_bytes(25_000_001, 4) == 25_000_016
    assert table.bucket_bytes(1, 3) == 12


def test_bus_factors_are_those_of_nccl_tests():
    assert table.bus_factor("reduce_scatter", 4) == table.bus_factor("all_gather", 4) == 0.75
    assert table.bus_factor("all_reduce", 4) == table.bus_factor("rs_ag", 4) == 1.5
    assert table.bus_factor("all_reduce", 2) == 1.0


def test_an_iteration_takes_as_long_as_its_slowest_rank():
    assert table.slowest([[1.0, 5.0], [2.0, 4.0]]) == [2.0, 5.0]


def test_percentiles_are_values_that_occurred():
    values = [float(i) for i in range(1, 101)]
    assert table.percentile(values, 50) == 50
    assert table.percentile(values, 99) == 99
    assert table.percentile([7.0], 99) == 7.0


def test_ratios_pair_the_rounds_and_give_their_range():
    ratio = table.Ratio.of([2.0, 6.0, 4.0], [1.0, 2.0, 2.0])
    assert f"{ratio.text()} {ratio.spread()}" == "2.00x (2.00..3.00, 3 rounds)"


def test_the_report_compares_engines_round_by_round():
    samples = [
        sample("a", "reduce_scatter", 0, [[0.1, 0.1], [0.1, 0.1]]),
        sample("b", "reduce_scatter", 0, [[0.2, 0.2], [0.1, 0.1]]),
        sample("b", "reduce_scatter", 1, [[9.0], [9.0]]),  # a has no such round
    ]
    lines = Report(samples, 2, {}).ratios([("reduce_scatter", 25_000_000)], ["a", "b"], "a")
    assert lines[0] == "reduce_scatter 25 MB n=2: a 2.00x b (2.00..2.00, 1 rounds)"
    assert samples[0].cpu_s_per_gb() == pytest.approx(0.2 / 2 / 0.025)


def test_a_missing_engine_has_a_row_that_says_so():
    samples = [sample("gloo", "all_gather", 0, [[0.1], [0.1]])]
    report = Report(samples, 2, {"horovod": "unavailable: no horovod"})
    rows = report.rows([("all_gather", 25_000_000)], ["gloo", "horovod"], NO_LIMIT).splitlines()
    assert rows[1].split()[:3] == ["all_gather", "gloo", "25000000"]
    assert rows[2].split(maxsplit=3)[1::2] == ["horovod", "unavailable: no horovod"]


def test_nearness_is_a_fraction_of_the_wire_and_a_multiple_of_the_memory_bound():
    samples = [sample("a", "all_gather", 0, [[0.2], [0.2]])]
    bound = {("all_gather", 25_000_000, 0): 0.1}
    for kind, median in (("wire", 0.5), ("memory", 2.0)):
        ratio = Limits(kind=kind, bound_s=bound).ratio(samples)
        assert ratio is not None
        assert ratio.median == pytest.approx(median)


def test_results_are_never_overwritten(tmp_path):
    path = tmp_path / "out.json"
    path.write_text("precious")
    done = run("--engines", "gloo", "--json", str(path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        f"error: --json {path} exists; results are never overwritten"
    ]
    assert path.read_text() == "precious"


def test_a_run_without_results_gives_the_name_back(tmp_path):
    path = tmp_path / "out.json"
    Output(path).close()
    assert not path.exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--engines", "glo"], "unknown engine 'glo'; did you mean 'gloo'?"),
        (["--ops", "all_redce"], "unknown operation 'all_redce'; did you mean 'all_reduce'?"),
        (["--sizes", "4X"], "size '4X' is not a number of bytes"),
        (["-n", "1"], "-n 1: collectives need 2 to 64 ranks"),
        (["--congestion", "cubik"], "unknown congestion control 'cubik'"),
        (["--hosts", "netns", "--rate", "fast"], "--rate 'fast' is not none or a speed"),
        (["--hosts", "netns", "-n", "4", "--ranks-per-host", "3"], "-n 4 is not a multiple"),
    ],
)
def test_a_users_mistake_is_one_line_and_status_2(arguments, said):
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {said}")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.timeout(300)
def test_gloo_on_two_local_ranks_is_right_and_recorded(tmp_path):
    path = tmp_path / "out.json"
    options = ["--sizes", "4K", "--repeats", "2", "--seconds", "0.02", "-n", "2"]
    done = run("--engines", "gloo", *options, "--json", str(path))
    assert done.returncode == 0, done.stderr
    record = json.loads(path.read_text())
    assert len(record["samples"]) == 4 * 2
    assert {s["op"] for s in record["samples"]} == set(table.OPS)
    for one in record["samples"]:
        assert one["wrong"] == 0
        assert len(one["times_s"]) == 2
        assert len(one["times_s"][0]) == len(one["times_s"][1]) >= 3
        assert min(one["cpu_s"]) >= 0
    pids = [rank["pid"] for rank in record["ranks"]]
    assert not [pid for pid in pids if Path("/proc", str(pid)).exists()]
    assert "gloo rank 1 pid" in done.stdout


@pytest.mark.timeout(300)
def test_an_engine_that_cannot_start_fails_the_run_and_not_the_others(tmp_path):
    # Without a PATH there is no mpirun.
    command = [sys.executable, str(SCRIPT), "--engines", "mpi", "gloo", "--ops", "all_gather"]
    command += ["--sizes", "4K", "-n", "2", "--repeats", "1", "--seconds", "0.01"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=280, env={"PATH": str(tmp_path)}
    )
    assert done.returncode == 1
    rows = [line.split(maxsplit=3) for line in done.stdout.splitlines()]
    assert ["all_gather", "mpi", "4000", "unavailable: no mpirun on the PATH"] in rows
    assert ["all_gather", "gloo", "4000"] in [row[:3] for row in rows]


@needs_sandbox
@pytest.mark.timeout(300)
def test_gloo_on_two_virtual_hosts_leaves_nothing_behind(tmp_path):
    outside = Outside()
    path = tmp_path / "out.json"
    options = ["--hosts", "netns", "--rate", "1gbit", "--congestion", "reno", "-n", "2"]
    options += ["--ops", "reduce_scatter", "--sizes", "400K", "--repeats", "1"]
    options += ["--engines", "gloo", "--seconds", "0.02", "--json", str(path)]
    done = run(*options, env=outside.environment)
    assert done.returncode == 0, done.stderr
    record = json.loads(path.read_text())
    assert [one["wrong"] for one in record["samples"]] == [0]
    assert [rank["host"] for rank in record["ranks"]] == ["h0", "h1"]
    # 200 KB over a link of 125 MB/s, less the 128 KiB that its bucket lets through at once.
    assert min(record["samples"][0]["times_s"][0]) > (200e3 - 131072) / 125e6
    outside.check_clean()


@needs_sandbox
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", ["virtual", "unlimited", "local"])
def test_hosts_are_removed_after_an_exception_with_what_runs_on_them(case):
    outside = Outside()
    done = subprocess.run(
        in_sandbox("me", sys.executable, str(ROOT / "tests" / "bench_hosts_program.py"), case),
        env=outside.environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert (done.returncode, done.stderr) == (0, "")
    outside.check_clean()


def test_virtual_hosts_where_none_can_be_made_are_a_users_mistake(monkeypatch):
    monkeypatch.setattr(hosts, "unable", lambda: "namespaces are forbidden here")
    assert not hosts.need_sandbox(0, None)
    with pytest.raises(UserError, match="forbidden here; or use --hosts local"):
        hosts.need_sandbox(2, None)
    with pytest.raises(RuntimeError, match="sandbox"), hosts.Hosts(0, "none", "reno"):
        pass
