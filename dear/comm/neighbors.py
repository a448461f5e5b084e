"""Rounds of averaging between neighbours: what each rank weighs, and the messages that carry it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dear.errors import UserError
from dear.lazy import torch
from dear.topology.graphs import in_neighbors, out_neighbors, recv_weights

if TYPE_CHECKING:
    import networkx as nx

    from dear.comm.communicator import Communicator


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
        return cls(
            self_weight=own,
            sources=sources,
            destinations=dict.fromkeys(out_neighbors(graph, rank), 1.0),
        )

    @classmethod
    def splitting(cls, graph: nx.DiGraph, rank: int) -> Round:
        """The sender decides: each rank shares itself out equally to itself and its k targets."""
        targets = out_neighbors(graph, rank)
        share = 1.0 / (len(targets) + 1)
        return cls(
            self_weight=share,
            sources=dict.fromkeys(in_neighbors(graph, rank), 1.0),
            destinations=dict.fromkeys(targets, share),
        )

    @classmethod
    def uniform(cls, destinations: Iterable[int], sources: Iterable[int]) -> Round:
        """Equal weights for this rank and what it receives."""
        sources = list(sources)
        share = 1.0 / (len(sources) + 1)
        return cls(
            self_weight=share,
            sources=dict.fromkeys(sources, share),
            destinations=dict.fromkeys(destinations, 1.0),
        )


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
        communicator.blocked_s += communicator.clock() - began

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
        if any(factor != 1 for factor in part.destinations.values()):
            return self._start_factored(values, part)
        received = values.new_empty(len(part.sources), values.numel())
        handle = self.core.neighbor_all_gather(
            values, list(received), list(part.sources), list(part.destinations), check=False
        )

        def combine(target: torch.Tensor) -> None:
            weighted_sum(target, part.self_weight, zip(part.sources.values(), received))  # noqa: B905

        return self.pending(handle, values.nbytes * len(part.destinations), combine)

    def _start_factored(self, values: torch.Tensor, part: Round) -> Pending:
        mixed = torch.empty_like(values)
        handle = self.core.neighbor_all_reduce(
            values,
            part.sources,
            part.destinations,
            self_weight=part.self_weight,
            out=mixed,
            check=False,
        )
        sent = values.nbytes * len(part.destinations)
        return self.pending(handle, sent, lambda target: target.copy_(mixed))

    def pending(
        self, handle: int, nbytes: int, combine: Callable[[torch.Tensor], Any] = lambda values: None
    ) -> Pending:
        """A handle of `core`, accounted for: `nbytes` leave this rank."""
        self._communicator.bytes_sent += nbytes
        core = self.core
        wait = timed(self._communicator, lambda: core.sync_stream(handle))
        return Pending(wait, lambda: core.done(handle), combine)

    def close(self) -> None:
        """Waits for what is under way and lets go of the process groups."""
        self.core.destroy()


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


def core_module() -> Any:
    """The module `comm_core`; raises `Unavailable` where it is not built."""
    from dear.errors import Unavailable

    try:
        import comm_core
    except ImportError as error:
        raise Unavailable(f"neighbour averaging needs the comm core: {error}") from None
    return comm_core


def check_weights(
    self_weight: float | None, sources: object, destinations: object, what: str
) -> None:
    """Refuses weights given by halves: those of this rank and of its sources belong together."""
    if (self_weight is None) != (sources is None):
        given, missing = ("self_weight", "src_weights")
        if self_weight is None:
            given, missing = missing, given
        raise UserError(f"{what}: {given} is given without {missing}; give both or neither")
    if destinations is not None and sources is None:
        raise UserError(
            f"{what}: dst_weights are given without self_weight and src_weights; ranks must know "
            "whom they receive from"
        )
