"""Promises of one-sided algorithms alone: nobody waits, and the age of values is known."""

from __future__ import annotations

import os
import time
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from torch import nn

import dear
from common.harness.worker.checking.serial import Ranks
from dear.comm import runtime
from dear.comm.neighbors import GlobalAverage
from dear.comm.peers import Peers, Staleness
from dear.comm.windows import NeighborWindow
from dear.topology import graph, matrix, recv_weights, splitting
from dear.training.pace import run_for
from tests.contract.loops import loss_of, make_model, message, mine, steps
from tests.contract.models import loss_of as loss_of_kind
from tests.contract.models import make_model as make_kind
from tests.contract.models import make_optimizer
from tests.contract.training import Script, difference, far, state_of
from tests.ranks import RankPool, on_ranks

with_barrier = pytest.mark.parametrize("name", ["win-put", "pull-get", "push-sum"])
every = pytest.mark.parametrize("name", ["win-put", "pull-get", "push-sum", "asyncddp"])


def _wrapped(model: nn.Module, name: str, lr: float, **options: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return dear.DistributedOptimizer(optimizer, model, algorithm=name, **options)


def _barrier() -> None:
    dear.allreduce(torch.zeros(1))


def _still(optimizer: Any, step: Any) -> None:
    """A step that moves no parameter."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _in_turns(turns: list[int], kind: str, options: dict[str, Any]) -> tuple[Any, dict[int, int]]:
    """Ranks step one after another, after a first step of all; returns the highest ages, too."""
    model = make_kind("awkward")
    optimizer = make_optimizer(kind, model)
    dear.DistributedOptimizer(optimizer, model, algorithm="asyncddp", bucket_mb=0.0002, **options)

    def step(number: int) -> None:
        optimizer.zero_grad()
        loss_of_kind("awkward", model, dear.rank(), number).backward()
        optimizer.step()
        optimizer.synchronize()

    _still(optimizer, lambda: step(0))
    _barrier()
    for number, turn in enumerate(turns):
        if turn == dear.rank():
            step(number)
        _barrier()
    counted = optimizer.statistics()
    assert not any(counted["skipped"].values()) and counted["lost"] == []
    optimizer.close()
    ages = {int(sender): age["max"] for sender, age in counted["staleness"].items()}
    return {"end": state_of(model)}, ages


def _simulated(turns: list[int], kind: str, size: int, topology: str) -> tuple[Any, list[int]]:
    """x <- w_self x + sum w * (what came last) - update(g(x)), and every rank's highest age."""
    models = [make_kind("awkward") for _ in range(size)]
    optimizers = [make_optimizer(kind, model) for model in models]
    for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        loss_of_kind("awkward", model, rank, 0).backward()
        _still(optimizer, optimizer.step)
    ranks, weights = Ranks(models, optimizers), torch.as_tensor(matrix(graph(topology, size)))
    counts, ages = [1] * size, [0] * size
    for number, turn in enumerate(turns):
        optimizers[turn].zero_grad()
        loss_of_kind("awkward", models[turn], turn, number).backward()
        x = ranks.x
        x[turn] = weights[:, turn] @ x
        ranks.x = x
        ranks.update(turn)
        sources = recv_weights(graph(topology, size), turn)[1]
        ages[turn] = max([ages[turn], *(counts[turn] - counts[sender] for sender in sources)])
        counts[turn] += 1
    return [{"end": state_of(model)} for model in models], ages


SCHEDULES = [
    (2, "complete", [0, 0, 0, 1, 0, 1, 1]),
    (3, "ring-right", [2, 2, 0, 1, 0, 2, 1, 1, 1, 0]),
    (4, "exp2", [0, 3, 1, 2, 0, 0, 3, 1, 2, 3, 1, 0]),
    (4, "star", [1, 2, 3, 0, 3, 3, 1, 0, 2]),
]


@pytest.mark.parametrize(("update", "kind"), [("backward", "AdamW"), ("step", "SGD")])
@pytest.mark.parametrize(("size", "topology", "turns"), SCHEDULES)
def test_y4_y7_y9_any_schedule_equals_its_simulation(world, size, topology, turns, kind, update):
    _compare(world(size), turns, kind, size, {"topology": topology, "update": update})


def test_on_gloo_windows_are_the_comm_cores(world):
    _compare(world(3, "gloo"), [0, 1, 2, 2, 0, 1], "SGD", 3, {"topology": "exp2"})


def _compare(
    pool: RankPool, turns: list[int], kind: str, size: int, options: dict[str, Any]
) -> None:
    wanted, highest = _simulated(turns, kind, size, options["topology"])
    for rank, (state, ages) in enumerate(pool.run(_in_turns, turns, kind, options)):
        assert difference(state, wanted[rank]) < 2e-5
        assert max([0, *ages.values()]) == highest[rank]
        assert ages.keys() == recv_weights(graph(options["topology"], size), rank)[1].keys()


@pytest.mark.parametrize("size", [2, 3])
@every
def test_y1_equal_replicas_that_learn_nothing_stay_as_they_are(world, size, name):
    world(size).run(_equal_start, name)


def _equal_start(name: str) -> None:
    """Ranks run at different speeds."""
    model, start = make_model(), make_model()
    optimizer = _wrapped(model, name, 0.0)
    slow = lambda *_: time.sleep(0.002 * dear.rank())  # noqa: E731
    steps(model, optimizer, mine(), range(3 + 4 * dear.rank()), after_step=slow)
    optimizer.close()
    assert difference({"end": state_of(model)}, {"end": state_of(start)}) < 1e-5


@pytest.mark.parametrize("again", [False, True], ids=["wrapped", "trained"])
@every
@on_ranks(2)
def test_only_parameters_that_were_broadcast_are_averaged(name: str, again: bool) -> None:
    """Rank 0 steps first, beside a rank that had other values before."""
    model = nn.Linear(3, 1, bias=False)
    nn.init.constant_(model.weight, 1.0 + dear.rank())
    optimizer = _wrapped(model, name, 0.0)
    if again:
        _drawn_to_rank(model, optimizer, 1)
        optimizer.synchronize()
        _barrier()
        nn.init.constant_(model.weight, 1.0 + dear.rank())
        dear.broadcast_optimizer_state(optimizer)
    dear.broadcast_parameters(model.state_dict())
    _barrier()
    # The first step of asyncddp makes the windows on all ranks.
    for turn in ([0, 1],) if name == "asyncddp" and not again else ([0], [1]):
        if dear.rank() in turn:
            _drawn_to_rank(model, optimizer, 1)
            optimizer.synchronize()
        _barrier()
    optimizer.close()
    assert model.weight.tolist() == [[1.0] * 3]


def _drawn_to_rank(model: nn.Module, optimizer: Any, count: int, pause_s: float = 0.0) -> None:
    """Every rank would have its own number as weights."""
    for _ in range(count):
        optimizer.zero_grad()
        (model(torch.eye(3)) - dear.rank()).square().sum().div(2).backward()
        optimizer.step()
        time.sleep(pause_s)


def _halted_peer(name: str) -> tuple[float, dict[str, Any]]:
    """Rank 0 makes no step until the others have made 20, which they cannot if they wait for it."""
    model = nn.Linear(3, 1, bias=False)
    nn.init.constant_(model.weight, 0.0)
    optimizer = _wrapped(model, name, 0.1)
    _drawn_to_rank(model, optimizer, 1)  # in which windows may be made
    _barrier()
    _drawn_to_rank(model, optimizer, 20 * (dear.rank() > 0))
    ages = optimizer.statistics()["staleness"]
    _barrier()
    _drawn_to_rank(model, optimizer, 40, 0.002)
    _barrier()
    mean = dear.allreduce(model.weight.detach()).mean().item()
    optimizer.close()
    return mean, ages


@with_barrier
def test_nobody_waits_for_a_halted_rank(world, name):
    results = world(3).run(_halted_peer, name)
    for rank, (mean, ages) in enumerate(results):
        assert mean == pytest.approx(1.0, abs=0.5)
        assert set(ages) == {"0", "1", "2"} - {str(rank)}
    assert results[1][1]["0"]["max"] > 5  # rank 1 has made steps that rank 0 has not


@with_barrier
@on_ranks(2)
def test_ranks_in_step_are_level(name: str) -> None:
    model, other = make_model(), str(1 - dear.rank())
    optimizer = _wrapped(model, name, 0.1, barrier=True, every=2)
    steps(model, optimizer, mine(), range(6))
    counted = optimizer.statistics()
    optimizer.close()
    assert counted["staleness"] == {other: {"uses": 3, "mean": 0, "max": 0, "last": 0}}
    assert counted["sent"] == {other: 0 if name == "pull-get" else 3}
    assert counted["skipped"] == {other: 0} and counted["lost"] == []


def _paced(slow: int | None, seconds: float, **options: Any) -> dict[str, Any]:
    """Rank `slow` makes a fifth of the others' steps."""
    model = make_model()
    optimizer = _wrapped(model, "asyncddp", 0.02, topology="complete", **options)
    losses = []

    def step() -> int:
        optimizer.zero_grad()
        loss = loss_of(model, dear.rank(), 0)
        loss.backward()
        optimizer.step()
        time.sleep(0.05 if dear.rank() == slow else 0.01)
        losses.append(loss.item())
        return 32 + 8 * dear.rank()

    step()  # in which windows are made
    pace = run_for(seconds, step, runtime.communicator())
    counted = optimizer.statistics()
    optimizer.close()
    apart = GlobalAverage(runtime.communicator(), model.parameters()).apply()
    fell = losses[-1] < losses[0]
    return {"steps": pace.steps, "samples": pace.samples, "fell": fell, "apart": apart, **counted}


@pytest.mark.full  # it takes times
def test_y5_h10_a_slow_rank_holds_nobody_up_and_its_age_is_known(world):
    even = world(3).run(_paced, None, 1.0)
    odd = world(3).run(_paced, 2, 1.0)
    for rank in (0, 1):
        assert odd[rank]["steps"] > 0.75 * even[rank]["steps"]
        assert odd[rank]["staleness"]["2"]["max"] > 0.5 * odd[rank]["steps"]
        assert abs(odd[rank]["staleness"][str(1 - rank)]["mean"]) < 10
    assert odd[2]["steps"] < 0.4 * odd[0]["steps"]
    for rank, result in enumerate(odd):
        assert result["samples"] == result["steps"] * (32 + 8 * rank)
        assert result["fell"] and result["apart"] < 1.0


@pytest.mark.full  # it takes times
def test_a_bound_on_staleness_holds_the_others_back(world):
    results = world(3).run(partial(_paced, 2, 0.8, max_staleness=4))
    for rank in (0, 1):
        # One step more once rank 2 has ended, which frees those who wait for it.
        assert results[rank]["staleness"]["2"]["max"] <= 4 + 1
        assert results[rank]["steps"] <= results[2]["steps"] + 2 * 4 + 2
        assert not any(results[rank]["skipped"].values())


def _alone(bound: int) -> tuple[int | None, int]:
    """Rank 1 makes no second step until rank 0 waits for it.

    Returns: for rank 0, steps that it made alone before it waited, None if it never did; and how
    far behind the oldest values were that this rank has used.
    """
    model = make_model()
    optimizer = _wrapped(model, "asyncddp", 0.01, topology="complete", max_staleness=bound)
    steps(model, optimizer, mine(), range(1))  # in which windows are made
    optimizer.synchronize()
    _barrier()
    communicator = optimizer._engine.communicator
    pause, pauses, before_wait = communicator.pause, 0, None

    def noted(seconds: float) -> None:
        nonlocal before_wait
        if before_wait is None:
            before_wait = pauses
            _barrier()  # lets rank 1 go on
        pause(seconds)

    if dear.rank() == 0:
        communicator.pause = noted
    else:
        _barrier()
    for step in range(bound + 3):
        steps(model, optimizer, mine(), [1 + step])
        pauses += 1
    if dear.rank() == 0:
        communicator.pause = pause
        if before_wait is None:
            _barrier()
    ages = optimizer.statistics()["staleness"].values()
    optimizer.close()
    return before_wait, max(age["max"] for age in ages)


@pytest.mark.parametrize("bound", [0, 2])
def test_a_step_begins_with_values_as_old_as_the_bound_and_no_older(world, bound):
    (alone, behind), (_, other) = world(2).run(_alone, bound)
    assert alone == bound + 1  # the last of them with values that are `bound` steps behind
    assert behind == bound and other <= bound


def _stops_early(stopper: int, options: dict[str, Any]) -> int:
    model = make_model()
    optimizer = _wrapped(model, "asyncddp", 0.01, **options)
    count = 2 if dear.rank() == stopper else 25
    steps(model, optimizer, mine(), range(count))
    optimizer.close()
    return count


@pytest.mark.parametrize("bound", [None, 3])
def test_y6_a_rank_that_stops_early_holds_nobody_up(world, bound):
    counts = world(3).run(_stops_early, 1, {"topology": "ring", "max_staleness": bound})
    assert counts == [25, 2, 25]


def _dies(victim: int) -> list[Any]:
    model = make_model()
    optimizer = _wrapped(model, "asyncddp", 0.01, topology="complete")
    for step in range(40):
        steps(model, optimizer, mine(), [step])
        time.sleep(0.005)
        if step == 5 and dear.rank() == victim:
            os._exit(9)
    counted = optimizer.statistics()
    optimizer.close()
    return [counted["lost"], all(p.isfinite().all().item() for p in model.parameters())]


def _ends_early(name: str) -> None:
    """Rank 1 ends long before the others, for longer than a collective may take."""
    model = make_model()
    optimizer = _wrapped(model, name, 0.01)
    steps(model, optimizer, mine(), range(2))
    for step in range(2, 2 + 15 * (dear.rank() != 1)):
        steps(model, optimizer, mine(), [step])
        time.sleep(0.3)
    optimizer.close()


@pytest.mark.parametrize(
    "name",
    ["win-put", *(pytest.param(n, marks=pytest.mark.full) for n in ("pull-get", "push-sum"))],
)
def test_a_rank_that_ends_early_waits_longer_than_a_collective(own_pool, name):
    pool = own_pool(3, 3.0)
    for pipe in pool.pipes.values():
        pipe.send((_ends_early, (name,)))
    for pipe in pool.pipes.values():
        assert pipe.poll(30) and pipe.recv() == (True, None)


def _dies_before_it_ends(name: str, victim: int) -> None:
    """The others wait for the victim in `close()`."""
    model = make_model()
    optimizer = _wrapped(model, name, 0.01, topology="complete")
    steps(model, optimizer, mine(), range(2))
    optimizer.synchronize()
    if dear.rank() == victim:
        time.sleep(1.0)
        os._exit(9)
    optimizer.close()


@pytest.mark.parametrize(("name", "ok"), [("win-put", False), ("asyncddp", True)])
def test_nobody_waits_for_a_rank_that_dies_before_it_ends(own_pool, name, ok):
    pool = own_pool(3)
    for pipe in pool.pipes.values():
        pipe.send((_dies_before_it_ends, (name, 2)))
    for rank in (0, 1):
        assert pool.pipes[rank].poll(20)
        ended, text = pool.pipes[rank].recv()
        assert ended == ok and (ok or "lost" in text)


def test_when_a_rank_is_killed_the_others_finish_and_know_which(own_pool):
    pool = own_pool(4)
    for pipe in pool.pipes.values():
        pipe.send((_dies, (2,)))
    for rank in (0, 1, 3):
        assert pool.pipes[rank].poll(30)
        assert pool.pipes[rank].recv() == (True, [[2], True])
    with pytest.raises((EOFError, ConnectionResetError)):
        pool.pipes[2].recv()


class _Never:
    """A put that is never finished."""

    def is_completed(self) -> bool:
        return False

    def wait(self) -> None:
        return None


@on_ranks(2)
def test_a_put_that_is_still_under_way_is_not_waited_for_and_later_ones_are_left_out() -> None:
    model, other = make_model(), str(1 - dear.rank())
    optimizer = _wrapped(model, "asyncddp", 0.01, topology="complete")
    steps(model, optimizer, mine(), range(1))
    optimizer.synchronize()
    for window in optimizer._engine.exchange.windows.values():
        window._under_way = {1 - dear.rank(): _Never()}
    steps(model, optimizer, mine(), range(1, 5))
    counted = optimizer.statistics()
    optimizer.close()
    assert counted["skipped"] == {other: 4} and counted["sent"] == {other: 1}


@on_ranks(2)
def test_a_resumed_rank_counts_on() -> None:
    model = make_model()
    optimizer = _wrapped(model, "asyncddp", 0.1)
    steps(model, optimizer, mine(), range(3))
    state = optimizer.state_dict()
    values = {name: value.clone() + dear.rank() for name, value in model.state_dict().items()}
    optimizer.close()
    model.load_state_dict(values)
    optimizer = _wrapped(model, "asyncddp", 0.1)
    optimizer.load_state_dict(state)
    _still(optimizer, lambda: steps(model, optimizer, mine(), [4]))
    assert optimizer._engine.steps == 4
    # Slots start with what each rank loaded, so this first step averages nothing foreign: at most
    # what a neighbour has put already.
    assert max(age["max"] for age in optimizer.statistics()["staleness"].values()) <= 0
    optimizer.close()


def _resumed_often() -> dict[str, Any]:
    """Only rank 0 makes steps; what it has sent is not collected before the state is saved."""
    model, saved = make_model(), None
    for _ in range(4):
        optimizer = _wrapped(model, "push-sum", 0.01)
        if saved is not None:
            optimizer.load_state_dict(saved)
        for step in range(2 if dear.rank() == 0 else 0):
            steps(model, optimizer, mine(), [step])
            optimizer.synchronize()  # a put that is still under way would leave the next one out
        _barrier()
        counted = optimizer.statistics()
        saved = optimizer.state_dict()
        optimizer.close()
    return counted


def test_resumed_ranks_of_push_sum_lose_no_weight_and_go_on_to_send(world):
    counted = world(2).run(_resumed_often)
    weights = [weight for rank in counted for weight in (*rank["p"], *rank["p_arrived"])]
    assert sum(weights) == pytest.approx(2.0)
    assert counted[0]["sent"] == {"1": 2}


@on_ranks(3)
def test_push_sum_begins_anew_with_a_state_of_another_algorithm() -> None:
    model = make_model()
    optimizer = _wrapped(model, "win-put", 0.1, barrier=True)
    steps(model, optimizer, mine(), range(2))
    state = optimizer.state_dict()
    optimizer.close()
    optimizer = _wrapped(model, "push-sum", 0.1, barrier=True, topology="star")
    steps(model, optimizer, mine(), range(2))
    uneven = optimizer.statistics()["p"]
    optimizer.load_state_dict(state)
    assert uneven != [1.0] and optimizer.statistics()["p"] == [1.0]
    assert optimizer._engine.steps == 2
    state["param_groups"][0]["replica"]["p"] = [1.0, 1.0]
    assert "bucket_mb" in message(lambda: optimizer.load_state_dict(state))
    optimizer.close()


ROLLBACKS = [
    *((name, {}) for name in ("win-put", "pull-get", "push-sum", "asyncddp")),
    *((name, {"barrier": True}) for name in ("win-put", "pull-get", "push-sum")),
]


@pytest.mark.parametrize("shared", [False, True], ids=["after a step", "after a forward pass"])
@pytest.mark.parametrize(("name", "options"), ROLLBACKS)
@on_ranks(2)
def test_a_loaded_model_is_averaged_with_nothing_from_before(
    name: str, options: dict[str, Any], shared: bool
) -> None:
    """All ranks had numbers that are none; rank 0 goes on first."""
    model = nn.Linear(3, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    best = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer = _wrapped(model, name, 0.0, **options)
    _drawn_to_rank(model, optimizer, 2)
    nn.init.constant_(model.weight, torch.nan)
    _drawn_to_rank(model, optimizer, 2)
    if shared:
        model(torch.eye(3))
    model.load_state_dict(best)
    _barrier()
    for turn in ([0, 1],) if options else ([0], [1], [0]):
        if dear.rank() in turn:
            _drawn_to_rank(model, optimizer, 2)
            optimizer.synchronize()
        _barrier()
    counted = optimizer.statistics()
    optimizer.close()
    assert model.weight.tolist() == [[pytest.approx(1.0)] * 3]
    if name == "push-sum":
        weight = torch.tensor([*counted["p"], *counted["p_arrived"]]).sum()
        assert dear.allreduce(weight, average=False).item() == pytest.approx(2.0)


def _published(ranks: Any, options: Any) -> Any:
    """Stochastic gradient push on a star; every second step averages."""
    shares = torch.as_tensor(matrix(splitting(graph("star", len(ranks.x))))).T
    u, p = ranks.x, torch.ones(len(ranks.x), 1).double()
    for step in count():
        x = ranks.x
        ranks.update()
        u = u + ranks.x - x
        if step % 2:
            u, p = shares @ u, shares @ p
        ranks.x = u / p
        yield


@pytest.mark.parametrize("size", [3, 4])
def test_all_updates_of_push_sum_have_the_same_weight(world, size):
    options = {"barrier": True, "topology": "star", "every": 2}
    given = ("push-sum", options, Script())
    assert far(world(size), size, *given, reference=_published) < 2e-5


def test_staleness_is_summed_up_over_all_uses():
    seen = Staleness()
    assert seen.summary() == {"uses": 0, "mean": None, "max": None, "last": None}
    for behind in (-3, 2, -1):
        seen.note(behind)
    assert seen.summary() == {"uses": 3, "mean": pytest.approx(-2 / 3), "max": 2, "last": -1}


@on_ranks(2)
def test_a_window_that_is_freed_leaves_the_others_their_groups() -> None:
    peers = Peers(runtime.communicator(), graph("ring", 2), apart=True)
    first, second = (NeighborWindow(peers, torch.zeros(3)) for _ in range(2))
    first.free()
    for work in second.put(torch.ones(3), {1 - dear.rank(): 1.0}):
        work.wait()
    _barrier()
    second.collect(total := torch.zeros(3), 0.0, {1 - dear.rank(): 1.0})
    second.free()
    assert total.tolist() == [1.0] * 3 and peers.statistics()["lost"] == []
