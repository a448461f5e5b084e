"""The algorithm `decentralized` behind the ordinary loop, against training written out serially."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import dear
from dear.comm import runtime
from dear.comm.consensus import GlobalAverage
from dear.errors import UserError
from dear.topology.schedules import Edge, Topology, TopologyReg
from dear.training.algorithm import algorithm_options
from tests import awkward
from tests.decentralized_serial import serial
from tests.ranks import RankPool

TINY = 0.0002  # MB: many buckets


class Uneven(Topology):
    """Weights that are not the mean, pairs and larger groups, ranks alone."""

    def _get_topo_edges(self):
        n = self._world_size
        pairs = [Edge([i, i + 1], 0.7) for i in range(0, n - 1, 2)]
        alone = [Edge([n - 1], 1.0)] if n % 2 else []
        later = [Edge([0], 1.0), Edge(range(1, n), 0.4 if n > 2 else 1.0)]
        return [[Edge(range(n), 0.1)], pairs + alone, later]


def _register():
    if "uneven" not in TopologyReg.registry:
        TopologyReg.register("uneven")(Uneven)


_register()


def _train(kind: str, options: dict, loop: dict) -> tuple[float, list]:
    _register()
    model = awkward.make_model()
    optimizer = awkward.make_optimizer(kind, model)
    optimizer = dear.DistributedOptimizer(optimizer, model, algorithm="decentralized", **options)
    awkward.train(model, optimizer, dear.rank(), dear.size(), **loop)
    optimizer.close()
    assert type(optimizer) in (torch.optim.SGD, torch.optim.AdamW)
    wanted = serial(
        kind,
        dear.size(),
        options.get("topology", "complete"),
        local=options.get("ranks_per_node", 1),
        micros=loop.get("micro_steps", 1),
        factor=options.get("adaptive_factor", 1.0),
    )
    return awkward.error([model.state_dict()], [wanted[dear.rank()]])


CASES = [
    (1, "complete", {}),
    (2, "complete", {}),
    (3, "complete", {"bucket_mb": TINY}),
    (4, "complete", {"update": "step"}),
    (2, "ring", {"bucket_mb": TINY}),
    (4, "ring", {"bucket_mb": TINY, "adaptive_factor": 0.6}),
    (2, "one-peer-exp", {"update": "step"}),
    (4, "one-peer-exp", {"bucket_mb": TINY}),
    (4, "alternating-exp-ring", {"bucket_mb": TINY}),
    (4, "alternating-exp-ring", {"ranks_per_node": 2, "update": "step", "bucket_mb": TINY}),
    (2, "uneven", {"bucket_mb": TINY}),
    (3, "uneven", {"adaptive_factor": 0.3}),
    (4, "uneven", {"bucket_mb": TINY, "update": "step"}),
]


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize(("world_size", "topology", "options"), CASES)
def test_equals_the_serial_simulation(world, world_size, topology, options, kind):
    options = {"topology": topology, "ranks_per_node": 1, **options}
    assert max(world(world_size).run(_train, kind, options, {})) < 1e-5


LOOPS = [
    ({"micro_steps": 2, "no_sync": True}, {}),
    ({"micro_steps": 2}, {"update": "step"}),
    ({"micro_steps": 2, "no_sync": True}, {"update": "step"}),
    ({"evaluate": "grad", "read_every_step": True}, {}),
    ({"evaluate": "no_grad"}, {"update": "step"}),
]


@pytest.mark.parametrize(("loop", "options"), LOOPS)
def test_p13_accumulation_and_evaluations_change_nothing(world, loop, options):
    options = {"topology": "one-peer-exp", "bucket_mb": TINY, **options}
    assert max(world(4).run(_train, "sgd", options, loop)) < 1e-5


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


def _resume(topology: str, update: str, order: str) -> bool:
    """Saved and loaded into new objects after 3 of 6 steps: the same bits as without."""
    options = {"topology": topology, "update": update, "bucket_mb": TINY}

    def wrapped():
        model = awkward.make_model()
        optimizer = awkward.make_optimizer("adamw", model)
        return model, dear.DistributedOptimizer(
            optimizer, model, algorithm="decentralized", **options
        )

    def run(model, optimizer, steps):
        for step in steps:
            optimizer.zero_grad()
            _loss(model, step).backward()
            optimizer.step()

    model, optimizer = wrapped()
    run(model, optimizer, range(3))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    run(model, optimizer, range(3, 6))
    optimizer.close()

    again = awkward.make_model()
    if order == "before":
        with torch.no_grad():
            again.load_state_dict(saved[0])
        plain = awkward.make_optimizer("adamw", again)
        plain.load_state_dict(saved[1])
        resumed = dear.DistributedOptimizer(plain, again, algorithm="decentralized", **options)
    else:
        again, resumed = wrapped()
        run(again, resumed, range(2))  # other parameters and another phase
        if order == "model first":
            again.load_state_dict(saved[0])
        resumed.load_state_dict(saved[1])
        again.load_state_dict(saved[0])
    run(again, resumed, range(3, 6))
    resumed.close()
    return all(
        torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True)
    )


def _loss(model, step):
    x, y = awkward.data(step, 0, dear.size())
    rows = slice(dear.rank() * awkward.BATCH, (dear.rank() + 1) * awkward.BATCH)
    return functional.cross_entropy(model(x[rows]), y[rows])


@pytest.mark.parametrize("order", ["before", "model first", "optimizer first"])
@pytest.mark.parametrize(("topology", "update"), [("one-peer-exp", "backward"), ("ring", "step")])
def test_p14_a_resumed_training_goes_on_with_the_same_bits(world, topology, update, order):
    assert all(world(4).run(_resume, topology, update, order))


def _scaler(kind: str, bad_step: int | None) -> list:
    """With a scaler and clipping, in `step()`; where one rank meets a gradient that is not finite,
    it alone leaves the update out, and averaging goes on."""
    model = awkward.make_model()
    optimizer = awkward.make_optimizer(kind, model)
    optimizer = dear.DistributedOptimizer(
        optimizer, model, algorithm="decentralized", topology="ring", update="step", bucket_mb=TINY
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
    for step in range(4):
        optimizer.zero_grad()
        loss = _loss(model, step)
        if step == bad_step and dear.rank() == 0:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    optimizer.synchronize()
    optimizer.close()
    return [param.detach().clone() for param in model.parameters()]


def _clipped_serially(kind: str, world_size: int, bad_step: int | None) -> list:
    from tests.decentralized_serial import backward, mix

    models = [awkward.make_model() for _ in range(world_size)]
    optimizers = [awkward.make_optimizer(kind, model) for model in models]
    topology = TopologyReg.make("ring", world_size=world_size, rank=0)
    for step in range(4):
        for rank, model in enumerate(models):
            model.zero_grad()
            backward(model, rank, world_size, step, 1)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if step > 0:
            mix(models, topology.edges_at(step), 1.0)
        for rank, optimizer in enumerate(optimizers):
            if not (step == bad_step and rank == 0):
                optimizer.step()
    return [list(model.parameters()) for model in models]


@pytest.mark.parametrize("bad_step", [None, 1])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_p6_scaler_and_clipping_judge_whole_steps_of_each_rank(world, kind, bad_step):
    wanted = _clipped_serially(kind, 2, bad_step)
    for got, want in zip(world(2).run(_scaler, kind, bad_step), wanted, strict=True):
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b.detach(), rtol=1e-4, atol=1e-6)


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


def _moved() -> str:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = dear.DistributedOptimizer(optimizer, model, algorithm="decentralized")
    said = ""
    for dtype in (torch.float32, torch.float64):
        model.to(dtype)
        optimizer.zero_grad()
        try:
            model(torch.ones(1, 3, dtype=dtype)).sum().backward()
            optimizer.step()
        except UserError as error:
            said = str(error)
    optimizer.synchronize()
    optimizer.close()
    return said


def test_a_model_that_becomes_another_is_refused(world):
    assert all("moved or converted" in said for said in world(2).run(_moved))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"topology": "rign"}, "did you mean 'ring'"),
        ({"bucket_mb": 0.0}, "'bucket_mb'"),
        ({"adaptive_factor": 1.5}, "'adaptive_factor'"),
        ({"adaptive_factor": -0.5}, "'adaptive_factor'"),
        ({"update": "never"}, "'update'"),
        ({"ranks_per_node": 0}, "'ranks_per_node'"),
        ({"topologie": "ring"}, "did you mean 'topology'"),
    ],
)
def test_bad_options_are_refused_in_one_line(options, named):
    with pytest.raises(UserError) as caught:
        algorithm_options("decentralized", options)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def _unmoved() -> float:
    model = awkward.make_model()
    start = [param.detach().clone() for param in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer = dear.DistributedOptimizer(optimizer, model, algorithm="decentralized")
    for step in range(3):
        optimizer.zero_grad()
        _loss(model, step).backward()
        optimizer.step()
    optimizer.close()
    return max((p - s).abs().max().item() for p, s in zip(model.parameters(), start, strict=True))


def test_y2_without_updates_equal_models_stay_as_they_are(world):
    assert max(world(3).run(_unmoved)) < 1e-6


@pytest.fixture(scope="module")
def gloo():
    pool = RankPool(4, backend="gloo")
    yield pool
    pool.close()


@pytest.mark.parametrize("topology", ["complete", "one-peer-exp", "uneven"])
def test_it_runs_on_gloo(gloo, topology):
    options = {"topology": topology, "bucket_mb": TINY, "ranks_per_node": 1}
    assert max(gloo.run(_train, "sgd", options, {})) < 1e-5


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
