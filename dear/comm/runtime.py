"""Joining and leaving the job: `init`, `shutdown`, and what a rank knows about itself."""

from __future__ import annotations

import atexit
import fcntl
import logging
import os
import socket
import struct
import time
from collections.abc import Callable
from datetime import timedelta

from dear.comm.communicator import Communicator, default_backend, prepare
from dear.comm.environment import RankFacts, rank_facts
from dear.comm.rendezvous import meet
from dear.errors import UserError
from dear.lazy import dist, torch

log = logging.getLogger("dear")

DEFAULT_TIMEOUT_S = 120.0
THREADS_END_S = 0.1

_facts: RankFacts | None = None
_communicator: Communicator | None = None
_at_shutdown: list[Callable[[], None]] = []


def init(backend: str | None = None, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
    """Joins the job that torchrun, mpirun or srun started, or a job of one process if nobody did.

    Uses the process group that exists, if the script already made one. A second call does nothing.

    Args:
        backend: `comm_core`, `gloo`, `nccl`, `mpi` or another that torch.distributed knows; by
            default `nccl` where every rank of this host has a GPU of its own, else `comm_core`.
        timeout_s: the longest that any one collective may take, in seconds; then it raises.

    Raises:
        UserError: the environment is contradictory, or offers no way for the ranks to meet, or a
            rank is there twice or not at all; then every rank that is there raises it.
        Unavailable: the backend is not built.
    """
    global _facts, _communicator
    if _communicator is not None:
        return
    facts = rank_facts()
    if not dist.is_initialized():
        _join(facts, prepare(backend or default_backend(facts)), timeout_s)
    elif facts.launcher == "none":
        rank, size = dist.get_rank(), dist.get_world_size()
        place = {"rank": rank, "world_size": size, "local_rank": rank, "local_world_size": size}
        facts = RankFacts(launcher="torch.distributed", **place)
    if dist.get_world_size() != facts.world_size or dist.get_rank() != facts.rank:
        raise UserError(
            f"{facts.launcher} started rank {facts.rank} of {facts.world_size}, but the process "
            f"group that exists is rank {dist.get_rank()} of {dist.get_world_size()}"
        )
    _facts = facts
    _communicator = Communicator(dist.group.WORLD, timeout_s=timeout_s)
    atexit.unregister(_let_threads_end)
    atexit.register(_let_threads_end)


def _let_threads_end() -> None:
    # A thread of Gloo frees the tensors of its last collective a moment after `wait` has returned,
    # and needs the interpreter's lock for that. If the interpreter is ending by then, CPython ends
    # the thread in the middle of a C++ destructor, which aborts the process. Sleeping gives up the
    # lock; destroying the process group does not help, since torch keeps its threads.
    time.sleep(THREADS_END_S)


def _join(facts: RankFacts, backend: str, timeout_s: float) -> None:
    timeout = timedelta(seconds=timeout_s)
    if "nccl" in backend:
        if facts.local_rank >= torch.cuda.device_count():
            raise UserError(
                f"backend nccl needs a GPU per rank: this host has {torch.cuda.device_count()} and "
                f"this is its rank {facts.local_rank}"
            )
        torch.cuda.set_device(facts.local_rank)
    _choose_interface(facts)
    store = meet(facts, timeout_s)
    place = {"rank": facts.rank, "world_size": facts.world_size}
    dist.init_process_group(backend, store=store, timeout=timeout, **place)


def _choose_interface(facts: RankFacts) -> None:
    # Gloo otherwise resolves the host's own name, which fails or gives a loopback or foreign
    # address on many machines. Ranks of one host need the loopback interface only.
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    if facts.one_host:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    elif "MASTER_ADDR" in os.environ:
        name = interface_towards(os.environ["MASTER_ADDR"])
        if name not in (None, "lo"):
            os.environ["GLOO_SOCKET_IFNAME"] = name


def at_shutdown(callback: Callable[[], None]) -> None:
    """Runs `callback` in `shutdown`, before the process group goes; the last registered first."""
    _at_shutdown.append(callback)


def shutdown() -> None:
    """Leaves the job. A second call does nothing; `init` may be called again afterwards."""
    global _facts, _communicator
    while _at_shutdown:
        _at_shutdown.pop()()
    if _communicator is not None:
        _communicator.close()
        _communicator = None
        _facts = None
        if dist.is_initialized():
            dist.destroy_process_group()


def is_initialized() -> bool:
    """True between `init` and `shutdown`."""
    return _communicator is not None


def communicator() -> Communicator:
    """The communicator of all ranks; raises `UserError` before `init`."""
    if _communicator is None:
        raise UserError("call dear.init() first")
    return _communicator


def facts() -> RankFacts:
    """What the launcher told this process; raises `UserError` before `init`."""
    communicator()
    assert _facts is not None
    return _facts


def rank() -> int:
    """This process's number in the job, 0 .. size()-1."""
    return communicator().rank


def size() -> int:
    """Number of processes in the job."""
    return communicator().size


def local_rank() -> int:
    """This process's number among those of its host; choose the GPU by it."""
    return facts().local_rank


def local_size() -> int:
    """Number of the job's processes on this host."""
    return facts().local_world_size


def ranks_per_machine(communicator: Communicator) -> int:
    """How many ranks each machine runs; a blocking collective call.

    Raises `UserError` if machines run different numbers of ranks, or not neighbouring ones.
    """
    found = communicator.gather_objects((local_rank(), local_size()))
    sizes = {size for _, size in found}
    if len(sizes) > 1:
        raise UserError(
            f"machines run different numbers of ranks ({', '.join(map(str, sorted(sizes)))}); "
            "hierarchical topologies need the same on all; give local_size to choose blocks"
        )
    size = sizes.pop()
    for rank, (local, _) in enumerate(found):
        if local != rank % size:
            raise UserError(
                f"rank {rank} is number {local} of its machine; hierarchical topologies need the "
                f"ranks of a machine side by side ({rank % size})"
            )
    return size


_SIOCGIFADDR = 0x8915


def address_of(interface: str) -> str | None:
    """The IPv4 address of an interface, None if it has none or does not exist."""
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def interface_towards(host: str) -> str | None:
    """The interface that packets to `host` leave by, None if there is no IPv4 way to it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 1))  # a datagram socket: nothing is sent
        except OSError:
            return None
        address = probe.getsockname()[0]
    for _, name in socket.if_nameindex():
        if address_of(name) == address:
            return name
    return None
