"""Ranks at their own pace: batches, time budgets, and waiting for who is too far behind."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from dear.algorithms.asynchronous.asyncddp import DEFAULT_PATIENCE_S, POLL_S, AsyncExchange
from dear.errors import UserError
from dear.training.pace import LocalStepRandomBatchSampler, Pace, run_for


def sizes(sampler):
    return [len(batch) for batch in sampler]


def test_y8_rounds_of_ten_samples_in_batches_of_four():
    sampler = LocalStepRandomBatchSampler(range(10), 4, base_seed=7)
    assert len(sampler) == 3
    assert sizes(LocalStepRandomBatchSampler(range(10), 4, 7)) == [4, 4, 2]
    assert sizes(LocalStepRandomBatchSampler(range(10), 4, 7, drop_last=True)) == [4, 4]
    first = iter(sampler)
    seen = [*next(first), *next(first)]
    assert sampler.local_step == 2
    rest = list(sampler)
    assert len(rest) == 1
    assert sorted([*seen, *rest[0]]) == list(range(10))
    resumed = LocalStepRandomBatchSampler(range(10), 4, base_seed=7)
    resumed.local_step = 2
    assert list(resumed) == rest


def test_y8_orders_follow_from_seed_rank_and_round():
    def rounds(rank, count=2, seed=7):
        sampler = LocalStepRandomBatchSampler(range(50), 50, seed, rank=rank)
        return [next(iter(sampler)) for _ in range(count)]

    assert rounds(0) == rounds(0)
    assert rounds(0)[0] != rounds(0)[1] != rounds(1)[1]
    generator = torch.Generator().manual_seed(7 + 10000 * 2 + 1)
    assert rounds(2)[1] == torch.randperm(50, generator=generator).tolist()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((range(0), 4, 1), "number of samples"),
        ((range(5), 0, 1), "batch_size"),
        ((range(3), 4, 1, 0, True), "number of samples"),
    ],
)
def test_sizes_that_cannot_be(arguments, said):
    with pytest.raises(UserError, match=said):
        LocalStepRandomBatchSampler(*arguments)


class Clock:
    """A communicator whose time passes only by steps and pauses."""

    blocked_s = 0.0

    def __init__(self):
        self.now = 100.0

    def clock(self):
        return self.now

    def barrier(self):
        self.now += 5.0  # not counted

    def pause(self, seconds):
        self.now += seconds


def test_h10_a_run_ends_with_the_step_in_which_the_time_is_over():
    communicator = Clock()

    def step():
        communicator.now += 0.4
        return 16

    wanted = Pace(steps=3, samples=48, elapsed_s=pytest.approx(1.2))
    assert run_for(1.0, step, communicator) == wanted
    assert run_for(0.1, step, communicator).steps == 1
    with pytest.raises(UserError, match="budget_s"):
        run_for(0.0, step, communicator)


@pytest.mark.parametrize(
    ("timeout", "limit_s"), [(timedelta(seconds=7), 7.0), (None, DEFAULT_PATIENCE_S)]
)
def test_patience_with_who_is_too_far_behind_ends_by_the_same_clock(timeout, limit_s):
    exchange = AsyncExchange.__new__(AsyncExchange)
    exchange.communicator = Clock()
    exchange.communicator.timeout = timeout
    exchange.windows = {None: SimpleNamespace(steps_in=lambda source: 3)}
    exchange.peers = SimpleNamespace(departures=SimpleNamespace(gone=lambda rank: False))
    with pytest.raises(RuntimeError, match="rank 1 is 4 steps behind, more than max_staleness=2"):
        exchange._catch_up(1, steps=7, limit=2)
    assert exchange.communicator.now - 100 == pytest.approx(limit_s, abs=2 * POLL_S[1])
