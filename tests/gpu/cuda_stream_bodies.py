"""Programs of ranks in the tests of stream ordering, on CUDA or CPU tensors.

Every tensor is first filled with a wrong value, and gets the right one late, on a stream of its
own: who does not wait for that stream moves the wrong one. Results are read at once after `wait`,
and then overwritten: what is copied back later than that shows, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from dear.comm import runtime
from dear.comm.communicator import Communicator, Work
from tests.gpu.cuda_worlds import keep_busy, settle, side_stream

WRONG = -7
PART = 2**17
"""Elements of a rank's part of a tensor."""

Launched = tuple[Work, torch.Tensor]


def values(rank: int, numel: int) -> torch.Tensor:
    """Small whole numbers, different on all ranks; sums are exact in every type."""
    return (torch.arange(numel) * (rank + 2)) % 5 + rank + 1


def late(device: torch.device, right: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor that will hold `right` once the current stream has come so far."""
    tensor = torch.full(right.shape, WRONG, dtype=dtype, device=device)
    source = right.to(device, dtype)  # by now the wrong values are there
    keep_busy(device)
    return tensor.copy_(source)


def all_reduce(c: Communicator, mine: torch.Tensor, channel: int = 0) -> Launched:
    return c.all_reduce(mine, op="sum", channel=channel), mine


def reduce_scatter(c: Communicator, mine: torch.Tensor, channel: int = 0) -> Launched:
    output = torch.full_like(mine[: mine.numel() // c.size], WRONG)
    return c.reduce_scatter(output, mine, op="sum", channel=channel), output


def all_gather(c: Communicator, mine: torch.Tensor, channel: int = 0) -> Launched:
    output = mine.new_full((mine.numel() * c.size,), WRONG)
    return c.all_gather(output, mine, channel=channel), output


def broadcast(c: Communicator, mine: torch.Tensor, channel: int = 0) -> Launched:
    return c.broadcast(mine, root=c.size - 1, channel=channel), mine


COLLECTIVES = (all_reduce, reduce_scatter, all_gather, broadcast)


def wanted(collective: Callable[..., Launched], c: Communicator, numel: int) -> torch.Tensor:
    everybody = [values(rank, numel) for rank in range(c.size)]
    total = torch.stack(everybody).sum(dim=0)
    return {
        all_reduce: lambda: total,
        reduce_scatter: lambda: total.chunk(c.size)[c.rank],
        all_gather: lambda: torch.cat(everybody),
        broadcast: lambda: everybody[-1],
    }[collective]()


def check(device: torch.device, seen: torch.Tensor, right: torch.Tensor, what: str) -> None:
    settle(device)
    got = seen.cpu().to(torch.int64)
    assert torch.equal(got, right), f"{what}: {got[got != right][:8].tolist()} is wrong"


def written_late_and_read_at_once(
    device: torch.device, name: str, dtype: torch.dtype, wait_elsewhere: bool
) -> None:
    """The input comes late on a side stream; the result is read on that stream, or on another."""
    collective, c = globals()[name], runtime.communicator()
    numel = PART * c.size
    for _ in range(3):
        with side_stream(device):
            work, result = collective(c, late(device, values(c.rank, numel), dtype))
            if not wait_elsewhere:
                work.wait()
                seen = result.clone()
                result.fill_(WRONG)
        if wait_elsewhere:
            with side_stream(device):
                work.wait()
                seen = result.clone()
                result.fill_(WRONG)
        check(device, seen, wanted(collective, c, numel), f"{name} {dtype}")
        assert (result == WRONG).all(), f"{name} {dtype}: written again after wait()"


def many_under_way(device: torch.device, dtype: torch.dtype) -> None:
    """Sixteen collectives of different sizes, from two streams in turn, waited for backwards."""
    c = runtime.communicator()
    streams = [side_stream(device), side_stream(device)]
    launched = []
    for i in range(16):
        collective = COLLECTIVES[i % len(COLLECTIVES)]
        numel = (i * 1000 + 3) * c.size
        with streams[i % 2]:
            mine = late(device, values(c.rank, numel), dtype)
            launched.append((collective, numel, *collective(c, mine)))
    seen = []
    for collective, numel, work, result in reversed(launched):
        work.wait()
        seen.append((collective, numel, result.clone()))
    for collective, numel, got in seen:
        check(device, got, wanted(collective, c, numel), collective.__name__)


def two_channels(device: torch.device) -> None:
    """Two process groups at a time, each fed and read on a stream of its own."""
    c = Communicator(dist.group.WORLD, channels=2)
    numel = PART * c.size
    streams = [side_stream(device), side_stream(device)]
    for collective in COLLECTIVES:
        launched = []
        for channel, stream in enumerate(streams):
            with stream:
                mine = late(device, values(c.rank, numel), torch.float32)
                launched.append(collective(c, mine, channel))
        for (work, result), stream in zip(launched, streams, strict=True):
            with stream:
                work.wait()
                seen = result.clone()
            check(device, seen, wanted(collective, c, numel), collective.__name__)
    dist.destroy_process_group(c.groups[1])


def memory_reused(device: torch.device) -> None:
    """The caller lets go of the input at once, and its memory is written by others."""
    c = runtime.communicator()
    numel = PART * c.size
    for _ in range(5):
        with side_stream(device):
            mine = late(device, values(c.rank, numel), torch.float32)
            work, result = reduce_scatter(c, mine)
            del mine
            others = [torch.full((numel,), 99.0, device=device) for _ in range(4)]
            work.wait()
            seen = result.clone()
        check(device, seen, wanted(reduce_scatter, c, numel), "reduce_scatter")
        assert all((other == 99).all() for other in others)


def chain(device: torch.device) -> None:
    """Each step's input is the last one's result: nothing waits for the host in between."""
    c = runtime.communicator()
    right = float(c.rank)
    everybody = [float(rank) for rank in range(c.size)]
    with side_stream(device):
        x = torch.full((PART,), right, dtype=torch.float64, device=device)
        for _ in range(10):
            keep_busy(device)
            x.mul_(2).add_(c.rank)
            c.all_reduce(x, op="mean").wait()
            mean = sum(2 * value + rank for rank, value in enumerate(everybody)) / c.size
            everybody = [mean] * c.size
    settle(device)
    assert torch.allclose(x.cpu(), torch.full((PART,), everybody[0], dtype=torch.float64))


def other_operations(device: torch.device) -> None:
    """Other operations of torch.distributed, through the same late inputs and early reads."""
    rank, size = dist.get_rank(), dist.get_world_size()
    numel = PART * size
    total = sum(values(r, numel) for r in range(size))
    cut = [values(r, numel).chunk(size)[rank] for r in range(size)]

    def mine() -> torch.Tensor:
        return late(device, values(rank, numel), torch.float32)

    def empty(*shape: int) -> torch.Tensor:
        return torch.full(shape, float(WRONG), device=device)

    def waited(work: Any, result: torch.Tensor, right: torch.Tensor, what: str) -> None:
        work.wait()
        seen = result.clone()
        result.fill_(WRONG)
        check(device, seen.flatten(), right, what)

    with side_stream(device):
        x = mine()
        reduced = dist.reduce(x, dst=0, async_op=True)
        waited(reduced, x, total if rank == 0 else values(rank, numel), "reduce")
        x, lists = mine(), [empty(numel) for _ in range(size)]
        gathered = dist.gather(x, lists if rank == 0 else None, dst=0, async_op=True)
        gathered.wait()
        for r, got in enumerate(lists if rank == 0 else []):
            check(device, got.clone(), values(r, numel), "gather")
        x, part = mine(), empty(numel // size)
        parts = list(x.chunk(size)) if rank == 0 else None
        scattered = dist.scatter(part, parts, src=0, async_op=True)
        waited(scattered, part, values(0, numel).chunk(size)[rank], "scatter")
        x, everything = mine(), empty(numel)
        exchanged = dist.all_to_all_single(everything, x, async_op=True)
        waited(exchanged, everything, torch.cat(cut), "all_to_all")
        x, got = mine(), empty(numel)
        if size > 1:
            received = dist.irecv(got, src=(rank - 1) % size)
            sent = dist.isend(x, dst=(rank + 1) % size)
            waited(received, got, values((rank - 1) % size, numel), "send and recv")
            sent.wait()
        columns = late(device, values(rank, numel).view(size, -1), torch.float32).t()
        transposed = dist.all_reduce(columns, async_op=True)
        transposed.wait()
        check(device, columns.t().reshape(-1), total, "all_reduce of a strided tensor")


def seed_communicator(device: torch.device) -> None:
    """`comm_core.Communicator` on two streams of its own."""
    import comm_core

    rank, size = dist.get_rank(), dist.get_world_size()
    numel = PART * size
    total = sum(values(r, numel) for r in range(size))
    with comm_core.Communicator(2) as comm:
        for call in (comm.all_reduce, comm.all_reduce_rsag, comm.all_reduce_rb):
            with side_stream(device):
                tensors = [late(device, values(rank, numel), torch.float32) for _ in range(4)]
                handles = [call(tensor) for tensor in tensors]
            with side_stream(device):
                for handle, tensor in zip(handles, tensors, strict=True):
                    comm.sync_stream(handle)
                    check(device, tensor.clone(), total, call.__name__)
        with side_stream(device):
            shard = torch.full((numel // size,), float(WRONG), device=device)
            send = late(device, values(rank, numel), torch.float32)
            handle = comm.reduce_scatter(send, shard)
            comm.sync_stream(handle)
            check(device, shard.clone(), total.chunk(size)[rank], "reduce_scatter")
            tensor = late(device, values(rank, numel), torch.float32)
            comm.sync_stream(comm.bcast(tensor, size - 1))
            check(device, tensor.clone(), values(size - 1, numel), "bcast")
