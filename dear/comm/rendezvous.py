"""How the ranks of a job find each other: the store that torch's process groups are made with."""

from __future__ import annotations

import itertools
import os
import queue
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from dear.comm.environment import RankFacts
from dear.comm.roll_call import call_roll
from dear.errors import UserError

HELD_PORT_S = 10.0
_joins = itertools.count()


@dataclass(frozen=True, kw_only=True)
class MeetingPoint:
    """Where the store is: a file, or a port that rank 0 opens; neither: a world of one."""

    path: str | None = None
    host: str | None = None
    port: int = 0


def meeting_point(facts: RankFacts, env: Mapping[str, str] = os.environ) -> MeetingPoint:
    """Reads it from the environment.

    Raises:
        UserError: there is none, or MASTER_PORT is no port.
    """
    if "DEAR_STORE" in env:
        return MeetingPoint(path=env["DEAR_STORE"])
    if "MASTER_ADDR" in env and "MASTER_PORT" in env:
        return MeetingPoint(host=env["MASTER_ADDR"], port=_port(env["MASTER_PORT"]))
    if facts.world_size == 1:
        return MeetingPoint()
    if facts.one_host and "PMIX_SERVER_TMPDIR" in env:
        # Open MPI's session folder: one per job, removed with the job.
        return MeetingPoint(path=str(Path(env["PMIX_SERVER_TMPDIR"], "dear-store")))
    if facts.launcher == "Slurm" and "SLURM_JOB_ID" in env:
        return _slurm_meeting_point(facts, env)
    raise UserError(
        f"{facts.launcher} started {facts.world_size} ranks but gave them no meeting point: set "
        "MASTER_ADDR to the first host and MASTER_PORT to a free port (mpirun: -x MASTER_ADDR -x "
        "MASTER_PORT)"
    )


def meet(facts: RankFacts, timeout_s: float) -> dist.Store:
    """Joins the other ranks; returns the job's store when each of them is there exactly once.

    Raises:
        UserError: two processes have the same rank, or a rank has not come in time; every rank
            that did come raises it, and it names hosts and processes.
    """
    point = meeting_point(facts)
    if point.path is None and point.host is None:
        return dist.HashStore()
    store = _open(point, facts, timeout_s)
    # A script may leave the job and join again, with the same store (torchrun keeps one).
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"dear{attempt}.{next(_joins)}", store)
    store.set_timeout(timedelta(seconds=timeout_s))
    call_roll(store, facts, timeout_s)
    return store


def _open(point: MeetingPoint, facts: RankFacts, timeout_s: float) -> dist.Store:
    if point.path is not None:
        return dist.FileStore(point.path, facts.world_size)
    timeout = timedelta(seconds=timeout_s)
    # torchrun's own process serves the store.
    serve = facts.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    where = f"{point.host}:{point.port}"
    if serve:
        try:
            return _tcp_store(point, facts, timeout, serve=True)
        except dist.DistNetworkError as error:
            if "EADDRINUSE" not in str(error):
                raise UserError(f"rank 0 cannot open MASTER_PORT {point.port}: {error}") from None
            # Another rank 0 may hold the port: the roll call will tell. Or somebody else does.
    try:
        _await_listener(point, timeout_s)
        seconds = HELD_PORT_S if serve else max(timeout_s, HELD_PORT_S)
        return _in_time(lambda: _tcp_store(point, facts, timeout, serve=False), seconds)
    except (dist.DistError, OSError) as error:
        if serve:
            raise UserError(
                f"rank 0 cannot open MASTER_PORT {point.port}: another program uses it; choose "
                "another port"
            ) from None
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"rank {facts.rank} of {facts.world_size} did not reach rank 0 at {where} within "
            f"{timeout_s:g} s ({reason}): was it started, on that host?"
        ) from None


def _await_listener(point: MeetingPoint, timeout_s: float) -> None:
    # torch would wait for it, too, but up to three times as long as it is told.
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((point.host, point.port), timeout=timeout_s).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.05)


def _in_time(make: Callable[[], dist.Store], seconds: float) -> dist.Store:
    """Calls `make`, which may never return: torch talks without a limit to whoever has the port."""
    answers: queue.SimpleQueue[dist.Store | Exception] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put(make())
        except Exception as error:
            answers.put(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        answer = answers.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError("what listens there is no store of torch") from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def _tcp_store(
    point: MeetingPoint, facts: RankFacts, timeout: timedelta, serve: bool
) -> dist.TCPStore:
    assert point.host is not None
    return dist.TCPStore(
        point.host,
        point.port,
        facts.world_size,
        is_master=serve,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
    )


def _slurm_meeting_point(facts: RankFacts, env: Mapping[str, str]) -> MeetingPoint:
    """The step's first host, and a port made of the numbers of job and step.

    A port that only the ranks of this step compute needs no exchange; another one can be set.
    """
    number = f"{env['SLURM_JOB_ID']}.{env.get('SLURM_STEP_ID', '0')}"
    job, step = (int(digits) for digits in re.findall(r"\d+", number)[:2])
    port = 10000 + (job * 31 + step) % 20000
    host = "127.0.0.1"
    if not facts.one_host:
        nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "")
        first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
        host = re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0]) if first else host
    return MeetingPoint(
        host=env.get("MASTER_ADDR", host), port=_port(env.get("MASTER_PORT", str(port)))
    )


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise UserError(f"MASTER_PORT={text!r}: must be a number in 1..65535")
    return int(text)
