"""The ssh launcher over a stand-in that only hangs up, and the tether that ends what it started."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from common.launch import per_host
from common.launch.hosts import Host
from common.launch.job import make_launcher
from common.launch.ranks import rank_env
from dear.errors import UserError
from tests.system.launch_stub import StubJob, place, stub_job
from tests.system.processes import FOREVER, LIMIT_S, ROOT, alive, number_in, python, wait_for

AGENT = """
import os, subprocess, sys, threading, time
host, command = sys.argv[1:]
if host.startswith("dead"):
    sys.exit(f"ssh: connect to host {host} port 22: Connection refused")
if host.startswith("silent"):
    time.sleep(10000)
far = subprocess.Popen(["sh", "-c", command], stdin=subprocess.PIPE, start_new_session=True)

def pump():
    while text := os.read(0, 4096):
        os.write(far.stdin.fileno(), text)
    far.stdin.close()

threading.Thread(target=pump, daemon=True).start()
status = far.wait()
os._exit(status if status >= 0 else 255)
"""


PROGRAM = """
import dataclasses, json, signal, sys
from pathlib import Path
from tests.system.launch_stub import StubJob
from tests.system.test_launch_ssh import make_launcher, ssh
signal.signal(signal.SIGINT, signal.default_int_handler)  # as benchmarks.py does
folder, agent = sys.argv[1:]
job = StubJob(folder=Path(folder), repeat=0, world_size=2, timeout_s=200)
mpirun = agent == "mpirun" and make_launcher(agent, hosts=None, world_size=2)
print(json.dumps(dataclasses.asdict((mpirun or ssh(agent, "far0", "far1")).run(job))))
"""


def start_driver(job: StubJob, agent: str) -> subprocess.Popen:
    """A program that runs the job and prints the outcome; its temporary files are in the folder."""
    (job.folder / "temporary").mkdir()
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(job.folder), agent],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(job.folder / "temporary")},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


@pytest.fixture
def agent(tmp_path: Path) -> str:
    path = tmp_path / "agent.py"
    path.write_text(AGENT)
    return f"{sys.executable} {path}"


def ssh(agent: str, *names: str, slots: int = 1):
    hosts = [Host(name=name, slots=slots) for name in names]
    size = slots * len(hosts)
    return make_launcher("ssh", hosts=hosts, world_size=size, options={"agent": agent})


def pids(job: StubJob) -> list[int]:
    """Returns the ranks' process ids, once all of them are there."""
    paths = [job.folder / f"place-{rank}.json" for rank in range(job.world_size)]
    wait_for(lambda: all(path.exists() for path in paths))
    return [place(job.folder, rank)["pid"] for rank in range(job.world_size)]


def test_every_host_gets_one_command_for_its_ranks(tmp_path, agent):
    job = stub_job(tmp_path / "job", "ok", world_size=4)
    outcome = ssh(agent, "far0", "far1", slots=2).run(job)
    assert outcome.status == "ok", outcome.error
    assert [place(job.folder, rank)["ranks"] for rank in range(4)] == [
        [0, 4, 0, 2],
        [1, 4, 1, 2],
        [2, 4, 0, 2],
        [3, 4, 1, 2],
    ]
    assert {place(job.folder, rank)["env"]["MASTER_ADDR"] for rank in range(4)} == {"far0"}


def test_ranks_of_this_host_need_no_remote_shell(tmp_path):
    hosts = [Host(name=socket.gethostname(), slots=2)]
    job = stub_job(tmp_path / "job", "ok", world_size=2)
    outcome = make_launcher("ssh", hosts=hosts, world_size=2).run(job)
    assert outcome.status == "ok", outcome.error


def test_a_killed_remote_rank_is_named_and_the_others_end(tmp_path, agent):
    job = stub_job(tmp_path / "job", "kill", world_size=2)
    outcome = ssh(agent, "far0", "far1").run(job)
    assert (outcome.status, outcome.error["rank"]) == ("failed", 1)
    assert outcome.error["message"] == "rank 1 was killed by signal 9"
    assert not any(map(alive, pids(job)))


def test_a_connection_that_breaks_ends_the_job_and_names_the_host(tmp_path, agent):
    job = stub_job(tmp_path / "job", "hang", world_size=2)
    driver = start_driver(job, agent)
    ranks = pids(job)
    connections = psutil.Process(driver.pid).children()
    (far1,) = [process for process in connections if "far1" in process.cmdline()]
    far1.kill()
    outcome = json.loads(driver.communicate(timeout=LIMIT_S)[0])
    assert outcome["status"] == "failed"
    assert "host far1 ended with status -9" in outcome["error"]["message"]
    wait_for(lambda: not any(map(alive, ranks)))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.parametrize("launcher", ["ssh", "mpirun"])
def test_remote_ranks_end_with_the_driver(tmp_path, agent, launcher, number):
    if shutil.which(launcher) is None:
        pytest.skip(f"no {launcher} here")
    job = stub_job(tmp_path / "job", "hang", world_size=2)
    driver = start_driver(job, agent if launcher == "ssh" else launcher)
    ranks = pids(job)
    driver.send_signal(number)
    driver.communicate(timeout=LIMIT_S)
    wait_for(lambda: not any(map(alive, ranks)))
    wait_for(lambda: not list((job.folder / "temporary").iterdir()))


def test_a_host_without_the_folder_says_so(tmp_path, agent):
    job = stub_job(tmp_path / "job", "ok", world_size=2)
    (job.folder / "trial.json").unlink()
    outcome = ssh(agent, "far0", "far1").run(job)
    assert outcome.status == "failed"
    assert (
        f"does not have {job.folder}: all hosts must share this folder" in outcome.error["message"]
    )


def test_hosts_that_do_not_answer_are_named(agent, monkeypatch):
    with pytest.raises(UserError, match=r"no answer from host dead1: .*Connection refused"):
        ssh(agent, "far0", "dead1").check()
    assert per_host.PROBE_S <= 12
    monkeypatch.setattr(per_host, "PROBE_S", 1.0)
    with pytest.raises(UserError, match="hosts silent0, dead1, silent2"):
        ssh(agent, "silent0", "dead1", "silent2").check()


def test_a_missing_remote_shell_is_named():
    with pytest.raises(UserError, match="no remote shell 'nosuchshell' on the PATH"):
        ssh("nosuchshell -q", "far0").check()


# Starts a process in a session of its own, whose parent then ends: nobody's descendant any more.
STRAYS = """
import os, subprocess, sys, time
stray = [sys.executable, "-c", "import os, sys, time; os.setsid(); "
         "open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(10000)"]
if os.fork() == 0:
    subprocess.Popen([*stray, sys.argv[1]])
    os._exit(0)
open(sys.argv[2], "w").write(str(os.getpid()))
time.sleep(10000)
"""


@contextlib.contextmanager
def tethered(*command: str, options=()):
    """A tether with this command, as a launcher starts it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "common.launch.node", "--tied", *options, "--", *command],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        yield process
    finally:
        process.stdin.close()
        process.wait(LIMIT_S)
        process.stdout.close()


@pytest.mark.parametrize("cut", ["end of input", signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_cutting_ends_everything_below(tmp_path, cut):
    paths = [tmp_path / "stray", tmp_path / "child"]
    with tethered(sys.executable, "-c", STRAYS, *map(str, paths)) as process:
        pids = wait_for(lambda: all(map(number_in, paths)) and list(map(number_in, paths)))
        assert all(map(alive, pids))
        if cut == "end of input":
            process.stdin.close()
        else:
            process.send_signal(cut)
        assert process.wait(LIMIT_S) == 128 + signal.SIGTERM
    assert not any(map(alive, pids))


def test_what_a_command_leaves_behind_ends_with_it(tmp_path):
    code = STRAYS.replace("time.sleep(10000)\n", "\n")
    paths = [tmp_path / "stray", tmp_path / "child"]
    code += "while not os.path.exists(sys.argv[1]): time.sleep(0.05)\n"
    with tethered(sys.executable, "-c", code, *map(str, paths)) as process:
        assert process.wait(LIMIT_S) == 0
    assert not alive(wait_for(lambda: number_in(paths[0])))


@pytest.mark.parametrize(("code", "status"), [(":", 0), ("exit 3", 3), ("kill -9 $$", 128 + 9)])
def test_the_exit_status_is_the_commands(code, status):
    with tethered("sh", "-c", code) as process:
        assert process.wait(LIMIT_S) == status


def test_stacks_go_to_those_who_listen_and_harm_nobody_else(tmp_path):
    ready = tmp_path / "ready"
    listener = (
        "import faulthandler, signal, sys, time; faulthandler.register(signal.SIGUSR1); "
        f"open(sys.argv[1], 'w').write('1'); {FOREVER}"
    )
    # The shell does not catch the signal, which would end it.
    command = f'"{sys.executable}" -c "{listener}" {ready}; echo over'
    with tethered("sh", "-c", command) as process:
        wait_for(lambda: number_in(ready))
        process.stdin.write(b"stacks\n")
        process.stdin.flush()
        line = process.stdout.readline() + process.stdout.readline()
        assert b"most recent call first" in line
        assert process.poll() is None


def test_undo_runs_only_if_the_tether_is_cut(tmp_path):
    undone = tmp_path / "undone"
    options = ["--undo", json.dumps(["touch", str(undone)])]
    with tethered("true", options=options) as process:
        assert process.wait(LIMIT_S) == 0
    assert not undone.exists()
    with tethered("sleep", "10000", options=options) as process:
        process.stdin.close()
        process.wait(LIMIT_S)
    assert undone.exists()


@pytest.mark.parametrize(
    ("code", "status", "signal_"),
    [("kill -9 $$", 0, "9"), ("kill -TERM $PPID; sleep 10000", 143, None), ("exit 3", 3, None)],
)
def test_only_what_kills_a_kept_rank_is_hidden_from_its_launcher(tmp_path, code, status, signal_):
    """The second rank's child holds the output; what waits for its end would wait for hours."""
    job = stub_job(tmp_path, "ok", world_size=2)
    words = [
        "--kept",
        str(tmp_path),
        "0",
        "--",
        "-c",
        f"import os; os.execlp('sh', 'sh', '-c', {code!r})",
    ]
    done = python("-m", "common.launch.node", *words, env=os.environ | rank_env(1, 2))
    assert done.returncode == status, done.stderr
    path = job.killed_path(1)
    assert (path.read_text() if path.exists() else None) == signal_


def test_stacks_of_a_kept_rank_are_printed(tmp_path):
    ready = tmp_path / "ready"
    listener = (
        "import faulthandler, signal, time; faulthandler.register(signal.SIGUSR1); "
        f"open({str(ready)!r}, 'w').write('1'); {FOREVER}"
    )
    command = [sys.executable, "-m", "common.launch.node", "--kept", str(tmp_path), "0", "--"]
    with subprocess.Popen(
        [*command, "-c", listener],
        cwd=ROOT,
        env=os.environ | rank_env(0, 2),
        stderr=subprocess.PIPE,
    ) as process:
        wait_for(lambda: number_in(ready))
        process.send_signal(signal.SIGUSR1)
        assert b"most recent call first" in process.stderr.readline() + process.stderr.readline()
        assert process.poll() is None
        process.terminate()


def test_a_killed_tether_takes_its_command_along(tmp_path):
    path = tmp_path / "pid"
    code = f"import os; open({str(path)!r}, 'w').write(str(os.getpid())); {FOREVER}"
    with tethered(sys.executable, "-c", code) as process:
        pid = wait_for(lambda: number_in(path))
        process.kill()
    wait_for(lambda: not alive(pid))
