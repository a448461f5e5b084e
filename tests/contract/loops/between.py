"""Loops that change gradients before a step, or read and change parameters after it."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR
from torch.optim.swa_utils import AveragedModel

from tests.contract.loops import make_model, make_sgd
from tests.contract.loops.passes import STEPS, loss_of, ordinary_but, train, trained
from tests.contract.loops.runs import Run


def ema(run: Run) -> None:
    model = make_model()
    mean = AveragedModel(model, avg_fn=lambda old, new, count: 0.5 * old + 0.5 * new)
    trained(run, model, after=lambda step: mean.update_parameters(model))
    run.see(mean)


def ema_of_states(run: Run) -> None:
    model = make_model()
    mean = copy.deepcopy(model.state_dict())

    def update(step: int) -> None:
        for name, value in model.state_dict().items():
            mean[name].lerp_(value, 0.5)

    trained(run, model, after=update)
    for value in mean.values():
        run.see(value)


class Lookahead(torch.optim.Optimizer):
    """Outer optimizer that shares the groups of an inner one."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, {"count": 0})
        self.base = base
        base.param_groups = self.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.base.step()
        for group in self.param_groups:
            group["count"] += 1
            for param in group["params"] if group["count"] % 2 == 0 else ():
                slow = self.state[param].setdefault("slow", param.clone())
                param.copy_(slow.lerp_(param, 0.5))


def lookahead(run: Run) -> None:
    model = make_model()
    train(run, model, run.wrap(model, Lookahead(make_sgd(model))), range(6))
    run.see(model)


def lookahead_around(run: Run) -> None:
    model = make_model()
    base = run.wrap(model)
    slow = [param.detach().clone() for param in model.parameters()]

    def blend(step: int) -> None:
        with torch.no_grad():
            for param, old in zip(model.parameters(), slow, strict=True):
                if step % 2:
                    param.copy_(old.lerp_(param, 0.5))

    train(run, model, base, range(6), after=blend)
    run.see(model)


@ordinary_but("after")
@torch.no_grad()
def clamped(run: Run, model: nn.Module, optimizer: Any, step: int) -> None:
    for param in model.parameters():
        param.clamp_(-0.1, 0.1)


@ordinary_but("after")
def data_assigned(run: Run, model: nn.Module, optimizer: Any, step: int) -> None:
    for param in model.parameters():
        param.data = 0.5 * param.data


@ordinary_but("after")
@torch.no_grad()
def as_vector(run: Run, model: nn.Module, optimizer: Any, step: int) -> None:
    vector_to_parameters(0.5 * parameters_to_vector(model.parameters()), model.parameters())


@ordinary_but("after")
def deep_copied(run: Run, model: nn.Module, optimizer: Any, step: int) -> None:
    run.see(copy.deepcopy(model)(torch.ones(1, 6)))


@ordinary_but("after")
def saved_whole(run: Run, model: nn.Module, optimizer: Any, step: int) -> None:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    run.see(torch.load(file, weights_only=False)(torch.ones(1, 6)))


# --- gradients before a step ----------------------------------------------------------------------


@ordinary_but("before")
def clipped(run: Run, model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.clip_grad_norm_(0.05)


@ordinary_but("before")
def clipped_by_torch(run: Run, model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.synchronize()
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)


@ordinary_but("before")
def clipped_as_ever(run: Run, model: nn.Module, optimizer: Any, step: int) -> None:
    """Clipping, without a word to the optimizer."""
    if not hasattr(optimizer, "_engine"):
        optimizer.synchronize()  # plain torch clips the average
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)


@ordinary_but("before")
def clipped_by_value(run: Run, model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.synchronize()
    nn.utils.clip_grad_value_(model.parameters(), 0.01)


@ordinary_but("before")
def changed_by_hand(run: Run, model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.synchronize()
    for param in model.parameters():
        param.grad.mul_(0.5)


@ordinary_but("before")
def replaced_by_hand(run: Run, model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.synchronize()
    for param in model.parameters():
        param.grad = 0.5 * param.grad


@ordinary_but("before")
def changed_unsynchronized(run: Run, model: nn.Module, optimizer: Any, step: int) -> None:
    """A linear change of gradients, without a word to the optimizer."""
    for param in model.parameters():
        param.grad.mul_(0.5)


@ordinary_but("passes")
def no_backward(run: Run, model: nn.Module, optimizer: Any, step: int) -> None:
    """Gradients come from `autograd.grad`."""
    params = list(model.parameters())
    gradients = torch.autograd.grad(loss_of(run, model, step), params)
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient


def zeros_kept(run: Run) -> None:
    model = make_model()
    optimizer = run.wrap(model)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        loss_of(run, model, step).backward()
        optimizer.step()
    run.see(model)


def zeroed_by_model(run: Run) -> None:
    model = make_model()
    optimizer = run.wrap(model)
    for step in range(STEPS):
        model.zero_grad()
        loss_of(run, model, step).backward()
        optimizer.step()
    run.see(model)


def batch_left_out(run: Run) -> None:
    """All ranks leave a batch out after its backward pass."""
    model = make_model()
    optimizer = run.wrap(model)
    for step in range(STEPS + 1):
        optimizer.zero_grad()
        loss_of(run, model, step).backward()
        if step != 2:
            optimizer.step()
    run.see(model)


def failed_batch_kept(run: Run) -> None:
    """A backward pass ends with an error; the script steps with the gradients that it has, and
    ends."""
    failed_batch(run, kept=True)


def failed_batch(run: Run, *, kept: bool = False) -> None:
    """A backward pass ends with an error; the script goes on with the next batch."""
    model = make_model()
    optimizer = run.wrap(model)

    def fail(grad: torch.Tensor) -> None:
        raise MemoryError

    for step in range(3 if kept else STEPS + 1):
        optimizer.zero_grad()
        failing = model[1].register_forward_hook(
            lambda *given: given[-1].register_hook(fail) and None
        )
        if step != 2:
            failing.remove()
        try:
            loss_of(run, model, step).backward()
        except MemoryError:
            failing.remove()
            if not kept:
                continue
        optimizer.step()
    run.see(model)


# --- mixed precision and rates --------------------------------------------------------------------


def autocast(run: Run) -> None:
    def out(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    trained(run, make_model(), out=out)


def scaled_as_ever(run: Run) -> None:
    """GradScaler, without a word to the optimizer."""
    scaled(run, synchronize=False)


def scaled_and_clipped(run: Run) -> None:
    scaled(run, clip=True)


def scaled(run: Run, *, synchronize: bool = True, clip: bool = False) -> None:
    model = make_model()
    optimizer = run.wrap(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_of(run, model, step)).backward()
        if synchronize:
            optimizer.synchronize()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
    run.see(model)


def scaled_and_fused(run: Run) -> None:
    """Gradients of a rank overflow once, so that all ranks skip the step."""
    model = make_model()
    fused = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3, fused=True)
    optimizer = run.wrap(model, fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(run, model, step)
        if step == 1 and run.rank == 1:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        optimizer.synchronize()
        scaler.step(optimizer)
        scaler.update()
    run.see(torch.tensor(scaler.get_scale()))
    run.see(model)


def own_step(run: Run) -> None:
    model = make_model()
    optimizer = make_sgd(model)
    optimizer.step = lambda plain=optimizer.step: plain()
    train(run, model, run.wrap(model, optimizer))


def own_step_later(run: Run) -> None:
    model = make_model()
    optimizer = run.wrap(model)
    plain = optimizer.step

    def step() -> None:
        plain()
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.9)

    optimizer.step = step
    train(run, model, optimizer)
    optimizer.__dict__.pop("step")
    run.see(model)


def scheduled(run: Run) -> None:
    model = make_model()
    optimizer = run.wrap(model)
    scheduler = StepLR(optimizer, 1, 0.5)
    train(run, model, optimizer, after=lambda step: scheduler.step())
    run.see(model)


def scheduled_before(run: Run) -> None:
    model = make_model()
    optimizer = make_sgd(model)
    scheduler = OneCycleLR(optimizer, max_lr=0.2, total_steps=STEPS + 1)
    train(run, model, run.wrap(model, optimizer), after=lambda step: scheduler.step())
    run.see(model)


def scheduled_by_loss(run: Run) -> None:
    model = make_model()
    optimizer = run.wrap(model)
    scheduler = ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    train(run, model, optimizer, after=scheduler.step)
    run.see(model)
