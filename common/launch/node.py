"""Helper program of launchers on a host; when the launcher ends, it kills all ranks there.

    python -m common.launch.node --ranks FOLDER REPEAT FIRST COUNT WORLD_SIZE -- COMMAND...
    python -m common.launch.node --tied [--undo JSON] -- COMMAND...
    python -m common.launch.node --kept FOLDER REPEAT -- ARGUMENTS...

With `--ranks`, COMMAND runs once for every rank of a job on this host; the environment has the
rank's number. MASTER_ADDR and MASTER_PORT must be set.

With `--tied`, standard input is a pipe from the launcher. When the pipe closes (because the
launcher closes it or ends, or the network fails), or on SIGTERM, SIGINT or SIGHUP, all descendants
of this process are killed. The line `stacks` in the pipe makes the workers print their stacks.

With `--kept`, this process stands for a rank of a job that goes on if the rank is killed: it runs
`python ARGUMENTS`. If a signal kills that, it writes the signal into a file, and ends with 0. It
kills it itself when the others have come to their end without it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from common.launch.job import Job, LeftBehind
from common.launch.ranks import GRACE_S, Ranks, rank_env
from dear.comm.environment import rank_facts

STOP_S = 5.0
UNDO_S = 12.0
CUT = 128 + signal.SIGTERM
"""Exit status after the pipe has closed."""
_PR_SET_CHILD_SUBREAPER = 36


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit status (128 + N after signal N); with `--ranks`, 0 or
    1."""
    options = _parser().parse_args(argv)
    if options.kept:
        return _keep(Path(options.kept[0]), int(options.kept[1]), options.command)
    job, first, count = None, 0, 1
    if options.ranks:
        folder = Path(options.ranks[0])
        repeat, first, count, size = map(int, options.ranks[1:])
        if not (folder / "trial.json").exists():
            host = socket.gethostname()
            print(f"{host} does not have {folder}: all hosts must share this folder")
            return 2
        # This process needs neither the module nor the time limit.
        job = Job(folder=folder, repeat=repeat, world_size=size, timeout_s=0.0, worker_module="")
    _adopt()
    watch = {_signals(): lambda: True}
    if options.tied:
        watch[0] = _read_pipe
    with Ranks() as ranks:
        for rank in range(first, first + count):
            if job is None:
                ranks.command(options.command)
            else:
                env = rank_env(rank, job.world_size, first=first, local_size=count)
                ranks.command(options.command, env=env, log=job.log_path(rank))
        ended = ranks.wait(grace_s=GRACE_S if job else 0.0, watch=watch)
        if job is not None:
            for index, code in ranks.codes.items():
                job.exit_path(first + index).write_text(str(code), encoding="utf-8")
        if not ended and options.undo:
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(options.undo, stdin=subprocess.DEVNULL, timeout=UNDO_S)
        ranks.stop(STOP_S, ask=signal.SIGTERM)
        _kill_all_below()
    if not ended:
        return CUT
    status = 0 if ranks.first_failure is None else ranks.codes[ranks.first_failure]
    if job is not None:
        return int(status != 0)
    return status if status >= 0 else 128 - status


def _keep(folder: Path, repeat: int, arguments: Sequence[str]) -> int:
    facts = rank_facts()
    job = Job(
        folder=folder, repeat=repeat, world_size=facts.world_size, timeout_s=0.0, worker_module=""
    )
    _adopt()
    woken = _signals()
    signal.signal(signal.SIGUSR1, lambda *_: None)  # for the worker, which prints its stacks
    with Ranks() as ranks:

        def must_end() -> bool:
            numbers = set(os.read(woken, 64))
            if signal.SIGUSR1 in numbers:
                ranks.signal(signal.SIGUSR1)
            return numbers != {signal.SIGUSR1}

        ranks.command([sys.executable, *arguments])
        left_behind = LeftBehind(job)
        ended = ranks.wait(watch={woken: must_end}, left_behind=lambda _: left_behind(facts.rank))
        ranks.stop(STOP_S, ask=signal.SIGTERM)
        _kill_all_below()
    code = ranks.codes[0] if ended else CUT
    if code < 0:
        job.killed_path(facts.rank).write_text(str(-code), encoding="utf-8")
    return max(code, 0)


def _adopt() -> None:
    """Makes descendants that lose their parent children of this process, which can kill them."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _signals() -> int:
    """Returns a file descriptor that becomes readable on a signal to end.

    A signal handler alone could run just before the process starts to wait.
    """
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    return woken


_HANDLED = ("SigCgt", "SigBlk")


def _read_pipe() -> bool:
    try:
        text = os.read(0, 4096)
    except ConnectionError:  # it may be a socket
        return True
    if b"stacks" in text:
        for process in _below():
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
                # Other processes would end by the signal. srun blocks it, and waits for it.
                masks = (status.partition(f"\n{name}:")[2].split()[0] for name in _HANDLED)
                if any(int(mask, 16) >> (signal.SIGUSR1 - 1) & 1 for mask in masks):
                    _send(process.pid, signal.SIGUSR1)
    return text == b""


def _kill_all_below() -> None:
    while below := _below():
        for process in below:
            with contextlib.suppress(OSError):
                _send(process.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)


def _below() -> list[psutil.Process]:
    """Returns all descendants of this process, with the PIDs that /proc shows.

    /proc may belong to another PID namespace, so that `os.kill` may need other PIDs.
    """
    me = int(Path("/proc/self").readlink().name)
    return psutil.Process(me).children(recursive=True)


def _send(pid: int, number: signal.Signals) -> None:
    folder = os.open(f"/proc/{pid}", os.O_RDONLY | os.O_DIRECTORY)
    try:
        signal.pidfd_send_signal(folder, number)
    finally:
        os.close(folder)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m common.launch.node")
    add = parser.add_argument
    add("--tied", action="store_true", help="end when standard input closes")
    add("--undo", type=json.loads, default=[], help="command to run first if standard input closes")
    names = ("FOLDER", "REPEAT", "FIRST", "COUNT", "WORLD_SIZE")
    add("--ranks", nargs=5, metavar=names, help="run the command for these ranks of a job")
    add("--kept", nargs=2, metavar=names[:2], help="stand for a rank that may be killed")
    add("command", nargs="+")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
