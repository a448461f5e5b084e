"""Averaging and gathering over a directed graph, of which each rank knows its own neighbours."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from .collectives import Body, Channel, exchange, flat, plain
from .operands import check_rank

Ranks = Sequence[int] | Mapping[int, float]
"""Ranks, or rank -> weight."""


@dataclass(frozen=True, kw_only=True)
class Neighbors:
    """This rank's place in a directed graph."""

    rank: int
    sources: dict[int, float]
    """In-neighbours and the factors of what comes from them, in the caller's order."""
    destinations: dict[int, float]
    """Out-neighbours and the factors of what goes to them."""
    self_weight: float

    @classmethod
    def of(
        cls, rank: int, size: int, sources: Ranks, destinations: Ranks, self_weight: float | None
    ) -> Neighbors:
        """Checks what one rank can check alone.

        Raises:
            ValueError: a rank that does not exist, is this rank or occurs twice, or only one of
                `self_weight` and the weights of the sources.
            TypeError: a rank that is no int.
        """
        weighted = isinstance(sources, Mapping)
        if weighted != (self_weight is not None):
            raise ValueError(
                "give self_weight together with weights of the sources ({rank: weight}), or neither"
            )
        uniform = 1.0 / (len(sources) + 1)
        return cls(
            rank=rank,
            sources=_weights("source", sources, uniform, rank, size),
            destinations=_weights("destination", destinations, 1.0, rank, size),
            self_weight=uniform if self_weight is None else float(self_weight),
        )


def _weights(kind: str, ranks: Ranks, default: float, rank: int, size: int) -> dict[int, float]:
    for other in ranks:
        check_rank(kind, other, size)
        if other == rank:
            raise ValueError(f"{kind} {other} is this rank itself; its share is self_weight")
    if isinstance(ranks, Mapping):
        return {other: float(weight) for other, weight in ranks.items()}
    if len(set(ranks)) != len(ranks):
        raise ValueError(f"a rank occurs twice among the {kind}s {list(ranks)}")
    return dict.fromkeys(ranks, default)


def description(
    near: Neighbors, size: int, dtype: torch.dtype | None, sent: int, wanted: Sequence[int]
) -> torch.Tensor:
    """What this rank will send and expects, int64 `[1 + 2 * size]`, for `disagreement`.

    Args:
        dtype: of the messages; None if it is not known yet.
        sent: elements in each message that goes out.
        wanted: elements expected from each source.
    """
    row = torch.full((1 + 2 * size,), -1)
    row[0] = zlib.crc32(str(dtype).encode())
    for other in near.destinations:
        row[1 + other] = sent
    for other, numel in zip(near.sources, wanted, strict=True):
        row[1 + size + other] = numel
    return row


def disagreement(rows: torch.Tensor) -> str | None:
    """The first contradiction in all ranks' descriptions `[size, 1 + 2 * size]`, or None."""
    size = rows.shape[0]
    sent, wanted = rows[:, 1 : 1 + size], rows[:, 1 + size :].T
    for source, destination in (sent != wanted).nonzero().tolist():
        n, m = int(sent[source, destination]), int(wanted[source, destination])
        if m < 0:
            return (
                f"rank {source} sends to rank {destination}, which does not name rank {source} "
                "among its sources"
            )
        if n < 0:
            return (
                f"rank {destination} expects a message of rank {source}, which does not name rank "
                f"{destination} among its destinations"
            )
        return f"rank {source} sends {n} elements to rank {destination}, which expects {m}"
    for source, destination in (sent >= 0).nonzero().tolist():
        if rows[source, 0] != rows[destination, 0]:
            return f"rank {source} sends another dtype to rank {destination} than that expects"
    return None


def all_reduce(channel: Channel, tensor: torch.Tensor, out: torch.Tensor, near: Neighbors) -> Body:
    """`out = self_weight * tensor + sum of weight * message`, added in the order of the ranks.

    This rank's own share is added at its place in that order, so ranks with the same terms and
    weights get the same bits. Half precision is added in float32 and rounded once.
    """
    own = flat(tensor)
    messages = {source: torch.empty_like(own) for source in sorted(near.sources)}
    scaled = {weight: own * weight for weight in set(near.destinations.values()) if weight != 1}
    yield exchange(
        channel,
        list(messages.items()),
        [(rank, scaled.get(weight, own)) for rank, weight in near.destinations.items()],
    )
    terms = {near.rank: (near.self_weight, own)}
    terms.update({source: (near.sources[source], t) for source, t in messages.items()})
    first, *others = (terms[rank] for rank in sorted(terms))
    half = own.dtype in (torch.float16, torch.bfloat16)
    total = first[1].to(torch.float32 if half else own.dtype) * first[0]
    for weight, term in others:
        total.add_(term, alpha=weight)
    out.copy_(total.view(out.shape))


def all_gather(
    channel: Channel, tensor: torch.Tensor, outputs: Sequence[torch.Tensor], near: Neighbors
) -> Body:
    """Receives the message of each source, in the caller's order, into its output."""
    own = flat(tensor)
    buffers = [flat(output) for output in outputs]
    yield exchange(
        channel,
        list(zip(near.sources, buffers, strict=True)),
        [(rank, own) for rank in near.destinations],
    )
    for output, buffer in zip(outputs, buffers, strict=True):
        if not plain(output):
            output.copy_(buffer.view(output.shape))
