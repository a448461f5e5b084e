"""Training with compressed gradients: exact if nothing is left out, and the same everywhere."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import dear
from tests.contract.awkward import error
from tests.contract.loops import (
    far_from_serial,
    loss_of,
    make_model,
    make_sgd,
    message,
    mine,
    steps,
    wrap,
)

# Plans and buckets are made in the first passes, which are dense.
_LONG = {"which": range(5)}


@pytest.mark.parametrize("compression", ["topk", "eftopk", "gaussian"])
@pytest.mark.parametrize("algorithm", ["allreduce", "wfbp", "mgwfbp", "dear", "ddp"])
def test_all_elements_are_the_dense_gradient(world, algorithm, compression):
    options = {"compression": compression, "density": 1.0}
    assert far_from_serial(world(3), algorithm, options=options, **_LONG) < 1e-5


@pytest.mark.parametrize(
    "algorithm", ["allreduce", "wfbp", "mgwfbp", "bytescheduler", "dear", "ddp"]
)
@pytest.mark.parametrize(("compression", "most"), [("fp16", 1e-3), ("bf16", 1e-2)])
def test_half_precision_on_the_wire_is_near(world, algorithm, compression, most):
    options = {"compression": compression}
    assert 1e-7 < far_from_serial(world(2), algorithm, options=options, **_LONG) < most


def _large(algorithm: str, compression: str) -> list[float]:
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    wrap(optimizer, model, algorithm, compression=compression)
    model(torch.tensor([[40000.0, -40000.0]])).sum().backward()
    optimizer.synchronize()
    gradient = model.weight.grad.view(-1).tolist()
    optimizer.close()
    return gradient


@pytest.mark.parametrize("algorithm", ["allreduce", "dear"])
def test_half_precision_does_not_overflow_in_the_sum(world, algorithm):
    for gradient in world(2).run(_large, algorithm, "fp16"):
        assert gradient == [40000.0, -40000.0]


def _simulated(micro_steps: int, density: float) -> nn.Module:
    """Serial SGD with what two ranks with error feedback would send, tensor by tensor."""
    model = make_model()
    optimizer = make_sgd(model)
    params = list(model.parameters())
    residuals = [[torch.zeros_like(p) for p in params] for _ in range(2)]
    for step in range(4):
        means = [torch.zeros_like(p) for p in params]
        for rank, residual in enumerate(residuals):
            model.zero_grad()
            for micro in range(micro_steps):
                loss_of(model, rank, micro_steps * step + micro).backward()
            for param, rest, mean in zip(params, residual, means, strict=True):
                rest += param.grad
                count = max(int(rest.numel() * density), 1)
                chosen = rest.abs().view(-1).topk(count).indices
                mean.view(-1)[chosen] += rest.view(-1)[chosen] / 2
                rest.view(-1)[chosen] = 0
        for param, mean in zip(params, means, strict=True):
            param.grad = mean
        optimizer.step()
    return model


def _trained(algorithm: str, options: dict[str, Any], micro_steps: int) -> float:
    model = make_model()
    optimizer = wrap(make_sgd(model), model, algorithm, density=0.1, **options)
    for step in range(4):
        optimizer.zero_grad()
        for micro in range(micro_steps):
            loss_of(model, dear.rank(), micro_steps * step + micro).backward()
        optimizer.step()
    far = error([model.state_dict()], [_simulated(micro_steps, 0.1).state_dict()])
    optimizer.close()
    return far


@pytest.mark.parametrize(
    ("algorithm", "options", "micro_steps"),
    [
        ("allreduce", {}, 1),
        ("wfbp", {"channels": 2}, 1),
        ("dear", {"fusion": "none"}, 1),
        # Sent twice, of which the second one supersedes the first.
        ("dear", {"fusion": "none"}, 2),
    ],
)
def test_error_feedback_equals_a_written_out_simulation(world, algorithm, options, micro_steps):
    options = {"compression": "eftopk", **options}
    for far in world(2).run(_trained, algorithm, options, micro_steps):
        assert far < 1e-5


def _replicas(algorithm: str, options: dict[str, Any]) -> tuple[float, float]:
    model, start = make_model(), make_model()
    optimizer = wrap(make_sgd(model), model, algorithm, **options)
    steps(model, optimizer, mine(), range(5))
    optimizer.synchronize()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    moved = error([state], [start.state_dict()])
    dear.broadcast_parameters(model.state_dict())
    spread = error([state], [model.state_dict()])
    optimizer.close()
    return moved, spread


@pytest.mark.parametrize("algorithm", ["wfbp", "mgwfbp", "dear", "ddp"])
@pytest.mark.parametrize(
    "options",
    [
        {"compression": "gaussian", "density": 0.05},
        {"compression": "eftopk", "density": 0.01, "density_warmup_steps": 3},
        {"compression": "signum"},
        {"compression": "efsignum"},
    ],
    ids=lambda options: options["compression"],
)
def test_replicas_are_bitwise_equal(world, algorithm, options):
    for moved, spread in world(3).run(_replicas, algorithm, options):
        assert moved > 1e-3
        assert spread == 0.0


def _regrouped() -> tuple[bool, bool]:
    model = make_model()
    options = {"compression": "eftopk", "density": 0.1, "fusion": "nearby_layers"}
    optimizer = wrap(make_sgd(model), model, "dear", nearby_layers=-1, **options)
    steps(model, optimizer, mine(), range(2))
    engine = optimizer._engine

    def kept() -> dict[Any, torch.Tensor]:
        return {
            param: (step, rest.clone())
            for part in engine._parts
            for param, (step, rest) in part.kept().items()
        }

    before = kept()
    engine._lay_out(learn=False)
    after = kept()
    same = all(
        step == after[param][0] == 2 and torch.equal(rest, after[param][1])
        for param, (step, rest) in before.items()
    )
    some = any(rest.any() for _, rest in before.values())
    optimizer.close()
    return same and len(before) == len(after), some


def test_new_groups_of_dear_keep_what_has_not_travelled(world):
    assert world(2).run(_regrouped) == [(True, True)] * 2


def _unused() -> list[bool]:
    """Layer 4 has no gradient in the second step, on any rank."""
    model = make_model()
    optimizer = wrap(make_sgd(model), model, "wfbp", compression="eftopk", density=0.1)
    steps(model, optimizer, mine(), range(1))
    carrier = optimizer._engine._carriers[model[4].weight]
    rest, values = carrier.compressor.residual.clone(), model[4].weight.detach().clone()
    optimizer.zero_grad()
    model[:4](torch.ones(2, 6)).sum().backward()
    optimizer.step()
    seen = [
        model[4].weight.grad is None,
        torch.equal(model[4].weight, values),
        torch.equal(carrier.compressor.residual, rest),
    ]
    optimizer.close()
    return seen


def test_a_parameter_that_nobody_uses_is_left_alone_and_so_is_what_is_kept_of_it(world):
    assert world(2).run(_unused) == [[True] * 3] * 2


def _complex() -> list[str]:
    said = []
    for algorithm in ("wfbp", "allreduce", "mgwfbp", "dear", "bytescheduler", "ddp", "fsdp"):
        model = nn.Linear(3, 2, dtype=torch.complex64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        said.append(message(partial(wrap, optimizer, model, algorithm, compression="fp16")))
    return said


def test_complex_gradients_are_refused(world):
    for said in world(2).run(_complex):
        assert all("'compression'='fp16'" in line and "complex64" in line for line in said)


def _alone(compression: str) -> list[float]:
    return [
        far_from_plain(algorithm, compression) for algorithm in ("wfbp", "mgwfbp", "dear", "ddp")
    ]


def far_from_plain(algorithm: str, compression: str) -> float:
    model, wanted = make_model(), make_model()
    optimizer = wrap(make_sgd(model), model, algorithm, compression=compression)
    steps(model, optimizer, [0])
    optimizer.close()
    steps(wanted, make_sgd(wanted), [0])
    return error([model.state_dict()], [wanted.state_dict()])


@pytest.mark.parametrize("compression", ["fp16", "signum"])
def test_alone_nothing_is_compressed(world, compression):
    (far,) = world(1).run(_alone, compression)
    assert far == [0.0] * 4
