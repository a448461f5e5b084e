"""BlueFog's commands: what they run, and what they refuse."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dear.bluefog import run
from dear.errors import UserError

ROOT = Path(__file__).parents[2]


def test_on_this_machine_torchrun_starts_the_ranks(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    command, env = run.words(
        ["-np", "2", "--timeline-filename", "t_", "python", "x.py", "-np", "9"]
    )
    assert command[1:] == [
        *("-m", "torch.distributed.run", "--standalone", "--no-python"),
        *("--nproc-per-node", "2", "python", "x.py", "-np", "9"),
    ]
    assert env == {"BLUEFOG_TIMELINE": "t_"}


def test_on_several_hosts_mpirun_does(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.chdir(tmp_path)
    Path("h").touch()
    for name in ("OMP_NUM_THREADS", "HOME_OF_MINE"):
        monkeypatch.setenv(name, "1")
    given = ["-np", "4", "-H", "a:2,b:2", "-p", "2222", "--network-interface", "eth1"]
    given += ["--prefix", "/opt/mpi", "--extra-mpi-flags", "--mca orte_x 'a b'"]
    command, _ = run.words([*given, "python", "x.py"])
    text = " ".join(command)
    assert text.startswith("/usr/bin/mpirun -np 4 --bind-to none -H a:2,b:2 --mca pml ob1 ")
    assert "--mca btl_tcp_if_include eth1 --mca oob_tcp_if_include eth1" in text
    assert "--mca plm_rsh_args -p 2222 --prefix /opt/mpi" in text
    assert "-x OMP_NUM_THREADS" in text and "HOME_OF_MINE" not in text
    assert command[-5:] == ["--mca", "orte_x", "a b", "python", "x.py"]
    fast, _ = run.words(["-np", "2", "-hostfile", "h", "--use-infiniband", "x"])
    assert "--mca pml ucx" in " ".join(fast) and "--hostfile h" in " ".join(fast)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["-np", "2"], "no command given"),
        (["-np", "0", "x"], "-np must be at least 1"),
        (["-np", "2", "--use-infiniband", "x"], "--use-infiniband needs -H or -hostfile"),
        (["-np", "2", "-p", "9", "x"], "--ssh-port needs -H or -hostfile"),
        (["-H", "a:1", "-hostfile", "h", "x"], "not both"),
        (["-H", "a:1", "x"], "Open MPI's mpirun, which is not on the PATH"),
        (["-np", "2", "nosuch"], "bfrun: nosuch: no such program"),
        (["-hostfile", "/nosuch", "mpi"], "hostfile /nosuch: no such file"),
        (["-H", "a:1", "--extra-mpi-flags", "'x", "mpi"], "extra-mpi-flags: No closing quotation"),
    ],
)
def test_what_cannot_be_is_a_line(monkeypatch, capsys, given, text):
    monkeypatch.setattr(shutil, "which", lambda name: name if "mpi" in given else None)
    assert run.main(given) == 2
    output = capsys.readouterr().err
    assert text in output and output.count("\n") == 1


def test_engines_for_a_notebook(monkeypatch):
    monkeypatch.setattr(run.importlib.util, "find_spec", lambda name: name)
    started = run.notebook_words(["start", "-np", "3", "--ipython-profile", "mine"])
    assert started[2:] == [
        *("ipyparallel.cluster", "start", "--profile", "mine", "-n", "3", "--daemonize")
    ]
    words = ["ipyparallel.cluster", "stop", "--profile", "bluefog"]
    assert run.notebook_words(["stop"])[2:] == words
    with pytest.raises(UserError, match="-np must be at least 1, got 0"):
        run.notebook_words(["start", "-np", "0"])
    monkeypatch.setattr(run.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"ipyparallel is not installed: .*\[notebook\]"):
        run.notebook_words(["start"])


def printed_by_two(script: str) -> str:
    command = [sys.executable, "-m", "dear.bluefog.run", "-np", "2", sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_ranks_that_it_starts_have_their_numbers():
    # One write, because lines of two processes can mix.
    line = "f\"rank {e['RANK']} of {e['WORLD_SIZE']}\\n\""
    script = f"import os; e = os.environ; os.write(1, {line}.encode())"
    output = printed_by_two(script)
    assert output.count("rank 0 of 2") == output.count("rank 1 of 2") == 1


@pytest.mark.full  # tests/contract/test_bluefog.py has the averages of ranks that it starts itself
def test_ranks_that_it_starts_average():
    script = (
        "import torch, dear.bluefog as bf; bf.init(); "
        "x = bf.allreduce(torch.tensor([float(bf.rank())])); "
        "print(f'mean {x.item()}', flush=True); bf.shutdown()"
    )
    assert printed_by_two(script).count("mean 0.5") == 2
