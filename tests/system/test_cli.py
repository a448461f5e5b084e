"""The command line: quick answers, one clear line for every mistake, nothing written for them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
QUICK = "configs/experiments/quick.yaml"
EMULATED = "configs/experiments/emulated-quick.yaml"


def benchmarks(*arguments: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "benchmarks.py", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        **options,
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "algorithms.0=deer"], "unknown algorithm 'deer'; did you mean 'dear'?"),
        (["--set", "models.0.name=resnet5"], "unknown model 'resnet5'; did you mean 'resnet50'?"),
        (["--set", "world_size=2"], "did you mean 'world_sizes'?"),
        (["--set", "measure.repeat=2"], "did you mean 'repeats'?"),
        (["--set", "algorithms=[{name: dear, options: {treshold_mb: 1}}]"], "'threshold_mb'"),
        (["--set", "algorithms=[{name: dear, options: {threshold_mb: 0}}]"], "greater than 0"),
        (["--set", "models.0.batch_size=0"], "batch_size must be at least 1, got 0"),
        (["--set", "models.0.batch_size=four"], "must be a whole number, got 'four'"),
        (["--set", "world_sizes=[0]"], "world_sizes must be at least 1, got 0"),
        (["--set", "dtype=float23"], "unknown dtype 'float23'; did you mean 'float32'?"),
        (["--set", "launcher=mpi"], "did you mean 'mpirun'?"),
        (["--set", "faults=[{kind: link_down, host: 1}]"], "faults: need virtual hosts"),
        (["--set", "networks=[1gbe]"], "networks: need virtual hosts"),
        (["--filter", "resnet5000"], "no trial of quick matches"),
        (["--rerun", "some"], "invalid choice: 'some'"),
        (["run", "no/such.yaml"], "no/such.yaml: No such file"),
        (["runn"], "unknown verb 'runn'; did you mean 'run'?"),
        (["show", "nothing-here"], "no records in"),
        (["run", QUICK, "--no-such-flag"], "--no-such-flag"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else None,
)
def test_a_mistake_is_one_line_and_status_2(tmp_path, arguments, words):
    if arguments[0].startswith("--"):
        arguments = ["run", QUICK, *arguments]
    _refused(tmp_path, arguments, words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--hosts", "0"], "cluster.hosts must be at least 1, got 0"),
        (["--network", "10gb"], "did you mean '10gbe'?"),
        (["--time-scale", "2", "--set", "models=[mnist_cnn]"], "time_scale: 2 would slow"),
        (["--hosts", "2", "--set", "world_sizes=[3]"], "3 workers do not fit on 2 hosts"),
        (["--hosts", "4000", "--dry-run"], "GiB are available"),
        (["--set", "faults=[{kind: link_up, host: 1}]"], "did you mean 'link_"),
        (["--set", "faults=[{kind: link_down, host: 9}]"], "host 9 runs no rank"),
        (["--set", "models.0.batch_size=63"], "there are some for 64"),
        (["--set", "launcher=slurm"], "does not run on virtual hosts"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else None,
)
def test_a_mistake_about_virtual_hosts_is_one_line_and_status_2(tmp_path, arguments, words):
    _refused(tmp_path, ["run", EMULATED, *arguments], words)


def _refused(tmp_path: Path, arguments: list[str], words: str) -> None:
    done = benchmarks(*arguments, "--logs", str(tmp_path / "logs"))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert words in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_malformed_yaml_names_the_place(tmp_path):
    experiment = tmp_path / "broken.yaml"
    experiment.write_text("name: x\nalgorithms: [dear\nmodels: [mnist_cnn]\n")
    done = benchmarks("run", str(experiment), "--logs", str(tmp_path / "logs"))
    assert done.returncode == 2
    assert "broken.yaml line 3" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "No such file"),
        ("localhost slots=1\n", "has 1 slots, fewer than the 2 workers"),
        ("localhost slots=many\n", "line 1: must be `HOST slots=N`"),
    ],
)
def test_a_wrong_hostfile_is_refused_before_anything_starts(tmp_path, text, words):
    # A stand-in mpirun on the PATH: the hostfile is judged before it would be called.
    mpirun = tmp_path / "bin" / "mpirun"
    mpirun.parent.mkdir()
    mpirun.write_text("#!/bin/sh\nexit 99\n")
    mpirun.chmod(0o755)
    hostfile = tmp_path / "hosts"
    if text is not None:
        hostfile.write_text(text)
    done = benchmarks(
        *("run", QUICK, "--set", "launcher=mpirun", "--set", f"hostfile={hostfile}"),
        *("--logs", str(tmp_path / "logs")),
        env={**os.environ, "PATH": f"{mpirun.parent}:{os.environ['PATH']}"},
    )
    assert done.returncode == 2
    assert words in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "logs").exists()


def test_mpirun_without_mpirun_is_refused(tmp_path):
    flags = ["--set", "launcher=mpirun", "--logs", str(tmp_path / "logs")]
    done = benchmarks("run", QUICK, *flags, env={"PATH": "/nonexistent"})
    assert done.returncode == 2
    assert "no mpirun on the PATH" in done.stderr


def test_logs_that_cannot_be_written_are_refused(tmp_path):
    blocked = tmp_path / "logs"
    blocked.mkdir(mode=0o555)
    flags = ["run", QUICK, "--logs", str(blocked), "-k", "mnist"]
    if os.geteuid() != 0:
        done = benchmarks(*flags)
    else:  # root may write anywhere but below a file
        blocked.rmdir()
        blocked.write_text("")
        done = benchmarks(*flags)
    assert done.returncode == 2
    assert "cannot write to" in done.stderr and done.stderr.count("\n") == 1


def test_a_dry_run_prints_every_trial_and_writes_nothing(tmp_path):
    done = benchmarks("run", QUICK, "--dry-run", "--logs", str(tmp_path / "logs"))
    assert done.returncode == 0
    for name in ("allreduce", "wfbp", "ddp", "horovod", "dear", "single worker"):
        assert f"mnist_cnn bs=32 n=1 {name}" in done.stdout or f"n=2 {name}" in done.stdout
    assert "12 trials, 12 to run" in done.stdout
    assert "threshold_mb=25.0" in done.stdout
    assert not (tmp_path / "logs").exists()


def test_a_dry_run_as_json_is_the_plan(tmp_path):
    done = benchmarks(
        "run", QUICK, "-n", "--json", "-k", "algorithm=dear", "--logs", str(tmp_path / "logs")
    )
    plan = json.loads(done.stdout)
    assert [entry["trial"]["model"] for entry in plan] == ["resnet50", "mnist_cnn"]
    assert all(entry["run"] for entry in plan)


def test_list_names_what_there_is():
    done = benchmarks("list", "--json")
    listing = json.loads(done.stdout)
    assert {"allreduce", "wfbp", "ddp", "horovod", "dear"} <= set(listing["algorithms"])
    assert {"resnet50", "bert", "bert_base", "inceptionv4", "mnist_cnn"} <= set(listing["models"])
    assert QUICK in listing["experiments"]


@pytest.mark.parametrize(
    "arguments", [["--dry-run"], ["list"], ["--help"], ["--set", "algorithms.0=deer"]]
)
def test_quick_answers_import_neither_torch_nor_numpy(arguments):
    code = (
        "import sys\nfrom common.harness.cli import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'scipy', 'matplotlib', 'rich'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_output_into_a_closed_pipe_is_no_traceback():
    listing = subprocess.Popen(
        [sys.executable, "benchmarks.py", "list"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    listing.stdout.close()
    assert "Traceback" not in listing.stderr.read()
    listing.wait(timeout=30)
