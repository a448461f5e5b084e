"""Promises of the all-reduce in three legs alone."""

from __future__ import annotations

import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dear
from dear.comm import hierarchy, runtime
from dear.comm.hierarchy import Hierarchy, blocks_of, in_blocks
from tests.contract.loops import make_model, make_sgd, message, mine, steps
from tests.contract.training import Script, far
from tests.ranks import on_ranks

PATIENCE_S = 20
TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64]


@pytest.mark.parametrize("kind", ["comm_core", "gloo"])
def test_three_legs_give_what_one_all_reduce_gives(world, kind):
    world(4, kind).run(_legs_and_whole)


def _legs_and_whole() -> None:
    whole = runtime.communicator()
    legs = in_blocks(whole, 2)
    assert isinstance(legs, Hierarchy)
    cases = [(dtype, op) for dtype in TYPES for op in ("sum", "mean", "max", "min")]
    sent: list[tuple[torch.Tensor, torch.Tensor, Any]] = []
    for dtype, op in cases:
        if op == "mean" and dtype == torch.int64:
            continue
        generator = torch.Generator().manual_seed(whole.rank)
        ours = (torch.rand(3, 34, generator=generator) * 100).to(dtype)
        theirs = ours.clone()
        whole.all_reduce(theirs, op=op).wait()
        sent.append((ours, theirs, legs.all_reduce(ours, op=op)))
    for ours, theirs, work in reversed(sent):  # many at once, waited for in any order
        work.wait()
        assert work.done()
        torch.testing.assert_close(ours, theirs)
    legs.close()
    whole.barrier()  # which is the caller's, and goes on


@on_ranks(4, "comm_core")
def test_all_ranks_get_the_same_bits() -> None:
    legs = in_blocks(runtime.communicator(), 2)
    values = torch.rand(1000, generator=torch.Generator().manual_seed(dear.rank()))
    legs.all_reduce(values, op="mean").wait()
    gathered = runtime.communicator().gather_objects(values)
    assert all(torch.equal(gathered[0], other) for other in gathered)
    legs.close()


@on_ranks(4, "comm_core")
def test_between_blocks_a_rank_sends_its_share_only() -> None:
    """Cut out the legs, and a rank sends the whole buffer to all."""
    whole = runtime.communicator()
    legs = in_blocks(whole, 2)
    before = whole.bytes_sent
    with whole.logged() as log:
        legs.all_reduce(torch.ones(1024), op="sum").wait()
    sent = {name.partition("_tensor")[0]: work.nbytes for name, _, work in log.started}
    scattered, between, gathered = sent.values()
    assert list(sent)[1] == "all_reduce"
    assert (scattered, between, gathered) == (4096, 2048, 4096)
    assert whole.bytes_sent - before == 4096 + 2048 + 2048
    assert len(log.waits) == 1, "legs that nobody waits for count as waiting"
    legs.close()


@on_ranks(4, "comm_core")
def test_legs_of_one_tensor_do_not_hold_up_those_of_the_next() -> None:
    """The legs between blocks end when the test says so: until then the next one has begun, too."""
    legs = in_blocks(runtime.communicator(), 2)
    begin, between, end = legs._legs
    began: list[str] = []
    both, may_end = threading.Event(), threading.Event()

    class Held:
        def __init__(self, work: Any) -> None:
            self._work = work

        def join(self) -> None:
            may_end.wait(PATIENCE_S)
            self._work.join()

    def started(leg: Any, name: str, hold: bool) -> None:
        plain = getattr(leg, name)

        def call(*tensors: torch.Tensor, **how: Any) -> Any:
            began.append(name)
            if began.count("all_reduce") == 2:
                both.set()
            work = plain(*tensors, **how)
            return Held(work) if hold else work

        setattr(leg, name, call)

    started(begin, "reduce_scatter", hold=False)
    started(between, "all_reduce", hold=True)
    started(end, "all_gather", hold=False)
    tensors = [torch.full((8,), float(i)) for i in (1, 2)]
    works = [legs.all_reduce(tensor, op="sum") for tensor in tensors]
    assert both.wait(PATIENCE_S), f"the second tensor waits for the first: {began}"
    assert "all_gather" not in began and not any(work.done() for work in works)
    may_end.set()
    for work, tensor, value in zip(works, tensors, (4, 8), strict=True):
        work.wait()
        assert (tensor == value).all()
    legs.close()


def _blocks(communicator: Any, ranks: Any) -> Any:
    raise AssertionError("no group is needed")


@pytest.mark.parametrize(("size", "local_size"), [(1, 1), (4, 4), (4, 1)])
def test_with_one_block_or_blocks_of_one_it_is_the_communicator_itself(
    monkeypatch, size, local_size
):
    monkeypatch.setattr(hierarchy, "sub_communicators", _blocks)
    whole = SimpleNamespace(size=size)
    assert in_blocks(whole, local_size) is whole


def test_blocks_are_neighbours():
    blocks, places = blocks_of(6, 2)
    assert [list(ranks) for ranks in blocks] == [[0, 1], [2, 3], [4, 5]]
    assert [list(ranks) for ranks in places] == [[0, 2, 4], [1, 3, 5]]


@pytest.mark.full
def test_three_blocks_equal_the_reference(own_pool):
    assert far(own_pool(6), 6, "hierarchical", {"local_size": 2}, Script()) < 1e-5


@on_ranks(3)
def test_what_cannot_be_in_blocks_is_refused() -> None:
    model, legs = make_model(), Hierarchy(runtime.communicator(), 3)
    wrap = partial(dear.DistributedOptimizer, make_sgd(model), model, algorithm="hierarchical")
    for words, call in (
        ("3 ranks cannot be split into blocks of 2", partial(wrap, local_size=2)),
        (
            "3 ranks of a block cannot share 4 elements",
            lambda: legs.all_reduce(torch.ones(4), op="sum"),
        ),
    ):
        line = message(call)
        assert words in line and "\n" not in line


@pytest.mark.parametrize(("options", "stated"), [({"local_size": 2}, "three legs"), ({}, None)])
@on_ranks(4, "comm_core")
def test_it_tells_what_its_legs_take_together(options: dict[str, Any], stated: str | None) -> None:
    model = make_model()
    optimizer = make_sgd(model)
    optimizer = dear.DistributedOptimizer(optimizer, model, algorithm="hierarchical", **options)
    sender = optimizer.sender()
    assert (sender and sender.name) == stated
    if sender is not None:
        before = runtime.communicator().bytes_sent
        taken_s = [sender.timed(4096, tensors)() for tensors in (1, 2)]
        # What test_between_blocks_a_rank_sends_its_share_only counts, for each of the two calls.
        assert runtime.communicator().bytes_sent - before == 2 * (4096 + 2048 + 2048)
        assert all(0 < seconds < PATIENCE_S for seconds in taken_s)
        steps(model, optimizer, mine(), range(1))
    optimizer.close()


@on_ranks(4, "comm_core")
def test_a_script_may_close_and_wrap_again() -> None:
    model = make_model()
    for _ in range(2):
        optimizer = make_sgd(model)
        dear.DistributedOptimizer(optimizer, model, algorithm="hierarchical", local_size=2)
        steps(model, optimizer, mine(), range(2))
        optimizer.close()
