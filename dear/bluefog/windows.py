"""BlueFog's one-sided windows, by name: the target rank takes no part in put, get and accumulate.

Each rank has a slot for each in-neighbour in the topology at `win_create`. Each rank also publishes
one tensor, which other ranks read by `win_get`. `win_create`, `win_put` and `win_accumulate`
publish their tensor; `win_update` publishes its result. (In BlueFog, readers see the memory of the
tensor itself, even while it changes.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dear.bluefog.collectives import Targets, check_weights, factors
from dear.bluefog.job import blocking, called, job, poll, started, synchronize
from dear.comm.peers import Peers
from dear.comm.windows import NeighborWindow
from dear.errors import UserError, one_of
from dear.lazy import torch

win_poll = poll


def win_wait(handle: int) -> bool:
    """Waits for a nonblocking call and returns True; raises the error of the call."""
    synchronize(handle)
    return True


class Named:
    """Window, and the tensor that it was created with."""

    def __init__(self, window: NeighborWindow, tensor: torch.Tensor) -> None:
        self.window = window
        self.tensor = tensor
        self._worker: ThreadPoolExecutor | None = None

    def in_background(self, call: Callable[[], Any]) -> int:
        """Returns a handle for `call`, which runs in a thread after earlier calls."""
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="dear window")
        future = self._worker.submit(call)
        return started("window", None, future.done, future.result)

    def free(self) -> None:
        if self._worker is not None:
            self._worker.shutdown(wait=True)
        self.window.free()


def named(name: str) -> Named:
    """Returns the window `name`; raises `UserError` if there is none."""
    window: Named = one_of("window", name, job().windows)
    return window


def win_create(tensor: torch.Tensor, name: str, zero_init: bool = False) -> bool:
    """Creates a window for `tensor` on all ranks; a collective call.

    Args:
        tensor: floating-point; `win_update` writes to it.
        zero_init: slots start as zeros instead of this rank's own values.

    Raises:
        UserError: the name is in use, or the tensor is not floating-point.
    """
    current = job()
    if name in current.windows:
        raise UserError(f"window {name!r} exists already; call win_free() on it first")
    peers = Peers(current.communicator, current.topology)
    window = NeighborWindow(peers, tensor, zero_slots=zero_init, weighted=current.with_p)
    current.windows[name] = Named(window, tensor)
    return True


def win_free(name: str | None = None) -> bool:
    """Frees the window `name`, or all windows; a collective call."""
    for each in [name] if name is not None else list(job().windows):
        named(each).free()
        del job().windows[each]
    return True


def get_current_created_window_names() -> list[str]:
    """Returns the names of all windows, sorted."""
    return sorted(job().windows)


def _sender(operation: str, does: str) -> Callable[..., int]:
    add = operation == "win_accumulate"

    def start(
        tensor: torch.Tensor,
        name: str,
        self_weight: float | None = None,
        dst_weights: Targets | None = None,
        require_mutex: bool = False,
    ) -> int:
        entry = named(name)
        window = entry.window
        weights = factors(window.targets if dst_weights is None else dst_weights)
        if require_mutex:
            frozen, p = tensor.detach().clone(), window.p

            def locked() -> None:
                with window.slots.mutex(weights):
                    _wait(window.put(frozen, weights, add=add, p=p))

            handle = entry.in_background(locked)
        else:
            works = window.put(tensor, weights, add=add)
            done = lambda: all(work.is_completed() for work in works)  # noqa: E731
            handle = started(operation, name, done, lambda: _wait(works))
        if self_weight is not None:
            with torch.no_grad():
                tensor.mul_(self_weight)
            if window.weighted:
                window.p *= self_weight
        window.show(tensor)
        return handle

    doc = f"""{does} this rank's slot at its out-neighbours.

    Args:
        tensor: the caller may change it immediately.
        self_weight: factor by which `tensor` (and p) is multiplied in place after the start.
        dst_weights: rank -> factor, or ranks; default: 1 for all out-neighbours.
        require_mutex: hold the targets' mutexes during the operation.
    """
    return called(f"{operation}_nonblocking", doc, start)


win_put_nonblocking = _sender("win_put", "Writes `dst_weight * tensor` into")
win_accumulate_nonblocking = _sender("win_accumulate", "Adds `dst_weight * tensor` to")


def _wait(works: list[Any]) -> None:
    for work in works:
        work.wait()


def win_get_nonblocking(
    name: str, src_weights: Targets | None = None, require_mutex: bool = False
) -> int:
    """Reads what the in-neighbours publish, times `src_weight`, into this rank's slots.

    Args:
        src_weights: rank -> factor, or ranks; default: 1 for all in-neighbours.
        require_mutex: hold the sources' mutexes during the operation.
    """
    entry = named(name)
    window = entry.window
    weights = factors(window.sources if src_weights is None else src_weights)
    fetched = [] if require_mutex else window.fetch(weights)

    def store() -> None:
        with window.slots.mutex(weights) if require_mutex else contextlib.nullcontext():
            window.store(fetched or window.fetch(weights), weights)

    return entry.in_background(store)


win_put = blocking(win_put_nonblocking)
win_accumulate = blocking(win_accumulate_nonblocking)
win_get = blocking(win_get_nonblocking)


def win_update(
    name: str,
    self_weight: float | None = None,
    neighbor_weights: Mapping[int, float] | None = None,
    reset: bool = False,
    clone: bool = False,
    require_mutex: bool = False,
) -> torch.Tensor:
    """Computes `self_weight * tensor + sum of weight * slot` in the tensor of `win_create`.

    Args:
        self_weight, neighbor_weights: both or neither; default: the weights of the topology.
        reset: set the slots that were read to zero.
        clone: return a new tensor; do not change the tensor of `win_create`.
        require_mutex: hold this rank's own mutex during the operation.

    Returns:
        The result.

    Raises:
        UserError: incomplete weights, or a rank that is not an in-neighbour.
    """
    entry = named(name)
    window = entry.window
    check_weights(self_weight, neighbor_weights, None, "win_update")
    part = job().part()
    own_weight = part.self_weight if self_weight is None else self_weight
    weights = part.sources if neighbor_weights is None else neighbor_weights
    with window.slots.mutex([window.rank]) if require_mutex else contextlib.nullcontext():
        target = entry.tensor.detach().clone() if clone else entry.tensor.detach()
        window.collect(target, own_weight, weights, reset=reset)
        if clone:
            return target
        window.show(target)
    return entry.tensor


def win_update_then_collect(name: str, require_mutex: bool = True) -> torch.Tensor:
    """Adds all slots to the tensor of `win_create` and sets the slots to zero."""
    sources = dict.fromkeys(named(name).window.sources, 1.0)
    return win_update(name, 1.0, sources, reset=True, require_mutex=require_mutex)


def win_read_neighbor(name: str, rank: int, require_mutex: bool = False) -> torch.Tensor:
    """Returns a copy of the last value from in-neighbour `rank`, and sets its version to 0.

    Raises:
        UserError: `rank` is not an in-neighbour.
    """
    entry = named(name)
    window, copy = entry.window, torch.zeros_like(entry.tensor).detach()
    with window.slots.mutex([window.rank]) if require_mutex else contextlib.nullcontext():
        window.collect(copy, 0.0, {rank: 1.0}, with_p=False)
    return copy


@contextlib.contextmanager
def win_mutex(name: str, for_self: bool = False, ranks: list[int] | None = None) -> Iterator[None]:
    """Returns a context that holds the window's mutexes at `ranks` (default: the out-neighbours).

    Args:
        for_self: also hold this rank's own mutex.
    """
    window = named(name).window
    wanted = list(window.targets if ranks is None else ranks)
    with window.slots.mutex([*wanted, window.rank] if for_self else wanted):
        yield


def get_win_version(name: str) -> dict[int, int]:
    """Returns in-neighbour -> number of writes to its slot since the last `win_update`."""
    return named(name).window.slots.versions()


def win_associated_p(name: str) -> float:
    """Returns the push-sum weight p, which travels with the window's values."""
    return named(name).window.p


def turn_on_win_ops_with_associated_p() -> None:
    """Makes window operations carry p; all ranks must call it, between barriers."""
    _set_p(True)


def turn_off_win_ops_with_associated_p() -> None:
    """Stops window operations from carrying p; all ranks must call it, between barriers."""
    _set_p(False)


def _set_p(on: bool) -> None:
    for each in job().windows.values():
        each.window.weigh(on)
    job().with_p = on
