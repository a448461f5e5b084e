"""BlueFog's view of the job: ranks, machines, topologies, and operations that have not ended.

Nonblocking calls return handles: numbers of operations for `poll` and `synchronize`. If the
environment variable BLUEFOG_TIMELINE is set, `bf.shutdown()` writes a file in Chrome's trace
format. The file's name is the variable's value and `<rank>.json`. It shows activities, waits for
operations, and the comm core's transfers.
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
from dear.bluefog import variables
from dear.bluefog.variables import NODES_PER_MACHINE, TIMELINE
from dear.comm import runtime
from dear.comm.communicator import Communicator, sub_communicators
from dear.comm.hierarchy import blocks_of
from dear.comm.neighbors import Exchange, Machines, Round
from dear.errors import UserError
from dear.lazy import dist, nx
from dear.training.trace import Timeline

log = logging.getLogger("dear")

P = ParamSpec("P")
T = TypeVar("T")
_numbers = itertools.count()


class Job:
    """State of the job from `init` to `shutdown`."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.rank, self.size = communicator.rank, communicator.size
        self.pairs = Exchange(communicator)
        """Exchange for calls between two ranks; made here, because all ranks must take part."""
        self.topology = self.weights = graphs.exponential(communicator.size)
        """Topology of the ranks, and the same graph with the weights for averaging."""
        self.machine_topology: nx.DiGraph | None = None
        self.machine_weights: nx.DiGraph | None = None
        self.skip_checks = False
        self.windows: dict[str, Any] = {}
        """Windows (`dear.bluefog.windows.Named`) by name."""
        self.with_p = False
        self.running: dict[int, tuple[Callable[[], bool], Callable[[], Any]]] = {}
        """Handle -> two functions: one tests whether the operation has ended, one waits for it."""
        self.timeline = Timeline(TIMELINE, self.rank)
        self.activities: dict[str, list[tuple[str, float]]] = {}
        """Name of a tensor -> activities that have begun, with their start times in seconds."""

    @functools.cached_property
    def exchange(self) -> Exchange:
        """Exchange for neighbour calls; the first access is a collective call."""
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
                f"{NODES_PER_MACHINE}={simulated}: {size} ranks cannot be split into machines of "
                "this size"
            )
        return int(simulated)

    @functools.cached_property
    def machines(self) -> Machines:
        """Machines for hierarchical calls; the first access is a collective call."""
        return Machines(self.communicator, self.local_size)

    @functools.cached_property
    def local(self) -> Communicator:
        """Communicator of this machine's ranks; the first access is a collective call.

        It is not that of `machines`, whose thread starts transfers at other moments on each rank.
        """
        blocks, _ = blocks_of(self.size, self.local_size, "machines")
        (ranks,) = sub_communicators(self.communicator, blocks).values()
        return ranks

    def part(self) -> Round:
        """Returns this rank's part in averaging over the topology."""
        return Round.of(self.weights, self.rank)

    def machine_part(self) -> Round:
        """Returns the part of this rank's machine in averaging over the machine topology."""
        if self.machine_weights is None:
            raise UserError("no machine topology is set: call set_machine_topology() first")
        return Round.of(self.machine_weights, machine_rank())

    def close(self) -> None:
        """Frees windows and process groups; a collective call."""
        for name in list(self.windows):
            self.windows.pop(name).free()
        self.pairs.close()
        for name in ("local", "machines", "exchange"):
            if name in self.__dict__:
                self.__dict__.pop(name).close()


_job: Job | None = None


def job() -> Job:
    """Returns the state of the job; raises `UserError` before `init`."""
    if _job is None:
        raise UserError("bf is not initialized, or was shut down: call bf.init() first")
    return _job


def init(
    topology_fn: Callable[[int], nx.DiGraph] | None = None,
    is_weighted: bool = False,
    backend: str | None = None,
    timeout_s: float = runtime.DEFAULT_TIMEOUT_S,
) -> None:
    """Joins the job and sets the topology; a second call only sets the topology.

    Args:
        topology_fn: makes the topology from the world size; default: exponential with base 2.
        is_weighted: use the topology's weights; otherwise 1 / (number of sources + 1).
        backend, timeout_s: as for `dear.init`.
    """
    global _job
    if _job is None:
        variables.read()
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
    """Returns True between `init` and `shutdown`."""
    return _job is not None


def size() -> int:
    """Returns the number of ranks."""
    return job().size


def rank() -> int:
    """Returns this process's rank, 0 .. size() - 1."""
    return job().rank


def local_size() -> int:
    """Returns the number of ranks per machine, or BLUEFOG_NODES_PER_MACHINE if that is set."""
    return job().local_size


def local_rank() -> int:
    """Returns this process's rank within its machine."""
    return rank() % local_size()


def machine_size() -> int:
    """Returns the number of machines."""
    return size() // local_size()


def machine_rank() -> int:
    """Returns the number of this process's machine."""
    return rank() // local_size()


def is_homogeneous() -> bool:
    """Returns True if every machine runs the same number of ranks, with consecutive numbers.

    The first call is collective.
    """
    try:
        return local_size() > 0
    except UserError:
        return False


def is_available() -> bool:
    """Returns True: a job can run on every backend."""
    return True


def mpi_threads_supported() -> bool:
    """Returns True: any thread may make calls, with and without MPI."""
    return True


def unified_mpi_window_model_supported() -> bool:
    """Returns True: a `win_put` becomes visible without further synchronization."""
    return True


def nccl_built() -> bool:
    """Returns True if this torch has NCCL."""
    return dist.is_nccl_available()


def set_topology(topology: nx.DiGraph | None = None, is_weighted: bool = False) -> bool:
    """Sets which ranks average with each other; a collective call.

    Args:
        topology: a graph of all ranks, the same on all ranks; None: exponential with base 2.
        is_weighted: use the weights of the edges; otherwise 1 / (number of sources + 1).

    Returns:
        True; or False, and the topology stays, if windows exist, because these use the old
        topology.

    Raises:
        UserError: the nodes are not the ranks, the graph is not strongly connected, ranks give
            different graphs, or `is_weighted` and a rank's incoming weights do not sum to 1.
    """
    current = job()
    if current.windows:
        log.warning(
            "the topology cannot change while windows exist: %s", ", ".join(current.windows)
        )
        return False
    chosen = graphs.exponential(size()) if topology is None else topology
    current.weights = weighed(chosen, size(), is_weighted)
    current.topology = chosen
    return True


def load_topology() -> nx.DiGraph:
    """Returns the topology of the ranks."""
    return job().topology


def set_machine_topology(topology: nx.DiGraph, is_weighted: bool = False) -> bool:
    """Sets the topology of the machines, for hierarchical calls; see `set_topology`."""
    job().machine_weights = weighed(topology, machine_size(), is_weighted)
    job().machine_topology = topology
    return True


def load_machine_topology() -> nx.DiGraph | None:
    """Returns the topology of the machines, or None if none was set."""
    return job().machine_topology


def weighed(graph: nx.DiGraph, count: int, is_weighted: bool) -> nx.DiGraph:
    """Checks `graph`, also that it is the same on all ranks; returns it with averaging weights."""
    if is_weighted:
        graphs.check_graph(graph, count)
    else:
        graphs.check_nodes(graph, count)
        graphs.check_connected(graph)
    kinds = job().communicator.gather_objects((graphs.matrix(graph).tobytes(), is_weighted))
    different = [rank for rank, kind in enumerate(kinds) if kind != kinds[0]]
    if different:
        raise UserError(
            f"topology: rank {different[0]} and rank 0 give different graphs; all ranks must set "
            "the same graph"
        )
    return graph if is_weighted else graphs.uniform(graph)


def in_neighbor_ranks() -> list[int]:
    """Returns the ranks that send to this rank, ascending."""
    return graphs.in_neighbors(job().topology, rank())


def out_neighbor_ranks() -> list[int]:
    """Returns the ranks that this rank sends to, ascending."""
    return graphs.out_neighbors(job().topology, rank())


def in_neighbor_machine_ranks() -> list[int]:
    """Returns the machines that send to this machine, ascending."""
    return sorted(job().machine_part().sources)


def out_neighbor_machine_ranks() -> list[int]:
    """Returns the machines that this machine sends to, ascending."""
    return sorted(job().machine_part().destinations)


def set_skip_negotiate_stage(value: bool) -> None:
    """Sets whether neighbour calls that give lists of ranks skip the comparison of these lists."""
    job().skip_checks = bool(value)


def get_skip_negotiate_stage() -> bool:
    """Returns the value that `set_skip_negotiate_stage` has set."""
    return job().skip_checks


def started(
    operation: str,
    name: str | None,
    done: Callable[[], bool],
    wait: Callable[[], Any],
    result: Callable[[], Any] = lambda: True,
) -> int:
    """Returns a handle of an operation; `done` never blocks, `result` is called after `wait`."""

    def ended() -> Any:
        with timeline_context(name or operation, f"wait {operation}"):
            wait()
            return result()

    number = next(_numbers)
    job().running[number] = done, ended
    return number


def poll(handle: int) -> bool:
    """Returns True once the operation of `handle` has ended; never blocks."""
    return _running(handle)[0]()


def synchronize(handle: int) -> Any:
    """Waits for the operation of `handle`, returns its result, and removes the handle.

    Raises:
        UserError: the handle does not exist, or was removed.
        RuntimeError: the operation failed.
    """
    _, result = _running(handle)
    del job().running[handle]
    return result()


wait = synchronize


def _running(handle: int) -> tuple[Callable[[], bool], Callable[[], Any]]:
    if handle not in job().running:
        raise UserError(f"no operation has the handle {handle!r}; synchronize() removes handles")
    return job().running[handle]


def blocking(start: Callable[P, int]) -> Callable[P, Any]:
    """Returns the blocking form of a nonblocking call, with the same arguments."""

    @functools.wraps(start)
    def call(*args: P.args, **kwargs: P.kwargs) -> Any:
        return synchronize(start(*args, **kwargs))

    return called(start.__name__.replace("_nonblocking", ""), start.__doc__, call)


def called(name: str, doc: str | None, function: Callable[P, T]) -> Callable[P, T]:
    """Returns `function` with BlueFog's name and a docstring."""
    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    return function


def suspend() -> None:
    """Does nothing.

    BlueFog stops a busy polling thread here, between the cells of a notebook. The comm core sleeps
    anyway while it has no work.
    """


def resume() -> None:
    """Does nothing; see `suspend`."""


def timeline_start_activity(tensor_name: str, activity_name: str) -> bool:
    """Begins an activity of `tensor_name`; activities nest. Returns False without a timeline."""
    if TIMELINE not in os.environ:
        return False
    job().activities.setdefault(tensor_name, []).append((activity_name, time.monotonic()))
    return True


def timeline_end_activity(tensor_name: str) -> bool:
    """Ends the last activity of `tensor_name`; raises `UserError` if there is none."""
    if TIMELINE not in os.environ:
        return False
    if not job().activities.get(tensor_name):
        raise UserError(f"no activity of {tensor_name!r} has begun; start one first")
    activity, began = job().activities[tensor_name].pop()
    job().timeline.add(tensor_name, activity, began, time.monotonic())
    return True


@contextlib.contextmanager
def timeline_context(tensor_name: str, activity_name: str) -> Iterator[None]:
    """Returns a context that is an activity of `tensor_name` in the timeline."""
    timeline_start_activity(tensor_name, activity_name)
    try:
        yield
    finally:
        timeline_end_activity(tensor_name)
