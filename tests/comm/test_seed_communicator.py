"""Every collective of the seeds' `Communicator(nstreams)` gives what arithmetic says."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
import torch.distributed as dist

from tests.comm.seed import (
    DTYPES,
    Communicator,
    World,
    error,
    module,
    numels,
    on_ranks,
    run,
    same,
    total,
    values,
)


@on_ranks()
def test_every_collective_in_every_dtype_and_size(comm: Communicator) -> None:
    size, rank = comm.size, comm.rank
    for dtype, numel in itertools.product(DTYPES, numels(comm.size)):
        mine, summed = values(rank, numel).to(dtype), total(size, numel)
        for name in ("allReduce", "allReduceRSAG", "allReduceRB"):
            tensor = mine.clone()
            comm.syncStream(getattr(comm, name)(tensor))
            same(tensor, summed)
        for root in range(size):
            tensor = mine.clone()
            comm.syncStream(comm.reduce(tensor, root))
            if rank == root:
                same(tensor, summed)
            tensor = mine.clone()
            comm.syncStream(comm.bcast(tensor, root))
            same(tensor, values(root, numel))
        send = values(rank, numel * size).to(dtype)
        shard = torch.full((numel,), 99).to(dtype)
        comm.syncStream(comm.reduceScatter(send, shard))
        same(shard, total(size, numel * size)[rank * numel : (rank + 1) * numel])
        same(send, values(rank, numel * size))
        everything = torch.full((numel * size,), 99).to(dtype)
        comm.syncStream(comm.allGather(mine, everything))
        same(everything, torch.cat([values(r, numel) for r in range(size)]))


@on_ranks()
def test_sendrecv_exchanges_with_every_peer_and_oneself(comm: Communicator) -> None:
    for dtype, numel in itertools.product(DTYPES, numels(comm.size)):
        for peer in range(comm.size):
            recv = torch.full((numel,), 99).to(dtype)
            handle = comm.sendrecv(values(comm.rank, numel, peer).to(dtype), recv, peer)
            comm.syncStream(handle)
            same(recv, values(peer, numel, comm.rank))


@on_ranks(3, nstreams=[1])
def test_sendrecv_concerns_two_ranks_and_directions_may_differ_in_size(
    comm: Communicator,
) -> None:
    if comm.rank < 2:
        recv = torch.zeros(3 if comm.rank == 0 else 5)
        comm.sendrecv(values(comm.rank, 8 - recv.numel()).float(), recv, 1 - comm.rank)
        comm.synchronize()
        same(recv, values(1 - comm.rank, recv.numel()))
    tensor = torch.ones(4)
    comm.allReduce(tensor)  # on the same stream everywhere, though rank 2 made fewer calls
    comm.allReduce(tensor)
    comm.synchronize()
    assert tensor.tolist() == [9.0] * 4


@on_ranks(3)
def test_a_pair_does_not_shift_the_turns_of_the_others(comm: Communicator) -> None:
    if comm.rank < 2:
        comm.sendrecv(torch.ones(2), torch.zeros(2), 1 - comm.rank)
    tensors = [torch.full((4,), float(i)) for i in range(5)]
    for tensor in tensors:
        comm.allReduce(tensor)
    comm.synchronize()
    assert [t[0].item() for t in tensors] == [3.0 * i for i in range(5)]


def _multi_bcast(comm: Communicator) -> list[int]:
    large, ran = module.MULTI_BCAST_NUMEL, []
    sizes = [large, 5, large + 1, large - 1, large, large]
    tensors = [torch.full((n,), float(i + 1)) for i, n in enumerate(sizes)]
    outs = [torch.zeros(n) for n in sizes]

    def op(tensor: torch.Tensor, out: torch.Tensor) -> None:
        ran.append(int(tensor[0]) - 1)
        out.copy_(tensor * 10 + comm.rank)  # tells who computed it

    comm.syncStream(comm.multiBcast(tensors, outs, op))
    owners = iter(i % comm.size for i in range(4))
    for i, (n, out) in enumerate(zip(sizes, outs, strict=True)):
        by = next(owners) if n >= large else comm.rank
        same(out, torch.full((n,), 10.0 * (i + 1) + by))
    comm.syncStream(comm.multiBcast([], [], op))
    assert "2 outs" in error(ValueError, comm.multiBcast, tensors[:1], outs[:2], op)
    return ran


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_multi_bcast_shares_large_tensors_and_repeats_small_ones(world: World, world_size: int):
    ran = run(world(world_size), _multi_bcast)
    for rank, done in enumerate(ran):
        owned = [i for turn, i in enumerate([0, 2, 4, 5]) if turn % world_size == rank]
        assert done == sorted([1, 3, *owned])


# Layouts and dtypes ---------------------------------------------------------------------------


@on_ranks()
def test_any_strided_layout_works_in_logical_order(comm: Communicator) -> None:
    size, rank = comm.size, comm.rank
    summed = total(size, 24)
    base = values(rank, 24).float()
    for name in ("allReduce", "allReduceRSAG", "allReduceRB"):
        call = getattr(comm, name)
        turned = base.view(4, 6).t().contiguous().t()  # ranks differ in strides below
        tensor = turned if rank % 2 else base.clone().view(4, 6)
        comm.syncStream(call(tensor))
        same(tensor, summed)
        gaps = torch.zeros(24, 2)
        gaps[:, 0] = base
        comm.syncStream(call(gaps[:, 0]))
        same(gaps[:, 0], summed)
        assert not gaps[:, 1].any()
        image = base.view(1, 2, 3, 4).clone().to(memory_format=torch.channels_last)
        comm.syncStream(call(image))
        same(image, summed)
        scalar = torch.tensor(float(rank + 1))
        comm.syncStream(call(scalar))
        assert scalar.item() == size * (size + 1) / 2
        leaf = torch.nn.Parameter(base.clone()[: size + 1])
        comm.syncStream(call(leaf))
        same(leaf.detach(), summed[: size + 1])
    wide = torch.full((2, 3), float(rank)).expand(4, 2, 3)[:, :, 1:]  # a source may be expanded
    gathered = torch.zeros(16, size)
    comm.syncStream(comm.allGather(wide, gathered.t()))
    same(gathered, torch.arange(float(size)).repeat(16, 1))
    shards = torch.zeros(2, 6).t()
    comm.syncStream(comm.reduceScatter(values(rank, 12 * size).float(), shards))
    same(shards, total(size, 12 * size)[12 * rank : 12 * rank + 12])
    peer = rank ^ 1
    if peer < size:
        received = torch.zeros(6, 4).t()
        comm.syncStream(comm.sendrecv(base.view(4, 6), received, peer))
        same(received, values(peer, 24))


@on_ranks(nstreams=[1])
def test_complex_sums_and_bool_is_or(comm: Communicator) -> None:
    size, rank = comm.size, comm.rank
    for dtype in (torch.complex64, torch.complex128):
        numbers = (values(rank, 7) + 1j * values(rank, 7, 1)).to(dtype)
        summed = total(size, 7) + 1j * total(size, 7, 1)
        tensor = numbers.clone()
        comm.syncStream(comm.allReduce(tensor))
        same(tensor, summed)
        tensor = numbers.clone().conj()  # lazily conjugated: the memory holds the other sign
        comm.syncStream(comm.allReduceRSAG(tensor))
        same(tensor.resolve_conj(), summed.conj())
    for name in ("allReduce", "allReduceRSAG", "allReduceRB"):
        flags = torch.arange(9) % (rank + 2) == 0
        wanted = torch.stack([torch.arange(9) % (r + 2) == 0 for r in range(size)]).any(0)
        comm.syncStream(getattr(comm, name)(flags))
        assert flags.view(torch.uint8).tolist() == wanted.view(torch.uint8).tolist()
    flags, mine = torch.ones(2 * size, dtype=torch.bool), torch.zeros(2, dtype=torch.bool)
    comm.syncStream(comm.reduceScatter(flags, mine))
    assert mine.view(torch.uint8).tolist() == [1, 1]


@on_ranks(2, nstreams=[1])
def test_fact_r12_every_dtype_is_right_or_an_error(comm: Communicator) -> None:
    # R12, D10: what a backend lacks is an error, never a tensor left as it was.
    everything = [d for d in vars(torch).values() if isinstance(d, torch.dtype)]
    tried = 0
    for dtype in sorted(set(everything), key=str):
        try:
            mine, summed = values(comm.rank, 5).to(dtype), total(comm.size, 5).to(dtype)
        except (RuntimeError, TypeError, NotImplementedError):
            continue  # torch itself has no values of it
        tried += 1
        for name in ("allReduce", "allReduceRSAG", "allReduceRB", "bcast"):
            tensor = mine.clone()
            args, wanted = ((0,), values(0, 5).to(dtype)) if name == "bcast" else ((), summed)
            try:
                comm.syncStream(getattr(comm, name)(tensor, *args))
            except (RuntimeError, TypeError, ValueError):
                continue
            assert torch.equal(tensor.to(torch.complex128), wanted.to(torch.complex128)), (
                f"{name} of {dtype}: {tensor}"
            )
    assert tried >= 12


# Facts of the seed systems (seed-features, section 10) ------------------------------------------


@pytest.mark.parametrize(("numel", "wanted"), [(15, 16), (16, 16), (17, 20), (0, 0), (4, 4)])
def test_fact_r3_padding_to_a_multiple_of_four_ranks(numel: int, wanted: int):
    from comm_core.collectives import padded_numel

    assert padded_numel(numel, 4) == wanted


@on_ranks()
def test_fact_r6_reduce_scatter_and_all_gather_equal_an_all_reduce(comm: Communicator) -> None:
    for numel in range(1, 2 * comm.size + 2):
        generator = torch.Generator().manual_seed(10 * numel + comm.rank)
        one = torch.randn(numel, generator=generator)
        two = one.clone()
        comm.allReduce(one)
        comm.allReduceRSAG(two)
        comm.synchronize()
        torch.testing.assert_close(one, two)


# Errors ---------------------------------------------------------------------------------------


@on_ranks()
def test_mistakes_are_one_clear_sentence(comm: Communicator) -> None:
    x, size = torch.ones(4), comm.size
    for root in (-1, size):
        assert f"{root} is no rank" in error(ValueError, comm.reduce, x, root)
        assert f"{root} is no rank" in error(ValueError, comm.bcast, x, root)
        assert f"{root} is no rank" in error(ValueError, comm.sendrecv, x, x.clone(), root)
    assert "int" in error(TypeError, comm.bcast, x, 0.0)
    for call in (comm.allReduce, comm.allReduceRSAG, comm.allReduceRB):
        assert "list" in error(TypeError, call, [1.0])
        assert "layout" in error(ValueError, call, x.to_sparse())
        assert "meta" in error(ValueError, call, x.to("meta"))
        assert "expanded" in error(ValueError, call, torch.ones(1).expand(4))
    wrong = torch.ones(4 * size + 1)
    assert "4 of recv" in error(ValueError, comm.reduceScatter, wrong, x)
    assert "4 of send" in error(ValueError, comm.allGather, x, wrong)
    for call in (comm.reduceScatter, comm.allGather):
        assert "one dtype" in error(TypeError, call, x, x.double())
    assert "one dtype" in error(TypeError, comm.sendrecv, x, x.int(), 0)
    assert "oneself" in error(ValueError, comm.sendrecv, x, torch.ones(5), comm.rank)
    for bad in (0, -2):
        assert "at least 1" in error(ValueError, Communicator, bad)
    for bad in (1.0, "2", None, True):
        assert "int" in error(TypeError, Communicator, bad)
    comm.syncStream(comm.allReduce(x))  # all of that has harmed nobody
    same(x, torch.full((4,), float(size)))


@on_ranks(2, nstreams=[1, 2])
def test_a_failure_in_the_background_is_raised_by_whoever_waits(comm: Communicator) -> None:
    # A dtype that Gloo lacks, in an operation that the stream's thread runs.
    lacking = torch.ones(2 * comm.size + 1, dtype=torch.int16)
    good = torch.ones(5)
    bad = comm.allReduceRSAG(lacking)
    fine = comm.allReduce(good)
    for _ in range(2):
        assert "allReduceRSAG failed" in error(RuntimeError, comm.syncStream, bad)
    comm.syncStream(fine)
    same(good, torch.full((5,), float(comm.size)))
    comm.synchronize()  # reported already
    bad = comm.allReduceRSAG(lacking)
    assert "allReduceRSAG failed" in error(RuntimeError, comm.synchronize)
    comm.synchronize()
    assert "allReduceRSAG failed" in error(RuntimeError, comm.syncStream, bad)
    assert lacking.tolist() == [1] * (2 * comm.size + 1)


def _timeout() -> float:
    comm = Communicator(2, timeout_s=0.5)
    began = time.perf_counter()
    if comm.rank == 0:
        for handle in (comm.allReduce(torch.ones(3)), comm.allReduceRSAG(torch.ones(7))):
            with pytest.raises(RuntimeError, match=r"allReduce(RSAG)? failed"):
                comm.syncStream(handle)
    comm.destroy()
    return time.perf_counter() - began


def test_a_peer_that_does_not_call_is_an_error_after_the_timeout(world: World):
    assert max(world(2).run(_timeout)) < 10


# CUDA -------------------------------------------------------------------------------------------


def _cuda() -> None:
    torch.cuda.set_device(0)
    group = dist.new_group(backend="nccl")
    comm = Communicator(2, group)
    assert "cpu" in error(ValueError, comm.allReduce, torch.ones(3))
    tensor = torch.zeros(1 << 20, device="cuda")
    torch.cuda.synchronize()
    began = time.perf_counter()
    for i in range(4):
        torch.cuda._sleep(200_000_000)  # D11: the producer is late
        tensor.fill_(i + 1)
        calls = (comm.allReduce, comm.allReduceRSAG, comm.allReduceRB)
        handle = calls[i](tensor) if i < 3 else comm.sendrecv(tensor.clone(), tensor, 0)
        assert comm.getNumOfFreeStreams() < 2
        comm.syncStream(handle)
        tensor.mul_(2)  # the consumer waits for the communication
    assert time.perf_counter() - began < 0.2  # D15: the host has waited for nothing
    torch.cuda.synchronize()
    same(tensor.cpu(), torch.full((1 << 20,), 8.0))
    assert comm.getNumOfFreeStreams() == 2
    comm.syncStream(comm.neighbor_all_reduce(tensor, [], []))
    part = torch.empty_like(tensor)
    comm.syncStream(comm.allGather(tensor.view(1024, 1024).t(), part))
    comm.syncStream(comm.reduceScatter(part, tensor))
    comm.barrier()
    same(tensor.cpu(), torch.full((1 << 20,), 8.0))
    comm.reload()
    comm.destroy()
    comm.destroy()


@pytest.mark.skipif(
    not (torch.cuda.is_available() and dist.is_nccl_available()), reason="needs CUDA and NCCL"
)
def test_cuda_orders_streams_both_ways_and_never_blocks_the_host(world: World):
    world(1).run(_cuda)
