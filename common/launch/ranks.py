"""The one way to start the ranks of a job on this machine, and to be sure that none is left.

    with Ranks() as ranks:
        for rank in range(4):
            ranks.command(["python", "train.py"], env=rank_env(rank, 4, store=folder / "store"))
        in_time = ranks.wait(60.0)

A rank is the process of a command or of a function; launchers, benchmarks and tests differ only in
what they start, whom they ask how it went, and how long they wait.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from common.emulation.hosts.namespaces import die_with_parent

# After the first rank has failed, the others get this long to say what they saw.
GRACE_S = 2.0


def rank_env(
    rank: int, size: int, *, store: Path | None = None, first: int = 0, local_size: int = 0
) -> dict[str, str]:
    """What tells a process that it is rank `rank` of `size`, in torchrun's words.

    Args:
        store: the file at which the ranks meet; None: wherever the environment says already.
        first: the first rank on this host.
        local_size: how many ranks this host has; 0: all of them.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    env = dict(zip(names, map(str, (rank, size, rank - first, local_size or size)), strict=True))
    return env if store is None else {**env, "DEAR_STORE": str(store)}


class RankLost(Exception):  # noqa: N818  (what has happened, not a mistake)
    """A rank has died, or some have not answered in time, as the message says."""

    def __init__(self, message: str, *, died: bool) -> None:
        super().__init__(message)
        self.died = died


class Ranks:
    """Processes in rank order, from their start to their end; leaving the context kills them.

    Each is the leader of a session of its own: a Ctrl-C at the terminal is the caller's to handle,
    and whatever the process has started there can be killed with it. Each reacts to SIGINT, also
    where the caller does not (what a script runs in the background ignores it, and its children
    would). Each ends when the caller does, also by SIGKILL.

    Attributes:
        codes: exit status of the ranks that ended by themselves, minus N for signal N.
        first_failure: the rank that failed first, as far as `wait` has seen.
        pipes: the caller's ends, by rank, of functions started with `piped`.
    """

    def __init__(self) -> None:
        self.codes: dict[int, int] = {}
        self.first_failure: int | None = None
        self.pipes: dict[int, Connection] = {}
        self._processes: list[BaseProcess | _Command] = []

    def command(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        log: Path | None = None,
        tied: bool = False,
        cwd: Path | None = None,
    ) -> None:
        """Starts a command as the next rank; it gets SIGTERM when the caller dies.

        Args:
            env: what its environment has besides this process's.
            log: file for what it prints; None: where the caller prints.
            tied: its standard input, else empty, is a pipe that `say` writes to and closes; the
                caller's end closes it, too.
        """
        stdin = subprocess.PIPE if tied else subprocess.DEVNULL
        how = {"cwd": cwd, "env": {**os.environ, **(env or {})}, "stdin": stdin}
        how |= {"start_new_session": True, "preexec_fn": _prepare_command}
        with contextlib.nullcontext() if log is None else log.open("wb") as file:
            process = _Command(argv, stdout=file, stderr=file, **how)
        process.sentinel = os.pidfd_open(process.pid)
        self._processes.append(process)

    def function(
        self,
        function: Callable[..., int | None],
        *arguments: Any,
        env: Mapping[str, str] | None = None,
        log: Path | None = None,
        before: Callable[[], None] | None = None,
        piped: bool = False,
        method: str = "forkserver",
    ) -> None:
        """Starts `function(*arguments)`, which gives the exit status, as the next rank.

        Args:
            env: set before the function is called, in what the fork server's environment was when
                it started.
            before: called first of all, while the process has but one thread.
            piped: the function gets one end of a pipe as its first argument.
            method: of `multiprocessing`; the fork server's children have the modules it was told to
                preload already, those of `spawn` import everything anew.
        """
        context = multiprocessing.get_context(method)
        with contextlib.ExitStack() as stack:
            if piped:
                self.pipes[len(self._processes)], theirs = context.Pipe()
                stack.enter_context(theirs)
                arguments = (theirs, *arguments)
            process = context.Process(
                target=_be_rank,
                args=(function, arguments, dict(env or {}), log, before),
                daemon=True,
            )
            self._processes.append(process)
            process.start()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def pid(self, rank: int) -> int:
        """The rank's process."""
        number = self._processes[rank].pid
        assert number is not None
        return number

    def wait(
        self,
        timeout_s: float | None = None,
        *,
        grace_s: float = GRACE_S,
        matters: Callable[[int], bool] = bool,
        watch: Mapping[int, Callable[[], bool]] | None = None,
    ) -> bool:
        """Waits for all to end, but only `grace_s` longer than for the first failure.

        Args:
            matters: whether an exit status is such a failure.
            watch: functions by file descriptor, called when there is something to read there; one
                that returns True ends the waiting.

        Returns:
            False if time ran out with no failure, or the waiting was ended.
        """
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        watch = watch or {}
        failing = False
        while running := self._running(matters):
            if self.first_failure is not None and not failing:
                failing = True
                deadline = min(deadline, time.monotonic() + grace_s)
            left = deadline - time.monotonic()
            if left <= 0:
                return failing
            sentinels = [self._processes[rank].sentinel for rank in running]
            ready = wait([*sentinels, *watch], None if left == math.inf else left)
            if any(watch[fd]() for fd in watch if fd in ready):
                return False
        return True

    def signal(self, number: int, rank: int | None = None) -> None:
        """Sends a signal to a rank's process, or to all that still run; not to their children."""
        for one in self._running() if rank is None else [rank]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid(one), number)

    def say(self, text: bytes | None) -> None:
        """Writes to the standard input of commands that are tied; None closes it."""
        for process in self._processes:
            pipe = process.stdin if isinstance(process, _Command) else None
            if pipe is not None and not pipe.closed:
                with contextlib.suppress(BrokenPipeError):
                    if text is None:
                        pipe.close()
                    else:
                        pipe.write(text)
                        pipe.flush()

    def stop(self, patience_s: float = 0.0, ask: int | None = None) -> None:
        """Ends all that is left: by the signal `ask` and some patience, then by SIGKILL.

        Each is killed with its process group. What ends here has no place in `codes`.
        """
        # The last one may have been interrupted before it started.
        self._processes = [process for process in self._processes if process.pid is not None]
        left = self._running()
        codes = dict(self.codes)
        if left and ask is not None:
            self.signal(ask)
        if left and patience_s:
            self.wait(patience_s, grace_s=patience_s, matters=lambda _: False)
        for rank in left:
            if self._processes[rank].exitcode is None:
                _kill_group(self.pid(rank))
        self.say(None)
        for process in self._processes:
            process.join()
            if isinstance(process, _Command):
                os.close(process.sentinel)
        for pipe in self.pipes.values():
            pipe.close()
        self.codes, self.pipes, self._processes = codes, {}, []

    def _running(self, matters: Callable[[int], bool] = bool) -> list[int]:
        """The ranks that have not ended; notes how the others did."""
        running = []
        for rank, process in enumerate(self._processes):
            code = self.codes.get(rank, process.exitcode)
            if code is None:
                running.append(rank)
                continue
            self.codes[rank] = code
            if self.first_failure is None and matters(code):
                self.first_failure = rank
        return running


def gather(pipes: Mapping[int, Connection], timeout_s: float) -> Iterator[tuple[int, Any]]:
    """Yields rank and message for the next message of every pipe, as they come.

    Raises:
        RankLost: a rank has died, or some have said nothing in time.
    """
    deadline = time.monotonic() + timeout_s
    silent = dict(pipes)
    while silent:
        ready = wait(list(silent.values()), max(0.0, deadline - time.monotonic()))
        if not ready:
            late = ", ".join(map(str, silent))
            raise RankLost(f"no answer from rank {late} in {timeout_s:.0f} s", died=False)
        for rank in [rank for rank, pipe in silent.items() if pipe in ready]:
            try:
                message = silent.pop(rank).recv()
            except (EOFError, ConnectionResetError):
                raise RankLost(f"rank {rank} died", died=True) from None
            yield rank, message


class _Command(subprocess.Popen[bytes]):
    """A command with the names of `multiprocessing.Process`."""

    sentinel = -1

    @property
    def exitcode(self) -> int | None:
        return self.poll()

    def join(self, timeout: float | None = None) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(timeout)


def _prepare_command() -> None:
    die_with_parent(signal.SIGTERM)  # of which many take others along, which SIGKILL would not let
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _be_rank(
    function: Callable[..., int | None],
    arguments: Sequence[Any],
    env: Mapping[str, str],
    log: Path | None,
    before: Callable[[], None] | None,
) -> None:
    """Runs in the new process."""
    multiprocessing.current_process().daemon = False  # for then it may have none, to read data with
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if log is not None:
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    if before is not None:
        before()
    threading.Thread(target=_die_with_caller, daemon=True).start()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)
    os.environ.update(env)
    code: int | None = 1
    try:
        code = function(*arguments)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    # No interpreter shutdown: libraries' threads may outlive their modules there.
    os._exit(code or 0)


def _die_with_caller() -> None:
    # The fork server, the parent, outlives a caller killed by SIGKILL as long as it has children.
    caller = multiprocessing.parent_process()
    assert caller is not None
    wait([caller.sentinel])
    os.killpg(0, signal.SIGKILL)  # its own group: itself and what it has started


def _kill_group(pid: int) -> None:
    """Kills the group that this process leads, or the process if it does not yet lead one."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)
            return
