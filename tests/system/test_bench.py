"""Benchmarks as commands: output, result files, errors, and what is left behind."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from bench.rig.table import OPS
from common.profiling import network
from dear.cost.measurement import Measurement
from dear.errors import UserError
from tests.system.processes import ROOT, python
from tests.system.sandboxes import Outside, needs_sandbox

LIMIT_S = 280.0


@pytest.mark.timeout(LIMIT_S + 20)
def test_engines_are_right_and_recorded_and_one_that_cannot_start_fails_alone(tmp_path):
    path = tmp_path / "out.json"
    options = ["--sizes", "4K", "--repeats", "2", "--seconds", "0.02", "-n", "2"]
    # Without a PATH there is no mpirun.
    environment = {"PATH": str(tmp_path), "PYTHONPATH": str(ROOT)}
    engines = ["--engines", "mpi", "gloo"]
    wrong = python("bench/collectives.py", "--engines", "glo")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("error: unknown engine 'glo'; did you mean 'gloo'?")
    assert wrong.stderr.count("\n") == 1
    done = python("bench/collectives.py", *engines, *options, "--json", str(path), env=environment)
    assert done.returncode == 1
    rows = [line.split(maxsplit=3) for line in done.stdout.splitlines()]
    assert ["all_gather", "mpi", "4000", "unavailable: no mpirun on the PATH"] in rows
    assert ["all_gather", "gloo", "4000"] in [row[:3] for row in rows]
    assert "gloo rank 1 pid" in done.stdout
    record = json.loads(path.read_text())
    assert record["failures"] == {"mpi": "unavailable: no mpirun on the PATH"}
    assert (record["schema"], record["setup"]["world"]) == (1, 2)
    assert len(record["samples"]) == 4 * 2
    assert {sample["op"] for sample in record["samples"]} == set(OPS)
    for sample in record["samples"]:
        assert sample["wrong"] == 0
        assert len(sample["times_s"]) == 2
        assert len(sample["times_s"][0]) == len(sample["times_s"][1]) >= 3
        assert min(sample["cpu_s"]) >= 0
    pids = [rank["pid"] for rank in record["ranks"]]
    assert not [pid for pid in pids if Path("/proc", str(pid)).exists()]


@needs_sandbox
@pytest.mark.full
@pytest.mark.timeout(LIMIT_S + 20)
@pytest.mark.parametrize("rate", ["1gbit", "none"])
def test_gloo_on_two_virtual_hosts_leaves_nothing_behind(tmp_path, rate):
    outside = Outside()
    path = tmp_path / "out.json"
    options = ["--hosts", "netns", "--rate", rate, "--congestion", "reno", "-n", "2"]
    options += ["--ops", "reduce_scatter", "--sizes", "400K", "--repeats", "1"]
    options += ["--engines", "gloo", "--seconds", "0.02", "--json", str(path)]
    done = python("bench/collectives.py", *options, env=outside.environment)
    assert done.returncode == 0, done.stderr
    record = json.loads(path.read_text())
    assert [sample["wrong"] for sample in record["samples"]] == [0]
    assert [rank["host"] for rank in record["ranks"]] == ["h0", "h1"]
    if rate != "none":
        # 200 KB over a link of 125 MB/s, less the 128 KiB that its bucket lets through at once.
        assert min(record["samples"][0]["times_s"][0]) > (200e3 - 131072) / 125e6
    outside.check_clean()


@pytest.mark.full
@pytest.mark.timeout(LIMIT_S + 20)
@pytest.mark.parametrize(
    ("script", "arguments", "kept"),
    [
        ("wrappers.py", "memory --model mnist_cnn --algorithms wfbp --ranks 1", "rows"),
        (
            "wrappers.py",
            "overhead --algorithms wfbp mgwfbp --tensors 3 --ranks 2 --steps 2 --rounds 3 "
            "--warmup 3",
            "rows",
        ),
        (
            "decentralized_peer.py",
            "-n 2 --engines comm_core --topologies ring complete --width 8 --layers 2 --steps 2 "
            "--repeats 2",
            "cases",
        ),
    ],
)
def test_every_script_prints_a_table_and_writes_its_numbers(script, arguments, kept, tmp_path):
    path = tmp_path / "out.json"
    done = python(f"bench/{script}", *arguments.split(), "--json", str(path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1]
    record = json.loads(path.read_text())
    assert record["schema"] == 1 and record[kept]
    assert record["machine"]["cores"]
    if arguments.startswith("overhead"):
        assert [row["algorithm"] for row in record["rows"]] == ["plain", "wfbp", "mgwfbp"]
        assert all(len(row["seconds_per_step"]) == 3 for row in record["rows"])
    if script == "decentralized_peer.py":  # ours alone
        assert record["parameters"] == 2 * (64 + 8)
        for case in record["cases"]:
            assert len(case["step_s"]["dear"]) == 2 and min(case["step_s"]["dear"]) > 0
            assert "decent-dp" not in case["step_s"]


def test_network_starts_its_own_ranks_and_writes_the_fit(tmp_path):
    path = tmp_path / "network.json"
    arguments = ["--ranks", "2", "--largest", "65536", "--repeats", "2", "--json", str(path)]
    done = python("-m", "common.profiling.network", *arguments)
    assert done.returncode == 0, done.stderr
    assert "all_reduce: shared_memory: alpha" in done.stdout
    kept = json.loads(path.read_text())
    assert (kept["kind"], kept["ranks"]) == ("network", 2)
    assert set(kept["collectives"]) == {"all_reduce", "reduce_scatter", "all_gather", "exchange"}
    for fit in kept["collectives"].values():
        assert fit["nbytes"] == [4096, 8192, 16384, 32768, 65536]
        assert fit["alpha_s"] >= 0 and fit["beta_s_per_byte"] >= 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--ranks", "1"], "--ranks"),
        (["--repeats", "0"], "--repeats"),
        (["--largest", "5"], "--largest"),
        (["--operations", "all_reduse"], "did you mean 'all_reduce'"),
        (["--json", "/nowhere/at/all.json"], "/nowhere/at"),
    ],
)
def test_network_refuses_mistakes_in_one_line(arguments, named, monkeypatch):

    for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError) as caught:
        network.main(arguments)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


LINE = Measurement(
    operation="all_reduce",
    nbytes=[4096, 65536, 1048576],
    seconds=[[1e-4 + 1e-9 * n] * 3 for n in (4096, 65536, 1048576)],
)


def test_the_table_describes_the_fit_and_the_record_keeps_every_time():
    lines = network.table([LINE])
    assert lines[0].split() == ["bytes", "all_reduce", "us"]
    assert lines[1].split() == ["4096", "104.1"]
    assert lines[-1] == (
        "all_reduce: all sizes: alpha 100.0 us, beta 1.0000 ns/byte (1.000 GB/s); a fit to half "
        "of the repeats differs from the other half by 0.0%; the halves differ by 0.0%"
    )
    two_ways = dataclasses.replace(
        LINE,
        regimes=(("direct", 0), ("ring", 100_000)),
        nbytes=[*LINE.nbytes, 2_000_000],
        seconds=[*LINE.seconds, [2e-3] * 3],
    )
    assert "direct, below 100000 bytes: alpha 100.0 us" in network.table([two_ways])[-2]
    kept = json.loads(json.dumps(network.record([LINE], 4, "gloo")))
    assert kept["collectives"]["all_reduce"]["seconds"] == LINE.seconds
    assert kept["collectives"]["all_reduce"]["alpha_s"] == pytest.approx(1e-4)
