"""Bodies of a `Communicator`'s operations: the collectives that each starts, awaits and copies.

A body is a generator that `streams` runs. Its collectives use the process group of `channel`. The
caller has checked the tensors with the `check_...` functions of this module. Tensors that are not
contiguous are copied in and out in logical order, so ranks may use different strides. The
neighbour operations use a directed graph; each rank knows only its own neighbours.
"""

from __future__ import annotations

import zlib
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist


class Waited(Protocol):
    """Work of a collective, or what stands in for it."""

    def wait(self) -> object:
        """Blocks until the result may be used."""

    def is_completed(self) -> bool:
        """Returns True if `wait` would not block."""


Body = Generator[Sequence[Waited], None, None]
"""Generator that yields works; resume it once they have ended."""

# torch 2.13 renames these two; 2.11 has the old names only.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class Channel:
    """Process group that the operations of one stream use."""

    group: dist.ProcessGroup
    size: int
    ordered: bool
    """True if collectives of CPU tensors run one after another in the order of the calls."""

    def must_wait(self, tensor: torch.Tensor) -> bool:
        """Returns True if a collective of `tensor` has to end before the next call reads it.

        The comm core copies a GPU's tensors to host memory in the call.
        """
        return tensor.is_cuda or not self.ordered


def plain(tensor: torch.Tensor) -> bool:
    """Returns True if a backend can use the tensor's memory without a copy."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the elements as a contiguous `[numel]` tensor: a view if `plain`, else a copy."""
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1)


def _unflatten(tensor: torch.Tensor, buffer: torch.Tensor) -> None:
    if not plain(tensor):
        tensor.copy_(buffer.view(tensor.shape))


def _summable(buffer: torch.Tensor) -> tuple[torch.Tensor, dist.ReduceOp.RedOpType]:
    # Backends add bools as bytes: Gloo's sum of two True is the byte 2, which is not a valid bool.
    # The maximum of the bytes is the logical or.
    if buffer.dtype is torch.bool:
        return buffer.view(torch.uint8), dist.ReduceOp.MAX
    return buffer, dist.ReduceOp.SUM


def broadcast(channel: Channel, tensor: torch.Tensor, root: int) -> Body:
    """Copies the root's `tensor` into that of every rank."""
    buffer = flat(tensor)
    yield [dist.broadcast(buffer, group=channel.group, group_src=root, async_op=True)]
    _unflatten(tensor, buffer)


def reduce(channel: Channel, tensor: torch.Tensor, root: int) -> Body:
    """Sums `tensor` over the ranks into that of the root."""
    buffer = flat(tensor)
    data, op = _summable(buffer)
    yield [dist.reduce(data, op=op, group=channel.group, group_dst=root, async_op=True)]
    _unflatten(tensor, buffer)


def all_reduce(channel: Channel, tensor: torch.Tensor) -> Body:
    """Sums `tensor` over the ranks, in place on every rank."""
    buffer = flat(tensor)
    data, op = _summable(buffer)
    yield [dist.all_reduce(data, op=op, group=channel.group, async_op=True)]
    _unflatten(tensor, buffer)


def reduce_scatter(channel: Channel, send: torch.Tensor, recv: torch.Tensor) -> Body:
    """Sums `send` over the ranks; rank r's `recv` gets part r of the sum."""
    data, op = _summable(flat(send))
    buffer = flat(recv)
    shard, _ = _summable(buffer)
    yield [_reduce_scatter(shard, data, op=op, group=channel.group, async_op=True)]
    _unflatten(recv, buffer)


def all_gather(channel: Channel, send: torch.Tensor, recv: torch.Tensor) -> Body:
    """Concatenates the `send` of all ranks into `recv`, in rank order."""
    shard, buffer = flat(send), flat(recv)
    yield [_all_gather(buffer, shard, group=channel.group, async_op=True)]
    _unflatten(recv, buffer)


def all_reduce_rsag(channel: Channel, tensor: torch.Tensor) -> Body:
    """Sums with a reduce-scatter and an all-gather of the tensor, padded with zeros."""
    buffer = flat(tensor)
    numel = buffer.numel()
    part = padded_numel(numel, channel.size) // channel.size
    padded = buffer
    if part * channel.size > numel:
        padded = torch.cat([buffer, buffer.new_zeros(part * channel.size - numel)])
    data, op = _summable(padded)
    shard = data.new_empty(part)
    works = [_reduce_scatter(shard, data, op=op, group=channel.group, async_op=True)]
    if channel.must_wait(data):
        yield works
        works = []
    works.append(_all_gather(data, shard, group=channel.group, async_op=True))
    yield works
    if padded is not buffer:
        buffer.copy_(padded[:numel])
    _unflatten(tensor, buffer)


def padded_numel(numel: int, size: int) -> int:
    """Returns the smallest multiple of `size` that is at least `numel`."""
    return -(-numel // size) * size


def all_reduce_rb(channel: Channel, tensor: torch.Tensor) -> Body:
    """Sums with a reduce to rank 0 and a broadcast from it."""
    buffer = flat(tensor)
    data, op = _summable(buffer)
    works = [dist.reduce(data, op=op, group=channel.group, group_dst=0, async_op=True)]
    if channel.must_wait(data):
        yield works
        works = []
    works.append(dist.broadcast(data, group=channel.group, group_src=0, async_op=True))
    yield works
    _unflatten(tensor, buffer)


def copy(send: torch.Tensor, recv: torch.Tensor) -> Body:
    """Copies `send` into `recv`: a send from this rank to itself."""
    recv.view(-1).copy_(flat(send)) if plain(recv) else recv.copy_(send.reshape(recv.shape))
    yield []


def sendrecv(channel: Channel, send: torch.Tensor, recv: torch.Tensor, peer: int) -> Body:
    """Sends `send` to `peer` and receives `recv` from it."""
    buffer = flat(recv)
    yield exchange(channel, [(peer, buffer)], [(peer, flat(send))])
    _unflatten(recv, buffer)


Messages = Sequence[tuple[int, torch.Tensor]]


def exchange(channel: Channel, receives: Messages, sends: Messages) -> Sequence[Waited]:
    """Starts all receives and sends `(rank, contiguous tensor)`; returns their works."""
    group = channel.group
    if not receives and not sends:
        return []
    if (receives or sends)[0][1].is_cuda:
        if "gloo" in group._get_backend(torch.device("cuda")).name():
            return _staged(group, receives, sends)
        # Without a batch, NCCL runs messages one by one: two ranks that both send first would hang.
        ops = [dist.P2POp(dist.irecv, t, group=group, group_peer=rank) for rank, t in receives]
        ops += [dist.P2POp(dist.isend, t, group=group, group_peer=rank) for rank, t in sends]
        return dist.batch_isend_irecv(ops)
    works = [dist.irecv(t, group=group, group_src=rank) for rank, t in receives]
    works += [dist.isend(t, group=group, group_dst=rank) for rank, t in sends]
    return [work for work in works if work is not None]  # None: this rank is not in the group


class _Arrival:
    """Receive into host memory that `wait` copies to a GPU."""

    def __init__(self, work: dist.Work | None, buffer: torch.Tensor, target: torch.Tensor) -> None:
        self._work, self._buffer, self._target = work, buffer, target

    def is_completed(self) -> bool:
        return self._work is None or self._work.is_completed()

    def wait(self) -> None:
        if self._work is not None:  # None: this rank is not in the group
            self._work.wait()
        self._target.copy_(self._buffer)  # from pageable memory: it has ended on return


def _staged(group: dist.ProcessGroup, receives: Messages, sends: Messages) -> Sequence[Waited]:
    """Does what `exchange` does through host memory: Gloo takes a GPU's addresses for its own."""
    works: list[Waited] = []
    for rank, target in receives:
        buffer = torch.empty_like(target, device="cpu")
        works.append(_Arrival(dist.irecv(buffer, group=group, group_src=rank), buffer, target))
    copies = [(rank, tensor.cpu()) for rank, tensor in sends]
    sent = [dist.isend(copy, group=group, group_dst=rank) for rank, copy in copies]
    return [*works, *(work for work in sent if work is not None)]


def check_tensor(
    name: str, tensor: torch.Tensor, backends: Mapping[str, str], written: bool
) -> torch.Tensor:
    """Checks a tensor argument and returns it detached from autograd (same memory).

    Args:
        name: operation, for the messages.
        tensor: argument to check.
        backends: device type -> backend.
        written: True if the operation writes into the tensor.

    Raises:
        TypeError: `tensor` is not a tensor.
        ValueError: it is sparse or on a device without a backend, or several of its elements share
            memory although the operation writes into it.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} needs a tensor, got {type(tensor).__name__}")
    if tensor.layout is not torch.strided:
        raise ValueError(f"{name} needs a dense tensor, got layout {tensor.layout}")
    if tensor.device.type not in backends or tensor.device.type not in ("cpu", "cuda"):
        served = ", ".join(f"{device} ({backend})" for device, backend in backends.items())
        raise ValueError(f"{name}: no backend for tensors on {tensor.device}; allowed: {served}")
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    if written and any(length > 1 and step == 0 for length, step in steps):
        raise ValueError(
            f"{name} cannot write into an expanded tensor (shape {tuple(tensor.shape)}, strides "
            f"{tensor.stride()}): its elements share memory; clone it"
        )
    return tensor.detach()


def check_pair(name: str, first: torch.Tensor, second: torch.Tensor) -> None:
    """Raises TypeError if the dtypes differ, ValueError if the devices differ."""
    if first.dtype != second.dtype:
        raise TypeError(f"{name} needs tensors of one dtype, got {first.dtype} and {second.dtype}")
    if first.device != second.device:
        raise ValueError(
            f"{name} needs tensors on one device, got {first.device} and {second.device}"
        )


def check_rank(label: str, rank: int, size: int) -> None:
    """Raises TypeError if `rank` is not an int, ValueError if it is not in 0 .. size-1."""
    if not isinstance(rank, int) or isinstance(rank, bool):
        raise TypeError(f"{label} must be a rank (an int), got {rank!r}")
    if not 0 <= rank < size:
        raise ValueError(
            f"{label} {rank} is no rank of a group of {size}; allowed: 0 .. {size - 1}"
        )


Ranks = Sequence[int] | Mapping[int, float]
"""A list of ranks, or a dict rank -> weight."""


@dataclass(frozen=True, kw_only=True)
class Neighbors:
    """Neighbours of this rank in a directed graph, with their weights."""

    rank: int
    sources: dict[int, float]
    """In-neighbour -> factor for the message received from it, in the caller's order."""
    destinations: dict[int, float]
    """Out-neighbour -> factor for the message sent to it."""
    self_weight: float

    @classmethod
    def of(
        cls, rank: int, size: int, sources: Ranks, destinations: Ranks, self_weight: float | None
    ) -> Neighbors:
        """Returns the checked neighbours of `rank`, as far as one rank can check them alone.

        Raises:
            ValueError: a neighbour does not exist, is this rank itself or occurs twice, or only
                one of `self_weight` and the weights of the sources was given.
            TypeError: a neighbour is not an int.
        """
        weighted = isinstance(sources, Mapping)
        if weighted != (self_weight is not None):
            raise ValueError(
                "give both self_weight and weights of the sources ({rank: weight}), or neither"
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
            raise ValueError(f"{kind} {other} is this rank itself; its weight is self_weight")
    if isinstance(ranks, Mapping):
        return {other: float(weight) for other, weight in ranks.items()}
    if len(set(ranks)) != len(ranks):
        raise ValueError(f"a rank occurs twice in the {kind}s {list(ranks)}")
    return dict.fromkeys(ranks, default)


def description(
    near: Neighbors, size: int, dtype: torch.dtype | None, sent: int, wanted: Sequence[int]
) -> torch.Tensor:
    """Returns the messages that this rank sends and expects, for `disagreement`.

    The result is int64 `[1 + 2 * size]`: a checksum of the dtype, then the numbers of elements
    sent to each rank and expected from each rank; -1 for no message.

    Args:
        near: neighbours of this rank.
        size: number of ranks.
        dtype: element type of the messages; None if it is not known yet.
        sent: number of elements in each message sent.
        wanted: number of elements expected from each source.
    """
    row = torch.full((1 + 2 * size,), -1)
    row[0] = zlib.crc32(str(dtype).encode())
    for other in near.destinations:
        row[1 + other] = sent
    for other, numel in zip(near.sources, wanted, strict=True):
        row[1 + size + other] = numel
    return row


def disagreement(rows: torch.Tensor) -> str | None:
    """Returns the first contradiction among all descriptions `[size, 1 + 2 * size]`, or None."""
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
            return f"rank {source} sends another dtype to rank {destination} than it expects"
    return None


def weighted_sum(out: torch.Tensor, terms: Iterable[tuple[float, torch.Tensor]]) -> None:
    """Computes `out = sum of weight * term`, added in the order of the terms.

    Half precision is added in float32 and rounded once. `out` may share memory with the first
    term, but with no other term.
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
    """Computes `out = self_weight * tensor + sum of weight * message`.

    The terms, this rank's own included, are added in rank order. Ranks with the same terms and
    weights therefore get bit-identical results.
    """
    local = flat(tensor)
    messages = {source: torch.empty_like(local) for source in sorted(near.sources)}
    scaled = {weight: local * weight for weight in set(near.destinations.values()) if weight != 1}
    yield exchange(
        channel,
        list(messages.items()),
        [(rank, scaled.get(weight, local)) for rank, weight in near.destinations.items()],
    )
    terms = {near.rank: (near.self_weight, local)}
    terms.update({source: (near.sources[source], t) for source, t in messages.items()})
    total = torch.empty_like(local)
    weighted_sum(total, (terms[rank] for rank in sorted(terms)))
    out.copy_(total.view(out.shape))


def neighbor_all_gather(
    channel: Channel, tensor: torch.Tensor, near: Neighbors, *outputs: torch.Tensor
) -> Body:
    """Receives the message of each source into its output, in the caller's order."""
    local = flat(tensor)
    buffers = [flat(output) for output in outputs]
    yield exchange(
        channel,
        list(zip(near.sources, buffers, strict=True)),
        [(rank, local) for rank in near.destinations],
    )
    for output, buffer in zip(outputs, buffers, strict=True):
        _unflatten(output, buffer)
