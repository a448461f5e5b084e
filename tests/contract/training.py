"""One training loop with everything a script may do around a step, on a rank and serially."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

import dear
from common.harness.worker.checking.serial import Ranks
from tests.contract.algorithms import Meaning, algorithm_options, reference_of
from tests.contract.models import batch, loss_of, make_model, make_optimizer

STEPS = 5
States = dict[str, dict[str, np.ndarray]]
"""States of the model by moment ("step 0", ..., "end", "closed"), and what was seen besides."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """Script of a training; the defaults are the ordinary loop."""

    model: str = "awkward"
    optimizer: str = "SGD"
    micros: str = "one"
    """Backward passes per step: `one`, `two`, or `paused`: the first under `no_sync()`."""
    scheduler: str = "none"
    """Made `before` or `after` wrapping."""
    read: str = "at the end"
    """The state dict: `at the end` only, or after `every step`."""
    evaluate: str = "never"
    """Evaluates after every step: with `grad`, `no_grad` or `inference`."""
    clip: str = "none"
    """Clips by `own` (`clip_grad_norm_` of the optimizer) or `torch`, after `synchronize()`."""
    scaler: str = "none"
    """`overflow`: with a GradScaler; rank 1's second step is not finite."""
    zero: str = "none"
    """State that `zero_grad` leaves: `none` or `zeros`."""
    call: str = "step"
    """`closure`: `step(closure)`."""
    steps: str = "once"
    """`left out` in every second pass, or made `twice`."""
    checkpoint: str = "none"
    """Everything is saved after three steps and loaded into new objects: `before` they are
    wrapped, or, one step later, the `model first` or the `optimizer first`."""


def fails(script: Script, rank: int, size: int, step: int) -> bool:
    """Returns whether the loss of a rank is not finite."""
    return script.scaler == "overflow" and step == 1 and rank == min(1, size - 1)


def passes(script: Script) -> range:
    return range(1 if script.micros == "one" else 2)


def calls(script: Script, step: int) -> int:
    """Returns how often `step()` is called."""
    return {"once": 1, "left out": step % 2, "twice": 2}[script.steps]


class OnRank:
    """A script on this rank; tests of other interfaces override `_new_model` and `_wrap`."""

    def __init__(self, name: str, options: dict[str, Any], script: Script) -> None:
        self.name, self.options, self.script = name, options, script
        self.meaning = Meaning.of(name)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        self.scheduler: Any = None
        self.frozen = False
        self.states: States = {"norms": {}, "outputs": {}, "losses": {}}
        self._make()

    def run(self) -> States:
        for step in range(STEPS):
            if step == 3 and self.script.checkpoint != "none":
                self._move_to_new_objects()
            self._in_turn(step)
            if self.scheduler is not None:
                self.scheduler.step()
            after_step(self.script, self.model, step, self.states, dear.rank())
        self.states["end"] = state_of(self.model)
        self._count()
        self.optimizer.close()
        self.states["closed"] = state_of(self.model)
        return self.states

    def _make(self, saved: Any = None) -> None:
        script = self.script
        self.model = self._new_model()
        if self.frozen:
            self.model[0].requires_grad_(False)
        self.optimizer = make_optimizer(script.optimizer, self.model)
        if saved is not None:
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
        if script.scheduler == "before":
            self.scheduler = ExponentialLR(self.optimizer, 0.8)
        self._wrap()
        if script.scheduler == "after":
            self.scheduler = ExponentialLR(self.optimizer, 0.8)

    def _new_model(self) -> nn.Module:
        return make_model(self.script.model)

    def _wrap(self) -> None:
        dear.DistributedOptimizer(self.optimizer, self.model, algorithm=self.name, **self.options)

    def _count(self) -> None:
        self.optimizer.statistics()  # of every algorithm, also where a rank has no neighbour

    def _move_to_new_objects(self) -> None:
        script, order = self.script, ["model", "optimizer"]
        if script.checkpoint == "optimizer first":
            order.reverse()
        parts = {name: copy.deepcopy(getattr(self, name).state_dict()) for name in order}
        scheduler = self.scheduler and self.scheduler.state_dict()
        file = io.BytesIO()
        torch.save(parts, file)
        self.optimizer.close()
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        self.frozen = script.model == "freezing"
        if script.checkpoint == "before":
            self._make(saved)
        else:
            self._make()
            loss_of(script.model, self.model, dear.rank(), 1).backward()
            self.optimizer.step()  # on which nothing may depend
            for name in order:
                getattr(self, name).load_state_dict(saved[name])
        if scheduler:
            self.scheduler.load_state_dict(scheduler)

    def _in_turn(self, step: int) -> None:
        """One-sided algorithms in a free run: ranks one after another, but for the first step."""
        if not self.meaning.in_turn:
            self._step(step)
            return
        rates = [group["lr"] for group in self.optimizer.param_groups]
        if step == 0:  # in which all must take part, moves nothing
            for group in self.optimizer.param_groups:
                group["lr"] = 0.0
        for rank in range(dear.size()):
            if step == 0 or rank == dear.rank():
                self._step(step)
                self.optimizer.synchronize()
            dear.allreduce(torch.zeros(1))
            if step == 0:
                break
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def _step(self, step: int) -> None:
        script, optimizer = self.script, self.optimizer
        if script.call == "closure":
            loss = optimizer.step(lambda: self._backward(step))
            self.states["losses"][str(step)] = loss.detach().numpy()
            return
        self._backward(step)
        synchronized = self.meaning.averages_gradients
        if script.clip == "torch" or (script.scaler != "none" and synchronized):
            optimizer.synchronize()
        if script.scaler != "none" and script.clip != "none":
            self.scaler.unscale_(optimizer)
        if script.clip == "own":
            norm = optimizer.clip_grad_norm_(0.05)
            self.states["norms"][str(step)] = np.array(float(norm))
        if script.clip == "torch":
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.05)
        for _ in range(calls(script, step)):
            if script.scaler != "none":
                self.scaler.step(optimizer)
                self.scaler.update()
            else:
                optimizer.step()

    def _backward(self, step: int) -> Any:
        script = self.script
        self.optimizer.zero_grad(set_to_none=script.zero == "none")
        loss = None
        for micro in passes(script):
            paused = script.micros == "paused" and micro == 0
            with self.optimizer.no_sync() if paused else contextlib.nullcontext():
                loss = loss_of(script.model, self.model, dear.rank(), step, micro)
                if loss is not None:
                    bad = fails(script, dear.rank(), dear.size(), step)
                    scaled = self.scaler.scale(loss) if script.scaler != "none" else loss
                    (scaled * (torch.inf if bad else 1.0)).backward()
        return loss


def on_rank(name: str, options: dict[str, Any], script: Script, kind: Any = OnRank) -> States:
    """Returns the states of this rank's replica."""
    return kind(name, options, script).run()


def far(
    pool: Any,
    size: int,
    name: str,
    options: dict[str, Any],
    script: Script,
    kind: type[OnRank] = OnRank,
    reference: Any = None,
) -> float:
    """Returns the largest distance of any rank's replica from `serial`."""
    wanted = serial(name, options, script, size, reference)
    results = pool.run(on_rank, name, options, script, kind)
    return max(difference(got, want) for got, want in zip(results, wanted, strict=True))


def serial(
    name: str, options: dict[str, Any], script: Script, size: int, reference: Any = None
) -> list[States]:
    """Returns each rank's states by the algorithm's reference, or by one without options."""
    meaning, clipped = Meaning.of(name), script.clip != "none"
    models = [make_model(script.model) for _ in range(size)]
    optimizers = [make_optimizer(script.optimizer, model) for model in models]
    schedulers = [ExponentialLR(optimizer, 0.8) for optimizer in optimizers]
    states: list[States] = [{"norms": {}, "outputs": {}, "losses": {}} for _ in range(size)]
    step, closing = 0, False

    def clip(rank: int) -> None:
        norm = nn.utils.clip_grad_norm_(models[rank].parameters(), 0.05)
        if script.clip == "own":
            states[rank]["norms"][str(step)] = np.array(float(norm))

    def prepare(rank: int) -> bool:
        if clipped and meaning.averages_gradients and not closing:
            clip(rank)
        grads = [p.grad for p in models[rank].parameters() if p.grad is not None]
        return all(grad.isfinite().all() for grad in grads)

    typed = None if reference else algorithm_options(name, options)
    reference = reference or reference_of(name, options)
    steps = reference(Ranks(models, optimizers, prepare), typed)
    for step in range(STEPS):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            rates = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] *= not (meaning.in_turn and step == 0)
            for micro in passes(script):
                loss = loss_of(script.model, model, rank, step, micro)
                if loss is not None:
                    (loss * (torch.inf if fails(script, rank, size, step) else 1.0)).backward()
            if script.call == "closure":
                states[rank]["losses"][str(step)] = loss.detach().numpy()
            if clipped and not meaning.averages_gradients:
                clip(rank)
        for _ in range(calls(script, step)):
            next(steps)
        for rank, scheduler in enumerate(schedulers):
            for group, rate in zip(optimizers[rank].param_groups, rates, strict=True):
                group["lr"] = rate
            if script.scheduler != "none":
                scheduler.step()
            if script.clip == "own":  # of a step that had nothing to apply
                states[rank]["norms"].setdefault(str(step), np.zeros(()))
            after_step(script, models[rank], step, states[rank], rank)
    for rank, model in enumerate(models):
        states[rank]["end"] = state_of(model)
    closing = True
    steps.close()
    for rank, model in enumerate(models):
        states[rank]["closed"] = state_of(model)
    return states


def after_step(script: Script, model: nn.Module, step: int, states: States, rank: int) -> None:
    """Looks at the model, as far as the script does, and freezes a layer of it."""
    if script.read == "every step":
        states[f"step {step}"] = state_of(model)
    if script.evaluate != "never":
        model.eval()
        with _MODES[script.evaluate]():
            for seed in (8, 9):
                out = model(batch(script.model, rank, seed)[0])
        model.train()
        states["outputs"][str(step)] = out.detach().double().cpu().numpy()
    if script.model == "freezing" and step == 1:
        model[0].requires_grad_(False)


_MODES: dict[str, Callable[[], Any]] = {
    "grad": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}


def state_of(model: nn.Module) -> dict[str, np.ndarray]:
    """The state dict in double precision, complex numbers as pairs."""
    state = {}
    for name, value in model.state_dict().items():
        if value.is_floating_point() or value.is_complex():
            value = torch.view_as_real(value) if value.is_complex() else value
            state[name] = value.detach().double().cpu().numpy().copy()
    return state


def difference(got: States, wanted: States) -> float:
    """The largest difference of any tensor at any moment, relative to its norm."""
    assert got.keys() == wanted.keys()
    far = 0.0
    for moment, tensors in wanted.items():
        assert got[moment].keys() == tensors.keys(), moment
        for name, value in tensors.items():
            off = np.linalg.norm(got[moment][name] - value) / max(np.linalg.norm(value), 1e-3)
            if not np.isfinite(off) and _same_nonfinite(got[moment][name], value):
                continue
            far = max(far, off if np.isfinite(off) else np.inf)
    return far


def _same_nonfinite(got: Any, wanted: Any) -> bool:
    return not np.isfinite(got).all() and not np.isfinite(wanted).all()
