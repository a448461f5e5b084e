"""The bodies of a `Communicator`'s operations: what each starts, waits for, and copies.

Every function here is a generator for `streams`; `channel` says where its collectives go. Tensors
are checked by the caller. Those that are not contiguous are copied in and out, in logical order, so
that ranks whose tensors differ in strides still agree about the elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .streams import Body

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
