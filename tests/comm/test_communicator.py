"""The communicator of `dear`: results, what is refused, channels, works and their times."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ReduceOp

import comm_core
import dear
from dear.comm import runtime
from dear.comm.communicator import Batch, Communicator, Work, padded
from dear.errors import UserError
from tests.comm.operations import COMPLEX, FLOATS, Call, cases, check, same, strided
from tests.comm.worlds import on_ranks
from tests.contract.loops import message, mine, steps, wrap

OPS = {ReduceOp.AVG: "mean", ReduceOp.SUM: "sum", ReduceOp.MIN: "min", ReduceOp.MAX: "max"}


def _ops(dtype: torch.dtype) -> list[Any]:
    """Reductions that have a meaning for the type."""
    return list(OPS)[0 if dtype in FLOATS + COMPLEX else 1 : 2 if dtype in COMPLEX else 4]


def _shared() -> Any:
    return contextlib.nullcontext(runtime.communicator())


def _halves(c: Communicator, call: Call, op: str) -> Callable[[], None]:
    """A reduce-scatter and an all-gather of a padded tensor are an all-reduce."""
    data = call.out.new_zeros(padded(call.out.numel(), c.size))
    data[: call.out.numel()] = call.out
    shard = torch.empty_like(data[: data.numel() // c.size])
    c.reduce_scatter(shard, data, op=op).wait()
    data.fill_(True)
    last = c.all_gather(data, shard)

    def wait() -> None:
        last.wait()
        call.out.copy_(data[: call.out.numel()])

    return wait


def _exchange(c: Communicator, call: Call) -> Callable[[], None]:
    if call.peer == c.rank:
        return lambda: call.out.copy_(call.mine)
    return c.exchange(call.out, call.mine, peer=call.peer).wait


@on_ranks(_shared)
def test_operations(c: Communicator) -> None:
    interface = {
        "all_reduce": lambda k: c.all_reduce(k.out, op=OPS[k.op]).wait,
        "all_reduce halves": lambda k: _halves(c, k, OPS[k.op]),
        "reduce": lambda k: c.reduce(k.out, root=k.root, op=OPS[k.op]).wait,
        "broadcast": lambda k: c.broadcast(k.out, root=k.root).wait,
        "reduce_scatter tensor": lambda k: c.reduce_scatter(k.out, k.mine, op=OPS[k.op]).wait,
        "all_gather tensor": lambda k: c.all_gather(k.out, k.mine).wait,
        "exchange": lambda k: _exchange(c, k),
    }
    chosen = cases(c.size, list(interface), ops=_ops, gaps=lambda name: False)
    check(interface, chosen, at_once=20)


@on_ranks(_shared, 2)
def test_small_transfers_that_follow_each_other_all_start(c: Communicator) -> None:
    parts = [torch.ones(3), torch.ones(4, 2).t(), torch.ones(2).half(), torch.ones(2000)]
    parts += [torch.ones(1) for _ in range(100)]
    total, batch = torch.ones(1), Batch(c)
    c.follow(True)
    for part in parts:
        batch.start(part.mul_(1 + 2 * c.rank))
    asked, end_s = c.all_reduce(total, op="sum"), c.clock() + 60
    while not asked.done():  # nobody waits for it
        assert c.clock() < end_s
        c.pause(1e-3)
    batch.wait()
    c.follow(False)
    assert total.item() == 2 and all(bool((part == 2).all()) for part in parts)


@on_ranks(_shared, 2)
def test_operations_of_a_batch_have_its_priority_and_later_ones_have_not(c: Communicator) -> None:
    batch = Batch(c, priority=2)
    batch.start(torch.ones(3))
    batch.wait()
    c.all_reduce(torch.ones(3), op="sum").wait()
    assert [event["priority"] for event in comm_core.events()[-2:]] == [2, 0]


@on_ranks(_shared, 2)
def test_mean_in_half_precision_overflows_no_sooner_than_its_inputs(c: Communicator) -> None:
    tensor = torch.full((3,), 49152.0, dtype=torch.float16)
    c.all_reduce(tensor, op="mean").wait()
    assert tensor.max().item() == 49152


@on_ranks(_shared, 2)
def test_dense_tensors_of_any_layout_are_reduced_in_place(c: Communicator) -> None:
    base = torch.arange(120.0).view(2, 3, 4, 5)
    for change in (
        lambda t: t.contiguous(memory_format=torch.channels_last),
        lambda t: t.contiguous().transpose(1, 3),
        lambda t: t[1, 1, 1, 1].clone(),
    ):
        tensor = change(base + c.rank)
        c.all_reduce(tensor, op="sum").wait()
        same(tensor, change(base * c.size + sum(range(c.size))))
        tensor = change(base + c.rank)
        c.broadcast(tensor, root=1).wait()
        same(tensor, change(base + 1))


@on_ranks(_shared, 1, 2, 3)
def test_wrong_calls_are_user_errors(c: Communicator) -> None:
    gloo = Communicator(dist.new_group(backend="gloo"))
    ones, two, three, gaps = torch.ones(2 * c.size), torch.ones(2), torch.ones(3), strided
    for word, call in [
        ("sum", lambda: c.all_reduce(ones.long(), op="mean")),
        ("sum", lambda: c.reduce_scatter(two.long(), ones.long(), op="mean")),
        ("elements", lambda: c.reduce_scatter(three, ones, op="sum")),
        ("elements", lambda: c.all_gather(ones, three)),
        ("root", lambda: c.broadcast(ones, root=c.size)),
        ("root", lambda: c.broadcast(ones, root=-1)),
        ("root", lambda: c.broadcast_object("value", root=c.size)),
        ("channel", lambda: c.all_reduce(ones, op="sum", channel=1)),
        ("channel", lambda: c.all_gather(ones, two, channel=-1)),
        ("priorit", lambda: gloo.all_reduce(ones, op="sum", priority=1)),
        ("strides", lambda: c.all_reduce(gaps(ones), op="sum")),
        ("strides", lambda: c.broadcast(gaps(ones), root=0)),
        ("strides", lambda: c.all_reduce(torch.ones(1).expand(4), op="sum")),
        ("sparse", lambda: c.broadcast(ones.to_sparse(), root=0)),
    ]:
        assert word in message(call), word


@on_ranks(_shared, 2)
def test_halves_of_an_all_reduce_never_go_wrong_silently_on_tensors_with_gaps(
    c: Communicator,
) -> None:
    whole, part = torch.arange(2.0 * c.size), torch.tensor([1.0, 2.0])
    shard, everything = whole.chunk(c.size)[c.rank] * c.size, part.repeat(c.size)
    scatter = {"op": "sum"}
    for call, output, given, op, wanted in [
        (c.reduce_scatter, strided(part), whole.clone(), scatter, shard),
        (c.reduce_scatter, part * 0, strided(whole), scatter, shard),
        (c.all_gather, strided(whole), part, {}, everything),
        (c.all_gather, whole * 0, strided(part), {}, everything),
    ]:
        with contextlib.suppress(RuntimeError, ValueError, UserError):
            call(output, given, **op).wait()
            same(output, wanted)


@on_ranks(_shared, 2)
def test_channels_are_independent_and_work_tells_when_it_is_done(_: Communicator) -> None:
    c = Communicator(dist.group.WORLD, channels=2)
    data, signal = torch.full((5,), c.rank + 1.0), torch.ones(1)
    ended, late, waited = threading.Event(), threading.Event(), c.blocked_s

    def start() -> Work:
        work = c.all_reduce(data, op="sum")
        work.on_complete(ended.set)
        return work

    work = start() if c.rank == 0 else None
    # Rank 1 starts that one after this one.
    assert work is None or not (work.done() or ended.is_set())
    c.all_reduce(signal, op="sum", channel=1).wait()
    work = work or start()
    work.wait()
    work.on_complete(late.set)
    assert work.done() and ended.wait(20) and late.wait(20)
    assert data.tolist() == [3.0] * 5
    assert (work.nbytes, c.bytes_sent) == (20, 24)
    assert c.blocked_s > waited


@on_ranks(_shared, 1, 2, 3)
def test_bytes_sent_counts_the_inputs(_: Communicator) -> None:
    c = Communicator(dist.group.WORLD)
    part, whole, sent = torch.ones(2), torch.ones(2 * c.size), 0
    for call, nbytes in [
        (lambda: c.all_reduce(whole, op="sum"), 8 * c.size),
        (lambda: c.reduce_scatter(part, whole, op="sum"), 8 * c.size),
        (lambda: c.all_gather(whole, part), 8),
        (lambda: c.broadcast(part, root=0), 8),
    ]:
        call().wait()
        sent += nbytes
        assert c.bytes_sent == sent


@on_ranks(_shared, 2)
def test_times_are_in_order_or_a_user_error(_: Communicator) -> None:
    for backend in ("comm_core", "gloo"):
        c = Communicator(dist.new_group(backend=backend), channels=2, record_times=True)
        for channel in (0, 1, 0, 1):
            began = c.clock()
            works = [c.all_reduce(torch.ones(50), op="sum", channel=channel) for _ in range(5)]
            for work in works:
                work.wait()
            for times in map(Work.times, works):
                assert began <= times.enqueued_s <= times.started_s <= times.finished_s <= c.clock()
    work = Communicator(dist.new_group(backend="gloo")).all_reduce(torch.ones(3), op="sum")
    work.wait()
    assert "record_times" in message(work.times)


@on_ranks(_shared, 1, 2, 3)
def test_objects_are_broadcast_and_gathered(c: Communicator) -> None:
    each = [{"rank": rank, "text": "x" * rank} for rank in range(c.size)]
    mine, last = each[c.rank], c.size - 1
    assert (c.broadcast_object(mine), c.broadcast_object(mine, root=last)) == (each[0], each[-1])
    assert c.gather_objects(mine) == each


@on_ranks(_shared, 3)
def test_a_subgroup_counts_its_own_ranks(job: Communicator) -> None:
    group = dist.new_group([1, 2])
    if job.rank == 0:
        return
    c = Communicator(group)
    value = torch.tensor([10.0 * c.rank])
    c.broadcast(value, root=1).wait()
    assert (c.rank, c.size, value.item()) == (job.rank - 1, 2, 10.0)
    assert c.broadcast_object(c.rank, root=1) == 1


def _model_and_adam(rank: int, wrapped: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 / (1 + rank))
    steps(model, optimizer, mine(), range(rank + 1))
    if wrapped:
        wrap(optimizer, model, "dear")
        steps(model, optimizer, mine(), range(1))
    return model, optimizer


@on_ranks(_shared, 3)
def test_broadcasts_make_all_ranks_equal_to_the_root(c: Communicator) -> None:
    for wrapped in (False, True):
        model, optimizer = _model_and_adam(dear.rank(), wrapped)
        root = (model.state_dict(), optimizer.state_dict(), list(model[0].parameters()))
        values, state, _ = c.broadcast_object(root, root=1)
        dear.broadcast_parameters(model.state_dict(), root_rank=1)
        dear.broadcast_optimizer_state(optimizer, root_rank=1)
        mine_now = optimizer.state_dict()
        for name, value in values.items():
            assert torch.equal(value, model.state_dict()[name]), name
        assert mine_now["param_groups"] == state["param_groups"]
        assert mine_now["state"].keys() == state["state"].keys()
        for index, held in state["state"].items():
            for key, value in held.items():
                assert torch.equal(value, mine_now["state"][index][key]), key
    other = nn.Linear(2, 2)
    dear.broadcast_parameters(other.named_parameters(), root_rank=1)
    weights = c.gather_objects(other.weight.detach())
    assert all(torch.equal(weight, weights[1]) for weight in weights)
    assert "root" in message(lambda: dear.broadcast_parameters(other.state_dict(), 7))


@on_ranks(_shared, 3)
def test_allreduce_returns_the_mean_or_the_sum(c: Communicator) -> None:
    given = torch.tensor([1.0, 2.0], requires_grad=True) * (c.rank + 1)
    whole = torch.tensor([c.rank, 1])
    assert dear.allreduce(given).tolist() == [2.0, 4.0]
    assert dear.allreduce(given, average=False).tolist() == [6.0, 12.0]
    assert given.tolist() == [c.rank + 1.0, 2.0 * c.rank + 2]
    assert dear.allreduce(whole, average=False).tolist() == [3, 3]
    assert message(lambda: dear.allreduce(whole))


@on_ranks(_shared, 3)
def test_of_a_symmetric_matrix_only_the_upper_triangle_travels(c: Communicator) -> None:
    upper = torch.arange(9.0).view(3, 3).triu() + c.rank
    whole = upper.triu() + upper.triu(1).T
    before = runtime.communicator().bytes_sent
    mean = dear.allreduce(whole, symmetric=True)
    assert runtime.communicator().bytes_sent - before == 6 * whole.element_size()
    assert mean.equal(dear.allreduce(whole))
    assert dear.allreduce(upper, average=False, symmetric=True).equal(
        dear.allreduce(whole, average=False)
    )
    assert "must be a matrix [n, n], got [3]" in message(
        lambda: dear.allreduce(torch.ones(3), symmetric=True)
    )


def _alone() -> None:
    c = Communicator(dist.new_group(timeout=timedelta(seconds=0.5)))
    if c.rank == 0:
        work = c.all_reduce(torch.ones(4), op="sum")
        with pytest.raises(RuntimeError):
            work.wait()


def test_a_collective_whose_peer_never_comes_raises_in_time(own_pool):
    own_pool(2).run(_alone)  # its ranks are out of step afterwards
