"""Rendezvous of a job's ranks: the store with which torch makes its process groups."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import queue
import re
import socket
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from dear.comm.environment import RankFacts
from dear.errors import UserError
from dear.lazy import dist

if TYPE_CHECKING:  # torch.distributed exports its stores without declaring them
    import torch._C._distributed_c10d as stores
else:
    stores = dist

HELD_PORT_S = 10.0
_joins = itertools.count()


@dataclass(frozen=True, kw_only=True)
class MeetingPoint:
    """Place of the store: a file, or a port that rank 0 opens. A single rank needs neither."""

    path: str | None = None
    host: str | None = None
    port: int = 0
    announced: bool = False
    """True if `host` and `port` belong to horovodrun's server, where rank 0 announces its own."""


def meeting_point(facts: RankFacts, env: Mapping[str, str] = os.environ) -> MeetingPoint:
    """Reads the meeting point from the environment; raises `UserError` if none is valid."""
    if facts.world_size == 1:  # perhaps alone inside a job, whose store it must not join
        return MeetingPoint()
    if "DEAR_STORE" in env:
        return MeetingPoint(path=env["DEAR_STORE"])
    if (master := master_address(env)) and "MASTER_PORT" in env:
        return MeetingPoint(host=master, port=_port(env, "MASTER_PORT"))
    if facts.one_host and "PMIX_SERVER_TMPDIR" in env:
        # Open MPI's session folder exists once per job and is removed with the job.
        return MeetingPoint(path=str(Path(env["PMIX_SERVER_TMPDIR"], "dear-store")))
    if facts.launcher == "Slurm" and "SLURM_JOB_ID" in env:
        return _slurm_meeting_point(facts, env)
    if facts.launcher == "horovodrun" and "HOROVOD_GLOO_RENDEZVOUS_ADDR" in env:
        port = _port(env, "HOROVOD_GLOO_RENDEZVOUS_PORT")
        return MeetingPoint(host=env["HOROVOD_GLOO_RENDEZVOUS_ADDR"], port=port, announced=True)
    words = _TO_RANKS.get(facts.launcher, "in the environment of every rank")
    raise UserError(
        f"{facts.launcher} started {facts.world_size} ranks but gave them no meeting point: set "
        f"MASTER_ADDR to the first host and MASTER_PORT to a free port ({words})"
    )


_TO_RANKS = {
    "Open MPI": "mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=PORT",
    "MPICH": "mpiexec -genv MASTER_ADDR HOST -genv MASTER_PORT PORT",
    "MVAPICH2": "mpirun_rsh ... MASTER_ADDR=HOST MASTER_PORT=PORT COMMAND",
    "PALS": "mpiexec --env MASTER_ADDR=HOST --env MASTER_PORT=PORT",
    "jsrun": "jsrun -E MASTER_ADDR=HOST -E MASTER_PORT=PORT",
    "Flux": "flux run --env=MASTER_ADDR=HOST --env=MASTER_PORT=PORT",
}
"""Command line that gives these variables to all ranks, by launcher."""


def master_address(env: Mapping[str, str] = os.environ) -> str | None:
    """Returns MASTER_ADDR without the brackets that an IPv6 address may have; None if not set."""
    address = env.get("MASTER_ADDR")
    return address and re.sub(r"^\[(.*)\]$", r"\1", address)


def meet(facts: RankFacts, timeout_s: float) -> stores.Store:
    """Joins the other ranks; returns the job's store once each rank is present exactly once.

    Raises:
        UserError: two processes have the same rank, or a rank did not join in time. All ranks that
            have joined raise it. The message names ranks, hosts and processes.
    """
    point = meeting_point(facts)
    if point.path is None and point.host is None:
        return stores.HashStore()
    # A script may leave the job and join again with the same store (torchrun keeps one).
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    prefix = f"dear{attempt}.{next(_joins)}"
    if point.announced:
        store = _announced(point, prefix, facts, timeout_s)
    else:
        store = _open(point, facts, timeout_s)
    store = stores.PrefixStore(prefix, store)
    store.set_timeout(timedelta(seconds=timeout_s))
    call_roll(store, facts, timeout_s)
    return store


def _open(point: MeetingPoint, facts: RankFacts, timeout_s: float) -> stores.Store:
    if point.path is not None:
        return stores.FileStore(point.path, facts.world_size)
    timeout = timedelta(seconds=timeout_s)
    # With torchrun, its agent process serves the store.
    serve = facts.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    where = f"{point.host}:{point.port}"
    try:
        socket.getaddrinfo(point.host, point.port)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"MASTER_ADDR={point.host!r} is no usable address: {reason}; set it to a name or an "
            "address of rank 0's host that every host can resolve"
        ) from None
    if serve:
        try:
            return _tcp_store(point, facts, timeout, serve=True)
        except dist.DistNetworkError as error:
            if "EADDRINUSE" not in str(error):
                reason = str(error).partition("\n")[0]
                raise UserError(
                    f"rank 0 cannot open a port at MASTER_ADDR:MASTER_PORT {where}: {reason}; set "
                    f"MASTER_ADDR to an address of rank 0's host ({socket.gethostname()})"
                ) from None
            # The port may belong to another rank 0 (the roll call reports it) or another program.
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
            f"{timeout_s:g} s ({reason}); check that rank 0 was started on that host"
        ) from None


def _announced(point: MeetingPoint, scope: str, facts: RankFacts, timeout_s: float) -> stores.Store:
    """Opens the store at a port that rank 0 chooses and announces on horovodrun's server."""
    deadline = time.monotonic() + timeout_s
    while True:
        server = http.client.HTTPConnection(point.host or "", point.port, timeout=timeout_s)
        try:
            server.connect()
            if facts.rank == 0:
                # The other ranks' hosts reach the server at this address, so they can use it, too.
                host = server.sock.getsockname()[0]
                at = MeetingPoint(host=host)
                store = _tcp_store(at, facts, timedelta(seconds=timeout_s), serve=True)
                server.request("PUT", f"/{scope}/store", f"{host} {store.port}")
                server.getresponse().read()
                return store
            server.request("GET", f"/{scope}/store")
            answer = server.getresponse()
            text = answer.read().decode()
        except (OSError, http.client.HTTPException) as error:
            raise UserError(
                f"rank {facts.rank} of {facts.world_size} does not reach horovodrun's server at "
                f"{point.host}:{point.port} ({error}); set MASTER_ADDR and MASTER_PORT"
            ) from None
        finally:
            server.close()
        if answer.status == http.client.OK:
            host, _, port = text.partition(" ")
            left = max(deadline - time.monotonic(), 1.0)
            return _open(MeetingPoint(host=host, port=int(port)), facts, left)
        if time.monotonic() > deadline:
            raise UserError(
                f"rank {facts.rank} of {facts.world_size}: rank 0 did not announce its store in "
                f"{timeout_s:g} s; check that rank 0 calls dear.init(), too"
            )
        time.sleep(0.05)


def _await_listener(point: MeetingPoint, timeout_s: float) -> None:
    # torch waits for a listener, too, but for up to three times its timeout.
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((point.host, point.port), timeout=timeout_s).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.05)


def _in_time(make: Callable[[], stores.Store], seconds: float) -> stores.Store:
    """Calls `make` with a time limit, as torch has none if another program listens at the port."""
    results: queue.SimpleQueue[stores.Store | Exception] = queue.SimpleQueue()

    def run() -> None:
        try:
            results.put(make())
        except Exception as error:
            results.put(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        result = results.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError("the listening program is not a torch store") from None
    if isinstance(result, Exception):
        raise result
    return result


def _tcp_store(
    point: MeetingPoint, facts: RankFacts, timeout: timedelta, serve: bool
) -> stores.TCPStore:
    assert point.host is not None
    return stores.TCPStore(
        point.host,
        point.port,
        facts.world_size,
        is_master=serve,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
    )


def _slurm_meeting_point(facts: RankFacts, env: Mapping[str, str]) -> MeetingPoint:
    """Returns the step's first host, and a port computed from the job's and the step's number.

    All ranks of a step compute the same port, so they need no exchange. MASTER_ADDR and MASTER_PORT
    replace the host and the port.
    """
    number = f"{env['SLURM_JOB_ID']}.{env.get('SLURM_STEP_ID', '0')}"
    job, step = (int(digits) for digits in re.findall(r"\d+", number)[:2])
    # Not consecutive: jobs that are submitted together have steps with close numbers.
    port = 10000 + zlib.crc32(f"{job}.{step}".encode()) % 20000
    host = "127.0.0.1"
    if not facts.one_host:
        nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "")
        first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
        host = re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0]) if first else host
    return MeetingPoint(
        host=master_address(env) or host,
        port=_port(env, "MASTER_PORT") if "MASTER_PORT" in env else port,
    )


def _port(env: Mapping[str, str], name: str) -> int:
    text = env.get(name, "")
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise UserError(f"{name}={text!r}: must be a number in 1..65535")
    return int(text)


_VERDICT = "verdict"
_FAREWELL_S = 5.0


def call_roll(store: stores.Store, facts: RankFacts, timeout_s: float) -> None:
    """Waits until each rank has joined exactly once; raises the errors of `meet`."""
    times = store.add(f"rank{facts.rank}", 1)
    store.set(f"who{facts.rank}.{times}", f"{socket.gethostname()} process {os.getpid()}")
    if times > 1:
        _judge(store, _twice(store, facts))
    elif store.add("present", 1) == facts.world_size:
        _judge(store, None)
    try:
        try:
            store.wait([_VERDICT], timedelta(seconds=timeout_s))
        except dist.DistStoreError:
            _judge(store, _missing(store, facts, timeout_s))
        verdict = json.loads(store.get(_VERDICT))
        if verdict is None and times > 1:  # the store of another job, which is complete
            raise UserError(
                f"{_twice(store, facts)}; if these are two jobs, give each its own MASTER_PORT"
            )
        if verdict is not None:
            _let_the_others_read(store, facts)
    except dist.DistNetworkError:
        raise UserError(
            f"rank {facts.rank} of {facts.world_size} lost rank 0 while the ranks were joining; "
            "see the error of rank 0"
        ) from None
    if verdict is not None:
        raise UserError(verdict)


def _judge(store: stores.Store, verdict: str | None) -> None:
    # The first verdict counts: a rank that has read one must not be left alone by another one.
    store.compare_set(_VERDICT, "", json.dumps(verdict))


def _twice(store: stores.Store, facts: RankFacts) -> str:
    times = store.add(f"rank{facts.rank}", 0)
    # `get` waits for processes that have counted themselves but not yet stored their names.
    keys = [f"who{facts.rank}.{i}" for i in range(1, times + 1)]
    who = " and ".join(store.get(key).decode() for key in keys)
    return (
        f"rank {facts.rank} of {facts.world_size} was started more than once: on {who}; every "
        "process needs its own RANK"
    )


def _missing(store: stores.Store, facts: RankFacts, timeout_s: float) -> str:
    ranks = range(facts.world_size)
    who = {r: store.get(f"who{r}.1").decode() for r in ranks if store.check([f"who{r}.1"])}
    missing = ", ".join(str(rank) for rank in ranks if rank not in who)
    present = "; ".join(f"{rank} on {name}" for rank, name in who.items() if rank < 64)
    return (
        f"rank {missing} of {facts.world_size} did not come within {timeout_s:g} s (present: "
        f"{present}); was each started, with the same MASTER_ADDR, MASTER_PORT and world size?"
    )


def _let_the_others_read(store: stores.Store, facts: RankFacts) -> None:
    # The store ends with rank 0, so rank 0 must not exit before the others have read the verdict.
    joined_count = sum(store.add(f"rank{rank}", 0) for rank in range(facts.world_size))
    read_count = store.add("heard", 1)
    # From here on, rank 0 may exit at any time.
    try:
        if read_count == joined_count:
            store.set("all heard", "")
        store.wait(["all heard"], timedelta(seconds=_FAREWELL_S))
    except dist.DistError:
        return  # the other ranks are gone or late; this rank waits no longer
