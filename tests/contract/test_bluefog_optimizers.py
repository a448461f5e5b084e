"""BlueFog's optimizer factories: the same steps as the algorithms, with knobs that may change."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

import dear.bluefog as bf
from dear.errors import UserError
from dear.topology import matrix, uniform
from tests.contract import awkward
from tests.contract.decentral import Serial, error, loss, mixed, run
from tests.ranks import RankPool

T = bf.topology_util
LIMIT = 2e-5


@pytest.fixture(scope="module")
def pool():
    pool = RankPool(4, backend="comm_core", environments=[{"BLUEFOG_NODES_PER_MACHINE": "2"}] * 4)
    pool.run(bf.init)
    yield pool
    pool.close()


def _train(factory, kind, before_step=None, setup=None, **arguments):
    if setup is not None:
        setup()
    model = awkward.make_model()
    optimizer = awkward.make_optimizer(kind, model)
    made = getattr(bf, factory)(optimizer, model, **arguments)
    assert made is optimizer and isinstance(made, torch.optim.Optimizer)
    bf.broadcast_parameters(model.state_dict(), root_rank=0)
    bf.broadcast_optimizer_state(optimizer, root_rank=0)
    for step in range(awkward.STEPS):
        if before_step is not None:
            before_step(optimizer, step)
        optimizer.zero_grad()
        loss(model, step, bf.rank(), bf.size()).backward()
        optimizer.step()
    state = copy.deepcopy(model.state_dict())
    optimizer.close()
    assert bf.get_current_created_window_names() == []
    return state


def _star():
    bf.set_topology(T.StarGraph(4), is_weighted=True)


def _ring():
    bf.set_topology(T.RingGraph(4, 1))


def _ring_of_machines():
    bf.set_machine_topology(T.RingGraph(2), is_weighted=False)


def awc(kind, at):
    serial = Serial(4, kind)

    def step(number):
        serial.set_params(mixed(at(number), serial.params()))
        serial.update()

    return run(serial, step)


def atc(kind, at):
    serial = Serial(4, kind)

    def step(number):
        serial.update()
        serial.set_params(mixed(at(number), serial.params()))

    return run(serial, step)


AWC, ATC = "DistributedAdaptWithCombineOptimizer", "DistributedAdaptThenCombineOptimizer"
ORDER = {AWC: awc, ATC: atc}


@pytest.mark.parametrize("factory", [AWC, ATC])
def test_awc_and_atc_follow_the_topology(pool, factory):
    states = pool.run(_train, factory, "adamw", None, _star)
    weights = matrix(T.StarGraph(4))
    assert error(states, ORDER[factory]("adamw", lambda step: weights)) < LIMIT


def _one_peer(optimizer, step):
    if step == 0:
        _PEERS["of this run"] = _peers()
    send, receive = next(_PEERS["of this run"])
    optimizer.dst_weights = send
    optimizer.src_weights = dict.fromkeys(receive, 0.25)
    optimizer.self_weight = 0.75


_PEERS: dict = {}


def _peers():
    return T.GetDynamicOnePeerSendRecvRanks(T.ExponentialTwoGraph(4), bf.rank())


@pytest.mark.parametrize("factory", [AWC, ATC])
def test_weights_may_change_from_step_to_step(pool, factory):
    states = pool.run(_train, factory, "sgd", _one_peer, _ring)

    def at(step):
        weights = np.eye(4) * 0.75
        for rank in range(4):
            weights[rank, (rank + (1, 2)[step % 2]) % 4] = 0.25
        return weights

    assert error(states, ORDER[factory]("sgd", at)) < LIMIT


def _hierarchical(factory):
    kind = bf.CommunicationType.hierarchical_neighbor_allreduce
    return _train(factory, "sgd", None, _ring_of_machines, communication_type=kind)


@pytest.mark.parametrize("factory", [AWC, ATC])
def test_hierarchical_over_two_machines_is_the_mean_b29(pool, factory):
    states = pool.run(_hierarchical, factory)
    assert error(states, ORDER[factory]("sgd", lambda step: np.full((4, 4), 0.25))) < LIMIT


def _with_kind(factory, kind, steps):
    return _train(
        factory,
        "sgd",
        communication_type=bf.CommunicationType[kind],
        num_steps_per_communication=steps,
    )


@pytest.mark.parametrize("factory", [AWC, ATC])
def test_allreduce_and_empty_and_local_steps(pool, factory):
    mean = np.full((4, 4), 0.25)
    states = pool.run(_with_kind, factory, "allreduce", 2)
    wanted = ORDER[factory]("sgd", lambda step: mean if step % 2 else np.eye(4))
    assert error(states, wanted) < LIMIT
    states = pool.run(_with_kind, factory, "empty", 1)
    assert error(states, ORDER[factory]("sgd", lambda step: np.eye(4))) < LIMIT


@pytest.mark.parametrize(
    "factory", ["DistributedNeighborAllreduceOptimizer", "DistributedAllreduceOptimizer"]
)
def test_older_names_are_awc(pool, factory):
    states = pool.run(_train, factory, "sgd", None, _ring)
    weights = uniform(T.RingGraph(4, 1)) if "Neighbor" in factory else T.FullyConnectedGraph(4)
    assert error(states, awc("sgd", lambda step: matrix(weights))) < LIMIT


def _accumulate(micro_steps, zero_between):
    model = awkward.make_model()
    optimizer = awkward.make_optimizer("sgd", model)
    bf.DistributedGradientAllreduceOptimizer(
        optimizer, model, num_steps_per_communication=micro_steps
    )
    communicator = optimizer._engine.communicator
    before = communicator.bytes_sent
    states = awkward.train(model, optimizer, bf.rank(), bf.size(), micro_steps=micro_steps)
    sent = communicator.bytes_sent - before
    optimizer.close()
    return awkward.error(states, awkward.serial("sgd", bf.size(), micro_steps)), sent


def test_gradient_allreduce_equals_serial_training_b28(pool):
    (wrong, once), *_ = pool.run(_accumulate, 1, False)
    assert wrong < 1e-5
    (wrong, sent), *_ = pool.run(_accumulate, 3, False)
    assert wrong < 1e-5
    assert sent == once  # a third of the passes communicates


def _barrier(optimizer, step):
    optimizer.force_barrier = True


def _other_weights(optimizer, step):
    optimizer.force_barrier = True
    optimizer.self_weight = 0.4
    optimizer.src_weights = {(bf.rank() + 1) % 4: 0.6}


@pytest.mark.parametrize("factory", ["DistributedWinPutOptimizer", "DistributedPullGetOptimizer"])
def test_window_optimizers_with_a_barrier_are_awc(pool, factory):
    states = pool.run(_train, factory, "adamw", _barrier, _ring)
    weights = matrix(uniform(T.RingGraph(4, 1)))
    assert error(states, awc("adamw", lambda step: weights)) < LIMIT
    states = pool.run(_train, factory, "sgd", _other_weights, _ring)
    weights = 0.4 * np.eye(4) + 0.6 * np.roll(np.eye(4), -1, axis=1)
    assert error(states, awc("sgd", lambda step: weights)) < LIMIT


def test_push_sum_with_a_barrier_on_a_ring_is_atc(pool):
    states = pool.run(_train, "DistributedPushSumOptimizer", "sgd", _barrier, _ring)
    weights = matrix(uniform(T.RingGraph(4, 1)))
    assert error(states, atc("sgd", lambda step: weights)) < LIMIT


def _window_names():
    _ring()
    model = awkward.make_model()
    optimizer = awkward.make_optimizer("sgd", model)
    bf.DistributedWinPutOptimizer(optimizer, model, window_prefix="mine")
    names, kept = bf.get_current_created_window_names(), bf.set_topology(T.StarGraph(4))
    other = awkward.make_model()
    said = []
    for call in (
        lambda: bf.DistributedWinPutOptimizer(
            awkward.make_optimizer("sgd", other), other, window_prefix="mine"
        ),
        lambda: bf.DistributedWinPutOptimizer(optimizer, model),
        lambda: bf.DistributedAdaptWithCombineOptimizer(
            awkward.make_optimizer("sgd", other), other, "neighbor_allreduce"
        ),
        lambda: bf.DistributedAdaptThenCombineOptimizer(
            awkward.make_optimizer("sgd", other), other, num_steps_per_communication=0
        ),
        lambda: bf.DistributedAdaptThenCombineOptimizer(
            torch.optim.LBFGS(other.parameters()), other
        ),
    ):
        try:
            call()
        except UserError as error:
            said.append(str(error))
    optimizer.close()
    return names, kept, said, bf.get_current_created_window_names()


def test_windows_of_optimizers_have_names_and_bad_calls_are_refused(pool):
    words = ["window_prefix", "distributed already", "CommunicationType", "at least 1", "LBFGS"]
    for names, kept, said, after in pool.run(_window_names):
        assert names == ["mine.0"] and not kept and after == []
        assert len(said) == len(words)
        assert all(word in message for word, message in zip(words, said, strict=True))
