"""BlueFog's view of the job: ranks, machines, topologies, and what is under way.

Nonblocking calls return handles: numbers that stand for operations under way, for `poll` and
`synchronize`. Where the environment variable BLUEFOG_TIMELINE is set, `bf.shutdown()` writes the
file of that name with `<rank>.json` behind it, in Chrome's trace format: activities, waits for
operations, and what the comm core transferred.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from dear import topology as graphs
from dear.comm import runtime
from dear.comm.communicator import Communicator
from dear.comm.neighbors import Exchange, Machines, Round
from dear.errors import UserError
from dear.lazy import dist, nx
from dear.training.trace import Timeline

log = logging.getLogger("dear")

NODES_PER_MACHINE = "BLUEFOG_NODES_PER_MACHINE"
"""Environment variable: take blocks of so many ranks for machines."""
TIMELINE = "BLUEFOG_TIMELINE"
"""Environment variable: what the names of the traces begin with."""

P = ParamSpec("P")
T = TypeVar("T")
_numbers = itertools.count()


class Job:
    """What stays between calls, from `init` to `shutdown`."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.rank, self.size = communicator.rank, communicator.size
        self.pairs = Exchange(communicator)
        """Of calls in which two ranks take part only; so it must be there before."""
        self.topology = self.weights = graphs.exponential(communicator.size)
        """As it was set, and with the weights to average by."""
        self.machine_topology: nx.DiGraph | None = None
        self.machine_weights: nx.DiGraph | None = None
        self.skip_checks = False
        self.windows: dict[str, Any] = {}
        """Of `dear.bluefog.windows`, by name."""
        self.with_p = False
        self.running: dict[int, tuple[Callable[[], bool], Callable[[], Any]]] = {}
        """Handle -> whether its operation has ended, and what waits for its result."""
        self.timeline = Timeline(TIMELINE, self.rank)
        self.activities: dict[str, list[tuple[str, float]]] = {}
        """By the name of a tensor: activities that have begun, and when."""

    @functools.cached_property
    def exchange(self) -> Exchange:
        """Of the neighbour calls; made by the first of them, on all ranks."""
        return Exchange(self.communicator)

    @functools.cached_property
    def local_size(self) -> int:
        simulated = os.environ.get(NODES_PER_MACHINE)
        if simulated is None:
            return runtime.ranks_per_machine(self.communicator)
        if not simulated.isdigit() or not int(simulated):
            raise UserError(f"{NODES_PER_MACHINE} must be a whole number above 0, is {simulated!r}")
        size = self.communicator.size
        if size % int(simulated):
            raise UserError(
                f"{NODES_PER_MACHINE}={simulated}: {size} ranks are no whole number of machines"
            )
        return int(simulated)

    @functools.cached_property
    def machines(self) -> Machines:
        """Of the hierarchical calls; made by the first of them, on all ranks."""
        return Machines(self.communicator, self.local_size)

    def part(self) -> Round:
        """This rank's part in averaging over the topology."""
        return Round.of(self.weights, self.rank)

    def machine_part(self) -> Round:
        """This rank's machine's part in averaging over the machine topology."""
        if self.machine_weights is None:
            raise UserError("there is no machine topology: call set_machine_topology() first")
        return Round.of(self.machine_weights, machine_rank())

    def close(self) -> None:
        """Lets go of everything; a collective call."""
        for name in list(self.windows):
            self.windows.pop(name).free()
        self.pairs.close()
        for made in ("machines", "exchange"):
            if made in self.__dict__:
                self.__dict__.pop(made).close()


_job: Job | None = None


def job() -> Job:
    """The state of the job; raises `UserError` before `init`."""
    if _job is None:
        raise UserError("call bf.init() first")
    return _job


def init(
    topology_fn: Callable[[int], nx.DiGraph] | None = None,
    is_weighted: bool = False,
    backend: str | None = None,
    timeout_s: float = runtime.DEFAULT_TIMEOUT_S,
) -> None:
    """Joins the job and sets the topology; a second call sets the topology only.

    Args:
        topology_fn: makes the topology from the world size; default: exponential with base 2.
        is_weighted: use the topology's weights; otherwise 1 / (number of sources + 1).
        backend, timeout_s: as for `dear.init`.
    """
    global _job
    if _job is None:
        runtime.init(backend=backend, timeout_s=timeout_s)
        _job = Job(runtime.communicator())
        runtime.at_shutdown(_leave)
    if topology_fn is not None or is_weighted:
        set_topology((topology_fn or graphs.exponential)(size()), is_weighted)


def _leave() -> None:
    global _job
    if _job is not None:
        leaving, _job = _job, None
        prefix = os.environ.get(TIMELINE)
        if prefix is not None:
            leaving.timeline.add_transfers()
            leaving.timeline.write(Path(f"{prefix}{leaving.rank}.json"))
        leaving.close()


def shutdown() -> None:
    """Leaves the job; a collective call."""
    runtime.shutdown()


def is_initialized() -> bool:
    """True between `init` and `shutdown`."""
    return _job is not None


def size() -> int:
    """Number of ranks."""
    return job().size


def rank() -> int:
    """This process's number, 0 .. size() - 1."""
    return job().rank


def local_size() -> int:
    """Ranks per machine (blocks of BLUEFOG_NODES_PER_MACHINE, if that is set)."""
    return job().local_size


def local_rank() -> int:
    """This process's number among those of its machine."""
    return rank() % local_size()


def machine_size() -> int:
    """Number of machines."""
    return size() // local_size()


def machine_rank() -> int:
    """The number of this process's machine."""
    return rank() // local_size()


def is_homogeneous() -> bool:
    """True if all machines run equally many ranks, side by side; a collective call at first."""
    try:
        return local_size() > 0
    except UserError:
        return False


def is_available() -> bool:
    """True: what a job needs is there, whatever it moves bytes by."""
    return True


def mpi_threads_supported() -> bool:
    """True: calls may come from any thread. (There need not be an MPI.)"""
    return True


def unified_mpi_window_model_supported() -> bool:
    """True: what a `win_put` has written is seen without further synchronization."""
    return True


def nccl_built() -> bool:
    """True if this torch has NCCL."""
    return dist.is_nccl_available()


def set_topology(topology: nx.DiGraph | None = None, is_weighted: bool = False) -> bool:
    """Chooses who averages with whom; a collective call.

    Args:
        topology: a graph of all ranks, the same on all; None: exponential with base 2.
        is_weighted: use the weights of its edges; otherwise 1 / (number of sources + 1).

    Returns:
        False, and nothing changes, while there are windows: their slots are of the old topology.

    Raises:
        UserError: it is no graph of all ranks, not strongly connected, not the same on all ranks,
            or `is_weighted` and the weights that a rank receives with do not sum to 1.
    """
    current = job()
    if current.windows:
        log.warning("the topology stays: there are windows (%s)", ", ".join(current.windows))
        return False
    chosen = graphs.exponential(size()) if topology is None else topology
    current.weights = weighed(chosen, size(), is_weighted)
    current.topology = chosen
    return True


def load_topology() -> nx.DiGraph:
    """The topology of the ranks."""
    return job().topology


def set_machine_topology(topology: nx.DiGraph, is_weighted: bool = False) -> bool:
    """The same for machines; used by hierarchical calls only."""
    job().machine_weights = weighed(topology, machine_size(), is_weighted)
    job().machine_topology = topology
    return True


def load_machine_topology() -> nx.DiGraph | None:
    """The topology of the machines; None if none was set."""
    return job().machine_topology


def weighed(graph: nx.DiGraph, count: int, is_weighted: bool) -> nx.DiGraph:
    """The weights to average by on `graph`, which is checked and compared between the ranks."""
    if is_weighted:
        graphs.check_graph(graph, count)
    else:
        graphs.check_nodes(graph, count)
        graphs.check_connected(graph)
    kinds = job().communicator.gather_objects((graphs.matrix(graph).tobytes(), is_weighted))
    different = [rank for rank, kind in enumerate(kinds) if kind != kinds[0]]
    if different:
        raise UserError(
            f"topology: rank {different[0]} has another one than rank 0; all ranks must set the "
            "same"
        )
    return graph if is_weighted else graphs.uniform(graph)


def in_neighbor_ranks() -> list[int]:
    """Ranks that send to this one, ascending."""
    return graphs.in_neighbors(job().topology, rank())


def out_neighbor_ranks() -> list[int]:
    """Ranks that this one sends to, ascending."""
    return graphs.out_neighbors(job().topology, rank())


def in_neighbor_machine_ranks() -> list[int]:
    """Machines that send to this one, ascending."""
    return sorted(job().machine_part().sources)


def out_neighbor_machine_ranks() -> list[int]:
    """Machines that this one sends to, ascending."""
    return sorted(job().machine_part().destinations)


def set_skip_negotiate_stage(value: bool) -> None:
    """Whether neighbour calls with lists of their own go without comparing the ranks' lists."""
    job().skip_checks = bool(value)


def get_skip_negotiate_stage() -> bool:
    """What `set_skip_negotiate_stage` was told."""
    return job().skip_checks


def started(
    operation: str,
    name: str | None,
    done: Callable[[], bool],
    wait: Callable[[], Any],
    result: Callable[[], Any] = lambda: True,
) -> int:
    """A handle; `done` never blocks, `result` is called after `wait`. Traces show the names."""

    def ended() -> Any:
        with timeline_context(name or operation, f"wait {operation}"):
            wait()
            return result()

    number = next(_numbers)
    job().running[number] = done, ended
    return number


def poll(handle: int) -> bool:
    """True once the operation of `handle` has ended; never blocks."""
    return _found(handle)[0]()


def synchronize(handle: int) -> Any:
    """Waits for the operation of `handle` and returns its result; then the handle is used up.

    Raises `UserError` if there is no such handle (any more), RuntimeError if the operation failed.
    """
    _, result = _found(handle)
    del job().running[handle]
    return result()


wait = synchronize


def _found(handle: int) -> tuple[Callable[[], bool], Callable[[], Any]]:
    if handle not in job().running:
        raise UserError(f"no operation has the handle {handle!r}; it may have been waited for")
    return job().running[handle]


def blocking(start: Callable[P, int]) -> Callable[P, Any]:
    """The blocking twin of a nonblocking call: of the same arguments, it returns the result."""

    @functools.wraps(start)
    def call(*args: P.args, **kwargs: P.kwargs) -> Any:
        return synchronize(start(*args, **kwargs))

    return called(start.__name__.replace("_nonblocking", ""), start.__doc__, call)


def called(name: str, doc: str | None, function: Callable[P, T]) -> Callable[P, T]:
    """`function` by the name that BlueFog's users know, with its docstring."""
    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    return function


def suspend() -> None:
    """Does nothing, as `resume`: calls go on as always.

    In BlueFog it stops, between the cells of a notebook, a thread that polls and keeps a core busy.
    The comm core sleeps by itself while there is nothing to do.
    """


def resume() -> None:
    """Does nothing; see `suspend`."""


def timeline_start_activity(tensor_name: str, activity_name: str) -> bool:
    """An activity around `tensor_name` begins; they may nest. False if no timeline is written."""
    if TIMELINE not in os.environ:
        return False
    job().activities.setdefault(tensor_name, []).append((activity_name, time.monotonic()))
    return True


def timeline_end_activity(tensor_name: str) -> bool:
    """The last activity begun around `tensor_name` ends; raises `UserError` if there is none."""
    if TIMELINE not in os.environ:
        return False
    if not job().activities.get(tensor_name):
        raise UserError(f"no activity of {tensor_name!r} has been started")
    activity, began = job().activities[tensor_name].pop()
    job().timeline.add(tensor_name, activity, began, time.monotonic())
    return True


@contextlib.contextmanager
def timeline_context(tensor_name: str, activity_name: str) -> Iterator[None]:
    """An activity for the length of a `with` block."""
    timeline_start_activity(tensor_name, activity_name)
    try:
        yield
    finally:
        timeline_end_activity(tensor_name)
