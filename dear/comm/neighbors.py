"""Averaging between neighbours: the weights of each rank, and the messages that carry values.

`Exchange` runs a round of averaging along the edges of a graph of ranks. `Machines` averages
equally in each machine and with weights between machines. `GlobalAverage` measures the distance
between ranks (also importable as `dear.consensus`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from dear.comm.communicator import Communicator
from dear.comm.hierarchy import blocks_of
from dear.errors import UserError
from dear.lazy import dist, nx, torch
from dear.topology import in_neighbors, out_neighbors, recv_weights

PIECE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Round:
    """Part of one rank in a round of averaging.

    The rank computes `x <- self_weight * x + sum over j of sources[j] * (values that j sends)`.
    """

    self_weight: float
    sources: dict[int, float] = field(default_factory=dict)
    """Rank -> factor of the values that this rank receives from there."""
    destinations: dict[int, float] = field(default_factory=dict)
    """Rank -> factor of the values that this rank sends there."""

    @classmethod
    def of(cls, graph: nx.DiGraph, rank: int) -> Round:
        """Returns the part of `rank` if receivers weigh the values, by the weights of `graph`."""
        self_weight, sources = recv_weights(graph, rank)
        targets = dict.fromkeys(out_neighbors(graph, rank), 1.0)
        return cls(self_weight=self_weight, sources=sources, destinations=targets)

    @classmethod
    def splitting(cls, graph: nx.DiGraph, rank: int) -> Round:
        """Returns the part of `rank` if senders weigh: 1 / (k + 1) for itself and its k targets."""
        targets = out_neighbors(graph, rank)
        share = 1.0 / (len(targets) + 1)
        sources = dict.fromkeys(in_neighbors(graph, rank), 1.0)
        return cls(self_weight=share, sources=sources, destinations=dict.fromkeys(targets, share))

    @classmethod
    def uniform(cls, destinations: Iterable[int], sources: Iterable[int]) -> Round:
        """Returns the part with equal weights for this rank and its sources."""
        sources = list(sources)
        share = 1.0 / (len(sources) + 1)
        weights, targets = dict.fromkeys(sources, share), dict.fromkeys(destinations, 1.0)
        return cls(self_weight=share, sources=weights, destinations=targets)


class Pending:
    """Round of averaging that has started."""

    def __init__(
        self,
        wait: Callable[[], Any] = lambda: None,
        done: Callable[[], bool] = lambda: True,
        combine: Callable[[torch.Tensor], Any] = lambda values: None,
    ) -> None:
        self.wait = wait
        """Blocks until the sent values may change (on CUDA: blocks the current stream); raises
        RuntimeError if a peer died or did not answer in time."""
        self.done = done
        """Returns True once all messages have arrived; never blocks."""
        self._combine = combine

    def finish(self, values: torch.Tensor) -> None:
        """Waits, then replaces `values` (1-D, values of this rank) by the result of the round."""
        self.wait()
        with torch.no_grad():
            self._combine(values)


def timed(communicator: Communicator, wait: Callable[[], Any]) -> Callable[[], None]:
    """Returns a `wait` whose time counts as exposed communication."""

    def waiting() -> None:
        began_s = communicator.clock()
        wait()
        communicator.held_up(began_s)

    return waiting


class Exchange:
    """Rounds of averaging along the edges of graphs of ranks, over any process group.

    The constructor is collective. All ranks must start the same rounds in the same order. The comm
    core's neighbour collectives carry CPU tensors over comm_core or Gloo, and CUDA tensors over
    NCCL.

    Args:
        streams: number of rounds that may run at the same time.

    Raises:
        Unavailable: the comm core is not built.
    """

    def __init__(self, communicator: Communicator, streams: int = 1) -> None:
        self._communicator = communicator
        limit_s = communicator.timeout and communicator.timeout.total_seconds()
        self.core = communicator.core().Communicator(streams, communicator.groups[0], limit_s)

    def start(self, values: torch.Tensor, part: Round) -> Pending:
        """Starts a round with `values` (1-D); they must not change until `Pending.wait` returns."""
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
        """Returns the `Pending` of a handle of `core`, and counts `nbytes` as sent by this rank."""
        self._communicator.bytes_sent += nbytes
        core, ended = self.core, self._communicator.note("neighbors", nbytes)

        def sync() -> None:
            core.sync_stream(handle)
            ended()

        wait = timed(self._communicator, sync)
        return Pending(wait, lambda: core.done(handle), combine)

    def close(self) -> None:
        """Waits for all pending rounds, and releases the process groups."""
        self.core.destroy()


class Machines:
    """Averaging over machines, which are blocks of `local_size` consecutive ranks.

    A round has three parts. A reduce-scatter averages in the machine. Each rank then exchanges its
    share with the ranks of the same local rank on the neighbouring machines. An all-gather in the
    machine completes the result. So a machine sends one tensor to each neighbour, spread over its
    ranks, and all ranks of a machine get bitwise equal results.

    The constructor is collective.

    Raises:
        UserError: the world size is not a multiple of `local_size`, or the communicator does not
            hold all ranks of the job.
        Unavailable: the comm core is not built.
    """

    def __init__(self, communicator: Communicator, local_size: int) -> None:
        size = communicator.size
        blocks, _ = blocks_of(size, local_size, "machines")
        if size != dist.get_world_size():
            raise UserError(
                "hierarchical averaging needs a communicator of all ranks of the job, got "
                f"{size} of {dist.get_world_size()} ranks"
            )
        self.local_size = local_size
        self.count = len(blocks)
        self.machine, self._local_rank = divmod(communicator.rank, local_size)
        self._communicator = communicator
        self._group, _ = dist.new_subgroups(local_size, timeout=communicator.timeout)
        self.local = Communicator(self._group)
        """Communicator of the ranks of this machine."""
        self._between = Exchange(communicator)
        self._worker = communicator.worker("dear machines")

    def start(self, values: torch.Tensor, part: Round) -> Pending:
        """Starts a round over `values` (1-D); ranks in `part` stand for numbers of machines."""
        mixed = values.new_zeros(-(-values.numel() // self.local_size) * self.local_size)
        mixed[: values.numel()] = values
        share = mixed.nbytes // self.local_size
        # Reduce-scatter and all-gather inside the machine, and a share to each neighbour machine.
        self._communicator.bytes_sent += mixed.nbytes + share * (1 + len(part.destinations))

        def combine(target: torch.Tensor) -> None:
            target.copy_(mixed[: target.numel()])

        if values.is_cuda:
            self._run(mixed, part)  # runs asynchronously on the device
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
        """Maps numbers of machines to the ranks there with the same local rank as this rank."""
        return {m * self.local_size + self._local_rank: weight for m, weight in machines.items()}

    def close(self) -> None:
        """Waits for all pending rounds, and releases the process groups."""
        self._worker.shutdown(wait=True)
        self._between.close()
        self.local.close()
        dist.destroy_process_group(self._group)


def weighted_sum(
    target: torch.Tensor, self_weight: float, terms: Iterable[tuple[float, torch.Tensor]]
) -> None:
    """Computes `target <- self_weight * target + sum of weight * term`, in float32 for 16 bits."""
    half = target.dtype in (torch.float16, torch.bfloat16)
    total = target.float() if half else target
    total.mul_(self_weight)
    for weight, term in terms:
        total.add_(term, alpha=weight)
    if half:
        target.copy_(total)


class GlobalAverage:
    """Averages tensors over all ranks in place, and restores them on request.

    All calls are collective, with tensors of the same shapes on all ranks.

    Args:
        tensors: floating-point and complex tensors are averaged; others do not change.
    """

    def __init__(self, communicator: Communicator, tensors: Iterable[torch.Tensor]) -> None:
        self._communicator = communicator
        self._tensors = [t for t in tensors if t.is_floating_point() or t.is_complex()]
        self._kept: list[torch.Tensor] | None = None

    @property
    def applied(self) -> bool:
        """True if the tensors are averaged and `revert` can restore them."""
        return self._kept is not None

    def apply(self, *, keep: bool = True, measure: bool = True) -> float | None:
        """Averages in place; raises `UserError` if the last average with a copy was not reverted.

        Args:
            keep: keep a copy for `revert`.
            measure: return the distance of this rank's values to the mean (norm of the difference).
        """
        if self.applied:
            raise UserError("the models are averaged already; call revert() first")
        with torch.no_grad():
            copies = [tensor.clone() for tensor in self._tensors] if keep or measure else []
            full = [tensor for tensor in self._tensors if tensor.numel()]
            for work in [self._communicator.all_reduce(tensor, op="mean") for tensor in full]:
                work.wait()
            self._kept = copies if keep else None
            return distance(copies, self._tensors) if measure else None

    def revert(self) -> None:
        """Restores the tensors; raises `UserError` if `apply` has kept no copy."""
        if self._kept is None:
            raise UserError("there is nothing to revert: no average has kept a copy")
        with torch.no_grad():
            for tensor, copy in zip(self._tensors, self._kept, strict=True):
                tensor.copy_(copy)
        self._kept = None

    def forget(self) -> None:
        """Drops the copies of `apply`, because the tensors are being replaced."""
        self._kept = None


def distance(some: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> float:
    """Returns the Euclidean norm of the difference of two lists of tensors, computed in float64."""

    def pieces(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # Pieces limit the memory: a large float32 tensor in float64 would take three times its own.
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        split: tuple[torch.Tensor, ...] = real.detach().flatten().split(PIECE)
        return split

    total = 0.0
    for left, right in zip(some, others, strict=True):
        pairs = zip(pieces(left), pieces(right), strict=True)
        total += sum((a.double() - b.double()).square().sum().item() for a, b in pairs)
    return math.sqrt(total)
