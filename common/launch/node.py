"""On a host, for launchers: what must not outlive whoever started it.

    python -m common.launch.node --ranks FOLDER REPEAT FIRST COUNT WORLD_SIZE -- COMMAND...
    python -m common.launch.node --tied [--undo JSON] -- COMMAND...

With `--ranks`, COMMAND is run for every rank of a job on this host, with its place in the
environment, where MASTER_ADDR and MASTER_PORT, at which the ranks meet, stand already.

The tie is standard input, a pipe whose other end the launcher holds. When it closes (the launcher
ends it, dies, or the network to it breaks), or on SIGTERM, SIGINT or SIGHUP, everything below this
process is ended. The line `stacks` on it asks the workers for their stacks.
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

from common.launch.job import Job
from common.launch.ranks import GRACE_S, Ranks, rank_env

STOP_S = 5.0
UNDO_S = 12.0
CUT = 128 + signal.SIGTERM
"""Exit status when the tie was cut."""
_PR_SET_CHILD_SUBREAPER = 36


def main(argv: Sequence[str]) -> int:
    """Runs the command to its end: its exit status, 128 + n after signal n; of ranks 0 or 1."""
    given = _parser().parse_args(argv)
    job, first, count = None, 0, 1
    if given.ranks:
        folder = Path(given.ranks[0])
        repeat, first, count, size = map(int, given.ranks[1:])
        if not (folder / "trial.json").exists():
            print(f"{socket.gethostname()} does not see {folder}: all hosts must share it")
            return 2
        # It is not this process that runs a module or looks at the time.
        job = Job(folder=folder, repeat=repeat, world_size=size, timeout_s=0.0, worker_module="")
    # Descendants that lose their parent become children of this process, and so can be found.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    watch = {_signals(): lambda: True}
    if given.tied:
        watch[0] = _cut
    with Ranks() as ranks:
        for rank in range(first, first + count):
            if job is None:
                ranks.command(given.command)
            else:
                env = rank_env(rank, job.world_size, first=first, local_size=count)
                ranks.command(given.command, env=env, log=job.log_path(rank))
        ended = ranks.wait(grace_s=GRACE_S if job else 0.0, watch=watch)
        if job is not None:
            for place, code in ranks.codes.items():
                job.exit_path(first + place).write_text(str(code))
        if not ended and given.undo:
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(given.undo, stdin=subprocess.DEVNULL, timeout=UNDO_S)
        ranks.stop(STOP_S, ask=signal.SIGTERM)
        _kill_all_below()
    if not ended:
        return CUT
    status = 0 if ranks.first_failure is None else ranks.codes[ranks.first_failure]
    if job is not None:
        return int(status != 0)
    return status if status >= 0 else 128 - status


def _signals() -> int:
    """A file descriptor to read from when this process shall end.

    A handler alone may run just before the process falls asleep.
    """
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    return woken


def _cut() -> bool:
    """Reads from the tie; True if it is cut."""
    text = os.read(0, 4096)
    if b"stacks" in text:
        for process in _below():
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{process.pid}/status").read_text()
                caught = int(status.partition("\nSigCgt:")[2].split()[0], 16)
                if caught >> (signal.SIGUSR1 - 1) & 1:  # else it would end the process
                    _send(process.pid, signal.SIGUSR1)
    return text == b""


def _kill_all_below() -> None:
    """Ends every process below this one, also what has left its session."""
    while below := _below():
        for process in below:
            with contextlib.suppress(OSError):
                _send(process.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)


def _below() -> list[psutil.Process]:
    """Processes below this one, numbered as in /proc, which may be another PID namespace's."""
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
    add("--undo", type=json.loads, default=[], help="a command to run first if the tie is cut")
    names = ("FOLDER", "REPEAT", "FIRST", "COUNT", "WORLD_SIZE")
    add("--ranks", nargs=5, metavar=names, help="run the command for these ranks of a job")
    add("command", nargs="+")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
