"""Texts that a shell would act on, as folders, variables and hosts, through every launcher."""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from common.launch.hosts import Host, read_hostfile
from common.launch.job import make_launcher
from dear.errors import UserError
from tests.system.launch_stub import StubJob, place, stub_job
from tests.system.processes import LIMIT_S, ROOT
from tests.system.test_launch_ssh import AGENT

MARK = "acted"
"""File that a shell makes in the current folder if it acts on one of the words."""
WORDS = [
    "a b",
    "quote's",
    'double"quote',
    f"$(touch {MARK})",
    f"`touch {MARK}`",
    f"a;touch {MARK};",
    f"a\ntouch {MARK}\n",
    f"a && touch {MARK} #",
    f"'; touch {MARK}; '",
    f'"; touch {MARK}; "',
    f"a | touch {MARK}",
    f"a > {MARK}",
    "back\\slash",
    "$HOME",
    "~",
    "*?[a]",
    "!!",
    "{a,b}",
    "100%j%t",
    "größe",
    "-rf",
]
EVERY = "".join(WORDS)

SLURM = f"""#!{sys.executable}
import os, subprocess, sys
words = sys.argv[1:]
if "--wrap" in words:
    sys.exit(subprocess.run(["sh", "-c", words[words.index("--wrap") + 1]]).returncode)
os.environ |= dict(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
command = words[words.index("env"):]
os.execvp(command[0], command)
"""


@pytest.fixture(autouse=True)
def no_shell_was_there():
    yield
    marks = [folder / MARK for folder in (ROOT, Path.cwd(), Path.home())]
    left = [mark for mark in marks if mark.exists()]
    for mark in left:
        mark.unlink()
    assert not left


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Stand-ins of srun and sbatch that run what they get, as the real ones do."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("srun", "sbatch", "scancel", "squeue"):
        (tools / name).write_text(SLURM if name.startswith("s") else "")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    return monkeypatch


def _outcome(name: str, job: StubJob, tmp_path: Path):
    agent = tmp_path / "agent.py"
    agent.write_text(AGENT)
    there = {"hosts": [Host(name="far0", slots=1)]}
    options = {"options": {"agent": f"{sys.executable} '{agent}'"}}
    given = {
        "ssh": there | options,
        "torchrun": there | options,
        "torchrun here": {},
        "mpirun": {},
        "slurm": {},
        "slurm allocated": {},
    }[name]
    return make_launcher(name.split()[0], **{"hosts": None, "world_size": 1, **given}).run(job)


LAUNCHERS = ["ssh", "torchrun", "mpirun", "slurm", "slurm allocated"]
LAUNCHERS += [pytest.param("torchrun here", marks=pytest.mark.full)]
FULL = [pytest.param(word, marks=pytest.mark.full) for word in WORDS]


@pytest.mark.parametrize("name", LAUNCHERS)
@pytest.mark.parametrize("word", [EVERY, *FULL], ids=lambda word: "all" if word == EVERY else None)
def test_no_shell_acts_on_folders_and_variables(tmp_path, slurm, name, word):
    if name == "mpirun" and shutil.which("mpirun") is None:
        pytest.skip("no mpirun here")
    if name == "slurm allocated":
        slurm.setenv("SLURM_JOB_ID", "7")
    job = stub_job(tmp_path / f"x{word}", "ok", world_size=1)
    job = dataclasses.replace(job, env={"EXTRA": word})
    outcome = _outcome(name, job, tmp_path)
    assert outcome.status == "ok", outcome.error
    assert place(job.folder, 0)["env"]["EXTRA"] == word


NODE = """
import sys
from tests.system.test_launch_nodes import launcher
sys.exit(launcher(int(sys.argv[1]), 2, 1).follow())
"""


def test_no_shell_acts_on_what_node_0_sends(tmp_path):
    from common.paths import LOGS
    from tests.system.test_launch_nodes import launcher, leave

    port = random.randrange(20000, 30000)
    node = subprocess.Popen([sys.executable, "-c", NODE, str(port)], cwd=ROOT)
    try:
        leader = launcher(port)
        leader.check()
        job = stub_job(tmp_path / f"x{EVERY}", "ok", world_size=2)
        outcome = leader.run(dataclasses.replace(job, env={"EXTRA": EVERY}))
        assert outcome.status == "ok", outcome.error
        assert [place(job.folder, rank)["env"]["EXTRA"] for rank in range(2)] == [EVERY] * 2
        leave(leader)
        assert node.wait(LIMIT_S) == 0
    finally:
        node.kill()
        node.wait()
        (LOGS / f".nodes-127.0.0.1-{port}").unlink(missing_ok=True)


@pytest.mark.parametrize("word", WORDS, ids=repr)
def test_what_is_no_host_is_refused(tmp_path, word):
    """Each word as a host, as a user, and within them."""
    path = tmp_path / "hosts"
    for line in (word, f"a{word}", f"{word}@h1", f"h1@{word}", f"h0\n{word}@h1"):
        plain = word in ("größe",) or (word == "-rf" and line == f"a{word}")
        if plain:
            continue
        path.write_text(f"{line} slots=2\n")
        with pytest.raises(UserError):
            read_hostfile(path, 2)


@pytest.mark.parametrize("key", ["partition", "sbatch_args", "srun_args"])
def test_arguments_of_slurm_are_one_line_each(key):
    for end in ("\n", "\r", "\0"):
        value = f"--x{end}touch {MARK}"
        options = {key: value if key == "partition" else [value]}
        with pytest.raises(UserError, match="must be one line"):
            make_launcher("slurm", hosts=None, world_size=2, options=options)


def test_a_batch_script_quotes_what_it_is_given(tmp_path):
    words = [word for word in WORDS if "\n" not in word]
    options = {"partition": " ".join(words), "sbatch_args": words, "tasks_per_node": 2}
    launcher = make_launcher("slurm", hosts=None, world_size=2, options=options)
    script = launcher.batch_script(["printf", "%s\\n", *words], "name", 2)
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.splitlines() == words, done.stderr
    assert not list(tmp_path.iterdir())
