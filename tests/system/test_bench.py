"""Benchmarks as commands: output, result files, errors, and what is left behind."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from bench import fault_reports
from bench.rig.table import OPS
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
    assert "gloo rank 1 pid" in done.stderr and " pid " not in done.stdout
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
            "peers.py",
            "-n 2 --systems plain torch-ddp torch-fsdp2 gloo comm-core dear dear-ddp --width 8 "
            "--layers 2 --steps 2 --repeats 2",
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
    if script == "peers.py":
        cases = {case["system"]: case for case in record["cases"]}
        for name, case in cases.items():
            assert len(case["step_s"]) == 2 and min(case["step_s"]) > 0, name
            assert (case["difference"] is None) == (name in ("plain", "torch-ddp"))


def test_what_ranks_report_of_a_killed_one_names_it_and_the_operation():
    seen = fault_reports.observe("comm_core", "killed")
    assert seen.cell.endswith("s, names rank and operation"), seen.texts
    single = dataclasses.replace(seen, texts=seen.texts[:1], crashed=1)
    assert single.cell == "1 of 2 within 25 s, 1 crashed"
    assert dataclasses.replace(seen, texts=("an error", "rank 2")).cell.endswith("names neither")
    assert dataclasses.replace(seen, texts=(None, "rank 2")).cell == "no error"
