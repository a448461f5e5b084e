"""`dear.decentralized`: a model that its backward passes train, against serial simulations."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

import dear
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
from tests.contract.loops import message
from tests.contract.models import loss_of, make_model, make_optimizer
from tests.contract.training import OnRank, Script, fails, far, passes
from tests.ranks import on_ranks

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


@TopologyReg.register("halves")
class Halves(Topology):
    """Two halves apart, then joint."""

    def _get_topo_edges(self):
        n = self._world_size
        half = n // 2
        apart = [Edge(range(half), 1 / half), Edge(range(half, n), 1 / half)]
        return [[Edge(range(n), 1 / n)], apart]


class Wrapped(OnRank):
    """A script whose backward passes update, too."""

    views = True

    def _make(self, saved: Any = None) -> None:
        script = self.script
        self.model = self.optimizer = DecentralizedDataParallel(
            make_model(script.model),
            self._optimizer,
            partial(ExponentialLR, gamma=0.8) if script.scheduler != "none" else None,
            scaler=self.scaler if script.scaler != "none" else None,
            grad_clip_norm=0.05 if script.clip != "none" else 0.0,
            bucket_size_in_mb=TINY,
            param_as_bucket_view=self.views,
            _local_world_size=1,
            **self.options,
        )

    def _count(self) -> None:
        """The wrapper of a model has no statistics."""

    def _optimizer(self, params: Any) -> torch.optim.Optimizer:
        """Each parameter with the settings that `make_optimizer` gives it."""
        wanted = make_model(self.script.model)
        groups = make_optimizer(self.script.optimizer, wanted).param_groups
        settings = {id(p): group for group in groups for p in group["params"]}
        of = {name: settings[id(param)] for name, param in wanted.named_parameters()}
        return torch.optim.SGD([{**of[name], "params": [param]} for name, param in params])

    def _step(self, step: int) -> None:
        script = self.script
        for micro in passes(script):
            self.model.set_accumulate_grad(micro + 1 < len(passes(script)))
            if script.zero == "zeros" and micro == 0:
                self.model.zero_grad()
            loss = loss_of(script.model, self.model, dear.rank(), step, micro)
            loss = self.scaler.scale(loss) if script.scaler != "none" else loss
            (
                loss * (torch.inf if fails(script, dear.rank(), dear.size(), step) else 1.0)
            ).backward()
        if script.zero == "zeros":
            self.model.zero_grad()


class Copied(Wrapped):
    views = False


@pytest.mark.parametrize("views", [True, False])
@on_ranks(4)
def test_p7_constant_gradients_on_a_complete_graph(views: bool) -> None:
    rank = dear.rank()
    assert initialize_dist() == (rank, dear.size())
    model = DecentralizedDataParallel(Scalar(float(rank)), _sgd, param_as_bucket_view=views)
    seen = []
    for _ in range(4):
        model(float(rank)).backward()
        seen.append(next(model.parameters()).item())
    model.close()
    # All started with rank 0's value, 0.
    assert seen == [-rank, -1.5 - rank, -3.0 - rank, -4.5 - rank]


@pytest.mark.parametrize(
    ("size", "topology", "kind", "script"),
    [
        (1, "ring", Wrapped, {"scheduler": "before"}),
        (2, "ring", Wrapped, {"scheduler": "before", "zero": "zeros", "evaluate": "grad"}),
        (3, "complete", Copied, {"micros": "two"}),
        (4, "one-peer-exp", Copied, {"zero": "zeros"}),
        (4, "alternating-exp-ring", Wrapped, {"micros": "two", "zero": "zeros"}),
        (4, "halves", Wrapped, {}),
        # P6: clipping and scaler see the whole gradient.
        (2, "ring", Wrapped, {"clip": "torch"}),
        (2, "ring", Wrapped, {"clip": "torch", "scaler": "overflow"}),
        (3, "complete", Copied, {"scaler": "overflow"}),
    ],
)
def test_p13_equals_the_reference_wherever_gradients_are_cleared(
    world, size, topology, kind, script
):
    options, script = {"topology": topology}, Script(**script)
    assert far(world(size), size, "decentralized", options, script, kind) < 2e-5


@on_ranks(4)
def test_p9_the_global_average_its_distance_and_the_way_back() -> None:
    rank = dear.rank()
    model = Scalar()
    model.register_buffer("seen", torch.tensor([0.0, 0.0], dtype=torch.bfloat16))
    model.register_buffer("count", torch.tensor(0))
    wrapped = DecentralizedDataParallel(model, _sgd, sync_buffer_in_global_avg=True)
    with torch.no_grad():
        model.x.fill_(rank)
        model.seen.fill_(rank)
        model.count.fill_(rank)
    distance = wrapped.global_avg(return_d2c=True)  # before the first step, too
    # Parameter and two buffer elements; whole numbers are left as they are.
    assert distance == pytest.approx(abs(1.5 - rank) * 3**0.5)
    assert [model.x.item(), model.seen[0].item(), model.count.item()] == [1.5, 1.5, rank]
    for forbidden in (wrapped.global_avg, lambda: wrapped(0.0).backward()):
        with pytest.raises(UserError, match="revert"):
            forbidden()
    wrapped.revert_global_avg()
    assert [model.x.item(), model.seen[0].item()] == [rank, rank]
    with pytest.raises(UserError, match="nothing to revert"):
        wrapped.revert_global_avg()
    assert wrapped.global_avg(will_revert=False) is None and model.x.item() == 1.5
    wrapped.close()


@on_ranks(2)
def test_an_average_is_not_saved_as_a_ranks_own_state_and_ends_when_one_is_loaded() -> None:
    rank = dear.rank()
    model = DecentralizedDataParallel(Scalar(), _sgd, topology="ring")
    model(float(rank)).backward()
    saved = copy.deepcopy(model.checkpoint())
    model(1.0).backward()
    model.global_avg()
    line = message(model.checkpoint)
    assert "revert_global_avg() before checkpoint()" in line and "\n" not in line
    model.load_checkpoint(saved)
    assert model.state_dict()["x"].item() == -rank
    with pytest.raises(UserError, match="nothing to revert"):
        model.revert_global_avg()
    model(0.0).backward()
    assert model.state_dict()["x"].item() == -0.5
    model.close()


@pytest.mark.parametrize("revert", [True, False])
@on_ranks(4)
def test_training_goes_on_as_before_after_a_reverted_average_or_from_one_that_is_kept(
    revert: bool,
) -> None:
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
    assert seen == _one_peer(4, [0.0] * 4, average_after=None if revert else 1)[rank]


def _one_peer(count: int, start: list[float], average_after: int | None) -> list[list[float]]:
    """Returns what each of 4 ranks sees with gradients r and one-peer-exp: groups 1, 0, 1, ..."""
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


@on_ranks(4)
def test_p8_a_factor_of_zero_mixes_nothing_and_optimizers_hear_of_averages() -> None:
    optimizers = []

    def make(params):
        optimizers.append(Hooked([param for _, param in params], lr=1.0))
        return optimizers[-1]

    model = DecentralizedDataParallel(Scalar(), make, topology="ring")
    for _ in range(3):
        model(1.0).backward()
    model.set_adaptive_factor(0.0)
    before = next(model.parameters()).item()
    model(0.0).backward()
    assert next(model.parameters()).item() == before
    with pytest.raises(UserError, match="adaptive factor"):
        model.set_adaptive_factor(1.5)
    model.close()
    pairs = [[[0, 3], [0, 1]], [[1, 2], [0, 1]], [[1, 2], [2, 3]], [[0, 3], [2, 3]]][dear.rank()]
    (optimizer,) = optimizers
    assert optimizer.heard == [(pairs[step % 2], 0.5) for step in range(3)]


@pytest.mark.parametrize(
    ("topology", "views"), [("one-peer-exp", True), ("complete", False), ("ring", True)]
)
@on_ranks(4)
def test_p14_a_resumed_model_goes_on_with_the_same_bits(topology: str, views: bool) -> None:
    schedule = partial(lr_scheduler_fn_cosine_with_warmup, t_max=8, t_warmup=3)

    def make():
        return DecentralizedDataParallel(
            make_model("awkward"),
            partial(optim_fn_accum_adamw, accum_iter=2, lr=0.01),
            schedule,
            topology=topology,
            bucket_size_in_mb=TINY,
            param_as_bucket_view=views,
            _local_world_size=1,
        )

    def run(model, steps):
        for step in steps:
            loss_of("awkward", model, dear.rank(), step).backward()

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
    assert same == [True, True]


@on_ranks(2)
def test_a_checkpoint_from_elsewhere_is_refused() -> None:
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
    lines = [message(partial(model.load_checkpoint, {**saved, **change})) for change in changes]
    plain = Scalar()
    plain.load_state_dict(model.state_dict())  # under the plain model's names
    model.close()
    words = ["world_size 7", "topology 'ring'", "other trainable", "scaler", "1 schedulers"]
    assert all(word in line for word, line in zip(words, lines, strict=True))


@on_ranks(2)
def test_p9_p11_channels_last_types_frozen_parameters_and_buffers() -> None:
    torch.manual_seed(dear.rank())
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Flatten(), nn.Linear(8, 3)).to(
        memory_format=torch.channels_last
    )
    model.add_module("narrow", nn.Linear(3, 3, dtype=torch.bfloat16))
    model.register_buffer("buffer", torch.full((2,), float(dear.rank())))
    model[2].bias.requires_grad_(False)
    wrapped = DecentralizedDataParallel(model, partial(optim_fn_adamw, lr=0.05))
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
    assert strides and kept and types == 2
    assert first == 0.0 and second > 0 and model.buffer[0].item() == 0


@on_ranks(1)
def test_mistakes_are_told_in_one_line() -> None:
    linear = nn.Linear(2, 2)
    cases = [
        lambda: DecentralizedDataParallel(linear.requires_grad_(False), _sgd),
        lambda: DecentralizedDataParallel(Scalar(), _sgd, topology="one-peer"),
        lambda: DecentralizedDataParallel(Scalar(), _sgd, bucket_size_in_mb=0),
        lambda: DecentralizedDataParallel(Scalar(), _sgd, grad_clip_norm=-1.0),
        lambda: DecentralizedDataParallel(Scalar(), lambda params: None)(1.0).backward(),
        lambda: copy.deepcopy(DecentralizedDataParallel(Scalar(), _sgd)),
    ]
    lines = [message(case) for case in cases]
    words = ["nothing to train", "'one-peer-exp'", "bucket_size_in_mb", "grad_clip_norm", "return"]
    words.append("state_dict()")
    assert all(word in line for word, line in zip(words, lines, strict=True))
    assert not any("\n" in line for line in lines)
