"""Loops with forward and backward passes of other kinds."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.contract.loops import batch, make_model
from tests.contract.loops.runs import Run

STEPS = 4
Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def call(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x)


def loss_of(run: Run, model: nn.Module, step: int, out: Loss = call) -> torch.Tensor:
    x, y = batch(run.rank, step)
    return functional.cross_entropy(out(model, x).float(), y)


def train(
    run: Run,
    model: nn.Module,
    optimizer: Any,
    steps: range = range(STEPS),
    *,
    out: Loss = call,
    before: Callable[[int], Any] = lambda step: None,
    after: Callable[[int], Any] = lambda step: None,
) -> None:
    """The ordinary loop.

    Args:
        before, after: called before and after each `optimizer.step()`.
    """
    for step in steps:
        optimizer.zero_grad()
        loss_of(run, model, step, out).backward()
        before(step)
        optimizer.step()
        after(step)


def trained(run: Run, model: nn.Module, **loop: Any) -> None:
    train(run, model, run.wrap(model), **loop)
    run.see(model)


class Net(nn.Module):
    """A body and a head, with methods that scripts call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(x)))

    score = forward


# --- other ways to run a model ------------------------------------------------------------------


def another_method(run: Run) -> None:
    trained(run, Net(), out=lambda model, x: model.score(x))


def forward_itself(run: Run) -> None:
    trained(run, Net(), out=lambda model, x: model.forward(x))


def in_parts(run: Run) -> None:
    trained(run, Net(), out=lambda model, x: model.head(torch.tanh(model.body(x))))


def sub_module(run: Run) -> None:
    trained(run, Net(), out=lambda model, x: model.body(x)[:, :4])


def functional_call(run: Run) -> None:
    trained(
        run,
        Net(),
        out=lambda model, x: torch.func.functional_call(model, dict(model.named_parameters()), x),
    )


def two_forwards(run: Run) -> None:
    trained(run, Net(), out=lambda model, x: model(x) - model(-x))


def recomputed(run: Run) -> None:
    def out(model: Net, x: torch.Tensor) -> torch.Tensor:
        return model.head(checkpoint(model.body, x, use_reentrant=False))

    class Recomputed(Net):
        forward = out

    trained(run, Recomputed())


def compiled(run: Run) -> None:
    model = make_model()
    fast = run.compiled(model)
    train(run, fast, run.wrap(fast))
    run.see(model)


def compiled_later(run: Run) -> None:
    model = make_model()
    optimizer = run.wrap(model)
    fast = run.compiled(model)
    train(run, fast, optimizer)
    run.see(model)


def compiled_in_place(run: Run) -> None:
    model = make_model()
    optimizer = run.wrap(model)
    if run.compiled(model) is not model:
        model.compile(backend="eager")
    train(run, model, optimizer)
    run.see(model)


# --- several passes -----------------------------------------------------------------------------


def accumulated(run: Run) -> None:
    _accumulate(run, paused=False)


def accumulated_without_sync(run: Run) -> None:
    _accumulate(run, paused=True)


def _accumulate(run: Run, paused: bool) -> None:
    """Seven micro-batches, three to a step; one is left for the last step."""
    model = make_model()
    optimizer = run.wrap(model)
    optimizer.zero_grad()
    for micro in range(7):
        last = micro % 3 == 2 or micro == 6
        if paused and not last:
            with optimizer.no_sync():
                (loss_of(run, model, micro) / 3).backward()
        else:
            (loss_of(run, model, micro) / 3).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    run.see(model)


def two_passes_over_a_graph(run: Run) -> None:
    model = make_model()
    optimizer = run.wrap(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        out = model(batch(run.rank, step)[0])
        out.sum().backward(retain_graph=True)
        out.square().mean().backward()
        optimizer.step()
    run.see(model)


def closure(run: Run) -> None:
    model = make_model()
    optimizer = run.wrap(model)

    def passes(step: int) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(run, model, step)
        loss.backward()
        return loss

    for step in range(STEPS):
        run.see(optimizer.step(functools.partial(passes, step)))
    run.see(model)


def lbfgs(run: Run) -> None:
    model = make_model()
    optimizer = run.wrap(model, torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4))

    def passes() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(run, model, 0)
        loss.backward()
        return run.mean(loss)  # LBFGS stops by it, which all ranks must do together

    for _ in range(2):
        optimizer.step(passes)
    run.see(model)


def sam(run: Run) -> None:
    """Two passes; the first one on this rank's own batch."""
    model = make_model()
    optimizer = run.wrap(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        with optimizer.no_sync():
            loss_of(run, model, step).backward()
        kept = [param.detach().clone() for param in model.parameters()]
        with torch.no_grad():
            for param in model.parameters():
                param.add_(param.grad, alpha=0.05)
        optimizer.zero_grad()
        loss_of(run, model, step).backward()
        with torch.no_grad():
            for param, value in zip(model.parameters(), kept, strict=True):
                param.copy_(value)
        optimizer.step()
    run.see(model)


def sam_averaged(run: Run) -> None:
    """Two passes; the first one on the batch of all ranks."""
    model = make_model()
    optimizer = run.wrap(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(run, model, step).backward()
        if run.subject.meaning.family == "synchronous":
            optimizer.synchronize()
        moves = [0.05 * param.grad for param in model.parameters()]
        with torch.no_grad():
            torch._foreach_add_(list(model.parameters()), moves)
        optimizer.zero_grad()
        loss_of(run, model, step).backward()
        with torch.no_grad():
            torch._foreach_sub_(list(model.parameters()), moves)
        optimizer.step()
    run.see(model)


def penalty_before(run: Run) -> None:
    model = make_model()
    optimizer = run.wrap(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        x = batch(run.rank, step)[0].requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (out.square().mean() + slope.square().mean()).backward()
        optimizer.step()
    run.see(model)


def penalty_after(run: Run) -> None:
    model = make_model()
    optimizer = run.wrap(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(run, model, step).backward()
        x = batch(run.rank, step)[0].requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        slope.square().mean().backward()
        optimizer.step()
    run.see(model)


def penalty_of_gradients(run: Run) -> None:
    model = make_model()
    optimizer = run.wrap(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(run, model, step)
        slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        (loss + sum(slope.square().sum() for slope in slopes)).backward()
        optimizer.step()
    run.see(model)


def graph_of_gradients(run: Run) -> None:
    model = make_model()
    optimizer = run.wrap(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of a cycle of references
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(run, model, step).backward(create_graph=True)
            sum(param.grad.square().sum() for param in model.parameters()).backward()
            optimizer.step()
    run.see(model)


def gan(run: Run) -> None:
    torch.manual_seed(8)
    maker = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 6))
    judge = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
    making, judging = run.wrap(maker), run.wrap(judge)
    for step in range(STEPS):
        x = batch(run.rank, step)[0]
        drawn = maker(x)
        judging.zero_grad()
        judge(x).square().mean().backward()
        (judge(drawn.detach()) - 1).square().mean().backward()
        judging.step()
        making.zero_grad()
        judge(drawn).square().mean().backward()
        making.step()
    run.see(maker)
    run.see(judge)
