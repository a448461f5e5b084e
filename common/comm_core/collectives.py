"""The bodies of a `Communicator`'s operations: what each starts, waits for, and copies.

A body is a generator for `streams`; `channel` says where its collectives go. Its tensors have been
checked by the `check_...` functions here. Those that are not contiguous are copied in and out, in
logical order, so that ranks whose tensors differ in strides still agree about the elements.
Neighbours are those of a directed graph of which each rank knows its own place.
"""

from __future__ import annotations

import zlib
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

Body = Generator[list[Any], None, None]
"""Yields lists of `torch.distributed.Work` to await before it is continued."""

# torch 2.13 renames these two; 2.11 has the old names only.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class Channel:
    """The process group that one stream's operations use."""

    group: dist.ProcessGroup
    size: int
    ordered: bool
    """Collectives of the group run one after another in the order of the calls."""


def plain(tensor: torch.Tensor) -> bool:
    """True if a backend can use the tensor's memory as it lies."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous `[numel]` tensor of the same elements: a view if `plain`, else a copy."""
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1)


def _unflatten(tensor: torch.Tensor, buffer: torch.Tensor) -> None:
    if not plain(tensor):
        tensor.copy_(buffer.view(tensor.shape))


def _summable(buffer: torch.Tensor) -> tuple[torch.Tensor, Any]:
    # Backends add bools as bytes: Gloo's sum of two True is the byte 2, which is no bool. The
    # logical or is the maximum of the bytes.
    if buffer.dtype is torch.bool:
        return buffer.view(torch.uint8), dist.ReduceOp.MAX
    return buffer, dist.ReduceOp.SUM


def broadcast(channel: Channel, tensor: torch.Tensor, root: int) -> Body:
    """Copies root's `tensor` into everybody's."""
    buffer = flat(tensor)
    yield [dist.broadcast(buffer, group=channel.group, group_src=root, async_op=True)]
    _unflatten(tensor, buffer)


def reduce(channel: Channel, tensor: torch.Tensor, root: int) -> Body:
    """Sums into root's `tensor`."""
    buffer = flat(tensor)
    data, op = _summable(buffer)
    yield [dist.reduce(data, op=op, group=channel.group, group_dst=root, async_op=True)]
    _unflatten(tensor, buffer)


def all_reduce(channel: Channel, tensor: torch.Tensor) -> Body:
    """Sums into everybody's `tensor`."""
    buffer = flat(tensor)
    data, op = _summable(buffer)
    yield [dist.all_reduce(data, op=op, group=channel.group, async_op=True)]
    _unflatten(tensor, buffer)


def reduce_scatter(channel: Channel, send: torch.Tensor, recv: torch.Tensor) -> Body:
    """Sums `send`; rank r's `recv` is part r of it."""
    data, op = _summable(flat(send))
    buffer = flat(recv)
    shard, _ = _summable(buffer)
    yield [_reduce_scatter(shard, data, op=op, group=channel.group, async_op=True)]
    _unflatten(recv, buffer)


def all_gather(channel: Channel, send: torch.Tensor, recv: torch.Tensor) -> Body:
    """Concatenates everybody's `send` into `recv`."""
    shard, buffer = flat(send), flat(recv)
    yield [_all_gather(buffer, shard, group=channel.group, async_op=True)]
    _unflatten(recv, buffer)


def all_reduce_rsag(channel: Channel, tensor: torch.Tensor) -> Body:
    """Sums by reduce-scatter, then all-gather, of the tensor padded with zeros."""
    buffer = flat(tensor)
    numel = buffer.numel()
    part = padded_numel(numel, channel.size) // channel.size
    padded = buffer
    if part * channel.size > numel:
        padded = torch.cat([buffer, buffer.new_zeros(part * channel.size - numel)])
    data, op = _summable(padded)
    shard = data.new_empty(part)
    works = [_reduce_scatter(shard, data, op=op, group=channel.group, async_op=True)]
    if not channel.ordered:
        yield works
        works = []
    works.append(_all_gather(data, shard, group=channel.group, async_op=True))
    yield works
    if padded is not buffer:
        buffer.copy_(padded[:numel])
    _unflatten(tensor, buffer)


def padded_numel(numel: int, size: int) -> int:
    """The least multiple of `size` that is not less than `numel`."""
    return -(-numel // size) * size


def all_reduce_rb(channel: Channel, tensor: torch.Tensor) -> Body:
    """Sums by a reduce to rank 0, then a broadcast from it."""
    buffer = flat(tensor)
    data, op = _summable(buffer)
    works = [dist.reduce(data, op=op, group=channel.group, group_dst=0, async_op=True)]
    if not channel.ordered:
        yield works
        works = []
    works.append(dist.broadcast(data, group=channel.group, group_src=0, async_op=True))
    yield works
    _unflatten(tensor, buffer)


def copy(send: torch.Tensor, recv: torch.Tensor) -> Body:
    """A send to oneself."""
    recv.view(-1).copy_(flat(send)) if plain(recv) else recv.copy_(send.reshape(recv.shape))
    yield []


def sendrecv(channel: Channel, send: torch.Tensor, recv: torch.Tensor, peer: int) -> Body:
    """Sends to a peer what it receives from this rank, and the other way round."""
    buffer = flat(recv)
    yield exchange(channel, [(peer, buffer)], [(peer, flat(send))])
    _unflatten(recv, buffer)


Messages = Sequence[tuple[int, torch.Tensor]]


def exchange(channel: Channel, receives: Messages, sends: Messages) -> list[Any]:
    """Starts all receives and sends `(rank, contiguous tensor)` together; returns their works."""
    group = channel.group
    if not receives and not sends:
        return []
    if (receives or sends)[0][1].is_cuda:
        # NCCL makes progress on a send only beside the receive that its peer waits for.
        ops = [dist.P2POp(dist.irecv, t, group=group, group_peer=rank) for rank, t in receives]
        ops += [dist.P2POp(dist.isend, t, group=group, group_peer=rank) for rank, t in sends]
        return dist.batch_isend_irecv(ops)
    works: list[Any] = [dist.irecv(t, group=group, group_src=rank) for rank, t in receives]
    works += [dist.isend(t, group=group, group_dst=rank) for rank, t in sends]
    return works


def check_tensor(
    name: str, tensor: torch.Tensor, backends: Mapping[str, str], written: bool
) -> torch.Tensor:
    """Returns the tensor cut off from autograd (same memory).

    Args:
        name: of the operation, for the message.
        backends: device type -> backend.
        written: the operation writes into the tensor.

    Raises:
        TypeError: it is no tensor.
        ValueError: it is sparse, on a device that no backend serves, or to be written though
            several of its elements share memory.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} needs a tensor, got {type(tensor).__name__}")
    if tensor.layout is not torch.strided:
        raise ValueError(f"{name} needs a dense tensor, got layout {tensor.layout}")
    if tensor.device.type not in backends or tensor.device.type not in ("cpu", "cuda"):
        served = ", ".join(f"{device} ({backend})" for device, backend in backends.items())
        raise ValueError(f"{name}: no backend for tensors on {tensor.device}; there is {served}")
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    if written and any(length > 1 and step == 0 for length, step in steps):
        raise ValueError(
            f"{name} cannot write into an expanded tensor (shape {tuple(tensor.shape)}, strides "
            f"{tensor.stride()}): its elements share memory; clone it"
        )
    return tensor.detach()


def check_pair(name: str, first: torch.Tensor, second: torch.Tensor) -> None:
    """Both must be of one dtype (else TypeError) and on one device (else ValueError)."""
    if first.dtype != second.dtype:
        raise TypeError(f"{name} needs tensors of one dtype, got {first.dtype} and {second.dtype}")
    if first.device != second.device:
        raise ValueError(
            f"{name} needs tensors on one device, got {first.device} and {second.device}"
        )


def check_rank(what: str, rank: int, size: int) -> None:
    """Raises TypeError if `rank` is no int, ValueError if no rank of a group of `size`."""
    if not isinstance(rank, int) or isinstance(rank, bool):
        raise TypeError(f"{what} must be a rank, an int; got {rank!r}")
    if not 0 <= rank < size:
        raise ValueError(f"{what} {rank} is no rank of a group of {size}")


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


def weighted_sum(out: torch.Tensor, terms: Iterable[tuple[float, torch.Tensor]]) -> None:
    """`out <- sum of weight * term`, added in the order of the terms.

    Half precision is added in float32 and rounded once. `out` may be the first term's memory, but
    no other's.
    """
    (weight, first), *others = terms
    half = first.dtype in (torch.float16, torch.bfloat16)
    total = first.float() * weight if half else torch.mul(first, weight, out=out)
    for weight, term in others:
        total.add_(term, alpha=weight)
    if half:
        out.copy_(total)


def neighbor_all_reduce(
    channel: Channel, tensor: torch.Tensor, out: torch.Tensor, near: Neighbors
) -> Body:
    """`out = self_weight * tensor + sum of weight * message`, added in the order of the ranks.

    This rank's own share is added at its place in that order, so ranks with the same terms and
    weights get the same bits.
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
    total = torch.empty_like(own)
    weighted_sum(total, (terms[rank] for rank in sorted(terms)))
    out.copy_(total.view(out.shape))


def neighbor_all_gather(
    channel: Channel, tensor: torch.Tensor, near: Neighbors, *outputs: torch.Tensor
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
        _unflatten(output, buffer)
