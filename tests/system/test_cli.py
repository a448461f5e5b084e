"""The command line: quick answers, one clear line for every mistake, nothing written for them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from common.harness import cli
from common.harness.verbs.list import KEYS, keys_table, listing
from common.results.committed.pages import with_block
from dear.training.algorithm import algorithm_class
from tests.system.processes import ROOT, python

QUICK = str(ROOT / "configs" / "experiments" / "quick.yaml")
EMULATED = ("run", str(ROOT / "configs" / "experiments" / "emulated-quick.yaml"))


def refused(capsys, *arguments: str) -> str:
    """The one line that a mistake is answered with."""
    assert cli.main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1
    return output.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "algorithms.0=deer"], "unknown algorithm 'deer'; did you mean 'dear'?"),
        (["--set", "models.0.batch_size=four"], "must be a whole number, got 'four'"),
        (["--set", "launcher=mpi"], "did you mean 'mpirun'?"),
        (["--set", "faults=[{kind: link_down, host: 1}]"], "faults: need virtual hosts"),
        (["--set", "networks=[1gbe]"], "networks: need virtual hosts"),
        (["--filter", "resnet5000"], "no trial of quick matches"),
        (["--rerun", "some"], "invalid choice: 'some'"),
        (["run", "no/such.yaml"], "no/such.yaml: No such file"),
        (["run", "x" * 300], "File name too long"),
        (["show", "x" * 300], "File name too long"),
        (["--set", "algorithms=" + "[" * 3000], "not valid YAML"),
        (["runn"], "unknown verb 'runn'; did you mean 'run'?"),
        (["show", "nothing-here"], "no records in"),
        (["run", QUICK, "--no-such-flag"], "--no-such-flag"),
        ([*EMULATED, "--hosts", "0"], "cluster.hosts must be at least 1, got 0"),
        ([*EMULATED, "--network", "10gb"], "did you mean '10gbe'?"),
        ([*EMULATED, "--time-scale", "2", "--set", "models=[mnist_cnn]"], "2 slows the links"),
        ([*EMULATED, "--hosts", "2", "--set", "world_sizes=[3]"], "3 workers do not fit on 2"),
        ([*EMULATED, "--hosts", "4000", "--dry-run"], "GiB are available"),
        ([*EMULATED, "--set", "faults=[{kind: link_up, host: 1}]"], "did you mean 'link_"),
        ([*EMULATED, "--set", "faults=[{kind: link_down, host: 9}]"], "host 9 runs no rank"),
        ([*EMULATED, "--set", "models.0.batch_size=63"], "allowed: 16, 32, 64, 128"),
        ([*EMULATED, "--set", "launcher=slurm"], "does not run on virtual hosts"),
        (["--set", f"seed={1 << 32}"], "seed must be at least 0 and at most 4294967295, got"),
        (["--set", "seed=99999999999999999999"], "'seed': must be a whole number of less than 64"),
        (["--set", "measure.repeats=99999999999999999999"], "whole number of less than 64 bits"),
        (["--set", "world_sizes=[999999999999]"], "world_sizes must be at least 1 and at most"),
        (["--set", "threads_per_rank=99999"], "threads_per_rank must be at least 1 and at most"),
        ([*EMULATED, "--time-scale", "1e300"], "cluster.time_scale must be at least 0 and at most"),
        (["-n", "--ranks-per-host", "99999999999"], "world_sizes must be at least 1 and at most"),
        (["--set", 'name="a\\0b"'], "name: must be usable as a folder's name"),
        (["--set", 'algorithms=[{name: dear, label: "a\\nb"}]'], "label: must be a name on one"),
        (["--filter", ""], "an argument is empty"),
        (["report", "quick", "--out="], "an argument is empty"),
        (["compare", "a@", "b"], "a@: needs a label or key=value after the @"),
        *(
            ([*words, flag, f"{__file__}/below"], f"{__file__} is not a folder")
            for words, flag in (
                *((["run", QUICK, "-n"], flag) for flag in ("--logs", "--trace")),
                *(([verb], "--logs") for verb in ("list", "show", "report", "doctor")),
                (["compare", "a", "b"], "--logs"),
                (["merge", "a", "--into", "b"], "--logs"),
            )
        ),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else None,
)
def test_a_mistake_is_one_line_and_status_2(tmp_path, capsys, arguments, words):
    if arguments[0].startswith("--"):
        arguments = ["run", QUICK, *arguments]
    if "--logs" not in arguments:
        arguments = [*arguments, "--logs", str(tmp_path / "logs")]
    assert words in refused(capsys, *arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "No such file"),
        ("localhost slots=1\n", "has 1 slots, fewer than the 2 workers"),
        ("localhost slots=many\n", "line 1: must be `HOST slots=N`"),
    ],
)
def test_a_wrong_hostfile_is_refused_before_anything_starts(
    tmp_path, capsys, monkeypatch, text, words
):
    # A stand-in mpirun on the PATH: the hostfile is judged before it would be called.
    mpirun = tmp_path / "bin" / "mpirun"
    mpirun.parent.mkdir()
    mpirun.write_text("#!/bin/sh\nexit 99\n")
    mpirun.chmod(0o755)
    hostfile = tmp_path / "hosts"
    if text is not None:
        hostfile.write_text(text)
    monkeypatch.setenv("PATH", f"{mpirun.parent}:{os.environ['PATH']}")
    flags = ["--set", "launcher=mpirun", "--set", f"hostfile={hostfile}"]
    assert words in refused(capsys, "run", QUICK, *flags, "--logs", str(tmp_path / "logs"))
    assert not (tmp_path / "logs").exists()


def test_mpirun_without_mpirun_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    flags = ["--set", "launcher=mpirun", "--logs", str(tmp_path / "logs")]
    assert "no mpirun on the PATH" in refused(capsys, "run", QUICK, *flags)


def test_logs_that_cannot_be_written_are_refused(tmp_path, capsys):
    blocked = tmp_path / "logs"
    if os.geteuid() != 0:
        blocked.mkdir(mode=0o555)
    else:  # root may write anywhere but below a file
        blocked.write_text("")
    text = refused(capsys, "run", QUICK, "--logs", str(blocked), "-k", "mnist", "--quiet")
    assert "cannot write to" in text or "is not a folder" in text


def test_a_dry_run_prints_every_trial_and_writes_nothing(tmp_path, capsys):
    assert cli.main(["run", QUICK, "--dry-run", "--logs", str(tmp_path / "logs")]) == 0
    out = capsys.readouterr().out
    for name in ("allreduce", "wfbp", "ddp", "horovod", "dear", "single worker"):
        assert f"mnist_cnn bs=32 n=1 {name}" in out or f"n=2 {name}" in out
    assert "12 trials, 12 to run" in out
    assert "threshold_mb=25.0" in out
    flags = ["-n", "--json", "-k", "algorithm=dear", "--logs", str(tmp_path / "logs")]
    assert cli.main(["run", QUICK, *flags]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert [entry["trial"]["model"] for entry in plan] == ["resnet50", "mnist_cnn"]
    assert all(entry["run"] for entry in plan)
    assert not (tmp_path / "logs").exists()


def test_list_names_what_there_is(capsys):
    assert cli.main(["list", "--json"]) == 0
    listing = json.loads(capsys.readouterr().out)
    assert {"allreduce", "wfbp", "ddp", "horovod", "dear"} <= set(listing["algorithms"])
    assert {"resnet50", "bert", "bert_base", "inceptionv4", "mnist_cnn"} <= set(listing["models"])
    assert QUICK.endswith(next(name for name in listing["experiments"] if "/quick" in name))


def test_list_explains_each_key_of_an_experiment(capsys):
    assert cli.main(["list", "--keys"]) == 0
    text = capsys.readouterr().out
    assert "measure.precision: number or null = null\n    Half width of the 95 %" in text
    assert "models[].batch_size: " in text and "learn.schedule.kind: `constant` or " in text
    assert cli.main(["list", "--keys", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["keys"]
    assert {"name": "seed", "type": "integer", "default": "1"}.items() <= {
        key["name"]: key for key in listed
    }["seed"].items()
    assert all(key["meaning"].endswith(".") for key in listed)


def test_the_documents_have_todays_keys():
    page = (ROOT / "docs" / "experiments.md").read_text()
    assert with_block(page, KEYS, keys_table()) == page, "make docs"


def test_what_cannot_run_here_is_listed_with_the_reason(monkeypatch):
    kind = algorithm_class("horovod")
    monkeypatch.setattr(kind, "unavailable", classmethod(lambda cls: "it was not built"))
    listed = listing()["algorithms"]
    assert listed["horovod"].endswith("  [unsupported here: it was not built]")
    assert "unsupported" not in listed["wfbp"]


def test_names_survive_a_locale_that_cannot_write_them(tmp_path):
    path = tmp_path / "größer.yaml"
    text = "algorithms: [{name: ddp, label: größer}]\nmodels: [mnist_cnn]\nworld_sizes: [2]\n"
    path.write_text(text, encoding="utf-8")
    plain = {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = python("benchmarks.py", "run", path, "-n", env=os.environ | plain)
    assert done.returncode == 0, done.stderr
    assert r"n=2 gr\xf6\xdfer" in done.stdout


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


@pytest.mark.parametrize("raised", ["KeyboardInterrupt", "RuntimeError from KeyboardInterrupt()"])
def test_ctrl_c_while_modules_are_imported_is_one_line(raised):
    interrupted = f"""
import runpy, sys
class Finder:
    def find_spec(self, name, *_):
        if name == "common.harness.cli":
            raise {raised}
sys.meta_path.insert(0, Finder())
runpy.run_path("benchmarks.py", run_name="__main__")
"""
    done = python("-c", interrupted, env={**os.environ, "BENCHMARKS_OWN_ENVIRONMENT": "1"})
    assert done.returncode == 130
    assert done.stderr == "interrupted; run again to go on\n"


def test_quick_answers_import_neither_torch_nor_numpy(tmp_path):
    code = (
        "import sys\nfrom common.harness.cli import main\n"
        "for line in ('--dry-run', 'list', '--help', '--set algorithms.0=deer'):\n"
        "    try: main(line.split())\n    except SystemExit: pass\n"
        "    heavy = {'torch', 'numpy', 'scipy', 'matplotlib', 'rich'} & set(sys.modules)\n"
        "    if heavy: sys.exit(f'{line}: imported {heavy}')\n"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
