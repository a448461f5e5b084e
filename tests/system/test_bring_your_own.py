"""Whole sweeps of a model and an algorithm that lie outside of the repository."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from common.emulation import sandbox
from plots import throughput
from tests.system.processes import ROOT, finished, python
from tests.system.sweeps import Driver

ALGORITHM = ROOT / "examples" / "bring_your_own_algorithm.py"
MODEL = """
import torch
from width import WIDTH

def model():
    layers = [torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()] * 3
    return torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, 4))

def batch(batch_size):
    return torch.randn(batch_size, WIDTH), torch.randint(4, (batch_size,))
"""
SHORT = "measure={repeats: 2, warmup_steps: 1, steps_per_iter: 3, check_steps: 1}"


@pytest.fixture
def mine(tmp_path) -> Path:
    """A folder with a model, what it imports, and an algorithm."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "net.py").write_text(MODEL)
    (folder / "width.py").write_text("WIDTH = 512\n")
    shutil.copy(ALGORITHM, folder / "small_ones.py")
    return folder


def state() -> str:
    """Returns the repository's state by git; logs and figures are ignored."""
    return finished(["git", "status", "--porcelain"]).stdout


@pytest.mark.skipif(bool(sandbox.unable()), reason=f"no virtual hosts: {sandbox.unable()}")
@pytest.mark.timeout(300)
def test_one_command_from_a_file_to_a_table(tmp_path, mine, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before, logs = state(), tmp_path / "logs"
    done = python(
        *("benchmarks.py", "run", "--model-file", mine / "net.py", "--batch", "64"),
        *("--gpu", "rtx3090", "--hosts", "2", "--network", "25gbe", "--time-scale", "10"),
        *("--plugin", mine / "small_ones.py", "-k", "dear|small-ones", "--set", SHORT),
        *("--set", "compare_to=dear", "--logs", logs, "--no-plot"),
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stderr.count("net.py modelled for NVIDIA GeForce RTX 3090") == 1
    lines = (logs / "net" / "records.jsonl").read_text().splitlines()
    dear, small = (json.loads(line) for line in lines)
    assert [record["trial"]["algorithm"] for record in (dear, small)] == ["dear", "small-ones"]
    assert small["trial"]["plugin"]["path"] == str(mine / "small_ones.py")
    for record in (dear, small):
        assert record["status"] == "ok" and record["check"]["matches_reference"]
        assert (
            record["trial"]["model"] == "net.py@rtx3090-modelled"
            and record["fabric"]["kind"] == "emulated"
        )
        assert record["throughput"]["unit"] == "sample/s" and record["bound"]["step_s"] > 0
    assert dear["modelled"]["step_s"] > 0, dear["modelled"]
    table = (logs / "net" / "table.md").read_text()
    assert "net.py@rtx3090-modelled" in table and "small-ones" in table
    assert state() == before

    shown = python("benchmarks.py", "show", "net", "--logs", logs)  # needs neither of the files
    assert shown.returncode == 0 and "small-ones" in shown.stdout
    assert all(path.exists() for path in throughput.draw(logs / "net", tmp_path / "figures"))


@pytest.mark.full
def test_a_model_from_a_file_computes_in_every_rank(tmp_path, mine):
    flags = ("--model-file", mine / "net.py", "--batch", "4", "-k", "n=2 ddp|n=2 dear")
    for record in Driver(tmp_path).measured(*map(str, flags), "--set", SHORT):
        assert record["status"] == "ok" and record["check"]["matches_reference"]
        assert record["trial"]["model"] == "net.py"
        assert record["trial"]["brought"]["source"] == f"file:{mine / 'net.py'}"


def test_a_model_that_fails_in_a_rank_is_a_failed_trial_with_its_words(tmp_path, mine):
    (mine / "net.py").write_text(MODEL.replace("Linear(WIDTH, 4)", "Linear(7, 4)"))
    driver = Driver(tmp_path)
    done = driver.run("--model-file", str(mine / "net.py"), "--batch", "4", "-k", "n=2 ddp")
    assert done.returncode == 1, done.stderr + done.stdout
    (record,) = driver.records()
    assert record["status"] == "failed" and "shapes cannot be multiplied" in done.stdout
