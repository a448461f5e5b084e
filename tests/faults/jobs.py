"""Runs a job that a fault meets, through a launcher, and notes what everybody says."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from common.emulation.cluster import EmulatedCluster
from common.emulation.links.profile import network_profile
from common.harness.settings import LearnConfig
from common.harness.trial import Briefing
from common.launch.hosts import Host
from common.launch.job import (
    Job,
    Launcher,
    LeftBehind,
    Outcome,
    make_launcher,
    outcome_of,
    timed_out,
)
from common.launch.local import LocalLauncher
from common.launch.ranks import Ranks, rank_env
from tests.faults import rank as ranks_program
from tests.faults.drawing import COLLECTIVES, Fault
from tests.faults.rank import AT, DONE, OWN_PACE_S
from tests.system.made import make_trial
from tests.system.processes import ROOT
from tests.system.test_launch_ssh import AGENT

MODULE = "tests.faults.rank"
PRELOAD = (MODULE, "torch._dynamo", "dear.optimizer", "common.models.architectures.mnist")
STOP_S = 30.0
"""Duration of SIGSTOP where the rank goes on."""
BARE_GRACE_S = 6.5
LIMITS_S = {"silent": (5.0, 90.0), "endless": (40.0, 12.0)}
"""Time limit of a collective, and of the job, in seconds, by fate."""
OTHER_LIMITS_S = (50.0, 90.0)


@dataclass
class Seen:
    """End of a job, and what its ranks reported.

    Attributes:
        outcome: None if what ran the launcher was killed.
        after_s: seconds from the fault to the end of the job; None: the fault did not happen.
        reports: seconds from the fault to the error that a rank reported, and its text, by rank.
    """

    outcome: Outcome | None = None
    elapsed_s: float = 0.0
    after_s: float | None = None
    reports: dict[int, tuple[float, str]] = field(default_factory=dict)
    collective_s: float = 0.0
    timeout_s: float = 0.0
    hosts: tuple[str, ...] = ()
    """Name of each rank's host."""
    may_lose_ranks: bool = False


def run(fault: Fault, folder: Path) -> Seen:
    """Runs the job of a fault in an empty folder."""
    limits = LIMITS_S.get(fault.how.fate, OTHER_LIMITS_S)
    job = prepare(fault, folder, *limits)
    seen = Seen(collective_s=limits[0], timeout_s=limits[1], may_lose_ranks=job.may_lose_ranks)
    with _hosts(fault) as (hosts, cluster):
        seen.hosts = (
            tuple(host.name for host in hosts or ()) or (socket.gethostname(),) * fault.world
        )
        with _meanwhile(fault, folder, cluster):
            began = time.monotonic()
            if fault.kind in _TO_THE_DRIVER:
                _driven(fault, job, hosts)
            else:
                seen.outcome = launcher_of(fault, folder, hosts).run(job)
            seen.elapsed_s = time.monotonic() - began
        ended_ns = time.time_ns()
    at_ns = happened(folder)
    if at_ns is not None:
        seen.after_s = (ended_ns - at_ns) / 1e9
        seen.reports = _reports(folder, fault.world, at_ns)
    return seen


def prepare(fault: Fault, folder: Path, collective_s: float, timeout_s: float) -> Job:
    """Writes what the ranks read."""
    more = {}
    if fault.family == "asynchronous":
        more["learn"] = LearnConfig(budget_s=OWN_PACE_S)
    trial = make_trial(
        "allreduce" if fault.program == COLLECTIVES else fault.program,
        fault.world,
        batch_size=2,
        backend=fault.backend,
        launcher="local" if fault.launcher == "bare" else fault.launcher,
        collective_timeout_s=collective_s,
        **more,
    )
    folder.mkdir(parents=True)
    trial.save(folder)
    Briefing(folder=folder).save()
    fault.save(folder)
    return Job(
        folder=folder,
        repeat=0,
        world_size=fault.world,
        timeout_s=timeout_s,
        worker_module=MODULE,
        env={"COMM_CORE_TRANSPORT": fault.transport},
        may_lose_ranks=trial.own_pace,
    )


def launcher_of(fault: Fault, folder: Path, hosts: Sequence[Host] | None) -> Launcher:
    """Returns the launcher that was drawn."""
    if fault.launcher == "bare":
        return Bare()
    given = hosts
    options: dict[str, object] = {}
    if fault.launcher == "ssh" and given is None:
        agent = folder / "agent.py"
        agent.write_text(AGENT)
        options["agent"] = f"{sys.executable} {agent}"
        given = [Host(name="far0", slots=fault.world)]
    preload = PRELOAD
    return make_launcher(
        fault.launcher, hosts=given, world_size=fault.world, preload=preload, options=options
    )


def happened(folder: Path) -> int | None:
    """Time of the fault, by time.time_ns; None if it has not happened."""
    path = folder / AT
    return int(path.read_text().split()[0]) if path.exists() else None


class Bare(LocalLauncher):
    """Starts ranks, and leaves them alone when one fails."""

    def __init__(self) -> None:
        super().__init__(hosts=None, preload=PRELOAD)

    def run(self, job: Job) -> Outcome:
        store = job.folder / "store"
        with Ranks() as ranks:
            for rank in range(job.world_size):
                env = {**rank_env(rank, job.world_size, store=store), **job.env}
                log = job.log_path(rank)
                ranks.function(ranks_program.main, job.folder, 0, env=env, log=log)
            left_behind = LeftBehind(job) if job.may_lose_ranks else None
            in_time = ranks.wait(job.timeout_s, grace_s=BARE_GRACE_S, left_behind=left_behind)
        codes = {rank: ranks.codes.get(rank) for rank in range(job.world_size)}
        return outcome_of(job, codes) if in_time else timed_out(job)


@contextlib.contextmanager
def _hosts(fault: Fault) -> Iterator[tuple[list[Host] | None, EmulatedCluster | None]]:
    if fault.fabric != "emulated":
        yield None, None
        return
    profile = network_profile("1gbit")
    with EmulatedCluster(hosts=fault.world, profile=profile) as cluster:
        yield (
            [
                Host(name=host.name, slots=1, address=host.address, virtual=host)
                for host in cluster.hosts
            ],
            cluster,
        )


@contextlib.contextmanager
def _meanwhile(fault: Fault, folder: Path, cluster: EmulatedCluster | None) -> Iterator[None]:
    """Does what comes from outside the ranks, when the victim says so."""
    act = {"stopped 30 s": _go_on, "cut link": _cut, "half-open": _cut_one_way}.get(fault.kind)
    act = _knock if fault.kind == "strangers" else act
    ended = threading.Event()

    def watch() -> None:
        while happened(folder) is None:
            if ended.wait(0.01):
                return
        act(fault, folder, cluster, ended)

    if act is None:
        yield
        return
    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _go_on(fault: Fault, folder: Path, _: object, ended: threading.Event) -> None:
    ended.wait(STOP_S)
    with contextlib.suppress(ProcessLookupError):
        os.kill(int((folder / AT).read_text().split()[1]), signal.SIGCONT)


def _cut(fault: Fault, folder: Path, cluster: EmulatedCluster, ended: threading.Event) -> None:
    cluster.set_link(fault.victim, up=False)
    (folder / DONE).touch()


def _cut_one_way(
    fault: Fault, folder: Path, cluster: EmulatedCluster, ended: threading.Event
) -> None:
    """The victim sends to an Ethernet address that nobody has."""
    victim = cluster.hosts[fault.victim]
    for host in cluster.hosts:
        if host is not victim:
            wrong = f"ip neigh replace {host.address} lladdr 02:00:00:00:be:ef nud permanent"
            command = victim.command([*wrong.split(), "dev", victim.ifname])
            subprocess.run(command, check=True, capture_output=True)
    (folder / DONE).touch()


def _knock(fault: Fault, folder: Path, _: object, ended: threading.Event) -> None:
    """Opens connections to the ports of all ranks, and keeps them."""
    pids = [int(path.read_text().split()[0]) for path in folder.glob("phase-0-rank*")]
    greetings = (b"", b"\0", b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 40, b"\xff" * 64)
    with contextlib.ExitStack() as stack:
        for pid in pids:
            with contextlib.suppress(psutil.Error):
                for listener in psutil.Process(pid).net_connections("inet"):
                    if listener.status != psutil.CONN_LISTEN:
                        continue
                    for greeting in greetings:
                        with contextlib.suppress(OSError):
                            where = ("127.0.0.1", listener.laddr.port)
                            caller = socket.create_connection(where, timeout=5)
                            stack.enter_context(caller).sendall(greeting)
        (folder / DONE).touch()
        ended.wait()


_TO_THE_DRIVER = {
    "killed driver": (signal.SIGKILL,),
    "Ctrl-C twice": (signal.SIGINT, signal.SIGINT),
}


def _driven(fault: Fault, job: Job, hosts: Sequence[Host] | None) -> None:
    """Runs the launcher in a process of its own, which gets the signals."""
    (job.folder / "hosts").write_bytes(pickle.dumps(hosts))
    command = [sys.executable, "-m", "tests.faults.driver", str(job.folder), str(job.timeout_s)]
    with (job.folder / "driver.txt").open("w") as log:
        driver = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    until = time.monotonic() + job.timeout_s
    while happened(job.folder) is None and driver.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    for number in _TO_THE_DRIVER[fault.kind]:
        driver.send_signal(number)
        time.sleep(fault.delay_ms / 1000)
    try:
        driver.wait(job.timeout_s)
    finally:
        driver.kill()
        driver.wait()


def _reports(folder: Path, world: int, at_ns: int) -> dict[int, tuple[float, str]]:
    reports = {}
    for rank in range(world):
        path = folder / f"error-0-rank{rank}.json"
        if path.exists():
            error = json.loads(path.read_bytes())
            after_s = (path.stat().st_mtime_ns - at_ns) / 1e9
            reports[rank] = after_s, f"{error['kind']}: {error['message']}"
    return reports
