"""The compiled communication core: a torch.distributed backend, and a multi-stream Communicator.

    import comm_core
    torch.distributed.init_process_group("comm_core")          # CPU tensors
    torch.distributed.init_process_group("cpu:comm_core,cuda:nccl")

Importing it registers the backend. Environment variables COMM_CORE_* choose transport, network
interface and host identity; see the README beside this file.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

_FOLDER = Path(__file__).parent
_REBUILD = "build it with scripts/build.sh"

log = logging.getLogger("comm_core")


def _import_core() -> Any:
    built_for = _FOLDER / "_built_for.json"
    if not built_for.exists():
        raise ImportError(f"the comm core is not built: {_REBUILD}")
    built_torch = json.loads(built_for.read_text())["torch"]
    if built_torch != torch.__version__:
        raise ImportError(
            f"the comm core was built for torch {built_torch}, this is torch "
            f"{torch.__version__}: re{_REBUILD}"
        )
    from comm_core import _core

    return _core


_core = _import_core()
Work = _core.Work
Times = _core.Times


def _rendezvous_host() -> str:
    # Only where several hosts may be involved; the ranks of one host meet over loopback.
    host = os.environ.get("MASTER_ADDR", "")
    local = os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE"))
    world = os.environ.get("WORLD_SIZE", os.environ.get("OMPI_COMM_WORLD_SIZE"))
    return "" if local is not None and local == world else host


def _create(options: Any, _backend_options: Any) -> Any:
    backend = _core.CoreBackend(
        store=options.store,
        rank=options.group_rank,
        size=options.group_size,
        name=options.group_id or "default",
        towards=_rendezvous_host(),
        timeout_s=options.timeout.total_seconds(),
    )
    level = logging.INFO if options.group_rank == 0 else logging.DEBUG
    log.log(level, "%s", backend.summary())
    return backend


def register() -> None:
    """Makes `comm_core` known to torch.distributed; importing this package does it."""
    if "comm_core" not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            "comm_core", _create, extended_api=True, devices=["cpu", "cuda"]
        )


@contextlib.contextmanager
def priority(level: int) -> Iterator[None]:
    """Operations that this thread submits inside go before those of lower `level` (default 0).

    Higher goes first, between process groups: the operations of one group run in their order.
    """
    before = _core.priority()
    _core.set_priority(level)
    try:
        yield
    finally:
        _core.set_priority(before)


def empty(*shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A zeroed CPU tensor of `shape` in memory that the other ranks of this host can map.

    reduce_scatter and all_gather of such tensors (all ranks' inputs) need no staging copy. Make
    buffers once and keep them: each has a file descriptor of its own.

    Args:
        shape: sizes, as for torch.empty: `empty(2, 3)` or `empty((2, 3))`.
        dtype: torch's default type if None.

    Raises:
        RuntimeError: there is no memory or no file descriptor left.
    """
    sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
    kind = dtype or torch.get_default_dtype()
    count = math.prod(sizes)
    return _core.shared_bytes(count * kind.itemsize).view(kind).view(sizes)


class Regime(NamedTuple):
    """An algorithm of a collective, and from which size on it is taken."""

    name: str
    """`direct`, `doubling` or `tree`: few hops; `two_hops`: every rank sums a block; `blocks`: a
    ring of whole blocks; `pieces`: one that passes on parts of a block, larger for larger blocks;
    `pipeline`: one whose start-up no longer grows; `shared_memory`."""
    first_nbytes: int
    """Bytes of the whole operation: all ranks' blocks."""
    setting: str
    """The environment variable that moves this boundary; empty: none does."""


def regimes(operation: str, world_size: int, hosts: int | None = None) -> tuple[Regime, ...]:
    """The regimes of a collective by size, ascending, with the settings of the environment.

    A group's backend has `regimes(operation)`: the same rows of that group as it is connected.

    Args:
        operation: all_reduce, reduce_scatter, all_gather or broadcast.
        world_size: ranks, at least 2.
        hosts: on so many hosts, as many ranks on each; None: each on a host of its own.

    Raises:
        ValueError: another operation, or a world that cannot be.
    """
    hosts = world_size if hosts is None else hosts
    return tuple(Regime(*row) for row in _core.regimes(operation, world_size, hosts))


def events() -> list[dict[str, Any]]:
    """The last finished operations of this process (at most 4096), oldest first, for traces.

    Each has operation, dtype, priority, group, sequence, nbytes, enqueued_s, started_s,
    finished_s (seconds on `time.monotonic()`) and ok.
    """
    return _core.events()


def last_awaited_s() -> float:
    """When the last of the operations finished that this thread has waited for, on the same clock.

    Also of those that had finished before it waited; minus infinity before the first.
    """
    return _core.last_awaited_s()


def note_all_awaited() -> None:
    """Marks all operations that have finished as awaited by this thread (`last_awaited_s`).

    Torch's DDP waits by futures, of which the comm core does not learn: who knows that such a wait
    has ended calls this.
    """
    _core.note_all_awaited()


def lulls_s(after_s: float) -> list[tuple[float, float]]:
    """The times without an operation of this process under way that ended after `after_s`.

    In order, at most the last 64. Each is since when, and until when, on the same clock: since an
    operation finished (minus infinity before any), until the next was submitted.
    """
    return _core.lulls_s(after_s)


def __getattr__(name: str) -> Any:
    if name == "Window":
        from comm_core.windows import Window

        return Window
    if name == "Communicator":
        from comm_core.communicator import Communicator

        return Communicator
    raise AttributeError(f"module 'comm_core' has no attribute '{name}'")


register()
atexit.register(_core.shut_down)
