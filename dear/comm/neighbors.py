"""Averaging between neighbours: what each rank weighs, and the messages that carry it.

`Exchange` carries a round along the edges of a graph of ranks; `Machines` averages exactly inside
each machine, and with weights between machines. `GlobalAverage` tells how far the ranks are apart
(also importable as `dear.consensus`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from dear.comm.communicator import Communicator
from dear.comm.hierarchy import blocks_of
from dear.errors import Unavailable, UserError
from dear.lazy import dist, nx, torch
from dear.topology import in_neighbors, out_neighbors, recv_weights

PIECE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Round:
    """One rank's part: `x <- self_weight * x + sum of sources[j] * (what j sends)`."""

    self_weight: float
    sources: dict[int, float] = field(default_factory=dict)
    """Rank -> factor of what comes from it."""
    destinations: dict[int, float] = field(default_factory=dict)
    """Rank -> factor of what goes to it."""

    @classmethod
    def of(cls, graph: nx.DiGraph, rank: int) -> Round:
        """The part of `rank` in averaging by the weights of `graph`."""
        own, sources = recv_weights(graph, rank)
        targets = dict.fromkeys(out_neighbors(graph, rank), 1.0)
        return cls(self_weight=own, sources=sources, destinations=targets)

    @classmethod
    def splitting(cls, graph: nx.DiGraph, rank: int) -> Round:
        """The sender decides: each rank shares itself out equally to itself and its k targets."""
        targets = out_neighbors(graph, rank)
        share = 1.0 / (len(targets) + 1)
        sources = dict.fromkeys(in_neighbors(graph, rank), 1.0)
        return cls(self_weight=share, sources=sources, destinations=dict.fromkeys(targets, share))

    @classmethod
    def uniform(cls, destinations: Iterable[int], sources: Iterable[int]) -> Round:
        """Equal weights for this rank and what it receives."""
        sources = list(sources)
        share = 1.0 / (len(sources) + 1)
        weights, targets = dict.fromkeys(sources, share), dict.fromkeys(destinations, 1.0)
        return cls(self_weight=share, sources=weights, destinations=targets)


class Pending:
    """An exchange under way."""

    def __init__(
        self,
        wait: Callable[[], Any] = lambda: None,
        done: Callable[[], bool] = lambda: True,
        combine: Callable[[torch.Tensor], Any] = lambda values: None,
    ) -> None:
        self.wait = wait
        """Blocks until what was sent may be changed (on CUDA: by the current stream); raises
        RuntimeError if a peer died, or did not answer in time."""
        self.done = done
        """True once all messages are through; never blocks."""
        self._combine = combine

    def finish(self, values: torch.Tensor) -> None:
        """Waits, then makes `values`, flat, what the round says; on entry they are this rank's."""
        self.wait()
        with torch.no_grad():
            self._combine(values)


def timed(communicator: Communicator, wait: Callable[[], Any]) -> Callable[[], None]:
    """`wait` that counts as time in which communication held its caller up."""

    def waiting() -> None:
        began = communicator.clock()
        wait()
        communicator.held_up(began)

    return waiting


class Exchange:
    """Messages along the edges of graphs of ranks, over any process group.

    Making one is a collective call. All ranks must start the same exchanges in the same order.
    Works by the comm core's neighbour collectives: CPU tensors over comm_core or Gloo, CUDA tensors
    over NCCL.

    Args:
        streams: exchanges that may run at the same time.

    Raises:
        Unavailable: the comm core is not built.
    """

    def __init__(self, communicator: Communicator, streams: int = 1) -> None:
        self._communicator = communicator
        limit_s = communicator.timeout and communicator.timeout.total_seconds()
        self.core = core_module().Communicator(streams, communicator.groups[0], limit_s)

    def start(self, values: torch.Tensor, part: Round) -> Pending:
        """Starts a round with flat `values`, which must stay as they are until it is finished."""
        sent = values.nbytes * len(part.destinations)
        if any(factor != 1 for factor in part.destinations.values()):
            mixed = torch.empty_like(values)
            handle = self.core.neighbor_all_reduce(
                values,
                part.sources,
                part.destinations,
                self_weight=part.self_weight,
                out=mixed,
                check=False,
            )
            return self.pending(handle, sent, lambda target: target.copy_(mixed))
        received = values.new_empty(len(part.sources), values.numel())
        handle = self.core.neighbor_all_gather(
            values, list(received), list(part.sources), list(part.destinations), check=False
        )

        def combine(target: torch.Tensor) -> None:
            weighted_sum(target, part.self_weight, zip(part.sources.values(), received))  # noqa: B905

        return self.pending(handle, sent, combine)

    def pending(
        self, handle: int, nbytes: int, combine: Callable[[torch.Tensor], Any] = lambda values: None
    ) -> Pending:
        """A handle of `core`, accounted for: `nbytes` leave this rank."""
        self._communicator.bytes_sent += nbytes
        core, ended = self.core, self._communicator.note("neighbors", nbytes)

        def sync() -> None:
            core.sync_stream(handle)
            ended()

        wait = timed(self._communicator, sync)
        return Pending(wait, lambda: core.done(handle), combine)

    def close(self) -> None:
        """Waits for what is under way and lets go of the process groups."""
        self.core.destroy()


class Machines:
    """Ranks in blocks of `local_size`, each block a machine.

    A round averages over the machine by a reduce-scatter, lets every rank exchange its share with
    the rank of its place on the neighbouring machines, and gathers the shares again. So one tensor
    per neighbour leaves a machine, spread over its ranks, and all of them get the same bits.

    Making one is a collective call.

    Raises:
        UserError: the world is no multiple of `local_size`, or the communicator is not of the
            whole job.
        Unavailable: the comm core is not built.
    """

    def __init__(self, communicator: Communicator, local_size: int) -> None:
        size = communicator.size
        blocks, _ = blocks_of(size, local_size, "machines")
        if size != dist.get_world_size():
            raise UserError("hierarchical averaging needs a communicator of all ranks of the job")
        self.local_size = local_size
        self.count = len(blocks)
        self.machine, self._local_rank = divmod(communicator.rank, local_size)
        self._communicator = communicator
        self._group, _ = dist.new_subgroups(local_size, timeout=communicator.timeout)
        self.local = Communicator(self._group)
        """The ranks of this machine."""
        self._between = Exchange(communicator)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="dear machines")

    def start(self, values: torch.Tensor, part: Round) -> Pending:
        """Starts a round over flat `values`; the ranks of `part` are numbers of machines."""
        mixed = values.new_zeros(-(-values.numel() // self.local_size) * self.local_size)
        mixed[: values.numel()] = values
        share = mixed.nbytes // self.local_size
        # Scattered and gathered inside the machine, and sent to each neighbouring one.
        self._communicator.bytes_sent += mixed.nbytes + share * (1 + len(part.destinations))

        def combine(target: torch.Tensor) -> None:
            target.copy_(mixed[: target.numel()])

        if values.is_cuda:
            self._run(mixed, part)  # queued on the device
            return Pending(combine=combine)
        future = self._worker.submit(self._run, mixed, part)
        return Pending(timed(self._communicator, future.result), future.done, combine)

    def _run(self, mixed: torch.Tensor, part: Round) -> None:
        with torch.no_grad():
            shard = mixed.new_empty(mixed.numel() // self.local_size)
            self.local.reduce_scatter(shard, mixed, op="mean").wait()
            handle = self._between.core.neighbor_all_reduce(
                shard,
                self._places(part.sources),
                self._places(part.destinations),
                self_weight=part.self_weight,
                check=False,
            )
            self._between.core.sync_stream(handle)
            self.local.all_gather(mixed, shard).wait()

    def _places(self, machines: dict[int, float]) -> dict[int, float]:
        """The ranks of this rank's place on other machines."""
        return {m * self.local_size + self._local_rank: weight for m, weight in machines.items()}

    def close(self) -> None:
        """Waits for what is under way and lets go of the process groups."""
        self._worker.shutdown(wait=True)
        self._between.close()
        self.local.close()
        dist.destroy_process_group(self._group)


def weighted_sum(
    target: torch.Tensor, self_weight: float, terms: Iterable[tuple[float, torch.Tensor]]
) -> None:
    """`target <- self_weight * target + sum of weight * term`; halves are added in float32."""
    half = target.dtype in (torch.float16, torch.bfloat16)
    total = target.float() if half else target
    total.mul_(self_weight)
    for weight, term in terms:
        total.add_(term, alpha=weight)
    if half:
        target.copy_(total)


class GlobalAverage:
    """Replaces tensors by their means over all ranks, and puts them back if asked to.

    Its calls are collective: all ranks make them, with tensors of the same shapes.

    Args:
        tensors: floating-point or complex; whatever else there is is left as it is.
    """

    def __init__(self, communicator: Communicator, tensors: Iterable[torch.Tensor]) -> None:
        self._communicator = communicator
        self._tensors = [t for t in tensors if t.is_floating_point() or t.is_complex()]
        self._kept: list[torch.Tensor] | None = None

    @property
    def applied(self) -> bool:
        """True while `revert` would put something back."""
        return self._kept is not None

    def apply(self, *, keep: bool = True, measure: bool = True) -> float | None:
        """Averages in place; raises `UserError` if they are averaged already, and not reverted yet.

        Args:
            keep: make a copy to revert to.
            measure: return this rank's distance to the mean (the norm of the difference).
        """
        if self.applied:
            raise UserError("the models are averaged already; revert first")
        with torch.no_grad():
            own = [tensor.clone() for tensor in self._tensors] if keep or measure else []
            full = [tensor for tensor in self._tensors if tensor.numel()]
            for work in [self._communicator.all_reduce(tensor, op="mean") for tensor in full]:
                work.wait()
            self._kept = own if keep else None
            return distance(own, self._tensors) if measure else None

    def revert(self) -> None:
        """Puts back what was there; raises `UserError` if nothing was kept."""
        if self._kept is None:
            raise UserError("there is nothing to revert: no average with a copy has been made")
        with torch.no_grad():
            for tensor, kept in zip(self._tensors, self._kept, strict=True):
                tensor.copy_(kept)
        self._kept = None


def distance(some: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> float:
    """The Euclidean norm of the difference of two lists of tensors, in float64."""

    def pieces(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # In float64 a large tensor would take three times its memory.
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        return real.detach().flatten().split(PIECE)

    total = 0.0
    for one, other in zip(some, others, strict=True):
        pairs = zip(pieces(one), pieces(other), strict=True)
        total += sum((a.double() - b.double()).square().sum().item() for a, b in pairs)
    return math.sqrt(total)


def core_module() -> Any:
    """The module `comm_core`; raises `Unavailable` where it is not built."""
    try:
        import comm_core
    except ImportError as error:
        raise Unavailable(f"neighbour averaging needs the comm core: {error}") from None
    return comm_core
