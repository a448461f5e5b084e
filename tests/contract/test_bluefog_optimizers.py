"""BlueFog's optimizer factories: the same steps as the algorithms, with knobs that may change."""

from __future__ import annotations

import time
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch

import dear.bluefog as bf
from dear.algorithms import reference as references
from dear.bluefog.job import job
from dear.topology import matrix, uniform
from tests.contract.loops import loss_of, make_model, make_sgd, message
from tests.contract.training import OnRank, Script, far
from tests.ranks import on_ranks

T = bf.topology_util
AWC, ATC = "DistributedAdaptWithCombineOptimizer", "DistributedAdaptThenCombineOptimizer"
WIN_PUT, PULL_GET = "DistributedWinPutOptimizer", "DistributedPullGetOptimizer"
RING, STAR = T.RingGraph(4, 1), T.StarGraph(4)
MEAN = np.full((4, 4), 0.25)


class Factory(OnRank):
    """`options` have the factory's name and arguments, the topology, and how `weights` change."""

    def _wrap(self) -> None:
        options = dict(self.options)
        self.weights = options.pop("weights", "fixed")
        bf.set_topology(options.pop("graph", RING), is_weighted=options.pop("weighted", False))
        bf.set_machine_topology(T.RingGraph(2), is_weighted=False)
        if "kind" in options:
            options["communication_type"] = bf.CommunicationType[options.pop("kind")]
        wrapped = getattr(bf, options.pop("factory"))(self.optimizer, self.model, **options)
        assert wrapped is self.optimizer and isinstance(wrapped, torch.optim.Optimizer)
        bf.broadcast_parameters(self.model.state_dict(), root_rank=0)
        bf.broadcast_optimizer_state(self.optimizer, root_rank=0)
        self.peers = T.GetDynamicOnePeerSendRecvRanks(T.ExponentialTwoGraph(4), bf.rank())

    def _step(self, step: int) -> None:
        optimizer = self.optimizer
        optimizer.force_barrier = True
        if self.weights.startswith("one peer"):
            send, receive = next(self.peers)
            older = self.weights == "one peer, older names"
            to, of = (
                ("send_neighbors", "neighbor_weights") if older else ("dst_weights", "src_weights")
            )
            setattr(optimizer, to, send)
            setattr(optimizer, of, dict.fromkeys(receive, 0.25))
            optimizer.self_weight = 0.75
        if self.weights == "machines, older names":
            other = 1 - bf.machine_rank()
            optimizer.self_weight, optimizer.neighbor_machine_weights = 0.75, {other: 0.25}
            optimizer.send_neighbor_machines = [other]
        if self.weights == "others":
            optimizer.self_weight = 0.4
            optimizer.src_weights = {(bf.rank() + 1) % 4: 0.6}
        super()._step(step)

    def run(self) -> Any:
        states = super().run()
        assert bf.get_current_created_window_names() == []
        return states


def _reference(order: str, at: Any) -> Any:
    """`at(step)` is W; awc: x <- W' x - update(g); atc: x <- W' (x - update(g))."""

    def reference(ranks: Any, options: Any) -> Any:
        for step in count():
            if order == "atc":
                ranks.update()
            ranks.x = torch.as_tensor(at(step)).T @ ranks.x
            if order == "awc":
                ranks.update()
            yield

    return reference


def _one_peer(step: int) -> Any:
    return 0.75 * np.eye(4) + 0.25 * np.roll(np.eye(4), (1, 2)[step % 2], axis=1)


def _always(graph: Any) -> Any:
    return lambda step: matrix(graph)


def _every_second(step: int) -> Any:
    return matrix(uniform(RING)) if step % 2 else np.eye(4)


CASES: list[tuple[str, str, dict[str, Any], Any]] = [
    *(
        (order, factory, options, at)
        for order, factory in (("awc", AWC), ("atc", ATC))
        for options, at in [
            ({"graph": STAR, "weighted": True}, _always(STAR)),
            ({"weights": "one peer"}, _one_peer),
            ({"weights": "one peer, older names"}, _one_peer),
            ({"kind": "hierarchical_neighbor_allreduce"}, lambda step: MEAN),
            (
                {
                    "kind": "hierarchical_neighbor_allreduce",
                    "weights": "machines, older names",
                },
                lambda step: np.kron(0.5 * np.eye(2) + 0.25, np.full((2, 2), 0.5)),
            ),
            (
                {"kind": "allreduce", "num_steps_per_communication": 2},
                lambda step: MEAN if step % 2 else np.eye(4),
            ),
            ({"kind": "empty"}, lambda step: np.eye(4)),
        ]
    ),
    ("awc", "DistributedNeighborAllreduceOptimizer", {}, _always(uniform(RING))),
    ("awc", "DistributedAllreduceOptimizer", {}, lambda step: MEAN),
    ("awc", "DistributedHierarchicalNeighborAllreduceOptimizer", {}, lambda step: MEAN),
    *(
        ("awc", factory, options, at)
        for factory in (WIN_PUT, PULL_GET)
        for options, at in [
            ({}, _always(uniform(RING))),
            (
                {"weights": "others"},
                lambda step: 0.4 * np.eye(4) + 0.6 * np.roll(np.eye(4), -1, axis=1),
            ),
        ]
    ),
    ("awc", PULL_GET, {"num_steps_per_communication": 2}, _every_second),
    ("atc", "DistributedPushSumOptimizer", {}, _always(uniform(RING))),
]


@pytest.mark.parametrize(("order", "factory", "options", "at"), CASES)
def test_a_factory_equals_its_reference(bluefog_pool, order, factory, options, at):
    kind = "AdamW" if "graph" in options else "SGD"
    options, script = {"factory": factory, **options}, Script(optimizer=kind)
    assert far(bluefog_pool, 4, "neighbor", options, script, Factory, _reference(order, at)) < 2e-5


@on_ranks(4, "bluefog")
def test_ranks_that_get_nothing_from_this_rank_are_refused_as_targets() -> None:
    bf.set_topology(RING)
    model = make_model()
    optimizer = bf.DistributedWinPutOptimizer(make_sgd(model), model)
    optimizer.dst_weights = {(bf.rank() + 2) % 4: 1.0}
    line = message(lambda: loss_of(model, bf.rank(), 0))
    assert f"cannot send to rank {(bf.rank() + 2) % 4}: in the topology of the window" in line
    optimizer.close()


@on_ranks(4, "bluefog")
def test_averages_in_a_machine_do_not_queue_behind_those_of_machines() -> None:
    """The thread of the hierarchical average is late on half of the ranks."""
    bf.set_machine_topology(T.RingGraph(2), is_weighted=False)
    machines, machine = job().machines, bf.machine_rank()
    value = torch.full((4,), float(bf.rank()))
    run, late = machines._run, bf.rank() % 2

    def run_later(*args: Any) -> None:
        time.sleep(0.5 * late)
        run(*args)

    weights = {"self_weight": 0.75, "neighbor_machine_weights": {1 - machine: 0.25}}
    machines._run = run_later
    handle = bf.hierarchical_neighbor_allreduce_nonblocking(
        value, send_neighbor_machines=[1 - machine], **weights
    )
    time.sleep(0.2)
    total = bf.allreduce(value, average=False, is_hierarchical_local=True)
    mixed = bf.synchronize(handle)
    del machines._run
    assert total.tolist() == [1.0 + 4 * machine] * 4
    assert mixed.tolist() == [1.0 + machine] * 4
    line = message(
        lambda: bf.hierarchical_neighbor_allreduce(
            value, send_neighbor_machines=[1 - machine], src_machine_weights={1: 1.0}, **weights
        )
    )
    assert "neighbor_machine_weights is the older name of src_machine_weights" in line


def _averaging(micros: str) -> tuple[dict[str, Any], Script]:
    passes = {"num_steps_per_communication": {"one": 1, "two": 2}[micros]}
    options = {"factory": "DistributedGradientAllreduceOptimizer", **passes}
    return options, Script(micros=micros)


def _bytes_sent(micros: str) -> int:
    """Bytes of one step."""
    body = Factory("allreduce", *_averaging(micros))
    communicator = body.optimizer._engine.communicator
    before = communicator.bytes_sent
    body._step(0)
    sent = communicator.bytes_sent - before
    body.optimizer.close()
    return sent


def test_gradient_allreduce_equals_serial_training_b28(bluefog_pool):
    for micros in ("one", "two"):
        given = _averaging(micros)
        assert far(bluefog_pool, 4, "allreduce", *given, Factory, references.average) < 2e-5
    # Of two passes one communicates.
    assert bluefog_pool.run(_bytes_sent, "two") == bluefog_pool.run(_bytes_sent, "one")


@on_ranks(4, "bluefog")
def test_windows_of_optimizers_have_names_and_bad_calls_are_refused() -> None:
    bf.set_topology(RING)
    model, other = make_model(), make_model()
    optimizer, another = make_sgd(model), make_sgd(other)
    bf.DistributedWinPutOptimizer(optimizer, model, window_prefix="mine")
    assert bf.get_current_created_window_names() == ["mine.0"] and not bf.set_topology(STAR)
    lbfgs = torch.optim.LBFGS(other.parameters())
    put, awc, atc = (getattr(bf, name) for name in (WIN_PUT, AWC, ATC))
    every = (put, awc, atc, bf.DistributedGradientAllreduceOptimizer)
    assert "window_prefix" in message(lambda: put(another, other, window_prefix="mine"))
    assert "already distributed" in message(lambda: put(optimizer, model))
    assert "CommunicationType" in message(lambda: awc(another, other, "neighbor_allreduce"))
    assert "LBFGS" in message(lambda: atc(lbfgs, other))
    for make in every:
        line = message(partial(make, another, other, num_steps_per_communication=0))
        assert "num_steps_per_communication must be at least 1" in line
    optimizer.close()
    assert bf.get_current_created_window_names() == []
