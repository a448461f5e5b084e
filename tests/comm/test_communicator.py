"""Collectives give what arithmetic says, for every world, size, dtype and layout, or they raise."""

from __future__ import annotations

import itertools
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dear
from dear.comm import runtime
from dear.comm.communicator import Communicator, Work
from dear.errors import UserError
from tests.contract.loops import message, mine, steps, wrap
from tests.ranks import RankPool

# Of these a backend may lack some; then it must say so, not leave the tensor as it was.
_OPTIONAL = (torch.float16, torch.bfloat16, torch.uint8)
_DTYPES = (torch.float32, torch.float64, torch.int32, torch.int64, *_OPTIONAL)
_TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 2e-2}
_OPS = ("mean", "sum", "min", "max")

worlds = pytest.mark.parametrize("world_size", [1, 2, 3])


def _values(rank: int, numel: int) -> torch.Tensor:
    """A rank's tensor: small whole numbers, different on all ranks and at neighbouring places."""
    return (torch.arange(numel, dtype=torch.float64) * (rank + 2)) % 5 + 3 * rank + 1


def _reduced(op: str, world_size: int, numel: int) -> torch.Tensor:
    stacked = torch.stack([_values(rank, numel) for rank in range(world_size)])
    return {"mean": stacked.mean, "sum": stacked.sum, "min": stacked.amin, "max": stacked.amax}[op](
        dim=0
    )


def _padded(values: torch.Tensor, world_size: int) -> torch.Tensor:
    tail = -(-values.numel() // world_size) * world_size - values.numel()
    return torch.cat([values, values.new_zeros(tail)])


def _all_reduce(c: Communicator, op: str, dtype: torch.dtype, numel: int) -> tuple:
    tensor = _values(c.rank, numel).to(dtype)
    c.all_reduce(tensor, op=op).wait()
    return tensor, _reduced(op, c.size, numel)


def _scatter_then_gather(c: Communicator, op: str, dtype: torch.dtype, numel: int) -> tuple:
    data = _padded(_values(c.rank, numel).to(dtype), c.size)
    shard = torch.full((data.numel() // c.size,), 99, dtype=dtype)
    c.reduce_scatter(shard, data, op=op).wait()
    wanted = _padded(_reduced(op, c.size, numel), c.size).chunk(c.size)[c.rank]
    if not _close(shard, wanted):
        return shard, wanted
    data.fill_(99)
    c.all_gather(data, shard).wait()
    return data[:numel], _reduced(op, c.size, numel)


def _all_gather(c: Communicator, op: str, dtype: torch.dtype, numel: int) -> tuple:
    output = torch.full((c.size * numel,), 99, dtype=dtype)
    c.all_gather(output, _values(c.rank, numel).to(dtype)).wait()
    return output, torch.cat([_values(rank, numel) for rank in range(c.size)])


def _broadcast(c: Communicator, op: str, dtype: torch.dtype, numel: int) -> tuple:
    tensor = _values(c.rank, numel).to(dtype)
    c.broadcast(tensor, root=c.size - 1).wait()
    return tensor, _values(c.size - 1, numel)


def _close(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    tolerance = _TOLERANCE.get(got.dtype, 1e-6)
    return got.shape == wanted.shape and torch.allclose(got.double(), wanted, rtol=tolerance)


def _wrong_results(collective: Any, ops: tuple[str, ...]) -> list[str]:
    c, wrong = runtime.communicator(), []
    for op, dtype, numel in itertools.product(ops, _DTYPES, range(1, 2 * c.size + 2)):
        if op == "mean" and not dtype.is_floating_point:
            continue
        try:
            got, wanted = collective(c, op, dtype, numel)
        except (RuntimeError, TypeError, ValueError) as error:
            if dtype not in _OPTIONAL:
                wrong.append(f"{op} {dtype} {numel}: {error}")
            continue
        if got.dtype != dtype or not _close(got, wanted):
            wrong.append(f"{op} {dtype} {numel}: got {got.tolist()}, not {wanted.tolist()}")
    return wrong


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_all_reduce_reduces(world, world_size):
    assert world(world_size).run(_wrong_results, _all_reduce, _OPS) == [[]] * world_size


@worlds
def test_reduce_scatter_and_all_gather_of_a_padded_tensor_are_an_all_reduce(world, world_size):
    assert world(world_size).run(_wrong_results, _scatter_then_gather, _OPS) == [[]] * world_size


@worlds
@pytest.mark.parametrize("collective", [_all_gather, _broadcast])
def test_all_gather_and_broadcast_copy(world, world_size, collective):
    assert world(world_size).run(_wrong_results, collective, ("copy",)) == [[]] * world_size


def _half_precision_mean() -> float:
    tensor = torch.full((3,), 49152.0, dtype=torch.float16)
    runtime.communicator().all_reduce(tensor, op="mean").wait()
    return tensor.max().item()


def test_mean_in_half_precision_overflows_no_sooner_than_its_inputs(world):
    assert world(2).run(_half_precision_mean) == [49152.0] * 2


def _other_layouts() -> list[str]:
    c, wrong = runtime.communicator(), []
    last = torch.channels_last
    base = torch.arange(120.0).view(2, 3, 4, 5)
    for name, change in {
        "channels_last": lambda t: t.contiguous(memory_format=last),
        "transposed": lambda t: t.contiguous().transpose(1, 3),
        "scalar": lambda t: t[1, 1, 1, 1].clone(),
    }.items():
        reduced = change(base + c.rank)
        c.all_reduce(reduced, op="sum").wait()
        if not torch.equal(reduced, change(base * c.size + sum(range(c.size)))):
            wrong.append(f"all_reduce {name}")
        copied = change(base + c.rank)
        c.broadcast(copied, root=1).wait()
        if not torch.equal(copied, change(base + 1)):
            wrong.append(f"broadcast {name}")
    return wrong


def test_dense_tensors_of_any_layout_are_reduced_in_place(world):
    assert world(2).run(_other_layouts) == [[], []]


def _messages() -> dict[str, str]:
    """What each wrong call says; an empty text where it raised no UserError."""
    c = runtime.communicator()
    gloo = Communicator(dist.new_group(backend="gloo"))
    ones = torch.ones(2 * c.size)
    gaps = torch.ones(4, 6)[:, ::2]
    calls = {
        "mean of integers": lambda: c.all_reduce(ones.long(), op="mean"),
        "scattered mean of integers": lambda: c.reduce_scatter(
            torch.ones(2).long(), ones.long(), op="mean"
        ),
        "scatter size": lambda: c.reduce_scatter(torch.ones(3), ones, op="sum"),
        "gather size": lambda: c.all_gather(ones, torch.ones(3)),
        "root": lambda: c.broadcast(ones, root=c.size),
        "negative root": lambda: c.broadcast(ones, root=-1),
        "object root": lambda: c.broadcast_object("value", root=c.size),
        "channel": lambda: c.all_reduce(ones, op="sum", channel=1),
        "negative channel": lambda: c.all_gather(ones, torch.ones(2), channel=-1),
        "priority": lambda: gloo.all_reduce(ones, op="sum", priority=1),
        "gaps": lambda: c.all_reduce(gaps, op="sum"),
        "gaps in broadcast": lambda: c.broadcast(gaps, root=0),
        "overlap": lambda: c.all_reduce(torch.ones(1).expand(4), op="sum"),
        "sparse": lambda: c.broadcast(ones.to_sparse(), root=0),
    }
    return {name: message(call) for name, call in calls.items()}


@worlds
def test_wrong_calls_are_user_errors(world, world_size):
    words = {
        "mean of integers": "sum",
        "scattered mean of integers": "sum",
        "scatter size": "elements",
        "gather size": "elements",
        "root": "root",
        "negative root": "root",
        "object root": "root",
        "channel": "channel",
        "negative channel": "channel",
        "priority": "priorit",
        "gaps": "strides",
        "gaps in broadcast": "strides",
        "overlap": "strides",
        "sparse": "sparse",
    }
    for said in world(world_size).run(_messages):
        assert {name: word for name, word in words.items() if word not in said[name]} == {}


def _with_gaps(values: torch.Tensor) -> torch.Tensor:
    return torch.stack([values, values], dim=1)[:, 0]


def _halves_with_gaps() -> list[str]:
    """Which of reduce-scatter and all-gather give wrong results, without a word, on gaps."""
    c, wrong = runtime.communicator(), []
    whole, part = torch.arange(2.0 * c.size), torch.tensor([1.0, 2.0])
    mine, all_parts = whole.chunk(c.size)[c.rank] * c.size, part.repeat(c.size)
    scatter, gather = {"op": "sum"}, {}
    calls = {
        "scatter into": (c.reduce_scatter, _with_gaps(part), whole.clone(), scatter, mine),
        "scatter from": (c.reduce_scatter, part * 0, _with_gaps(whole), scatter, mine),
        "gather into": (c.all_gather, _with_gaps(whole), part, gather, all_parts),
        "gather from": (c.all_gather, whole * 0, _with_gaps(part), gather, all_parts),
    }
    for name, (call, output, given, op, wanted) in calls.items():
        try:
            call(output, given, **op).wait()
        except (RuntimeError, ValueError, UserError):
            continue
        if not torch.equal(output, wanted):
            wrong.append(name)
    return wrong


def test_halves_of_an_all_reduce_never_go_wrong_silently_on_tensors_with_gaps(world):
    assert world(2).run(_halves_with_gaps) == [[], []]


def _two_channels() -> dict[str, Any]:
    c = Communicator(dist.group.WORLD, channels=2)
    data, signal = torch.full((5,), c.rank + 1.0), torch.ones(1)
    ended, waited = threading.Event(), c.blocked_s
    if c.rank == 0:
        work = c.all_reduce(data, op="sum")
        work.on_complete(ended.set)
        early = work.done() or ended.is_set()  # rank 1 starts this collective after the next
        c.all_reduce(signal, op="sum", channel=1).wait()
    else:
        c.all_reduce(signal, op="sum", channel=1).wait()
        early = False
        work = c.all_reduce(data, op="sum")
        work.on_complete(ended.set)
    work.wait()
    late = threading.Event()
    work.on_complete(late.set)
    return {
        "early": early,
        "done": work.done(),
        "called": ended.wait(5) and late.wait(5),
        "data": data.tolist(),
        "nbytes": work.nbytes,
        "blocked": c.blocked_s > waited,
        "sent": c.bytes_sent,
    }


def test_channels_are_independent_and_work_tells_when_it_is_done(world):
    for seen in world(2).run(_two_channels):
        assert not seen["early"]
        assert seen["done"] and seen["called"] and seen["blocked"]
        assert seen["data"] == [3.0] * 5
        assert seen["nbytes"] == 20
        assert seen["sent"] == 24


def _bytes_sent() -> list[int]:
    c = Communicator(dist.group.WORLD)
    part, whole = torch.ones(2), torch.ones(2 * c.size)
    counts = []
    for work in (
        lambda: c.all_reduce(whole, op="sum"),
        lambda: c.reduce_scatter(part, whole, op="sum"),
        lambda: c.all_gather(whole, part),
        lambda: c.broadcast(part, root=0),
    ):
        before = c.bytes_sent
        work().wait()
        counts.append(c.bytes_sent - before)
    return counts


@worlds
def test_bytes_sent_counts_the_inputs(world, world_size):
    whole, part = 8 * world_size, 8
    assert world(world_size).run(_bytes_sent) == [[whole, whole, part, part]] * world_size


def _times(backend: str) -> list[bool]:
    c = Communicator(dist.new_group(backend=backend), channels=2, record_times=True)
    ordered = []
    for channel in (0, 1, 0, 1):
        began = c.clock()
        works = [c.all_reduce(torch.ones(50), op="sum", channel=channel) for _ in range(5)]
        for work in works:
            work.wait()
        for times in map(Work.times, works):
            ordered.append(
                began <= times.enqueued_s <= times.started_s <= times.finished_s <= c.clock()
            )
    return ordered


@pytest.mark.parametrize("backend", ["comm_core", "gloo"])
def test_recorded_times_are_in_order(world, backend):
    assert world(2).run(_times, backend) == [[True] * 20] * 2


def _overtaking() -> list[bool]:
    """Whether a small urgent collective on another channel ended before a large earlier one."""
    c = Communicator(dist.group.WORLD, channels=2)
    ended_first = []
    for _ in range(10):
        large = c.all_reduce(torch.ones(20_000_000), op="sum")
        urgent = c.all_reduce(torch.ones(100), op="sum", channel=1, priority=1)
        urgent.wait()
        large.wait()
        ended_first.append(urgent.times().finished_s < large.times().finished_s)
    return ended_first


def test_an_urgent_collective_overtakes_a_large_one(world):
    # A rank that is not scheduled between its two calls may let one large collective end first.
    for overtook in world(2).run(_overtaking):
        assert any(overtook)


def _times_unrecorded() -> str:
    gloo = dist.new_group(backend="gloo")
    work = Communicator(gloo).all_reduce(torch.ones(3), op="sum")
    work.wait()
    return message(work.times)


def test_times_that_were_not_recorded_are_a_user_error(world):
    assert all("record_times" in said for said in world(2).run(_times_unrecorded))


def _objects() -> tuple[Any, Any, list[Any]]:
    c = runtime.communicator()
    mine = {"rank": c.rank, "text": "x" * c.rank}
    last = c.size - 1
    return c.broadcast_object(mine), c.broadcast_object(mine, root=last), c.gather_objects(mine)


@worlds
def test_objects_are_broadcast_and_gathered(world, world_size):
    each = [{"rank": rank, "text": "x" * rank} for rank in range(world_size)]
    assert world(world_size).run(_objects) == [(each[0], each[-1], each)] * world_size


def _subgroup() -> tuple[int, int, float, int] | None:
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return None
    c = Communicator(group)
    value = torch.tensor([10.0 * c.rank])
    c.broadcast(value, root=1).wait()
    return c.rank, c.size, value.item(), c.broadcast_object(c.rank, root=1)


def test_a_subgroup_counts_its_own_ranks(world):
    assert world(3).run(_subgroup) == [None, (0, 2, 10.0, 1), (1, 2, 10.0, 1)]


def _broadcast_all(wrapped: bool) -> list[bool]:
    torch.manual_seed(dear.rank())
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 / (1 + dear.rank()))
    steps(model, optimizer, mine(), range(dear.rank() + 1))
    if wrapped:
        wrap(optimizer, model, "dear")
        steps(model, optimizer, mine(), range(1))
    root = (model.state_dict(), optimizer.state_dict(), list(model[0].parameters()))
    values, state, _ = runtime.communicator().broadcast_object(root, root=1)
    dear.broadcast_parameters(model.state_dict(), root_rank=1)
    dear.broadcast_optimizer_state(optimizer, root_rank=1)
    mine_now = optimizer.state_dict()
    same = [torch.equal(value, model.state_dict()[name]) for name, value in values.items()]
    same.append(mine_now["param_groups"] == state["param_groups"])
    same.append(mine_now["state"].keys() == state["state"].keys())
    for index, held in state["state"].items():
        same += [torch.equal(value, mine_now["state"][index][key]) for key, value in held.items()]
    other = nn.Linear(2, 2)
    dear.broadcast_parameters(other.named_parameters(), root_rank=1)
    weights = runtime.communicator().gather_objects(other.weight.detach())
    same += [torch.equal(weight, weights[1]) for weight in weights]
    same.append("root" in message(lambda: dear.broadcast_parameters(other.state_dict(), 7)))
    return same


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "dear"])
def test_broadcasts_make_all_ranks_equal_to_the_root(world, wrapped):
    for same in world(3).run(_broadcast_all, wrapped):
        assert all(same), same


def _averages() -> list[Any]:
    given = torch.tensor([1.0, 2.0], requires_grad=True) * (dear.rank() + 1)
    whole = torch.tensor([dear.rank(), 1])
    mean, total = dear.allreduce(given), dear.allreduce(given, average=False)
    unchanged = given.tolist() == [dear.rank() + 1.0, 2.0 * dear.rank() + 2]
    whole_sum = dear.allreduce(whole, average=False)
    refused = message(lambda: dear.allreduce(whole)) != ""
    return [mean.tolist(), total.tolist(), unchanged, whole_sum.tolist(), refused]


def test_allreduce_returns_the_mean_or_the_sum(world):
    for got in world(3).run(_averages):
        assert got == [[2.0, 4.0], [6.0, 12.0], True, [3, 3], True]


def _alone() -> str:
    c = Communicator(dist.new_group(timeout=timedelta(seconds=0.5)))
    if c.rank == 1:
        return "RuntimeError"
    work = c.all_reduce(torch.ones(4), op="sum")
    try:
        work.wait()
    except RuntimeError as error:
        return type(error).__name__
    return "no error"


def test_a_collective_whose_peer_never_comes_raises_in_time():
    pool = RankPool(2)  # its ranks are out of step afterwards
    try:
        assert all(name.endswith("Error") for name in pool.run(_alone))
    finally:
        pool.close()
