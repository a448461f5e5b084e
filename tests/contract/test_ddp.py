"""DDP's own options: static graphs, PowerSGD, ZeRO (compression: test_compression)."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

import comm_core
import dear
from dear.algorithms.synchronous.ddp import DEFAULT_FIRST_MB, Ddp
from dear.buckets.grouping import MIB, Arrived
from tests.contract.loops import (
    difference,
    everybody,
    far_from_serial,
    make_model,
    make_sgd,
    message,
    mine,
    moved_and_spread,
    steps,
    wrap,
)
from tests.ranks import on_ranks


def test_defaults_are_those_of_the_installed_torch():
    """Measurements of `ddp` are of what people run."""
    torchs = inspect.signature(torch.nn.parallel.DistributedDataParallel).parameters
    ours = Ddp.Options()
    for name in ("bucket_cap_mb", "find_unused_parameters", "gradient_as_bucket_view"):
        assert getattr(ours, name) == torchs[name].default, name
    assert ours.static_graph == torchs["static_graph"].default
    # torch 2.13 has a new name beside it, which is None until it is given.
    old = torchs.get("broadcast_buffers")
    assert ours.broadcast_buffers is True and (old is None or old.default in (True, None))
    assert torch.distributed._DEFAULT_FIRST_BUCKET_BYTES == DEFAULT_FIRST_MB * MIB


def _buckets(cap_mb: float | None, unused: bool) -> tuple[list[int], list[int]]:
    """Bytes of the buckets that DDP has, and of those that are stated without it."""
    torch.manual_seed(0)
    layers = [nn.Linear(300, 500, bias=False) for _ in range(4)]  # 0.57 MiB each
    layers = [layer if i % 2 else nn.Linear(500, 300, bias=False) for i, layer in enumerate(layers)]
    model = nn.Sequential(*layers)
    options = {"bucket_cap_mb": cap_mb, "find_unused_parameters": unused}
    optimizer = dear.DistributedOptimizer(make_sgd(model), model, algorithm="ddp", **options)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(2, 500)).sum().backward()
        optimizer.step()
    sizes = [param.nbytes for param in reversed(list(model.parameters()))]
    arrived = Arrived(sizes=sizes, arrivals_s=[0.0] * 4, owners=[*range(4)], end_s=0.0)
    stated = Ddp.grouping(Ddp.Options(**options), arrived, lambda nbytes: 0.0)
    actual = [nbytes for nbytes, _ in optimizer._engine.groups()]
    return actual, [sum(sizes[place] for place in group) for group in stated]


@pytest.mark.parametrize(
    ("cap_mb", "unused", "layers"),
    [
        (None, False, [2, 2]),
        (25.0, False, [4]),
        (0.5, False, [1, 1, 1, 1]),
        (1.5, False, [3, 1]),
        (1.5, True, [1, 3]),
    ],
)
def test_only_torchs_default_has_a_small_first_bucket(world, cap_mb, unused, layers):
    for actual, stated in world(2).run(_buckets, cap_mb, unused):
        assert actual == stated == [count * 600_000 for count in layers]


def _powersgd(start: int) -> tuple[float, float]:
    model, wanted = make_model(), make_model()
    options = {"powersgd_rank": 1, "powersgd_start_step": start}
    optimizer = wrap(make_sgd(model), model, "ddp", compression="powersgd", **options)
    steps(model, optimizer, mine(), range(6))
    steps(wanted, make_sgd(wanted), everybody(), range(6))
    far = difference(model, wanted)
    _, spread = moved_and_spread(model, optimizer)
    return spread, far


def test_powersgd_starts_at_its_step(world):
    for spread, far in world(2).run(_powersgd, 6):
        assert spread == 0.0 and far < 1e-5
    for spread, far in world(2).run(_powersgd, 2):
        assert spread == 0.0 and 1e-4 < far < 1.0


def make_adamw(model: nn.Module) -> torch.optim.Optimizer:
    params = list(model.parameters())
    groups = [{"params": params[::2], "lr": 0.01}, {"params": params[1::2], "lr": 0.003}]
    return torch.optim.AdamW(groups, weight_decay=0.05)


def _sharded_state() -> tuple[int, int, float]:
    model, wanted = make_model(), make_model()
    optimizer, serial = wrap(make_adamw(model), model, "ddp", zero=True), make_adamw(wanted)
    steps(model, optimizer, mine())
    steps(wanted, serial, everybody())
    mine_only = len(optimizer._engine._zero._zero.optim.state)
    whole = optimizer.state_dict()
    far = max(
        (value - serial.state_dict()["state"][place][key]).abs().max().item()
        for place, state in whole["state"].items()
        for key, value in state.items()
    )
    optimizer.close()
    far = max(far, difference(model, wanted))
    return mine_only, len(whole["state"]), max(far, float(len(optimizer.state) != 6))


def test_zero_shards_the_state_and_gives_whole_checkpoints(world):
    seen = world(2).run(_sharded_state)
    assert sum(mine_only for mine_only, _, _ in seen) == 6
    for mine_only, whole, far in seen:
        assert 0 < mine_only < 6
        assert whole == 6
        assert far < 1e-5


def test_a_static_graph_equals_serial(world):
    assert far_from_serial(world(2), "ddp", options={"static_graph": True}) < 1e-5


class Counting(torch.optim.SGD):
    """Slows down with the number of its own steps."""

    count = 0

    def step(self, closure: object = None) -> object:
        self.count += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.count
        return super().step(closure)


class Holding(torch.optim.Optimizer):
    """An optimizer around another one."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base = base

    def step(self, closure: object = None) -> object:
        return self.base.step(closure)


@on_ranks(2)
def test_zero_returns_what_an_optimizer_counts_and_refuses_one_that_holds_another():
    model, wanted = make_model(), make_model()
    optimizer, plain = (Counting(m.parameters(), lr=0.1) for m in (model, wanted))
    wrap(optimizer, model, "ddp", zero=True)
    steps(model, optimizer, mine())
    optimizer.count = 7  # by the script
    steps(model, optimizer, mine(), range(3, 5))
    steps(wanted, plain, everybody())
    plain.count = 7
    steps(wanted, plain, everybody(), range(3, 5))
    assert optimizer.count == plain.count == 9 and difference(model, wanted) < 1e-5
    model = make_model()
    refused = message(lambda: wrap(Holding(make_sgd(model)), model, "ddp", zero=True))
    assert "keeps a SGD in its attribute 'base'" in refused and "zero=False" in refused


def _finished_and_awaited() -> list[tuple[float, float]]:
    """Times at which the last message of each pass, and the last that was waited for, ended."""
    model = make_model()
    optimizer = dear.DistributedOptimizer(make_sgd(model), model, algorithm="ddp")
    times = []
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 6)).sum().backward()
        times.append((comm_core.events()[-1]["finished_s"], comm_core.last_awaited_s()))
        optimizer.step()
    return times


def test_the_comm_core_knows_what_torchs_reducer_has_waited_for(world):
    """Torch waits by futures; a replay of compute must know when they ended."""
    for times in world(2).run(_finished_and_awaited):
        assert all(ended == awaited for ended, awaited in times)


def _own_gradients(way: str) -> bool:
    """Returns True if steps on gradients that DDP has not averaged are refused."""
    model = make_model()
    optimizer = wrap(make_sgd(model), model, "ddp")
    params = list(model.parameters())
    # The reducer is of use, and its averages are not refused, first.
    x = torch.randn(5, params[0].shape[1]) + dear.rank()
    for _ in range(2):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    optimizer.step()  # with the same averages
    optimizer.zero_grad()
    out = model.forward(x) if way == "forward" else model(x)
    if way == "hand":
        for param, grad in zip(params, torch.autograd.grad(out.sum(), params), strict=True):
            param.grad = grad
    else:
        out.sum().backward(retain_graph=True)
    if way == "twice":
        out.square().sum().backward()
    return "model(...)" in message(optimizer.step)


@pytest.mark.parametrize("way", ["forward", "hand", "twice"])
def test_gradients_that_ddp_has_not_averaged_are_refused(world, way):
    assert all(world(2).run(_own_gradients, way))
