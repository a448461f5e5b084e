"""Joining and leaving the job: `init`, `shutdown`, and facts about this rank."""

from __future__ import annotations

import atexit
import contextlib
import ipaddress
import logging
import os
import socket
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

from dear.comm.backends import MPI, default_backend, prepare
from dear.comm.communicator import Communicator
from dear.comm.environment import RankFacts, launcher_facts, placed, rank_facts
from dear.comm.flight import reading, recorder
from dear.comm.rendezvous import master_address, meet
from dear.errors import UserError
from dear.lazy import dist, torch
from dear.options import positive

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


log = logging.getLogger("dear")

DEFAULT_TIMEOUT_S = 120.0
THREADS_END_S = 0.1
END_S = 10.0
"""Longest time that a rank waits at its end for the others, in seconds."""

_facts: RankFacts | None = None
_communicator: Communicator | None = None
_alike = False
"""True if all hosts are known to have equally many and consecutive ranks."""
_asked: str | None = None
"""Backend that `init` was asked for."""
_at_shutdown: list[Callable[[], None]] = []
_at_end: list[weakref.WeakMethod[Callable[[], None]]] = []


def init(backend: str | None = None, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
    """Joins the job that torchrun, mpirun, srun or horovodrun started, or starts a job of one rank.

    If the script has already made a process group, this group is used. A second call changes
    nothing, and refuses another backend.

    Args:
        backend: `comm_core`, `gloo`, `nccl`, `mpi` or another that torch.distributed knows. The
            default is `comm_core`, with `nccl` for CUDA tensors if every rank has its own GPU.
        timeout_s: time limit of each collective, in seconds; a collective raises beyond it.

    Raises:
        UserError: the environment contradicts itself, gives the ranks no meeting point, or a rank
            was started twice or not at all. All ranks that have joined raise this error. Or an
            argument is invalid, or the job already uses another backend.
        Unavailable: the backend is not built.
    """
    global _facts, _communicator, _asked
    positive("init: timeout_s", timeout_s)
    if backend is not None and not isinstance(backend, str):
        raise UserError(f"init: backend must be a name, got {backend!r}")
    if _communicator is not None:
        if backend not in (None, _asked) and dist.is_initialized():  # predictions have no group
            names = {part.rpartition(":")[2] for part in backend.split(",")}
            if any(name not in _communicator.backend for name in names):
                raise UserError(
                    f"init: backend={backend}: this job already uses {_communicator.backend}; "
                    "leave backend out"
                )
        return
    if not dist.is_initialized():
        facts = rank_facts()
        recorder.start(facts.rank, facts.world_size)
        facts = _join(facts, None if backend is None else prepare(backend), timeout_s)
    else:
        numbers = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
        recorder.start(*numbers.values())
        facts = launcher_facts() or RankFacts(
            launcher="torch.distributed", **numbers, local_rank=-1, local_world_size=0
        )
    if dist.get_world_size() != facts.world_size or dist.get_rank() != facts.rank:
        raise UserError(
            f"{facts.launcher} started rank {facts.rank} of {facts.world_size}, but the existing "
            f"process group has rank {dist.get_rank()} of {dist.get_world_size()}; make the group "
            "of all ranks, with the launcher's numbers"
        )
    world = dist.group.WORLD
    assert world is not None  # the process group exists by now
    communicator = Communicator(world, timeout_s=timeout_s)
    if facts.local_world_size == 0:
        facts = placed(facts, communicator.gather_objects(facts.place))
    _facts, _communicator, _asked = facts, communicator, backend
    atexit.unregister(_end_of_script)
    atexit.register(_end_of_script)


def _end_of_script() -> None:
    # After an error, other ranks may never come.
    if getattr(sys, "last_value", None) is None:
        _end()
        recorder.stop()
    else:
        reading.explain()
    # A Gloo thread frees the tensors of its last collective shortly after `wait` has returned, and
    # needs the interpreter's lock (GIL) for that. If the interpreter is already exiting, CPython
    # ends the thread in the middle of a C++ destructor, which aborts the process. Sleeping releases
    # the GIL. Destroying the process group does not help, since torch keeps its threads.
    time.sleep(THREADS_END_S)


def _join(facts: RankFacts, backend: str | None, timeout_s: float) -> RankFacts:
    """Makes the process group; returns the facts, completed by the place on the host."""
    timeout = timedelta(seconds=timeout_s)
    store = meet(facts, timeout_s)
    if facts.local_world_size == 0:
        store.set(f"place{facts.rank}", facts.place)
        places = [store.get(f"place{rank}").decode() for rank in range(facts.world_size)]
        facts = placed(facts, places)
    _choose_interface(facts)
    if backend is None or "nccl" in backend:
        clash = _gpu_clash(facts, store)
        if backend is None:
            backend = default_backend(facts, own_gpus=clash is None)
        elif clash is not None:
            raise UserError(f"backend nccl needs one GPU per rank, but {clash}; use comm_core")
    # Events and streams are made on the current device. Without a call this is the first GPU.
    # A call would take some GPU memory even if the script uses no GPU.
    if "nccl" in backend or torch.cuda.device_count() > 1:
        torch.cuda.set_device(gpu(facts))
    rank, size = facts.rank, facts.world_size
    try:
        dist.init_process_group(backend, store=store, timeout=timeout, rank=rank, world_size=size)
    except dist.DistBackendError as error:
        if backend != MPI:
            raise
        raise UserError(f"backend mpi: {error}") from None  # other ranks than mpirun's
    return facts


def gpu(facts: RankFacts) -> int:
    """Returns the index of a rank's GPU among the GPUs that the rank sees (maybe only one)."""
    return facts.local_rank % torch.cuda.device_count()


def _gpu_clash(facts: RankFacts, store: Store) -> str | None:
    """Returns the reason why ranks do not have one GPU each, or None; the same on every rank.

    Ranks exchange the UUIDs of their GPUs: two ranks that see one GPU each may see the same.
    """
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    identity = ""
    if torch.cuda.device_count():
        identity = f"{socket.gethostname()} {torch.cuda.get_device_properties(gpu(facts)).uuid}"
    store.set(f"gpu{facts.rank}", identity)
    seen: dict[str, int] = {}
    for rank in range(facts.world_size):
        name = store.get(f"gpu{rank}").decode()
        if not name:
            return f"rank {rank} sees none"
        if name in seen:
            return f"ranks {seen[name]} and {rank} have the same"
        seen[name] = rank
    return None


def _choose_interface(facts: RankFacts) -> None:
    # Gloo otherwise resolves the host's own name. On many machines that fails, or gives a loopback
    # or foreign address. Ranks on a single host need only the loopback interface.
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    if facts.one_host:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    else:
        address = master_address() or os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR")
        name = interface_towards(address) if address else None
        if address and name == "lo" and not is_loopback(address):
            raise UserError(
                f"{address} is a loopback address on this host ({socket.gethostname()}), which "
                "other hosts cannot reach; correct /etc/hosts, or set GLOO_SOCKET_IFNAME to the "
                "network interface"
            )
        if name not in (None, "lo"):
            os.environ["GLOO_SOCKET_IFNAME"] = name


@contextlib.contextmanager
def joined(facts: RankFacts, communicator: Communicator) -> Iterator[None]:
    """Returns a context in which this process is a rank of a job that somebody else has made.

    All its hosts must have equally many and consecutive ranks.
    """
    before = become(facts, communicator)
    try:
        yield
    finally:
        become(*before)


def become(
    facts: RankFacts | None, communicator: Communicator | None, alike: bool = True
) -> tuple[RankFacts | None, Communicator | None, bool]:
    """Makes this process another rank, as `joined` does; returns what to call it with to undo."""
    global _facts, _communicator, _alike
    before = _facts, _communicator, _alike
    _facts, _communicator, _alike = facts, communicator, alike
    return before


def at_end(method: Callable[[], None]) -> None:
    """Registers a method to call when the job or script ends; methods run in registration order.

    A script may end without `close()`: transfers of its last step are then under way. Nothing is
    called for an object that was collected before, nor after an error that ended the script.
    """
    _at_end.append(weakref.WeakMethod(method))


def forget(owner: object) -> None:
    """Cancels `at_end` for the methods of `owner`, and for those of collected objects."""
    methods = [(ref, ref()) for ref in _at_end]
    _at_end[:] = [ref for ref, method in methods if getattr(method, "__self__", owner) is not owner]


def _end() -> None:
    """Calls the methods of `at_end`, and waits for the other ranks."""
    methods = [ref() for ref in _at_end]
    _at_end.clear()
    if _communicator is None or not dist.is_initialized():
        return
    for method in methods:
        try:
            if method is not None:
                method()
        except RuntimeError as error:
            log.warning("the last transfers did not end: %s", error)
    _wait_for_others()


def _wait_for_others() -> None:
    """Returns when all ranks have come here, one is lost, or `END_S` are over.

    A message of a rank that has ended is lost if its receiver has not taken it yet.
    """
    if dist.get_backend() == "nccl":
        return  # its works are complete when they are queued
    until_s = time.monotonic() + END_S
    try:
        barrier = dist.barrier(async_op=True)
        while not barrier.is_completed() and time.monotonic() < until_s:
            time.sleep(0.002)
    except RuntimeError as error:
        log.debug("left without the others: %s", error)


def at_shutdown(callback: Callable[[], None]) -> None:
    """Registers a call that `shutdown` makes before the process group ends; last in, first out."""
    _at_shutdown.append(callback)


def shutdown() -> None:
    """Leaves the job. A second call does nothing; `init` may be called again afterwards."""
    global _facts, _communicator
    _end()
    while _at_shutdown:
        _at_shutdown.pop()()
    if _communicator is not None:
        _communicator.close()
        _communicator = None
        _facts = None
        if dist.is_initialized():
            dist.destroy_process_group()
    if sys.exc_info()[0] is None:  # else the record tells why the job ends
        recorder.stop()


def is_initialized() -> bool:
    """Returns True between `init` and `shutdown`."""
    return _communicator is not None


def communicator() -> Communicator:
    """Returns the communicator of all ranks; raises `UserError` before `init`."""
    if _communicator is None:
        raise UserError("dear is not initialized, or was shut down: call dear.init() first")
    return _communicator


def facts() -> RankFacts:
    """Returns the launcher's facts about this process; raises `UserError` before `init`."""
    communicator()
    assert _facts is not None
    return _facts


def rank() -> int:
    """Returns this process's rank, 0 .. size()-1."""
    return communicator().rank


def size() -> int:
    """Returns the number of processes in the job."""
    return communicator().size


def local_rank() -> int:
    """Returns this process's rank on its host; `device` chooses the GPU by it."""
    return facts().local_rank


def device() -> torch.device:
    """Returns this rank's device: its GPU if torch sees any (ranks may share one), else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", gpu(facts()))


def local_size() -> int:
    """Returns the number of the job's processes on this host."""
    return facts().local_world_size


def ranks_per_machine(communicator: Communicator, option: str = "local_size") -> int:
    """Returns the number of ranks per machine; a blocking collective call.

    Args:
        option: name of the option that sets the number, for the error.

    Raises:
        UserError: machines have different numbers of ranks, or not consecutive ranks.
    """
    if _alike:
        return local_size()
    positions = communicator.gather_objects((local_rank(), local_size()))
    sizes = {size for _, size in positions}
    if len(sizes) > 1:
        raise UserError(
            f"machines run different numbers of ranks ({', '.join(map(str, sorted(sizes)))}), but "
            f"hierarchical topologies need equal numbers; give {option}, the ranks of a group"
        )
    size = sizes.pop()
    for rank, (local, _) in enumerate(positions):
        if local != rank % size:
            raise UserError(
                f"rank {rank} has local rank {local}; hierarchical topologies need consecutive "
                f"ranks on each machine, so it must be {rank % size}"
            )
    return size


def address_of(interface: str) -> str | None:
    """Returns the IPv4 address of an interface, or None if there is none."""
    for name, family, address in _addresses():
        if name == interface and family == socket.AF_INET:
            return address
    return None


def is_loopback(host: str) -> bool:
    """Returns True for `localhost` and addresses such as 127.0.0.1, but not for other names."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def interface_towards(host: str) -> str | None:
    """Returns the interface by which packets to `host` leave this host, or None without a route."""
    try:
        family, kind, *_, where = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)  # a datagram socket: nothing is sent
            address = probe.getsockname()[0].partition("%")[0]
    except OSError:
        return None
    return next((name for name, _, other in _addresses() if other == address), None)


def _addresses() -> Iterator[tuple[str, int, str]]:
    import psutil

    for name, items in psutil.net_if_addrs().items():
        yield from ((name, item.family, item.address.partition("%")[0]) for item in items)
