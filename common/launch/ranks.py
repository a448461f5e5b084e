"""Start and end of the ranks of a job on this machine; no rank outlives its caller.

    with Ranks() as ranks:
        for rank in range(4):
            ranks.command(["python", "train.py"], env=rank_env(rank, 4, store=folder / "store"))
        in_time = ranks.wait(60.0)

A rank is the process of a command or of a function. Launchers, benchmarks and tests all use this.
"""

from __future__ import annotations

import contextlib
import functools
import math
import multiprocessing
import multiprocessing.util
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
from common.machine.folders import removed_at_last

# Time after the first failure of a rank in which the others may report errors.
GRACE_S = 2.0
LOOK_S = 1.0


def rank_env(
    rank: int, size: int, *, store: Path | None = None, first: int = 0, local_size: int = 0
) -> dict[str, str]:
    """Returns the variables of rank `rank` of `size`, named as by torchrun.

    Args:
        store: file for the rendezvous; None: the environment already determines it.
        first: first rank on this host.
        local_size: number of ranks on this host; 0: all of them.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    env = dict(zip(names, map(str, (rank, size, rank - first, local_size or size)), strict=True))
    return env if store is None else {**env, "DEAR_STORE": str(store)}


class RankLost(Exception):  # noqa: N818  (an event, not a mistake)
    """Death of a rank, or ranks that did not answer in time; the message names them."""

    def __init__(self, message: str, *, died: bool) -> None:
        super().__init__(message)
        self.died = died


class Ranks:
    """Context manager of processes in rank order; it kills the remaining ones on exit.

    Each process leads its own session, so that only the caller receives Ctrl-C from the terminal,
    and the descendants of a rank can be killed with it. Each reacts to SIGINT even if the caller
    ignores it, as a background process of a script does. Each ends when the caller does, also after
    SIGKILL.

    Attributes:
        codes: exit status of the ranks that ended by themselves, -N for signal N.
        first_failure: the rank whose failure `wait` noticed first.
        pipes: the caller's pipe ends, by rank, for functions started with `piped`.
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
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Starts a command as the next rank; it gets SIGTERM when the caller dies.

        Args:
            env: variables in addition to this process's environment.
            log: file for the output; None: the output of the caller.
            tied: True for a pipe as standard input (empty otherwise), which `send` writes to and
                closes. It also closes when the caller ends.
            pass_fds: descriptors that the command inherits.
        """
        stdin = subprocess.PIPE if tied else subprocess.DEVNULL
        how = {"cwd": cwd, "env": {**os.environ, **(env or {})}, "stdin": stdin}
        how |= {"start_new_session": True, "preexec_fn": _prepare_command, "pass_fds": pass_fds}
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
        """Starts `function(*arguments)`, which returns the exit status, as the next rank.

        Args:
            env: variables that are set before the call, in addition to the fork server's
                environment at its start.
            before: called first, while the process has only one thread.
            piped: True to pass one end of a pipe as the first argument.
            method: start method of `multiprocessing`. Children of the fork server already have its
                preloaded modules; those of `spawn` import everything again.
        """
        context = multiprocessing.get_context(method)
        if method == "forkserver":
            _remove_fork_server_folder()
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
        """Returns the PID of a rank."""
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
        left_behind: Callable[[int], bool] | None = None,
    ) -> bool:
        """Waits for all ranks to end, but at most `grace_s` after the first failure.

        Args:
            matters: returns True for an exit status that is a failure.
            watch: functions by file descriptor, called when the descriptor is readable; a function
                that returns True ends the wait.
            left_behind: returns True for a rank to kill, which then counts as killed by somebody
                else; called every second for the running ranks.

        Returns:
            False if time ran out without a failure, or a function of `watch` ended the wait.
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
            if left_behind is not None:
                left = min(left, LOOK_S)
                for rank in filter(left_behind, running):
                    self.signal(signal.SIGKILL, rank)
            sentinels = [self._processes[rank].sentinel for rank in running]
            ready = wait([*sentinels, *watch], None if left == math.inf else left)
            if any(watch[fd]() for fd in watch if fd in ready):
                return False
        return True

    def signal(self, number: int, rank: int | None = None) -> None:
        """Sends a signal to a rank's process, or to all running ones; not to their children."""
        for target in self._running() if rank is None else [rank]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid(target), number)

    def send(self, text: bytes | None) -> None:
        """Writes to the standard input of tied commands; None closes it."""
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
        """Ends all remaining ranks: by the signal `ask` and a wait of `patience_s`, then SIGKILL.

        A rank is killed with its process group. `codes` does not contain the ranks that end here.
        Ctrl-C during the call acts after it, so that no rank stays.
        """
        with _undisturbed():
            self._stop(patience_s, ask)

    def _stop(self, patience_s: float, ask: int | None) -> None:
        # The start of the last process may have been interrupted.
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
        self.send(None)
        for process in self._processes:
            process.join()
            if isinstance(process, _Command):
                os.close(process.sentinel)
        for pipe in self.pipes.values():
            pipe.close()
        self.codes, self.pipes, self._processes = codes, {}, []

    def _running(self, matters: Callable[[int], bool] = bool) -> list[int]:
        """Returns the ranks that have not ended, and records the exit status of the others."""
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
    """Yields rank and message for the next message of every pipe, in order of arrival.

    Raises:
        RankLost: a rank has died, or ranks have sent nothing in time.
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
    """Command with the interface of `multiprocessing.Process`."""

    sentinel = -1

    @property
    def exitcode(self) -> int | None:
        return self.poll()

    def join(self, timeout: float | None = None) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(timeout)


def _prepare_command() -> None:
    die_with_parent(signal.SIGTERM)  # not SIGKILL, so that commands can end their children
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _be_rank(
    function: Callable[..., int | None],
    arguments: Sequence[Any],
    env: Mapping[str, str],
    log: Path | None,
    before: Callable[[], None] | None,
) -> None:
    # Daemonic processes may not have children, which DataLoader needs.
    multiprocessing.current_process().daemon = False
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if log is not None:
        with log.open("w", encoding="utf-8") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    if before is not None:
        before()
    threading.Thread(target=_die_with_caller, daemon=True).start()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    os.environ.update(env)
    code: int | None = 1
    try:
        code = function(*arguments)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    # Without interpreter shutdown, in which threads of libraries may outlive their modules.
    os._exit(code or 0)


def _die_with_caller() -> None:
    # The parent is the fork server, which outlives a killed caller as long as it has children.
    caller = multiprocessing.parent_process()
    assert caller is not None
    wait([caller.sentinel])
    os.killpg(0, signal.SIGKILL)  # this process and its descendants in the group


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Puts SIGINT and SIGTERM off until the end of the block."""
    came: list[int] = []
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for number in came[:1]:
            os.kill(os.getpid(), number)


@functools.cache
def _remove_fork_server_folder() -> int:
    """Has the folder with the fork server's socket removed if this process is killed, too."""
    return removed_at_last(Path(multiprocessing.util.get_temp_dir()))


def _kill_group(pid: int) -> None:
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)
            return
