"""AccumAdam, the functions that make optimizers, and their schedule."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from dear.decentralized.optim import (
    AccumAdam,
    AccumAdamW,
    lr_scheduler_fn_cosine_with_warmup,
    optim_fn_accum_adam,
    optim_fn_accum_adamw,
    optim_fn_adam,
    optim_fn_adamw,
)
from dear.errors import UserError


def gradients(step, shape=(7, 5)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize(("ours", "torchs"), [(AccumAdam, "Adam"), (AccumAdamW, "AdamW")])
def test_p10_with_one_step_per_folding_it_is_adam(ours, torchs):
    params = [nn.Parameter(gradients(100)) for _ in range(2)]
    optimizers = [
        ours([params[0]], lr=0.01, weight_decay=0.1, accum_iter=1),
        getattr(torch.optim, torchs)([params[1]], lr=0.01, weight_decay=0.1),
    ]
    for step in range(12):
        for param, optimizer in zip(params, optimizers, strict=True):
            param.grad = gradients(step)
            optimizer.step()
        torch.testing.assert_close(*params, rtol=1e-6, atol=1e-7)


def test_p10_moments_are_folded_every_fourth_step():
    param = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = AccumAdam([param], lr=0.5, accum_iter=4)
    mean, seen = torch.zeros(3, dtype=torch.float64), []
    for step in range(8):
        param.grad = gradients(step, (3,)).double()
        if step == 0:
            wanted = 1 - 0.5 * param.grad / (param.grad.abs() + 1e-8)
        mean += param.grad / 4 if step < 4 else 0
        optimizer.step()
        if step == 0:
            torch.testing.assert_close(param.detach(), wanted)
        seen.append({k: v.clone() for k, v in optimizer.state[param].items() if k != "step"})
    for state in seen[:3]:
        assert not state["exp_avg"].any()
        assert not state["exp_avg_sq"].any()
    torch.testing.assert_close(seen[3]["exp_avg"], 0.1 * mean)
    torch.testing.assert_close(seen[3]["exp_avg_sq"], 0.001 * mean**2)
    assert torch.equal(seen[4]["exp_avg"], seen[3]["exp_avg"])
    assert not torch.equal(seen[7]["exp_avg"], seen[3]["exp_avg"])


def test_p10_the_second_round_corrects_bias_by_two_foldings():
    param = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = AccumAdam([param], lr=1.0, accum_iter=2)
    before = 0.0
    for _ in range(3):
        before = param.item()
        param.grad = torch.ones(1, dtype=torch.float64)
        optimizer.step()
    # Constant gradients: both moments are 1 after correction, so each step is -lr.
    assert param.item() - before == pytest.approx(-1.0, abs=1e-7)


def test_accum_adam_goes_on_from_its_state():
    params = [nn.Parameter(gradients(50)) for _ in range(2)]
    first, other = (AccumAdamW([p], weight_decay=0.1, accum_iter=3) for p in params)
    for step in range(5):
        params[0].grad = gradients(step)
        first.step()
    other.load_state_dict(copy.deepcopy(first.state_dict()))
    with torch.no_grad():
        params[1].copy_(params[0])
    for step in range(5, 9):
        for param, optimizer in zip(params, (first, other), strict=True):
            param.grad = gradients(step)
            optimizer.step()
    assert torch.equal(*params)


@pytest.mark.parametrize(
    ("make", "decay", "kind"),
    [
        (optim_fn_adam, 1 / 32768, torch.optim.Adam),
        (optim_fn_adamw, 0.1, torch.optim.AdamW),
        (optim_fn_accum_adam, 1 / 32768, AccumAdam),
        (optim_fn_accum_adamw, 0.1, AccumAdamW),
    ],
)
def test_p12_only_weights_decay(make, decay, kind):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.LayerNorm(4))
    optimizer = make(list(model.named_parameters()))
    assert type(optimizer) is kind
    groups = {g["weight_decay"]: [id(p) for p in g["params"]] for g in optimizer.param_groups}
    names = {id(param): name for name, param in model.named_parameters()}
    assert [names[p] for p in groups[decay]] == ["0.weight"]
    others = ["0.bias", "1.weight", "1.bias", "2.weight", "2.bias"]
    assert [names[p] for p in groups[0.0]] == others
    assert optimizer.param_groups[0]["lr"] == 1e-3
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    assert optimizer.param_groups[0].get("accum_iter", 4) == 4


def test_p12_a_table_of_biases_does_not_decay():
    optimizer = optim_fn_adamw([("attention.bias_table", nn.Parameter(torch.ones(3, 3)))])
    assert optimizer.param_groups[0]["params"] == []


def test_p11_cosine_with_warmup():
    param = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([{"params": [param], "lr": 0.5}])
    schedule = lr_scheduler_fn_cosine_with_warmup(optimizer, t_max=50, t_warmup=10)
    seen = []
    for _ in range(60):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert seen[0] == pytest.approx(0.005)
    assert seen[5] == pytest.approx(0.5 * (0.01 + 0.99 * 0.5))
    assert seen[10] == pytest.approx(0.5)
    assert seen[30] == pytest.approx((0.5 + 1e-6) / 2)
    assert seen[50] == seen[59] == pytest.approx(1e-6)
    assert seen[10:51] == sorted(seen[10:51], reverse=True)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda p: AccumAdam([p], accum_iter=0), "accum_iter"),
        (lambda p: AccumAdam([p], lr=-1.0), "lr"),
        (lambda p: AccumAdam([p], betas=(0.9, 1.0)), "betas"),
        (lambda p: lr_scheduler_fn_cosine_with_warmup(torch.optim.SGD([p], 1.0), 5, 5), "t_warmup"),
    ],
)
def test_arguments_out_of_range(call, words):
    with pytest.raises(UserError, match=words):
        call(nn.Parameter(torch.ones(1)))
