"""The algorithm `asyncddp`: what a step is, that nobody waits, and how old values were."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import dear
from dear.comm import runtime
from dear.comm.neighbors import GlobalAverage
from dear.topology import graph, recv_weights
from dear.training.pace import run_for
from tests.contract import awkward
from tests.contract.decentralized_serial import backward
from tests.ranks import RankPool

TINY = 0.0002


def _wrapped(model, optimizer, **options):
    return dear.DistributedOptimizer(optimizer, model, algorithm="asyncddp", **options)


def _loss(model, step):
    x, y = awkward.data(step, 0, dear.size())
    rows = slice(dear.rank() * awkward.BATCH, (dear.rank() + 1) * awkward.BATCH)
    return functional.cross_entropy(model(x[rows]), y[rows])


def _driven(turns: list[int], kind: str, options: dict) -> tuple[list, dict]:
    """Ranks step one after another as `turns` says; a first step of all leaves them as they are."""
    model = awkward.make_model()
    optimizer = _plain(kind, model)
    rates = [group["lr"] for group in optimizer.param_groups]
    optimizer = _wrapped(model, optimizer, bucket_mb=TINY, **options)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    _loss(model, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.synchronize()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)
    dist.barrier()
    for number, turn in enumerate(turns):
        if turn == dear.rank():
            _loss(model, number).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            optimizer.synchronize()
        dist.barrier()
    counted = optimizer.statistics()
    lr = optimizer.param_groups[0]["lr"] / rates[0]
    state = [param.detach().clone() for param in model.parameters()]
    optimizer.close()
    return state, counted, lr


def _plain(kind, model):
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1)
    if kind == "adamw":
        return awkward.make_optimizer("adamw", model)
    return torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=0.01, nesterov=False)


def _simulated(turns: list[int], kind: str, world_size: int, topology: str) -> tuple[list, list]:
    """x <- w_self x + sum w * (what came last) - update(g(x)); slots start as the own values."""
    made = graph(topology, world_size)
    models = [awkward.make_model() for _ in range(world_size)]
    optimizers = [_plain(kind, model) for model in models]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, gamma=0.8) for o in optimizers]
    trained = [[p for p in model.parameters() if p.requires_grad] for model in models]
    for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        # The first step of all, which moves no parameter, but AdamW's moments.
        rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        backward(model, rank, world_size, 0, 1)
        optimizer.step()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
    steps = [1] * world_size
    slots = {}  # (receiver, sender) -> values and the steps in them
    for receiver in range(world_size):
        for sender in recv_weights(made, receiver)[1]:
            slots[receiver, sender] = ([p.detach().clone() for p in trained[sender]], 1)
    gaps: list[list[int]] = [[] for _ in range(world_size)]
    for number, turn in enumerate(turns):
        models[turn].zero_grad()
        backward(models[turn], turn, world_size, number, 1)
        own_weight, sources = recv_weights(made, turn)
        with torch.no_grad():
            for place, param in enumerate(trained[turn]):
                mixed = own_weight * param
                for sender, weight in sources.items():
                    mixed += weight * slots[turn, sender][0][place]
                param.copy_(mixed)
        gaps[turn] += [steps[turn] - slots[turn, sender][1] for sender in sources]
        optimizers[turn].step()
        schedulers[turn].step()
        steps[turn] += 1
        for receiver, sender in slots:
            if sender == turn:
                values = [p.detach().clone() for p in trained[turn]]
                slots[receiver, sender] = (values, steps[turn])
    return [[p.detach() for p in model.parameters()] for model in models], gaps


SCHEDULES = [
    (2, "ring-left", [0, 1] * 4),
    (2, "complete", [0, 0, 0, 1, 0, 1, 1]),
    (3, "exp2", [0, 1, 2] * 3),
    (3, "ring-right", [2, 2, 0, 1, 0, 2, 1, 1, 1, 0]),
    (4, "exp2", [0, 3, 1, 2, 0, 0, 3, 1, 2, 3, 1, 0]),
    (4, "star", [1, 2, 3, 0, 3, 3, 1, 0, 2]),
]


@pytest.mark.parametrize("update", ["backward", "step"])
@pytest.mark.parametrize(("world_size", "topology", "turns"), SCHEDULES)
def test_y4_y7_y9_any_schedule_equals_its_simulation(world, world_size, topology, turns, update):
    kind = "decay" if world_size == 3 else "sgd"
    wanted, gaps = _simulated(turns, kind, world_size, topology)
    got = world(world_size).run(_driven, turns, kind, {"topology": topology, "update": update})
    for rank, (state, counted, lr) in enumerate(got):
        for a, b in zip(state, wanted[rank], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        assert lr == pytest.approx(0.8 ** turns.count(rank))
        # Steps besides the first one, in which all were level or a neighbour one ahead.
        highest = max([0, *gaps[rank]])
        ages = counted["staleness"].values()
        assert max(0, *(age["max"] for age in ages)) == highest
        assert {int(r) for r in counted["staleness"]} == set(
            recv_weights(graph(topology, world_size), rank)[1]
        )
        assert not any(counted["skipped"].values())
        assert counted["lost"] == []


@pytest.mark.parametrize("update", ["backward", "step"])
@pytest.mark.parametrize(
    ("world_size", "topology", "turns"),
    [
        (2, "complete", [0, 1] * 4),
        (3, "exp2", [0, 1, 2] * 3),
        (4, "ring", [0, 1, 2, 3] * 3),
        (4, "exp2", [0, 3, 1, 2, 0, 0, 3, 1, 2, 3, 1, 0]),
    ],
)
def test_y7_with_adamw_moments_are_of_the_own_gradients(world, world_size, topology, turns, update):
    wanted, gaps = _simulated(turns, "adamw", world_size, topology)
    options = {"topology": topology, "update": update}
    got = world(world_size).run(_driven, turns, "adamw", options)
    start = [param.detach() for param in awkward.make_model().parameters()]
    for rank, (state, counted, lr) in enumerate(got):
        for a, b in zip(state, wanted[rank], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        assert any((a - b).abs().max() > 0.01 for a, b in zip(state, start, strict=True))
        assert lr == pytest.approx(0.8 ** turns.count(rank))
        ages = counted["staleness"].values()
        assert max(0, *(age["max"] for age in ages)) == max([0, *gaps[rank]])


def _idle(options: dict) -> float:
    """Learning rate 0 and ranks at very different paces."""
    model = awkward.make_model()
    start = [param.detach().clone() for param in model.parameters()]
    optimizer = _wrapped(model, torch.optim.SGD(model.parameters(), lr=0.0), **options)
    for _ in range(3 + 4 * dear.rank()):
        _loss(model, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.002 * dear.rank())
    optimizer.close()
    pairs = zip(model.parameters(), start, strict=True)
    return max((p - s).abs().max().item() for p, s in pairs)


@pytest.mark.parametrize("topology", ["complete", "ring-left", "exp2"])
def test_y1_without_updates_parameters_stay_where_they_were(world, topology):
    assert max(world(3).run(_idle, {"topology": topology})) < 1e-6


def _paced(slow: int | None, seconds: float, options: dict) -> dict:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 1))
    generator = torch.Generator().manual_seed(dear.rank())
    weights = torch.linspace(-1, 1, 20)
    optimizer = _wrapped(model, torch.optim.SGD(model.parameters(), lr=0.02), **options)
    batch = 32 + 8 * dear.rank()
    losses = []

    def step() -> int:
        x = torch.randn(batch, 20, generator=generator)
        optimizer.zero_grad()
        loss = functional.mse_loss(model(x), (x @ weights)[:, None])
        loss.backward()
        optimizer.step()
        time.sleep(0.05 if dear.rank() == slow else 0.01)
        losses.append(loss.item())
        return batch

    step()  # in which windows are made
    pace = run_for(seconds, step, runtime.communicator())
    counted = optimizer.statistics()
    optimizer.close()
    apart = GlobalAverage(runtime.communicator(), model.parameters()).apply()
    return {
        "steps": pace.steps,
        "samples": pace.samples,
        "fell": losses[-1] / losses[0],
        "apart": apart,
        **counted,
    }


@pytest.mark.full  # it takes times
def test_y5_h10_a_slow_rank_holds_nobody_up_and_its_age_is_known(world):
    even = world(3).run(_paced, None, 1.0, {"topology": "complete"})
    odd = world(3).run(_paced, 2, 1.0, {"topology": "complete"})
    for rank in (0, 1):
        assert odd[rank]["steps"] > 0.75 * even[rank]["steps"]
        assert odd[rank]["staleness"]["2"]["max"] > 0.5 * odd[rank]["steps"]
        assert abs(odd[rank]["staleness"][str(1 - rank)]["mean"]) < 10
    assert odd[2]["steps"] < 0.4 * odd[0]["steps"]
    for rank, result in enumerate(odd):
        assert result["samples"] == result["steps"] * (32 + 8 * rank)
        assert result["fell"] < 0.5
        assert result["apart"] < 1.0


@pytest.mark.full  # it takes times
def test_a_bound_on_staleness_holds_the_others_back(world):
    bound = 4
    results = world(3).run(_paced, 2, 0.8, {"topology": "complete", "max_staleness": bound})
    for rank in (0, 1):
        # One step more once rank 2 has ended, which frees those who wait for it.
        assert results[rank]["staleness"]["2"]["max"] <= bound + 1
        assert results[rank]["steps"] <= results[2]["steps"] + 2 * bound + 2
        assert not any(results[rank]["skipped"].values())


def _stops_early(stopper: int, options: dict) -> int:
    model = awkward.make_model()
    optimizer = _wrapped(model, torch.optim.SGD(model.parameters(), lr=0.01), **options)
    count = 2 if dear.rank() == stopper else 25
    for step in range(count):
        optimizer.zero_grad()
        _loss(model, step).backward()
        optimizer.step()
    optimizer.close()
    return count


@pytest.mark.parametrize("bound", [None, 3])
def test_y6_a_rank_that_stops_early_holds_nobody_up(world, bound):
    counts = world(3).run(_stops_early, 1, {"topology": "ring", "max_staleness": bound})
    assert counts == [25, 2, 25]


def _dies(victim: int) -> list:
    model = awkward.make_model()
    optimizer = _wrapped(model, torch.optim.SGD(model.parameters(), lr=0.01), topology="complete")
    for step in range(40):
        optimizer.zero_grad()
        _loss(model, step).backward()
        optimizer.step()
        time.sleep(0.005)
        if step == 5 and dear.rank() == victim:
            os._exit(9)
    counted = optimizer.statistics()
    optimizer.close()
    return [counted["lost"], all(p.isfinite().all().item() for p in model.parameters())]


def test_when_a_rank_is_killed_the_others_finish_and_know_which(own_pool):
    pool = own_pool(4)
    for pipe in pool.pipes.values():
        pipe.send((_dies, (2,)))
    for rank in (0, 1, 3):
        assert pool.pipes[rank].poll(30)
        ok, value = pool.pipes[rank].recv()
        assert (ok, value) == (True, [[2], True])
    with pytest.raises((EOFError, ConnectionResetError)):
        pool.pipes[2].recv()


def _slow_peer() -> dict:
    """A put that is never finished: what follows to that rank is left out, nobody waits."""
    model = nn.Linear(4, 4)
    optimizer = _wrapped(model, torch.optim.SGD(model.parameters(), lr=0.01), topology="complete")
    engine = optimizer._engine

    class Never:
        def is_completed(self):
            return False

        def wait(self):
            return None

    for step in range(5):
        if step == 1:
            optimizer.synchronize()
            for window in engine.windows.values():
                window._under_way = {1 - dear.rank(): Never()}
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    counted = optimizer.statistics()
    optimizer.close()
    return counted


def test_a_put_that_is_still_under_way_is_not_waited_for(world):
    for rank, counted in enumerate(world(2).run(_slow_peer)):
        other = str(1 - rank)
        assert counted["skipped"] == {other: 4}
        assert counted["sent"] == {other: 1}


def _resumed() -> list[int]:
    model = awkward.make_model()
    make = lambda: _wrapped(model, torch.optim.SGD(model.parameters(), lr=0.1))  # noqa: E731
    optimizer = make()
    for step in range(3):
        optimizer.zero_grad()
        _loss(model, step).backward()
        optimizer.step()
    state, values = optimizer.state_dict(), model.state_dict()
    values = {name: value.clone() + dear.rank() for name, value in values.items()}
    optimizer.close()
    model.load_state_dict(values)
    optimizer = make()
    optimizer.load_state_dict(state)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    _loss(model, 4).backward()
    optimizer.step()
    steps = optimizer._engine.steps
    # Slots start with what each rank loaded, so this first step averages nothing foreign: at most
    # what a neighbour has put already.
    ages = optimizer.statistics()["staleness"].values()
    optimizer.close()
    return [steps, max(age["max"] for age in ages)]


def test_a_resumed_rank_counts_on(world):
    assert all(steps == 4 and age <= 0 for steps, age in world(2).run(_resumed))


def test_on_gloo_its_windows_are_the_comm_cores():
    pool = RankPool(3, backend="gloo")
    try:
        turns = [0, 1, 2, 2, 0, 1]
        wanted, _ = _simulated(turns, "sgd", 3, "exp2")
        for rank, (state, *_) in enumerate(pool.run(_driven, turns, "sgd", {"topology": "exp2"})):
            for a, b in zip(state, wanted[rank], strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    finally:
        pool.close()


def _average() -> float:
    param = torch.full((3,), float(dear.rank()))
    GlobalAverage(runtime.communicator(), [param]).apply(keep=False)
    return param[1].item()


def test_y3_the_global_average_is_a_mean(world):
    assert world(4).run(_average) == [1.5] * 4
