"""A model without arithmetic: real parameters and gradients, and a profile's times.

Forward and backward of each layer wait as long as the profile says they take on its device, and
leave the core to others meanwhile. Algorithms see an ordinary module tree: modules are called in
the recorded order, and gradients come through autograd in the recorded order at the recorded times.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any, NoReturn

import torch
from torch import nn

from common.models import pace
from common.models.registry import profile_of
from common.models.replay_gradients import BLOCK, Gradients, GradientSource, tile
from common.models.replay_plan import Body, Unit, Work, plan
from common.models.workload import Workload
from common.profiling.profile import Profile
from dear.errors import UserError

_WEIGHT_SCALE = 0.02
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of glibc's malloc.h
# What hooks do in less time is the host's work, in whose shadow the device goes on.
_SHORTEST_UPDATE_S = 100e-6


def build(
    name: str, batch_size: int, sentence_len: int | None, generator: torch.Generator
) -> Workload:
    """The replayed model `MODEL@DEVICE`, its gradients drawn from `generator`."""
    _keep_freed_memory()
    return workload(profile_of(name, batch_size, sentence_len), generator)


def workload(profile: Profile, generator: torch.Generator) -> Workload:
    """The model that replays `profile`; the batch is one number, and the loss that number."""
    return Workload(
        model=Replay(profile, generator),
        inputs=(torch.rand((), generator=generator),),
        targets=(),
        criterion=lambda output: output,
    )


class Module(nn.Module):
    """A module of the recorded model that owns parameters, or holds one that does."""

    def forward(self, x: torch.Tensor, body: Body, step: _Step) -> torch.Tensor:
        """Does what `body` says; `x` only ties the stretches of the backward pass together."""
        step.arrived()
        for part in body.parts:
            if isinstance(part, Work):
                step.forward(part.forward_s)
                for unit in part.units:
                    params = [step.model.parameter(name) for name, _ in unit.params]
                    x = _Backward.apply(x, step, unit, *params)
            else:
                child = self._modules[part.module.rpartition(".")[2]]
                step.left(child)
                x = child(x, part, step)
        return x


class Replay(Module):
    """The recorded model; `named_parameters()` are those of the real one."""

    def __init__(self, profile: Profile, generator: torch.Generator) -> None:
        super().__init__()
        for name in profile.modules:
            _descend(self, name)
        weights = torch.randn(BLOCK) * _WEIGHT_SCALE
        self._owners: dict[str, tuple[nn.Module, str]] = {}
        for param in profile.parameters:
            owner = _descend(self, param.module)
            own = param.name.rpartition(".")[2]
            values = torch.empty(param.shape)
            tile(values, weights)
            owner.register_parameter(own, nn.Parameter(values))
            self._owners[param.name] = owner, own
        for alias, name in profile.shared.items():
            module, _, own = alias.rpartition(".")
            _descend(self, module).register_parameter(own, self.get_parameter(name))
        self._body = plan(profile)
        places = {param.name: place for place, param in enumerate(profile.parameters)}
        self._chain = [(param.name, places[param.name]) for param in profile.gradients()]
        self._source = GradientSource(generator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x`, after the recorded time."""
        # Drawn, so that a training that starts from the same seed sees the same gradients again.
        key = int(torch.randint(2**31, ()))
        chain = []
        if torch.is_grad_enabled():
            pairs = ((self.parameter(name), index) for name, index in self._chain)
            chain = [(param, index) for param, index in pairs if param.requires_grad]
        step = _Step(self, Gradients(self._source, key, chain))
        if torch.is_grad_enabled():
            # The last stretch of the backward pass may have no parameter that leads to it.
            x = x.detach().requires_grad_()
        return super().forward(x, self._body, step)

    def parameter(self, name: str) -> torch.Tensor:
        """What is registered under `name` now."""
        owner, own = self._owners[name]
        return owner._parameters[own]

    def to(self, *args: Any, **kwargs: Any) -> Replay:
        """As ever, but raises `UserError` for a device that is no CPU."""
        for value in (*args, *kwargs.values()):
            if isinstance(value, (str, torch.device)):
                _check_device(torch.device(value))
        return super().to(*args, **kwargs)

    def cuda(self, device: Any = None) -> NoReturn:
        """Raises `UserError`."""
        _check_device(torch.device("cuda"))


class _Step:
    """One forward pass and the backward pass that belongs to it."""

    def __init__(self, model: Replay, gradients: Gradients) -> None:
        self.model = model
        self.gradients = gradients
        self.pace = pace.current()
        self.pace.restart()
        self._left: float | None = None

    def forward(self, seconds: float) -> None:
        """A layer computes; the host makes gradients for later, if it has time."""
        self.pace.begin(seconds)
        self.gradients.work_ahead(self.pace.rest)
        self.pace.finish()

    def left(self, child: nn.Module) -> None:
        """`child` is called next; its hooks may update parameters, which takes a device time."""
        self._left = time.perf_counter() if child._forward_pre_hooks else None

    def arrived(self) -> None:
        """The child's own code runs."""
        if self._left is not None:
            hooks_s = time.perf_counter() - self._left
            if hooks_s > _SHORTEST_UPDATE_S:
                self.pace.hold(hooks_s)
            self._left = None


def _check_device(device: torch.device) -> None:
    if device.type != "cpu":
        raise UserError(
            f"device: replayed models wait on the CPU and cannot run on {device.type}; "
            "use device: cpu"
        )


def _keep_freed_memory() -> None:
    """Lets the C library use memory again instead of giving it back, as a GPU's allocator does.

    Without it, the kernel hands out and clears the memory of all gradients anew in every step,
    which costs twice as much as filling them.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc only
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, -1)


def _descend(root: nn.Module, path: str) -> nn.Module:
    """The module called `path`, made if there is none."""
    module = root
    for name in path.split(".") if path else ():
        if name not in module._modules:
            module.add_module(name, Module())
        module = module._modules[name]
    return module


class _Backward(torch.autograd.Function):
    """Nothing forward; backward it takes a unit's time and makes its gradients meanwhile."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, step: _Step, unit: Unit, *params: torch.Tensor
    ) -> torch.Tensor:
        ctx.step, ctx.unit, ctx.params = step, unit, params
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        step = ctx.step
        step.pace.begin(ctx.unit.backward_s)
        scale = gradient.item()
        gradients = [
            step.gradients.take(param, index, scale) if wanted else None
            for param, (_, index), wanted in zip(
                ctx.params, ctx.unit.params, ctx.needs_input_grad[3:], strict=True
            )
        ]
        step.gradients.work_ahead(step.pace.rest)
        step.pace.finish()
        return gradient, None, None, *gradients
