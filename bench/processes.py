"""Runs a function on ranks that are processes of this machine."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from common.launch.orphans import die_with_parent
from dear.errors import UserError

ANSWER_S = 600.0


def run_ranks(
    function: Callable[..., Any],
    ranks: int,
    *arguments: Any,
    environment: Mapping[str, str] | None = None,
    limit_s: float = ANSWER_S,
) -> list[Any]:
    """What `function(*arguments)` returns on each rank; processes are new, and gone afterwards.

    Args:
        function: of a module's top level; calls `dear.init()` itself.
        environment: variables that are set before anything is imported.

    Raises:
        UserError: a rank failed, died, or did not answer within `limit_s`.
    """
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    processes = []
    with tempfile.TemporaryDirectory() as folder:
        place = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        common = {**(environment or {}), **place, "DEAR_STORE": f"{folder}/store"}
        try:
            for rank in range(ranks):
                ours, theirs = context.Pipe()
                own = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                process = context.Process(
                    target=_rank, args=(function, arguments, own, theirs), daemon=True
                )
                process.start()
                theirs.close()
                pipes.append(ours)
                processes.append(process)
            return [_answer(pipe, rank, limit_s) for rank, pipe in enumerate(pipes)]
        finally:
            for process in processes:
                process.join(10)
                if process.is_alive():
                    process.kill()
                    process.join()


def _answer(pipe: Connection, rank: int, limit_s: float) -> Any:
    if not pipe.poll(limit_s):
        raise UserError(f"rank {rank} did not answer in {limit_s:.0f} s")
    try:
        ok, value = pipe.recv()
    except EOFError:
        raise UserError(f"rank {rank} died; its last words are above") from None
    if not ok:
        raise UserError(f"rank {rank}: {value}")
    return value


def _rank(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    environment: Mapping[str, str],
    pipe: Connection,
) -> None:
    die_with_parent(signal.SIGKILL)
    os.environ.update(environment)
    try:
        pipe.send((True, function(*arguments)))
    except Exception as error:
        pipe.send((False, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"))
        os._exit(1)  # peers may hold this process's collectives open
    # Not by way of the interpreter's end, where threads of some libraries make trouble.
    pipe.close()
    os._exit(0)
