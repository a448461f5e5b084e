"""What decentralized algorithms alone promise."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import dear
from dear.comm import runtime
from dear.comm.neighbors import GlobalAverage
from dear.errors import UserError
from dear.topology.schedules import Edge, Topology, TopologyReg
from tests.contract import awkward
from tests.contract.decentral import loss
from tests.contract.training import Script, difference, on_rank, serial
from tests.ranks import RankPool

TINY = 0.0002  # MB: many buckets


@TopologyReg.register("uneven")
class Uneven(Topology):
    """Weights that are not the mean, pairs and larger groups, ranks alone."""

    def _get_topo_edges(self):
        n = self._world_size
        pairs = [Edge([i, i + 1], 0.7) for i in range(0, n - 1, 2)]
        alone = [Edge([n - 1], 1.0)] if n % 2 else []
        later = [Edge([0], 1.0), Edge(range(1, n), 0.4 if n > 2 else 1.0)]
        return [[Edge(range(n), 0.1)], pairs + alone, later]


def _on_rank(algorithm, options):
    return on_rank(algorithm, options, Script())  # here the topology above is known


def far(pool, size, algorithm, **options):
    wanted = serial(algorithm, options, Script(), size)
    results = pool.run(_on_rank, algorithm, options)
    return max(difference(got, want) for got, want in zip(results, wanted, strict=True))


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (2, {"bucket_mb": TINY}),
        (3, {"adaptive_factor": 0.3}),
        (4, {"bucket_mb": TINY, "update": "step"}),
    ],
)
def test_a_registered_topology_equals_its_reference(world, size, options):
    assert far(world(size), size, "decentralized", topology="uneven", **options) < 1e-5


@pytest.mark.full
@pytest.mark.parametrize("dynamic", ["inner-outer-ring", "inner-outer-exp2"])
def test_inner_outer_topologies_equal_their_reference(own_pool, dynamic):
    assert far(own_pool(6), 6, "neighbor", dynamic=dynamic, local_size=3) < 2e-5


def test_between_machines_nothing_is_lost_when_they_do_not_divide_the_parameters(world):
    options = {"combine": "atc", "hierarchical": True, "local_size": 3, "bucket_mb": 0.0001}
    assert far(world(3), 3, "neighbor", **options) < 2e-5


def test_replicas_of_one_machine_stay_the_same(world):
    options = {"combine": "atc", "hierarchical": True, "local_size": 2}
    states = [result["end"] for result in world(4).run(_on_rank, "neighbor", options)]
    for one, other in ((0, 1), (2, 3)):
        assert all((states[one][n] == states[other][n]).all() for n in states[one])


def _other_optimizer() -> float:
    """One that is not torch's, with hooks: only whole steps are possible."""

    class Mine(torch.optim.SGD):
        pass

    Mine.__module__ = "elsewhere"
    model = awkward.make_model()
    optimizer = Mine(model.parameters(), lr=0.1)
    options = {"algorithm": "decentralized", "topology": "one-peer-exp"}
    with pytest.raises(UserError, match="update='step'"):
        dear.DistributedOptimizer(optimizer, model, **options)
    optimizer = Mine(model.parameters(), lr=0.1)
    optimizer = dear.DistributedOptimizer(optimizer, model, update="step", **options)
    plain = awkward.make_model()
    other = dear.DistributedOptimizer(
        torch.optim.SGD(plain.parameters(), lr=0.1), plain, bucket_mb=TINY, **options
    )
    for one, by in ((model, optimizer), (plain, other)):
        awkward.train(one, by, dear.rank(), dear.size())
        by.close()
    return awkward.error([model.state_dict()], [plain.state_dict()])


def test_any_optimizer_can_be_stepped_as_a_whole(world):
    assert max(world(2).run(_other_optimizer)) < 1e-5


def _loss(model, step):
    x, y = awkward.data(step, 0, dear.size())
    rows = slice(dear.rank() * awkward.BATCH, (dear.rank() + 1) * awkward.BATCH)
    return functional.cross_entropy(model(x[rows]), y[rows])


def _late_changes() -> list[str]:
    said = []

    def attempt(change):
        model = awkward.make_model()
        optimizer = awkward.make_optimizer("sgd", model)
        optimizer = dear.DistributedOptimizer(optimizer, model, algorithm="decentralized")
        for _ in range(2):
            optimizer.zero_grad()
            _loss(model, 0).backward()
            try:
                change(model, optimizer)
                optimizer.step()
            except UserError as error:
                said.append(str(error))
                optimizer.zero_grad()
                optimizer.synchronize()
        optimizer.close()

    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def scaled(model, optimizer):
        scaler.step(optimizer)

    attempt(lambda model, _: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    attempt(lambda _, optimizer: optimizer.clip_grad_norm_(0.1))
    attempt(lambda model, _: _loss(model, 1).backward())
    scaler.scale(torch.zeros(()))
    attempt(scaled)
    return said


def test_what_comes_after_the_update_in_the_backward_pass_is_refused(world):
    for said in world(2).run(_late_changes):
        assert len(said) == 8
        assert all("update='step'" in line and "\n" not in line for line in said)
        words = ["changed between", "cannot be clipped", "second backward", "GradScaler"]
        assert [word in said[2 * i] for i, word in enumerate(words)] == [True] * 4


def _consensus() -> list[float]:
    """Without updates, the models come together; then the average is everybody's."""
    model = nn.Linear(40, 30)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(float(dear.rank()))
    communicator = runtime.communicator()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer = dear.DistributedOptimizer(
        optimizer, model, algorithm="decentralized", topology="one-peer-exp", bucket_mb=TINY
    )
    seen = []
    for _ in range(4):
        model(torch.ones(1, 40)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(model.weight[0, 0].item())
    optimizer.synchronize()
    seen.append(GlobalAverage(communicator, model.parameters()).apply())
    optimizer.close()
    return seen


def test_p5_pure_mixing_reaches_the_mean_in_log2_steps(world):
    wanted = [[0, 1, 1.5, 1.5, 0], [1, 2, 1.5, 1.5, 0], [2, 1, 1.5, 1.5, 0], [3, 2, 1.5, 1.5, 0]]
    assert world(4).run(_consensus) == wanted


@pytest.fixture(scope="module")
def gloo():
    pool = RankPool(4, backend="gloo")
    yield pool
    pool.close()


@pytest.mark.parametrize("topology", ["complete", "one-peer-exp", "uneven"])
def test_it_runs_on_gloo(gloo, topology):
    assert far(gloo, 4, "decentralized", topology=topology, bucket_mb=TINY) < 1e-5


def _odd_ring() -> str:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        dear.DistributedOptimizer(optimizer, model, algorithm="decentralized", topology="ring")
    except UserError as error:
        return str(error)
    return ""


def test_p2_an_odd_ring_is_refused(world):
    assert all("even number of ranks" in said for said in world(3).run(_odd_ring))


def _wrapped(algorithm, options, kind="adamw"):
    model = awkward.make_model()
    optimizer = awkward.make_optimizer(kind, model)
    dear.DistributedOptimizer(optimizer, model, algorithm=algorithm, **options)
    return model, optimizer


def _changed_between(combine):
    model, optimizer = _wrapped("neighbor", {"combine": combine})
    optimizer.zero_grad()
    loss(model, 0, dear.rank(), dear.size()).backward()
    model.load_state_dict(awkward.make_model().state_dict())
    try:
        optimizer.step()
        said = ""
    except UserError as error:
        said = str(error)
    optimizer.close()
    return said


def test_parameters_changed_while_they_are_sent_are_refused(world):
    assert all("step()" in said for said in world(2).run(_changed_between, "awc"))
    assert world(2).run(_changed_between, "atc") == ["", ""]


def _refused_worlds():
    said = {}
    for name, options in {
        "local_size": {"hierarchical": True, "local_size": 2},
        "small": {"dynamic": "inner-outer-ring", "local_size": 2},
        "machines": {"dynamic": "inner-outer-exp2", "local_size": 3},
    }.items():
        try:
            _wrapped("neighbor", options)
        except UserError as error:
            said[name] = str(error)
    return said


def test_worlds_that_do_not_fit_are_refused(world):
    words = {
        "local_size": "no whole number of machines",
        "small": "at least 3 ranks per machine",
        "machines": "at least 2 machines",
    }
    for said in world(3).run(_refused_worlds):
        assert all(word in said[name] and "\n" not in said[name] for name, word in words.items())
