"""`dear.decentralized`: a model that its backward passes train, against serial simulations."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn

import dear
from dear.comm import runtime
from dear.decentralized import (
    DecentralizedDataParallel,
    Edge,
    Topology,
    TopologyReg,
    initialize_dist,
    lr_scheduler_fn_cosine_with_warmup,
    optim_fn_accum_adamw,
    optim_fn_adamw,
)
from dear.errors import UserError
from tests.contract import awkward
from tests.contract.decentralized_serial import backward, mix, serial

TINY = 0.0002


class Scalar(nn.Module):
    """One number whose gradient is the input."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.tensor([value]))

    def forward(self, gradient: float) -> torch.Tensor:
        return (self.x * gradient).sum()


def _sgd(params, lr=1.0):
    return torch.optim.SGD([param for _, param in params], lr=lr)


def _awkward_sgd(params):
    """Each parameter with the settings that `awkward.make_optimizer` gives it."""
    names = [name for name, _ in awkward.make_model().named_parameters()]
    groups = [{"params": [p], "lr": (0.1, 0.02)[names.index(name) % 2]} for name, p in params]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=1e-2, nesterov=True)


def _exponential(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)


def _p7(views: bool) -> list[float]:
    rank = dear.rank()
    model = DecentralizedDataParallel(Scalar(float(rank)), _sgd, param_as_bucket_view=views)
    seen = []
    for _ in range(4):
        model(float(rank)).backward()
        seen.append(next(model.parameters()).item())
    model.close()
    return seen


@pytest.mark.parametrize("views", [True, False])
def test_p7_constant_gradients_on_a_complete_graph(world, views):
    for rank, seen in enumerate(world(4).run(_p7, views)):
        # All started with rank 0's value, 0.
        assert seen == [-rank, -1.5 - rank, -3.0 - rank, -4.5 - rank]


def _train(options: dict, loop: dict) -> float:
    micros, zero = loop.get("micros", 1), loop.get("zero", "never")
    model = DecentralizedDataParallel(
        awkward.make_model(),
        _awkward_sgd,
        _exponential,
        bucket_size_in_mb=TINY,
        _local_world_size=1,
        **options,
    )
    model.train()
    rows = slice(dear.rank() * awkward.BATCH, (dear.rank() + 1) * awkward.BATCH)
    for step in range(awkward.STEPS):
        for micro in range(micros):
            model.set_accumulate_grad(micro < micros - 1)
            x, y = awkward.data(step, micro, dear.size())
            if zero == "before" and micro == 0:
                model.zero_grad()
            (nn.functional.cross_entropy(model(x[rows]), y[rows]) / micros).backward()
            if zero == "after" and micro == micros - 1:
                model.zero_grad()
        model.eval()
        model(torch.ones(2, 3, 5, 5))  # an evaluation, with gradients enabled
        model.train()
    state = copy.deepcopy(model.state_dict())
    model.close()
    wanted = serial("sgd", dear.size(), options.get("topology", "complete"), micros=micros)
    return awkward.error([state], [wanted[dear.rank()]])


CASES = [
    (1, {}, {}),
    (1, {"topology": "ring"}, {}),
    (2, {"topology": "ring"}, {"zero": "before"}),
    (3, {"param_as_bucket_view": False}, {}),
    (3, {}, {"micros": 2}),
    (4, {"topology": "one-peer-exp"}, {"zero": "after"}),
    (4, {"topology": "one-peer-exp", "param_as_bucket_view": False}, {}),
    (4, {"topology": "alternating-exp-ring"}, {"micros": 2, "zero": "before"}),
    (4, {"grad_clip_norm": 1e9}, {}),
]


@pytest.mark.parametrize(("world_size", "options", "loop"), CASES)
def test_p13_equals_the_serial_simulation_wherever_gradients_are_cleared(
    world, world_size, options, loop
):
    assert max(world(world_size).run(_train, options, loop)) < 1e-5


def _global_average() -> list:
    rank = dear.rank()
    model = Scalar()
    model.register_buffer("seen", torch.tensor([0.0, 0.0], dtype=torch.bfloat16))
    model.register_buffer("count", torch.tensor(0))
    wrapped = DecentralizedDataParallel(model, _sgd, sync_buffer_in_global_avg=True)
    said = []
    with torch.no_grad():
        model.x.fill_(rank)
        model.seen.fill_(rank)
        model.count.fill_(rank)
    distance = wrapped.global_avg(return_d2c=True)  # before the first step, too
    said.append([distance, model.x.item(), model.seen[0].item(), model.count.item()])
    for forbidden in (wrapped.global_avg, lambda: wrapped(0.0).backward()):
        with pytest.raises(UserError, match="revert"):
            forbidden()
    wrapped.revert_global_avg()
    said.append([model.x.item(), model.seen[0].item()])
    with pytest.raises(UserError, match="nothing to revert"):
        wrapped.revert_global_avg()
    said.append(wrapped.global_avg(will_revert=False))
    said.append(model.x.item())
    wrapped.close()
    return said


def test_p9_the_global_average_its_distance_and_the_way_back(world):
    for rank, said in enumerate(world(4).run(_global_average)):
        distance, *averages = said[0]
        # Parameter and two buffer elements; whole numbers are left as they are.
        assert distance == pytest.approx(abs(1.5 - rank) * 3**0.5)
        assert averages == [1.5, 1.5, rank]
        assert said[1:] == [[rank, rank], None, 1.5]


def _average_in_between(revert: bool) -> list[float]:
    rank = dear.rank()
    model = DecentralizedDataParallel(Scalar(), _sgd, topology="one-peer-exp")
    seen = []
    for step in range(4):
        model(float(rank)).backward()
        seen.append(next(model.parameters()).item())
        if step == 1:
            model.global_avg(will_revert=revert)
            if revert:
                model.revert_global_avg()
    model.close()
    return seen


def test_training_goes_on_as_before_after_a_reverted_average(world):
    steps = _one_peer(4, [0.0] * 4, average_after=None)
    assert world(4).run(_average_in_between, True) == steps


def test_training_goes_on_from_an_average_that_is_kept(world):
    steps = _one_peer(4, [0.0] * 4, average_after=1)
    assert world(4).run(_average_in_between, False) == steps


def _one_peer(count: int, start: list[float], average_after: int | None) -> list[list[float]]:
    """What each of 4 ranks sees with gradients r and one-peer-exp: groups 1, 0, 1, ..."""
    x, seen, mixable = start, [[] for _ in range(4)], False
    for step in range(count):
        if mixable:
            distance = 2 if step % 2 else 1
            x = [(x[r] + x[r ^ distance]) / 2 for r in range(4)]
        x = [value - r for r, value in enumerate(x)]
        for r, value in enumerate(x):
            seen[r].append(value)
        mixable = step != average_after
        if step == average_after:
            x = [sum(x) / 4] * 4
    return seen


class Hooked(torch.optim.SGD):
    """Writes down what it hears before each average."""

    def pre_average_hook(self, edge, weight):
        self.heard = [*getattr(self, "heard", ()), (list(edge.ranks), weight)]


def _hooked() -> list:
    made = []

    def make(params):
        made.append(Hooked([param for _, param in params], lr=1.0))
        return made[-1]

    model = DecentralizedDataParallel(Scalar(), make, topology="ring")
    for _ in range(3):
        model(1.0).backward()
    model.set_adaptive_factor(0.0)
    before = next(model.parameters()).item()
    model(0.0).backward()
    unmixed = next(model.parameters()).item() == before
    with pytest.raises(UserError, match="adaptive factor"):
        model.set_adaptive_factor(1.5)
    model.close()
    return [made[0].heard, unmixed, len(made)]


def test_p8_a_factor_of_zero_mixes_nothing_and_optimizers_hear_of_averages(world):
    heard = world(4).run(_hooked)
    assert heard[0] == [[([0, 3], 0.5), ([0, 1], 0.5), ([0, 3], 0.5)], True, 1]
    assert heard[2] == [[([1, 2], 0.5), ([2, 3], 0.5), ([1, 2], 0.5)], True, 1]


def _resume(topology: str, views: bool) -> list[bool]:
    """New objects go on with the same bits: optimizers, schedules, step, phase, averages."""
    schedule = functools.partial(lr_scheduler_fn_cosine_with_warmup, t_max=8, t_warmup=3)

    def make():
        return DecentralizedDataParallel(
            awkward.make_model(),
            functools.partial(optim_fn_accum_adamw, accum_iter=2, lr=0.01),
            schedule,
            topology=topology,
            bucket_size_in_mb=TINY,
            param_as_bucket_view=views,
            _local_world_size=1,
        )

    def run(model, steps):
        for step in steps:
            backward(model, dear.rank(), dear.size(), step, 1)

    model = make()
    run(model, range(3))
    saved = copy.deepcopy(model.checkpoint())
    run(model, range(3, 7))
    fresh = make()
    assert fresh.get_lr() == 0.0
    fresh.load_checkpoint(copy.deepcopy(saved))  # optimizers take tensors as they are
    used = make()
    run(used, range(2))
    used.load_checkpoint(saved)
    same = []
    for other in (fresh, used):
        run(other, range(3, 7))
        pairs = zip(model.parameters(), other.parameters(), strict=True)
        same.append(all(torch.equal(p, q) for p, q in pairs) and other.get_lr() == model.get_lr())
        other.close()
    model.close()
    return same


@pytest.mark.parametrize(
    ("topology", "views"), [("one-peer-exp", True), ("complete", False), ("ring", True)]
)
def test_p14_a_resumed_model_goes_on_with_the_same_bits(world, topology, views):
    assert world(4).run(_resume, topology, views) == [[True, True]] * 4


def _foreign_checkpoints() -> list[str]:
    model = DecentralizedDataParallel(Scalar(), _sgd)
    model(1.0).backward()
    saved = model.checkpoint()
    changes = [
        {"world_size": 7},
        {"topology": "ring"},
        {"buckets": [["y"]]},
        {"training": {**saved["training"], "scaler": {}}},
        {"training": {**saved["training"], "schedulers": [{}]}},
    ]
    said = []
    for change in changes:
        with pytest.raises(UserError) as caught:
            model.load_checkpoint({**saved, **change})
        said.append(str(caught.value))
    plain = Scalar()
    plain.load_state_dict(model.state_dict())  # under the plain model's names
    model.close()
    return said


def test_a_checkpoint_from_elsewhere_is_refused(world):
    words = ["world_size 7", "topology 'ring'", "other trainable", "scaler", "1 schedulers"]
    for said in world(2).run(_foreign_checkpoints):
        assert [word in line for word, line in zip(words, said, strict=True)] == [True] * 5


def _clipped(scale: bool, bad_step: int | None) -> list[torch.Tensor]:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if scale else None
    model = DecentralizedDataParallel(
        awkward.make_model(),
        _awkward_sgd,
        topology="ring",
        scaler=scaler,
        grad_clip_norm=0.5,
        bucket_size_in_mb=TINY,
    )
    rows = slice(dear.rank() * awkward.BATCH, (dear.rank() + 1) * awkward.BATCH)
    for step in range(4):
        x, y = awkward.data(step, 0, dear.size())
        loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
        if step == bad_step and dear.rank() == 0:
            loss = loss * torch.inf
        (scaler.scale(loss) if scale else loss).backward()
    model.close()
    return [param.detach().clone() for param in model.parameters()]


def _clipped_serially(bad_step: int | None) -> list:
    models = [awkward.make_model() for _ in range(2)]
    optimizers = [awkward.make_optimizer("sgd", model) for model in models]
    topology = TopologyReg.make("ring", world_size=2, rank=0)
    for step in range(4):
        for rank, model in enumerate(models):
            model.zero_grad()
            backward(model, rank, 2, step, 1)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if step > 0:
            mix(models, topology.edges_at(step), 1.0)
        for rank, optimizer in enumerate(optimizers):
            if not (step == bad_step and rank == 0):
                optimizer.step()
    return [list(model.parameters()) for model in models]


@pytest.mark.parametrize(("scale", "bad_step"), [(False, None), (True, None), (True, 1)])
def test_p6_clipping_and_scaler_see_the_whole_gradient(world, scale, bad_step):
    wanted = _clipped_serially(bad_step)
    for got, want in zip(world(2).run(_clipped, scale, bad_step), wanted, strict=True):
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b.detach(), rtol=1e-4, atol=1e-6)


def _kinds_of_memory() -> list[bool]:
    """channels_last, several dtypes, a frozen parameter that differs at first, a buffer, too."""
    torch.manual_seed(dear.rank())
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Flatten(), nn.Linear(8, 3)).to(
        memory_format=torch.channels_last
    )
    model.add_module("narrow", nn.Linear(3, 3, dtype=torch.bfloat16))
    model.register_buffer("buffer", torch.full((2,), float(dear.rank())))
    model[2].bias.requires_grad_(False)
    wrapped = DecentralizedDataParallel(model, functools.partial(optim_fn_adamw, lr=0.05))
    x = torch.randn(2, 4, 3, 3).to(memory_format=torch.channels_last)
    frozen = model[2].bias.clone()
    first = wrapped.global_avg(will_revert=False, return_d2c=True)
    for _ in range(3):
        model.narrow(model[:3](x).bfloat16()).sum().backward()
    strides = model[0].weight.is_contiguous(memory_format=torch.channels_last)
    kept = torch.equal(frozen, model[2].bias)
    types = [p.dtype for p in model.parameters()].count(torch.bfloat16)
    second = wrapped.global_avg(return_d2c=True)
    wrapped.close()
    return [first == 0.0, strides, kept, types == 2, second > 0, model.buffer[0].item() == 0]


def test_p9_p11_channels_last_types_frozen_parameters_and_buffers(world):
    assert world(2).run(_kinds_of_memory) == [[True] * 6] * 2


def _mistakes() -> list[str]:
    said = []
    linear = nn.Linear(2, 2)
    cases = [
        lambda: DecentralizedDataParallel(linear.requires_grad_(False), _sgd),
        lambda: DecentralizedDataParallel(Scalar(), _sgd, topology="one-peer"),
        lambda: DecentralizedDataParallel(Scalar(), _sgd, bucket_size_in_mb=0),
        lambda: DecentralizedDataParallel(Scalar(), _sgd, grad_clip_norm=-1.0),
        lambda: DecentralizedDataParallel(Scalar(), lambda params: None)(1.0).backward(),
    ]
    for case in cases:
        with pytest.raises(UserError) as caught:
            case()
        said.append(str(caught.value))
    return said


def test_mistakes_are_told_in_one_line(world):
    words = ["nothing to train", "'one-peer-exp'", "bucket_size_in_mb", "grad_clip_norm", "return"]
    for said in world(1).run(_mistakes):
        assert [word in line for word, line in zip(words, said, strict=True)] == [True] * 5
        assert not any("\n" in line for line in said)


class Halves(Topology):
    """Two halves apart, then joint."""

    def _get_topo_edges(self):
        n = self._world_size
        half = n // 2
        apart = [Edge(range(half), 1 / half), Edge(range(half, n), 1 / half)]
        return [[Edge(range(n), 1 / n)], apart]


def _own_topology() -> list[float]:
    if "halves" not in TopologyReg.registry:
        TopologyReg.register("halves")(Halves)
    assert initialize_dist() == (runtime.rank(), runtime.size())
    model = DecentralizedDataParallel(Scalar(), _sgd, topology="halves")
    seen = []
    for step in range(3):
        model(float(dear.rank()) if step == 0 else 0.0).backward()
        seen.append(next(model.parameters()).item())
    model.close()
    return seen


def test_a_registered_topology_is_used(world):
    assert world(4).run(_own_topology) == [
        [0, -0.5, -1.5],
        [-1, -0.5, -1.5],
        [-2, -2.5, -1.5],
        [-3, -2.5, -1.5],
    ]
