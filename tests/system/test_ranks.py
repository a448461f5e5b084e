"""Ranks on this machine: their place, their end, and the end of whoever started them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from multiprocessing import active_children
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import psutil
import pytest

from common.launch.ranks import RankLost, Ranks, gather, rank_env
from common.machine.processes import started
from tests.system.processes import FOREVER, LIMIT_S, ROOT, alive, number_in, wait_for

PLACE = "import json, os; print(json.dumps({n: os.environ.get(n) for n in %r}))"
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "DEAR_STORE")


def tell_place() -> None:
    exec(PLACE % (NAMES,))


def answer(pipe, rank: int, how: str) -> int:
    """Sends its rank, or dies, or says nothing."""
    if how == "died" and rank == 1:
        os._exit(7)
    if how != "silent" or rank == 0:
        pipe.send(rank)
    pipe.poll(None)
    return 0


def write_pid_and_stay(path: Path) -> None:
    child = subprocess.Popen(["sleep", "10000"])  # goes with its session
    path.with_suffix(".child").write_text(str(child.pid))
    path.write_text(str(os.getpid()))
    time.sleep(10000)


def start_both(folder: Path) -> None:
    """A program that ranks of both kinds shall not outlive."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as benchmarks.py does
    with Ranks() as ranks:
        ranks.function(write_pid_and_stay, folder / "function")
        code = f"import os; open({str(folder / 'command')!r}, 'w').write(str(os.getpid())); "
        ranks.command([sys.executable, "-c", code + FOREVER])
        ranks.wait()


@pytest.mark.parametrize("kind", ["command", "function"])
def test_ranks_know_their_place_and_print_into_files(tmp_path, kind):
    logs = [tmp_path / f"log-{rank}" for rank in range(3)]
    with Ranks() as ranks:
        for rank, log in enumerate(logs):
            env = rank_env(rank, 3, store=tmp_path / "store", first=1, local_size=2)
            if kind == "command":
                ranks.command([sys.executable, "-c", PLACE % (NAMES,)], env=env, log=log)
            else:
                ranks.function(tell_place, env=env, log=log)
        assert ranks.wait(LIMIT_S)
        assert (ranks.codes, ranks.first_failure) == (dict.fromkeys(range(3), 0), None)
    places = [list(json.loads(log.read_text()).values()) for log in logs]
    assert places == [[str(r), "3", str(r - 1), "2", str(tmp_path / "store")] for r in range(3)]


def test_the_first_failure_is_named_and_ends_the_others_with_what_they_started(tmp_path):
    with Ranks() as ranks:
        ranks.function(write_pid_and_stay, tmp_path / "pid")
        pid = wait_for(lambda: number_in(tmp_path / "pid"))
        (child,) = psutil.Process(pid).children()
        ranks.command([sys.executable, "-c", "exit(3)"])
        assert ranks.wait(LIMIT_S, grace_s=0.0)
        assert (ranks.first_failure, ranks.codes) == (1, {1: 3})
    assert ranks.codes == {1: 3}, "whoever was stopped has no exit status of its own"
    assert not alive(pid)
    wait_for(lambda: not alive(child.pid))


def test_running_out_of_time_is_no_failure():
    with Ranks() as ranks:
        ranks.command([sys.executable, "-c", FOREVER])
        assert not ranks.wait(0.0)
        assert (ranks.first_failure, ranks.codes) == (None, {})


@pytest.mark.parametrize("how", ["well", "died", "silent"])
def test_answers_come_from_all_or_the_missing_rank_is_named(how):
    with Ranks() as ranks:
        for rank in range(2):
            ranks.function(answer, rank, how, piped=True)
        if how == "well":
            assert sorted(gather(ranks.pipes, LIMIT_S)) == [(0, 0), (1, 1)]
            return
        with pytest.raises(RankLost, match="1") as lost:
            list(gather(ranks.pipes, LIMIT_S if how == "died" else 1.0))
        assert lost.value.died == (how == "died")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_ranks_end_with_whoever_started_them(tmp_path, number):
    code = "from pathlib import Path; from tests.system import test_ranks; test_ranks.start_both"
    program = [sys.executable, "-c", f"{code}(Path({str(tmp_path)!r}))"]
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    env = os.environ | {"TMPDIR": str(temporary)}
    driver = subprocess.Popen(program, cwd=ROOT, env=env, stderr=subprocess.DEVNULL)
    paths = [tmp_path / name for name in ("function", "function.child", "command")]
    pids = wait_for(lambda: all(map(number_in, paths)) and list(map(number_in, paths)))
    assert list(temporary.iterdir()), "the fork server has a folder there"
    driver.send_signal(number)
    driver.wait(LIMIT_S)
    wait_for(lambda: not any(map(alive, pids)))
    wait_for(lambda: not list(temporary.iterdir()))


def stop_slowly(folder: Path) -> None:
    """A program whose rank needs time to end, and writes when it has been asked and has ended."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    asked, ended = folder / "asked", folder / "ended"
    trap = f"trap 'touch {asked}; sleep 1; touch {ended}; exit' TERM; touch {folder / 'ready'}"
    with Ranks() as ranks:
        ranks.command(["sh", "-c", f"{trap}; while :; do sleep 0.05; done"])
        try:
            (folder / "waiting").touch()
            ranks.wait()
        finally:
            ranks.stop(LIMIT_S, ask=signal.SIGTERM)


def test_a_second_ctrl_c_lets_ranks_end_that_the_first_has_asked_to(tmp_path):
    code = "from pathlib import Path; from tests.system import test_ranks; test_ranks.stop_slowly"
    program = [sys.executable, "-c", f"{code}(Path({str(tmp_path)!r}))"]
    driver = subprocess.Popen(program, cwd=ROOT, stderr=subprocess.DEVNULL)
    wait_for((tmp_path / "waiting").exists)
    for name in ("ready", "asked"):
        wait_for((tmp_path / name).exists)
        driver.send_signal(signal.SIGINT)
    assert driver.wait(LIMIT_S) != 0
    assert (tmp_path / "ended").exists()


def test_a_rank_reacts_to_sigint_where_its_starter_does_not(tmp_path):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a script's background jobs do
    try:
        with Ranks() as ranks:
            code = "import signal; exit(signal.getsignal(signal.SIGINT) == signal.SIG_IGN)"
            ranks.command([sys.executable, "-c", code])
            assert ranks.wait(LIMIT_S) and ranks.codes == {0: 0}
    finally:
        signal.signal(signal.SIGINT, before)


_SERVED = """
import multiprocessing.forkserver
from common.machine.processes import preload_in_fork_server
preload_in_fork_server(["taken_down"])
process = multiprocessing.get_context("forkserver").Process(target=print)
process.start()
process.join()
print(process.exitcode, multiprocessing.forkserver._forkserver._forkserver_pid)
"""
_TAKEN_DOWN = """
import atexit, pathlib
atexit.register(pathlib.Path(__file__).with_suffix(".down").touch)
pathlib.Path(__file__).with_suffix(".imported").touch()
"""


def test_a_fork_server_ends_without_taking_down_what_it_has_imported(tmp_path):
    module = tmp_path / "taken_down.py"
    module.write_text(_TAKEN_DOWN)
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    command = [sys.executable, "-c", f"if __name__ == '__main__':\n  exec({_SERVED!r})"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    status, server = map(int, done.stdout.split())
    assert status == 0
    wait_for(lambda: not alive(server))
    assert module.with_suffix(".imported").exists()
    assert not module.with_suffix(".down").exists()


def test_an_exception_ends_processes_in_the_middle_of_a_call():
    """Ctrl-C and SIGTERM are exceptions, too; without the end, this would wait for the calls."""
    with pytest.raises(KeyboardInterrupt), started(2) as pool:
        calls = [pool.submit(time.sleep, 10_000) for _ in range(2)]
        wait_for(lambda: all(call.running() for call in calls))
        raise KeyboardInterrupt
    assert not any(isinstance(child, ForkServerProcess) for child in active_children())
