"""Nothing outlives its tether: not the command, not what it started, not what left its session."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys

import pytest

from tests.system.processes import FOREVER, LIMIT_S, ROOT, alive, number_in, wait_for

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


@pytest.mark.parametrize(("code", "status"), [("", 0), ("exit(3)", 3)])
def test_the_exit_status_is_the_commands(code, status):
    with tethered(sys.executable, "-c", code) as process:
        assert process.wait(LIMIT_S) == status


def test_a_signal_becomes_128_and_its_number():
    with tethered("sh", "-c", "kill -9 $$") as process:
        assert process.wait(LIMIT_S) == 128 + 9


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


def test_a_killed_tether_takes_its_command_along(tmp_path):
    path = tmp_path / "pid"
    code = f"import os; open({str(path)!r}, 'w').write(str(os.getpid())); {FOREVER}"
    with tethered(sys.executable, "-c", code) as process:
        pid = wait_for(lambda: number_in(path))
        process.kill()
    wait_for(lambda: not alive(pid))
