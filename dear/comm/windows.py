"""One-sided exchange along a graph: each rank has a slot for every neighbour that sends to it.

A rank's process takes no part in what others put, read or add; the comm core's threads serve it.
CUDA tensors are staged through host memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from dear.comm.neighbors import core_module, weighted_sum
from dear.errors import UserError
from dear.lazy import torch
from dear.topology.graphs import check_nodes, in_neighbors, out_neighbors

if TYPE_CHECKING:
    import networkx as nx

    from dear.comm.communicator import Communicator

OWN = 0
"""The slot in which a rank shows its own value to those who read; neighbours follow, ascending."""


class NeighborWindow:
    """Slots of a tensor on every rank, one for each in-neighbour, and the own value others read.

    Making and freeing one is a collective call. While `weighted`, a number `p` travels with the
    values, in the same message: push-sum methods divide by it.

    Args:
        graph: who sends to whom; must be the same on all ranks. Weights do not count here.
        like: shape, dtype and device of the values; its values are what the rank shows at first.
        zero_slots: slots start as zeros; otherwise as this rank's own values.
        weighted: values carry `p`. It starts as 1, and as 0 in the slots. May be changed later,
            on all ranks between two barriers.

    Raises:
        UserError: the graph is not one of all ranks, the values are no floating-point ones, or
            `weighted` with a dtype in which p would be coarse.
        Unavailable: the comm core is not built.
    """

    def __init__(
        self,
        communicator: Communicator,
        graph: nx.DiGraph,
        like: torch.Tensor,
        *,
        zero_slots: bool = False,
        weighted: bool = False,
    ) -> None:
        check_nodes(graph, communicator.size)
        if not like.dtype.is_floating_point:
            raise UserError(f"a window needs floating-point values, got {like.dtype}")
        self._has_room = like.dtype in (torch.float32, torch.float64)
        self.weighted = weighted
        self._communicator = communicator
        self.rank = communicator.rank
        self.sources = in_neighbors(graph, self.rank)
        """Ranks that may put here, ascending."""
        self.targets = out_neighbors(graph, self.rank)
        """Ranks that this one may put to, ascending."""
        self._place = {t: 1 + in_neighbors(graph, t).index(self.rank) for t in self.targets}
        self.shape, self.dtype, self.device = like.shape, like.dtype, like.device
        self._numel = like.numel()
        self.p = 1.0
        """This rank's share of the total weight."""
        self._group, self._made_group = _host_group(communicator)
        window = core_module().Window
        room = self._numel + int(self._has_room)
        self._window = window(1 + len(self.sources), room, self.dtype, self._group)
        self.show(like)
        if not zero_slots:
            self.fill(like)
        self._barrier()

    @property
    def weighted(self) -> bool:
        """Whether p travels with the values."""
        return self._weighted

    @weighted.setter
    def weighted(self, on: bool) -> None:
        if on and not self._has_room:
            raise UserError("a weighted window needs float32 or float64 values")
        self._weighted = on

    def show(self, values: torch.Tensor) -> None:
        """Lets others read `values` (and p) from now on."""
        self._own(OWN, self._message(values, 1.0, self.p))

    def fill(self, values: torch.Tensor) -> None:
        """Puts `values` into every slot of this rank's own window; their p stays as it is.

        This does not count as a write: versions are 0 afterwards.
        """
        plain = self._host(values, 1.0)
        for slot in range(1, 1 + len(self.sources)):
            self._own(slot, plain)
        self._window.read(0, 1 + len(self.sources), reset_versions=True)

    def clear(self) -> None:
        """Leaves zeros in this rank's slots, their p included."""
        if self.sources:
            self._window.read(1, len(self.sources), reset_versions=True, clear=True)

    def put(
        self, values: torch.Tensor, weights: Mapping[int, float], *, p: float | None = None
    ) -> list[Any]:
        """Writes `weight * values` into this rank's slot at each target; returns the works.

        `values` may be changed at once.

        Args:
            weights: target rank -> weight.
            p: what goes with the values while `weighted`; default: the present p.
        """
        return self._send(self._window.put, values, weights, p)

    def accumulate(
        self, values: torch.Tensor, weights: Mapping[int, float], *, p: float | None = None
    ) -> list[Any]:
        """Adds `weight * values` to this rank's slot at each target; otherwise as `put`."""
        return self._send(self._window.accumulate, values, weights, p)

    def fetch(self, weights: Mapping[int, float]) -> list[tuple[int, torch.Tensor, Any]]:
        """Starts to read what each source shows: `(rank, buffer, work)` for `store`."""
        started = []
        for source in weights:
            self._check(source, self.sources, "read from", "sends to this rank")
            size = self._numel + int(self._weighted)
            buffer = torch.empty(size, dtype=self.dtype)
            self._communicator.bytes_sent += buffer.nbytes  # counted where it is read
            started.append((source, buffer, self._window.get(buffer, source, OWN)))
        return started

    def store(
        self, fetched: Iterable[tuple[int, torch.Tensor, Any]], weights: Mapping[int, float]
    ) -> None:
        """Waits for what `fetch` started, and puts `weight *` it into the slots of the sources."""
        for source, buffer, work in fetched:
            work.wait()
            self._own(1 + self.sources.index(source), buffer.mul_(weights[source]))

    def collect(
        self,
        values: torch.Tensor,
        self_weight: float,
        weights: Mapping[int, float],
        *,
        reset: bool = False,
    ) -> torch.Tensor:
        """`self_weight * values + sum of weight * slot`, as a new tensor; the same for p.

        Arguments as for `collect_into`.
        """
        mixed = values.detach().clone()
        self.collect_into(mixed, self_weight, weights, reset=reset)
        return mixed

    def collect_into(
        self,
        values: torch.Tensor,
        self_weight: float,
        weights: Mapping[int, float],
        *,
        reset: bool = False,
    ) -> None:
        """`values <- self_weight * values + sum of weight * slot`; the same for p.

        Versions of the slots that are read start again at 0.

        Args:
            weights: source rank -> weight.
            reset: leave zeros in these slots.
        """
        self._check_kind(values)
        slots = self._read(weights, reset)
        with torch.no_grad():
            terms = [
                (weight, slots[source][: self._numel].view(self.shape).to(values.device))
                for source, weight in weights.items()
            ]
            weighted_sum(values, self_weight, terms)
        if self._weighted:
            self.p *= self_weight
            self.p += sum(w * slots[source][-1].item() for source, w in weights.items())

    def versions(self) -> dict[int, int]:
        """Source rank -> writes to its slot since it was last collected."""
        return dict(zip(self.sources, self._window.versions()[1:], strict=True))

    @contextlib.contextmanager
    def mutex(self, ranks: Iterable[int]) -> Iterator[None]:
        """Holds the locks of the windows of `ranks`; taken in ascending order by everybody."""
        with contextlib.ExitStack() as locks:
            for rank in sorted(set(ranks)):
                locks.enter_context(self._window.mutex(rank))
            yield

    def free(self) -> None:
        """Gives the memory back when all ranks have called it."""
        import torch.distributed as dist

        self._window.free()
        if self._made_group:
            dist.destroy_process_group(self._group)

    def _read(self, wanted: Mapping[int, float], clear: bool) -> dict[int, torch.Tensor]:
        for source in wanted:
            self._check(source, self.sources, "collect from", "sends to this rank")
        if list(wanted) == self.sources:
            if not self.sources:
                return {}
            slots = self._window.read(1, len(self.sources), reset_versions=True, clear=clear)
            return dict(zip(self.sources, slots, strict=True))
        return {
            source: self._window.read(
                1 + self.sources.index(source), 1, reset_versions=True, clear=clear
            )[0]
            for source in wanted
        }

    def _send(
        self,
        operation: Any,
        values: torch.Tensor,
        weights: Mapping[int, float],
        p: float | None,
    ) -> list[Any]:
        for target in weights:
            self._check(target, self.targets, "send to", "receives from this rank")
        p = self.p if p is None else p
        messages = {weight: self._message(values, weight, p) for weight in set(weights.values())}
        self._communicator.bytes_sent += sum(messages[w].nbytes for w in weights.values())
        return [operation(messages[w], t, self._place[t]) for t, w in weights.items()]

    def _message(self, values: torch.Tensor, weight: float, p: float) -> torch.Tensor:
        message = self._host(values, weight)
        if self._weighted:
            message = torch.cat([message, message.new_tensor([p * weight])])
        return message

    def _host(self, values: torch.Tensor, weight: float) -> torch.Tensor:
        self._check_kind(values)
        copy = values.detach().to("cpu", copy=True).reshape(-1)
        return copy if weight == 1 else copy.mul_(weight)

    def _check_kind(self, values: torch.Tensor) -> None:
        if values.shape != self.shape or values.dtype != self.dtype:
            raise UserError(
                f"this window is of {tuple(self.shape)} {self.dtype}, the tensor is of "
                f"{tuple(values.shape)} {values.dtype}"
            )

    def _own(self, slot: int, message: torch.Tensor) -> None:
        self._window.put(message, self.rank, slot).wait()

    def _barrier(self) -> None:
        # Until everybody's slots are filled nobody may write to them.
        import torch.distributed as dist

        dist.barrier(self._group)

    def _check(self, rank: int, known: list[int], doing: str, what: str) -> None:
        if rank not in known:
            raise UserError(
                f"rank {self.rank} cannot {doing} rank {rank}: in the window's topology "
                f"{known or 'nobody'} {what}"
            )


def _host_group(communicator: Communicator) -> tuple[Any, bool]:
    """A group of the same ranks that serves windows, and whether it was made for this."""
    import torch.distributed as dist

    core_module()
    group = communicator.groups[0]
    if dist.get_backend(group) == "comm_core":
        return group, False
    ranks = dist.get_process_group_ranks(group)
    return dist.new_group(ranks, timeout=communicator.timeout, backend="comm_core"), True
