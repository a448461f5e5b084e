"""Loops with forward and backward passes of other kinds."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.contract.loops import batch, make_model
from tests.contract.loops.runs import Loop, Run

STEPS = 4
Out = Callable[[nn.Module, torch.Tensor], torch.Tensor]
Part = Callable[[Run, nn.Module, Any, int], Any]


def call(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x)


def loss_of(run: Run, model: nn.Module, step: int, out: Out = call) -> torch.Tensor:
    x, y = batch(run.rank, step)
    return functional.cross_entropy(out(model, x).float(), y)


def train(
    run: Run,
    model: nn.Module,
    optimizer: Any,
    steps: range = range(STEPS),
    *,
    out: Out = call,
    passes: Callable[[int], Any] | None = None,
    before: Callable[[int], Any] = lambda step: None,
    after: Callable[[int], Any] = lambda step: None,
) -> None:
    """The ordinary loop.

    Args:
        passes: called instead of a forward and a backward pass.
        before, after: called before and after each `optimizer.step()`.
    """
    passes = passes or (lambda step: loss_of(run, model, step, out).backward())
    for step in steps:
        optimizer.zero_grad()
        passes(step)
        before(step)
        optimizer.step()
        after(step)


def trained(run: Run, model: nn.Module, **loop: Any) -> None:
    train(run, model, run.wrap(model), **loop)
    run.see(model)


def ordinary_but(place: str) -> Callable[[Part], Loop]:
    """The function is what the ordinary loop does in the place of `passes`, `before` or `after`."""

    def decorate(part: Part) -> Loop:
        @functools.wraps(part)
        def loop(run: Run) -> None:
            model = make_model()
            optimizer = run.wrap(model)
            train(run, model, optimizer, **{place: functools.partial(part, run, model, optimizer)})
            run.see(model)

        return loop

    return decorate


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
    call = torch.func.functional_call
    trained(run, Net(), out=lambda model, x: call(model, dict(model.named_parameters()), x))


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


def accumulated_without_sync(run: Run) -> None:
    accumulated(run, paused=True)


def accumulated(run: Run, paused: bool = False) -> None:
    """Seven micro-batches, three to a step; one is left for the last step."""
    model = make_model()
    optimizer = run.wrap(model)
    optimizer.zero_grad()
    for micro in range(7):
        last = micro % 3 == 2 or micro == 6
        with optimizer.no_sync() if paused and not last else contextlib.nullcontext():
            (loss_of(run, model, micro) / 3).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    run.see(model)


@ordinary_but("passes")
def two_passes_over_a_graph(run: Run, model: nn.Module, optimizer: Any, step: int) -> None:
    out = model(batch(run.rank, step)[0])
    out.sum().backward(retain_graph=True)
    out.square().mean().backward()


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


@ordinary_but("passes")
def sam(run: Run, model: nn.Module, optimizer: Any, step: int) -> None:
    """Two passes; the first one on this rank's own batch."""
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


@ordinary_but("passes")
def sam_averaged(run: Run, model: nn.Module, optimizer: Any, step: int) -> None:
    """Two passes; the first one on the batch of all ranks."""
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


@ordinary_but("passes")
def penalty_before(run: Run, model: nn.Module, optimizer: Any, step: int) -> None:
    x = batch(run.rank, step)[0].requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (out.square().mean() + slope.square().mean()).backward()


@ordinary_but("passes")
def penalty_after(run: Run, model: nn.Module, optimizer: Any, step: int) -> None:
    loss_of(run, model, step).backward()
    x = batch(run.rank, step)[0].requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    slope.square().mean().backward()


@ordinary_but("passes")
def penalty_of_gradients(run: Run, model: nn.Module, optimizer: Any, step: int) -> None:
    loss = loss_of(run, model, step)
    slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    (loss + sum(slope.square().sum() for slope in slopes)).backward()


@ordinary_but("passes")
def graph_of_gradients(run: Run, model: nn.Module, optimizer: Any, step: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of a cycle of references
        loss_of(run, model, step).backward(create_graph=True)
    sum(param.grad.square().sum() for param in model.parameters()).backward()


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


# --- models in eval mode, as `from_pretrained` returns them ---------------------------------------


def _normed() -> nn.Module:
    model = make_model()
    return nn.Sequential(model[:2], nn.BatchNorm1d(8), model[4]).eval()


def in_eval_mode(run: Run) -> None:
    trained(run, _normed())


def accumulated_in_eval_mode(run: Run) -> None:
    """Batches 5 to 8 are thrown away; the others are used by two."""
    model = _normed()
    optimizer = run.wrap(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        with optimizer.no_sync():
            loss_of(run, model, 5 + step).backward()
        optimizer.zero_grad()
        with optimizer.no_sync():
            loss_of(run, model, step).backward()
        loss_of(run, model, 10 + step).backward()
        optimizer.step()
    run.see(model)


def stepped_without_sync(run: Run) -> None:
    model = make_model().eval()
    optimizer = run.wrap(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        with optimizer.no_sync():
            loss_of(run, model, step).backward()
            optimizer.step()
    run.see(model)


def _halve(param: nn.Parameter) -> None:
    param.grad.mul_(0.5)


@ordinary_but("passes")
def hooked_later(run: Run, model: nn.Module, optimizer: Any, step: int) -> None:
    if step == 0:
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(_halve)
    loss_of(run, model, step).backward()


def hooked_before(run: Run) -> None:
    model = make_model()
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(_halve)
        param.register_hook(lambda gradient: 0.5 * gradient)
    trained(run, model)
