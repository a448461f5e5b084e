"""BlueFog's one-sided windows, by name: put, get, accumulate and update without the target's help.

Each rank has a slot per in-neighbour of the topology at `win_create`. A window's own value, which
`win_get` of others reads, is what the owner's last call with the window left: `win_create`,
`win_put` and `win_accumulate` show their tensor, `win_update` its result. (BlueFog lets readers see
the tensor's memory itself, also while it is being changed.)
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
    """Waits for a nonblocking call; True, or the error of the call is raised."""
    synchronize(handle)
    return True


class Named:
    """A window and the tensor that it was created with."""

    def __init__(self, window: NeighborWindow, tensor: torch.Tensor) -> None:
        self.window = window
        self.tensor = tensor
        self._worker: ThreadPoolExecutor | None = None

    def in_background(self, call: Callable[[], Any]) -> int:
        """A handle for `call`, run after those before it."""
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="dear window")
        future = self._worker.submit(call)
        return started("window", None, future.done, future.result)

    def free(self) -> None:
        if self._worker is not None:
            self._worker.shutdown(wait=True)
        self.window.free()


def named(name: str) -> Named:
    """The window `name`; raises `UserError` if there is none."""
    return one_of("window", name, job().windows)


def win_create(tensor: torch.Tensor, name: str, zero_init: bool = False) -> bool:
    """Makes a window for `tensor` on all ranks; a collective call.

    Args:
        tensor: floating-point; `win_update` writes to it.
        zero_init: slots start as zeros instead of this rank's own values.

    Raises `UserError` if the name is taken, or the tensor is not of floating point.
    """
    current = job()
    if name in current.windows:
        raise UserError(f"there is a window {name!r} already: win_free() it first")
    peers = Peers(current.communicator, current.topology)
    window = NeighborWindow(peers, tensor, zero_slots=zero_init, weighted=current.with_p)
    current.windows[name] = Named(window, tensor)
    return True


def win_free(name: str | None = None) -> bool:
    """Frees the window `name`, or all; a collective call."""
    for each in [name] if name is not None else list(job().windows):
        named(each).free()
        del job().windows[each]
    return True


def get_current_created_window_names() -> list[str]:
    """Sorted."""
    return sorted(job().windows)


def _sender(operation: str, does: str) -> Callable[..., int]:
    """`win_put_nonblocking` or `win_accumulate_nonblocking`."""
    add = operation == "win_accumulate"

    def start(
        tensor: torch.Tensor,
        name: str,
        self_weight: float | None = None,
        dst_weights: Targets | None = None,
        require_mutex: bool = False,
    ) -> int:
        found = named(name)
        window = found.window
        weights = factors(window.targets if dst_weights is None else dst_weights)
        if require_mutex:
            frozen, p = tensor.detach().clone(), window.p

            def locked() -> None:
                with window.slots.mutex(weights):
                    _wait(window.put(frozen, weights, add=add, p=p))

            handle = found.in_background(locked)
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
        tensor: may be changed at once.
        self_weight: `tensor` (and p) is multiplied by it, in place, once it is on its way.
        dst_weights: rank -> factor, or ranks; default: 1 for all out-neighbours.
        require_mutex: hold the targets' mutexes meanwhile.
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
    """Reads what the in-neighbours show into this rank's slots, times `src_weight`.

    Args:
        src_weights: rank -> factor, or ranks; default: 1 for all in-neighbours.
        require_mutex: hold the sources' mutexes meanwhile.
    """
    found = named(name)
    window = found.window
    weights = factors(window.sources if src_weights is None else src_weights)
    fetched = [] if require_mutex else window.fetch(weights)

    def store() -> None:
        with window.slots.mutex(weights) if require_mutex else contextlib.nullcontext():
            window.store(fetched or window.fetch(weights), weights)

    return found.in_background(store)


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
    """`self_weight * own + sum of weight * slot`, in the tensor of `win_create`, which it returns.

    Args:
        self_weight, neighbor_weights: together, or neither: then those of the topology.
        reset: leave zeros in the slots that were read.
        clone: return a new tensor, and leave the own as it is.
        require_mutex: hold this rank's own mutex meanwhile.

    Raises:
        UserError: weights given by halves, or a rank that is no in-neighbour.
    """
    found = named(name)
    window = found.window
    check_weights(self_weight, neighbor_weights, None, "win_update")
    part = job().part()
    own = part.self_weight if self_weight is None else self_weight
    weights = part.sources if neighbor_weights is None else neighbor_weights
    with window.slots.mutex([window.rank]) if require_mutex else contextlib.nullcontext():
        target = found.tensor.detach().clone() if clone else found.tensor.detach()
        window.collect(target, own, weights, reset=reset)
        if clone:
            return target
        window.show(target)
    return found.tensor


def win_update_then_collect(name: str, require_mutex: bool = True) -> torch.Tensor:
    """The own tensor plus all slots, which are zero afterwards: nothing counts twice."""
    sources = dict.fromkeys(named(name).window.sources, 1.0)
    return win_update(name, 1.0, sources, reset=True, require_mutex=require_mutex)


def win_read_neighbor(name: str, rank: int, require_mutex: bool = False) -> torch.Tensor:
    """A copy of what in-neighbour `rank` has put here last; its version starts again at 0.

    Raises:
        UserError: it is no in-neighbour.
    """
    found = named(name)
    copy = torch.zeros_like(found.tensor).detach()
    with (
        found.window.slots.mutex([found.window.rank]) if require_mutex else contextlib.nullcontext()
    ):
        found.window.collect(copy, 0.0, {rank: 1.0})
    return copy


@contextlib.contextmanager
def win_mutex(name: str, for_self: bool = False, ranks: list[int] | None = None) -> Iterator[None]:
    """Holds the mutexes of the window at `ranks` (default: the out-neighbours) in a `with` block.

    With `for_self` also this rank's own.
    """
    window = named(name).window
    wanted = list(window.targets if ranks is None else ranks)
    with window.slots.mutex([*wanted, window.rank] if for_self else wanted):
        yield


def get_win_version(name: str) -> dict[int, int]:
    """In-neighbour -> writes to its slot since the last `win_update`."""
    return named(name).window.slots.versions()


def win_associated_p(name: str) -> float:
    """The number that went the way of the window's values, from 1 on; see push-sum."""
    return named(name).window.p


def turn_on_win_ops_with_associated_p() -> None:
    """From now on windows' operations carry p; call it on all ranks, between barriers."""
    _set_p(True)


def turn_off_win_ops_with_associated_p() -> None:
    """From now on they do not."""
    _set_p(False)


def _set_p(on: bool) -> None:
    for each in job().windows.values():
        each.window.weigh(on)
    job().with_p = on
