"""Whole sweeps of a model and an algorithm that lie outside of the repository."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from plots import throughput
from tests.system.processes import ROOT, finished, python, wait_for
from tests.system.sandboxes import Outside, needs_sandbox
from tests.system.sweeps import Driver, check_fabric, processes_of

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


@needs_sandbox
@pytest.mark.timeout(300)
def test_one_command_from_a_file_to_a_table(tmp_path, mine, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before, links, driver = state(), Outside.network(), Driver(tmp_path)
    driver.sweep = driver.logs / "net"
    done = python(
        *("benchmarks.py", "run", "--model-file", mine / "net.py", "--batch", "64"),
        *("--gpu", "rtx3090", "--hosts", "2", "--network", "25gbe", "--time-scale", "10"),
        *("--plugin", mine / "small_ones.py", "-k", "dear|small-ones", "--set", SHORT),
        *("--set", "measure.repeats=1", "--set", "compare_to=dear"),
        *("--logs", driver.logs, "--no-plot"),
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stderr.count("net.py modelled for NVIDIA GeForce RTX 3090") == 1
    dear, small = sorted(driver.records(), key=lambda record: record["trial"]["algorithm"])
    assert [record["trial"]["algorithm"] for record in (dear, small)] == ["dear", "small-ones"]
    assert small["trial"]["plugin"]["path"] == str(mine / "small_ones.py")
    for record in (dear, small):
        assert record["status"] == "ok" and record["check"]["matches_reference"]
        assert record["trial"]["model"] == "net.py@rtx3090-modelled"
        assert record["trial"]["network"] == "25gbe" and record["trial"]["world_size"] == 2
        assert record["throughput"]["unit"] == "sample/s" and record["bound"]["step_s"] > 0
    check_fabric(driver, [dear, small], gbps=25.0, time_scale=10.0, blocks=[3])
    assert dear["modelled"]["step_s"] > 0, dear["modelled"]
    table = (driver.sweep / "table.md").read_text()
    assert "net.py@rtx3090-modelled" in table and "small-ones" in table
    assert state() == before and Outside.network() == links
    wait_for(lambda: not processes_of(tmp_path))

    shown = driver.show("net")  # needs neither of the files
    assert shown.returncode == 0 and "small-ones" in shown.stdout
    assert all(path.exists() for path in throughput.draw(driver.sweep, tmp_path / "figures"))


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
