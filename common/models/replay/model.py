"""Model without arithmetic: real parameters and gradients, and the times of a profile.

Instead of computing, the forward and backward pass of each layer sleep for the time that the
profile contains for the recorded device (usually a GPU). Algorithms see an ordinary module tree:
modules are called in the recorded order, and autograd delivers gradients in the recorded order at
the recorded times. A unit is a part of the backward pass, with the gradients that it completes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection
from typing import Any, NoReturn

import torch
from torch import nn

from common.models.profile import Profile
from common.models.registry import profile_of
from common.models.replay import pace
from common.models.replay.gradients import (
    BLOCK,
    Blank,
    Gradients,
    GradientSource,
    fingerprint,
    tile,
)
from common.models.replay.lead import Lead
from common.models.replay.pace import BackwardPass
from common.models.replay.plan import Body, Unit, Work, plan
from common.models.workload import Workload
from dear.errors import UserError
from dear.training.hooks import at_end_of_backward

_WEIGHT_SCALE = 0.02
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # from glibc's malloc.h


def build(
    name: str, batch_size: int, sentence_len: int | None, generator: torch.Generator
) -> Workload:
    """Returns the replayed model `MODEL@DEVICE`, whose gradients are drawn from `generator`."""
    _keep_freed_memory()
    return workload(profile_of(name, batch_size, sentence_len), generator)


def workload(profile: Profile, generator: torch.Generator | None) -> Workload:
    """Returns the model that replays `profile`; its batch is one number, which is also the loss.

    Args:
        generator: source of the gradients; None: parameters and gradients may have any values.
    """
    return Workload(
        model=Replay(profile, generator),
        inputs=(torch.rand((), generator=generator),),
        targets=(),
        criterion=lambda output: output,
    )


class Module(nn.Module):
    """Module of the recorded model that owns parameters, or contains a module that does."""

    def forward(self, x: torch.Tensor, body: Body, step: _Step) -> torch.Tensor:
        """Runs `body`; returns `x`, through which autograd connects the units."""
        for part in body.parts:
            if isinstance(part, Work):
                step.forward(part)
                for unit in part.units:
                    params = [step.model._replay_parameter(name) for name, _ in unit.params]
                    x = _Backward.apply(x, step, unit, *params)
            else:
                child = self._modules[part.module.rpartition(".")[2]]
                x = child(x, part, step)
        return x


class List(Module, nn.Sequential):
    """Module that is a list or a sequence in the real model; algorithms may iterate over it.

    It runs, so it is no ModuleList: torch 2.11 refuses to shard these, whatever their forward is.
    """


class Replay(Module):
    """Recorded model; `named_parameters()` are those of the real model.

    Attributes:
        memory_bytes_per_s: memory bandwidth of the replayed device.
    """

    def __init__(self, profile: Profile, generator: torch.Generator | None) -> None:
        super().__init__()
        # A module whose children have numbers as names was a list or a sequence.
        paths = [name.split(".") for name in profile.modules]
        lists = {
            ".".join(path[:i]) for path in paths for i, word in enumerate(path) if word.isdecimal()
        }
        for name in profile.modules:
            _descend(self, name, lists)
        weights = torch.randn(BLOCK if generator is not None else 0) * _WEIGHT_SCALE
        self._owners: dict[str, tuple[nn.Module, str]] = {}
        for param in profile.parameters:
            owner = _descend(self, param.module)
            short_name = param.name.rpartition(".")[2]
            values = torch.empty(param.shape)
            if generator is not None:
                tile(values, weights)
            trained = param.name not in profile.frozen
            owner.register_parameter(short_name, nn.Parameter(values, requires_grad=trained))
            self._owners[param.name] = owner, short_name
        for alias, name in profile.shared.items():
            module, _, short_name = alias.rpartition(".")
            _descend(self, module).register_parameter(short_name, self.get_parameter(name))
        self._body = plan(profile)
        index = {param.name: number for number, param in enumerate(profile.parameters)}
        self._chain = [(param.name, index[param.name]) for param in profile.gradients()]
        self._blank: dict[int, torch.Tensor] = {}
        # The names of a model's own modules may be any others.
        self._replay_source = None if generator is None else GradientSource(generator)
        self.memory_bytes_per_s = profile.memory_bytes_per_s
        self._replay_lead = Lead(profile.memory_bytes_per_s)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns `x`, after the recorded time."""
        if self._replay_source is None:
            x = x.detach().requires_grad_()
            return super().forward(x, self._body, _Step(self, Blank(self._blank)))
        # The key is drawn at random, so that a training with the same seed has the same gradients.
        key = int(torch.randint(2**31, ()))
        chain = []
        if torch.is_grad_enabled():
            pairs = ((self._replay_parameter(name), index) for name, index in self._chain)
            chain = [(param, index) for param, index in pairs if param.requires_grad]
            # The last stretch of the backward pass may have no parameter that leads to it.
            x = x.detach().requires_grad_()
        step = _Step(self, Gradients(self._replay_source, key, chain))
        return super().forward(x, self._body, step)

    def _replay_parameter(self, name: str) -> torch.Tensor:
        """Returns the tensor that is now registered under `name`; algorithms may replace it."""
        owner, short_name = self._owners[name]
        return owner._parameters[short_name]

    def to(self, *args: Any, **kwargs: Any) -> Replay:
        """Moves the model as usual; raises `UserError` for a device that is not a CPU."""
        for value in (*args, *kwargs.values()):
            if isinstance(value, (str, torch.device)):
                _check_device(torch.device(value))
        return super().to(*args, **kwargs)

    def cuda(self, device: Any = None) -> NoReturn:
        """Raises `UserError`."""
        _check_device(torch.device("cuda"))


class _Step:
    def __init__(self, model: Replay, gradients: Gradients) -> None:
        self.model = model
        self.gradients = gradients
        self.pace = pace.current()
        self._pass: BackwardPass | None = None

    def forward(self, work: Work) -> None:
        """Waits for a layer's time, and makes later gradients meanwhile."""
        self.pace.part = work
        self.pace.begin(work.forward_s)
        self.gradients.work_ahead(self.pace.rest)
        self.pace.finish()

    def begin_backward(self, unit: Unit) -> None:
        """Starts a unit of the backward pass."""
        if self._pass is None:
            self._pass = self.pace.backward_pass(self.model._replay_lead)
            at_end_of_backward(self._pass.end)
        self.pace.part = unit
        self._pass.next(unit.backward_s)

    def end_backward(self, nbytes: int) -> None:
        """Ends a unit that has made `nbytes` bytes of gradients."""
        self.pace.finish()
        self._pass.left(nbytes)


def _check_device(device: torch.device) -> None:
    if device.type != "cpu":
        raise UserError(
            f"device: replayed models wait on the CPU and cannot run on {device.type}; "
            "use device: cpu"
        )


def _keep_freed_memory() -> None:
    """Makes the C library keep freed memory for later use, as a GPU's allocator does.

    Otherwise the kernel allocates and clears the memory of all gradients again in every step, which
    costs twice as much as filling them.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc only
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, -1)


def _descend(root: nn.Module, path: str, lists: Collection[str] = ()) -> nn.Module:
    """Returns the module at `path`, and creates it if necessary.

    Args:
        lists: paths of the modules that become a `List`.
    """
    module, names = root, path.split(".") if path else []
    for depth, name in enumerate(names, 1):
        if name not in module._modules:
            module.add_module(name, List() if ".".join(names[:depth]) in lists else Module())
        module = module._modules[name]
    return module


class _Backward(torch.autograd.Function):
    """Identity function; its backward pass makes a unit's gradients and takes the unit's time."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        # torch's method looks for wrappers of functorch first, for longer than the call takes.
        return super(torch.autograd.Function, cls).apply(*args)

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, step: _Step, unit: Unit, *params: torch.Tensor
    ) -> torch.Tensor:
        ctx.step, ctx.unit, ctx.params = step, unit, params
        ctx.factors = [1.0] * len(params)
        if step.model._replay_source is not None:
            ctx.factors = [fingerprint(param) for param in params]
        return step.gradients.link(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        step = ctx.step
        step.begin_backward(ctx.unit)
        scale = step.gradients.scale_of(gradient)
        gradients = [
            step.gradients.take(param, index, scale, factor) if wanted else None
            for param, (_, index), factor, wanted in zip(
                ctx.params, ctx.unit.params, ctx.factors, ctx.needs_input_grad[3:], strict=True
            )
        ]
        step.gradients.work_ahead(step.pace.rest)
        step.end_backward(sum(grad.nbytes for grad in gradients if grad is not None))
        return gradient, None, None, *gradients
