"""Compiled communication core: a torch.distributed backend and a multi-stream Communicator.

    import comm_core
    torch.distributed.init_process_group("comm_core")          # CPU tensors
    torch.distributed.init_process_group("cpu:comm_core,cuda:nccl")

Importing the package registers the backend. The environment variables COMM_CORE_* set the
transport, the network interface and the host identity; see the README in this folder.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from comm_core.built import problem, remedy

if TYPE_CHECKING:
    from torch._C._distributed_c10d import _DistributedBackendOptions

    from comm_core.streams.communicator import Communicator as Communicator
    from comm_core.windows import Window as Window

_FOLDER = Path(__file__).parent

OnGroup = Callable[[int, str, list[int], str], None]

log = logging.getLogger("comm_core")
_groups: deque[tuple[int, str, list[int]]] = deque(maxlen=256)
_on_group: OnGroup | None = None


if (reason := problem(_FOLDER, torch.__version__)) is not None:
    raise ImportError(f"{reason}: {remedy(_FOLDER)}")
from comm_core import _core  # noqa: E402  (the check explains a missing or foreign build)

Batch = _core.Batch
divide = _core.divide
Work = _core.Work
Times = _core.Times
MismatchError = _core.MismatchError


def _rendezvous_host(store: object) -> str:
    # Empty if all ranks are on this host: they connect over loopback. The host of the store counts
    # before MASTER_ADDR: it is that of `init_method`.
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host, given = getattr(store, "host", ""), os.environ.get("MASTER_ADDR", "")
    if not host or host in ("localhost", "0.0.0.0", "::") or host.startswith("127."):
        host = given or host
    local = os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE"))
    world = os.environ.get("WORLD_SIZE", os.environ.get("OMPI_COMM_WORLD_SIZE"))
    return "" if local is not None and local == world else host


def _create(options: _DistributedBackendOptions, _backend_options: object) -> _core.CoreBackend:
    backend = _core.CoreBackend(
        store=options.store,
        rank=options.group_rank,
        size=options.group_size,
        name=options.group_id or "default",
        towards=_rendezvous_host(options.store),
        timeout_s=options.timeout.total_seconds(),
    )
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    _groups.append((backend.number(), options.group_id or "default", ranks))
    if _on_group is not None:
        _on_group(*_groups[-1], "comm_core")
    level = logging.INFO if options.group_rank == 0 else logging.DEBUG
    log.log(level, "%s", backend.summary())
    return backend


def record_flight(path: str, on_group: OnGroup | None) -> None:
    """Keeps the last 1024 operations of this process in a new file, which outlives the process.

    Args:
        path: the file; empty: the operations are kept in memory only.
        on_group: called for each group, also for those that exist: its number in the file, its
            name, its global ranks, and `comm_core`.

    Raises:
        torch.distributed.DistBackendError: the file cannot be written.
    """
    global _on_group
    _core.record_flight(path)
    _on_group = on_group
    if on_group is not None:
        for facts in _groups:
            on_group(*facts, "comm_core")


def register() -> None:
    """Registers the backend `comm_core` with torch.distributed. The import calls this."""
    if "comm_core" not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            "comm_core", _create, extended_api=True, devices=["cpu", "cuda"]
        )


class priority:  # noqa: N801  (used as a function)
    """Context in which the operations that this thread submits have priority `level`.

    Operations of a higher level run before those of a lower level (default 0) in other process
    groups. The operations of one group always run in the order of the calls.
    """

    __slots__ = ("_level", "_previous")

    def __init__(self, level: int) -> None:
        self._level = level

    def __enter__(self) -> None:
        self._previous = _core.priority()
        _core.set_priority(self._level)

    def __exit__(self, *exception: object) -> None:
        _core.set_priority(self._previous)


def empty(*shape: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Returns a zeroed CPU tensor in memory that the other ranks of this host can map.

    reduce_scatter and all_gather need no staging copy if the inputs of all ranks are such tensors.
    Allocate buffers once and keep them, because each uses a file descriptor.

    Args:
        shape: sizes, as for torch.empty: `empty(2, 3)` or `empty((2, 3))`.
        dtype: element type; torch's default dtype if None.

    Raises:
        RuntimeError: the memory or the file descriptors are exhausted.
    """
    sizes = [length for part in shape for length in ([part] if isinstance(part, int) else part)]
    kind = dtype or torch.get_default_dtype()
    return _core.shared_bytes(math.prod(sizes) * kind.itemsize).view(kind).view(sizes)


class Regime(NamedTuple):
    """Range of sizes in which a collective uses one algorithm, up to the next range."""

    name: str
    """Algorithm: `direct`, `doubling` or `tree` (few hops); `two_hops` (every rank sums a block);
    `blocks` (a ring of whole blocks); `pieces` (a ring of parts of a block, which are larger for
    larger blocks); `pipeline` (a ring whose start-up time no longer grows); `shared_memory`."""
    first_nbytes: int
    """Smallest size in bytes of the whole operation (the blocks of all ranks)."""
    setting: str
    """Environment variable that moves this boundary; empty if none does."""


def regimes(operation: str, world_size: int, hosts: int | None = None) -> tuple[Regime, ...]:
    """Returns the regimes of a collective in ascending order of size.

    Uses the settings of the environment. The method `regimes(operation)` of a group's backend
    returns the same rows for that group and its actual connections.

    Args:
        operation: all_reduce, reduce_scatter, all_gather or broadcast.
        world_size: number of ranks, at least 2.
        hosts: number of hosts, with the same number of ranks on each; None: one rank per host.

    Raises:
        ValueError: another operation, or a world size that does not divide evenly among the hosts.
    """
    hosts = world_size if hosts is None else hosts
    return tuple(Regime(*row) for row in _core.regimes(operation, world_size, hosts))


def events() -> list[_core.Event]:
    """Returns the last finished operations of this process (at most 4096), oldest first.

    Traces use them. Each has operation, dtype, priority, group, sequence, nbytes, enqueued_s,
    started_s, finished_s (seconds on `time.monotonic()`) and ok.
    """
    return _core.events()


def last_awaited_s() -> float:
    """Returns the latest finish time of the operations that this thread has waited for.

    In seconds on `time.monotonic()`; minus infinity before the first wait. Operations that had
    already finished when the thread waited count as well.
    """
    return _core.last_awaited_s()


def note_all_awaited() -> None:
    """Marks all finished operations as awaited by this thread (see `last_awaited_s`).

    torch's DDP waits for futures, and the comm core does not see these waits. Call this after such
    a wait has ended.
    """
    _core.note_all_awaited()


def lulls_s(after_s: float) -> list[tuple[float, float]]:
    """Returns the idle intervals of this process that ended after `after_s`.

    An interval begins when the last operation in flight finishes (minus infinity before the first
    operation) and ends when the next one is submitted. Each is a pair (begin, end) in seconds on
    `time.monotonic()`. They are in order of time; at most the last 64 are kept.
    """
    return _core.lulls_s(after_s)


def __getattr__(name: str) -> object:
    if name == "Window":
        from comm_core.windows import Window

        return Window
    if name == "Communicator":
        from comm_core.streams.communicator import Communicator

        return Communicator
    raise AttributeError(f"module 'comm_core' has no attribute '{name}'")


register()
atexit.register(_core.shut_down)
