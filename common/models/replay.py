"""A model without arithmetic: real parameters and gradients, and a profile's times.

Forward and backward of each layer wait as long as the profile says they take on its device, and
leave the core to others meanwhile. Algorithms see an ordinary module tree: modules are called in
the recorded order, and gradients come through autograd in the recorded order at the recorded times.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NoReturn

import torch
from torch import nn

from common.models import lead, pace
from common.models.profile import Profile
from common.models.registry import profile_of
from common.models.workload import Workload
from dear.errors import UserError
from dear.training.hooks import at_end_of_backward

_WEIGHT_SCALE = 0.02
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of glibc's malloc.h


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
        for part in body.parts:
            if isinstance(part, Work):
                step.forward(part.forward_s)
                for unit in part.units:
                    params = [step.model.parameter(name) for name, _ in unit.params]
                    x = _Backward.apply(x, step, unit, *params)
            else:
                child = self._modules[part.module.rpartition(".")[2]]
                x = child(x, part, step)
        return x


class List(Module, nn.ModuleList):
    """A module that was a list or a sequence: algorithms may take its layers one by one."""


class Replay(Module):
    """The recorded model; `named_parameters()` are those of the real one."""

    def __init__(self, profile: Profile, generator: torch.Generator) -> None:
        super().__init__()
        # Lists and sequences name their modules by numbers; nothing else is known to.
        parts = [name.split(".") for name in profile.modules]
        lists = {
            ".".join(path[:i]) for path in parts for i, own in enumerate(path) if own.isdecimal()
        }
        for name in profile.modules:
            _descend(self, name, lists)
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
        self.memory_bytes_per_s = profile.memory_bytes_per_s
        """Of the device that is replayed."""
        self.lead = lead.Lead(profile.memory_bytes_per_s)

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
        self.lead: lead.Pass | None = None

    def forward(self, seconds: float) -> None:
        """A layer computes; the host makes gradients for later, if it has time."""
        self.pace.begin(seconds)
        self.gradients.work_ahead(self.pace.rest)
        self.pace.finish()

    def backward(self, unit: Unit) -> None:
        """A stretch of the backward pass begins; `done` must follow."""
        if self.lead is None:
            self.lead = self.model.lead.begin(self.pace)
            at_end_of_backward(self.lead.end)
        self.lead.next(unit.backward_s)

    def done(self, nbytes: int) -> None:
        """The stretch has ended, with so many bytes of gradients."""
        self.pace.finish()
        self.lead.left(nbytes)


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


def _descend(root: nn.Module, path: str, lists: Collection[str] = ()) -> nn.Module:
    """The module called `path`, made if there is none; `lists` are the names of those."""
    module, names = root, path.split(".") if path else []
    for depth, name in enumerate(names, 1):
        if name not in module._modules:
            module.add_module(name, List() if ".".join(names[:depth]) in lists else Module())
        module = module._modules[name]
    return module


class _Backward(torch.autograd.Function):
    """Nothing forward; backward it takes a unit's time and makes its gradients meanwhile."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, step: _Step, unit: Unit, *params: torch.Tensor
    ) -> torch.Tensor:
        ctx.step, ctx.unit, ctx.params = step, unit, params
        ctx.seen = [seen(param) for param in params]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        step = ctx.step
        step.backward(ctx.unit)
        scale = gradient.item()
        gradients = [
            step.gradients.take(param, index, scale, factor) if wanted else None
            for param, (_, index), factor, wanted in zip(
                ctx.params, ctx.unit.params, ctx.seen, ctx.needs_input_grad[3:], strict=True
            )
        ]
        step.gradients.work_ahead(step.pace.rest)
        step.done(sum(made.nbytes for made in gradients if made is not None))
        return gradient, None, None, *gradients


# A prime: no part of a large gradient then equals another at a distance that a collective that
# misplaces its pieces is likely to be off by.
BLOCK = 262_139
SCALE = 0.1
_PIECE = 2 * BLOCK


class GradientSource:
    """Cuts gradients out of one block of normal random numbers, small enough for a CPU's cache."""

    def __init__(self, generator: torch.Generator) -> None:
        block = torch.randn(BLOCK, generator=generator) * SCALE
        self._twice = torch.cat([block, block])
        """So that `BLOCK` numbers from any offset lie in one piece."""
        self._cast: dict[torch.dtype, torch.Tensor] = {}

    def window(self, dtype: torch.dtype, offset: int) -> torch.Tensor:
        """`BLOCK` numbers."""
        if dtype not in self._cast:
            self._cast[dtype] = self._twice.to(dtype)
        return self._cast[dtype].narrow(0, offset % BLOCK, BLOCK)


class Gradients:
    """The gradients of one step, made one after the other, as early as there is time.

    Args:
        key: tells the step's gradients from those of others.
        chain: parameters with their place in the model, in the order of the backward pass.
    """

    def __init__(
        self, source: GradientSource, key: int, chain: Sequence[tuple[torch.Tensor, int]]
    ) -> None:
        self._source = source
        self._key = key
        self._made: dict[int, torch.Tensor] = {}
        self._pieces = self._make(chain)
        self._piece_s = 0.0

    def take(
        self, param: torch.Tensor, index: int, scale: float, factor: float = 1.0
    ) -> torch.Tensor:
        """The gradient of `param`, number `index` of the model, times `scale`.

        Args:
            factor: what `seen` made of the parameter; the gradient's first `HEAD` elements are
                multiplied by it. They alone: gradients are made before the forward pass has read
                all layers, and a second pass over all of them would take time.
        """
        while index not in self._made:
            if next(self._pieces, None) is None:  # taken already, or frozen when the step began
                self._pieces = self._make([(param, index)])
        gradient = self._made.pop(index)
        gradient.view(-1)[:HEAD].mul_(factor)
        return gradient if scale == 1.0 else gradient.mul_(scale)

    def work_ahead(self, rest_s: Callable[[], float]) -> None:
        """Makes gradients that are needed later, as long as a piece fits into `rest_s()`."""
        while rest_s() > 1.5 * self._piece_s:
            began = time.perf_counter()
            if next(self._pieces, None) is None:
                return
            self._piece_s = 0.5 * (self._piece_s + time.perf_counter() - began)

    def _make(self, chain: Sequence[tuple[torch.Tensor, int]]) -> Iterator[bool]:
        for param, index in chain:
            gradient = torch.empty(param.shape, dtype=param.dtype)  # it may lie in parts now
            window = self._source.window(param.dtype, self._key + index * 65_537)
            for piece in gradient.view(-1).split(_PIECE):
                tile(piece, window)
                yield True
            self._made[index] = gradient


HEAD = 16_384
"""Elements of each gradient that depend on what the forward pass has read."""
SEEN = 16
"""Elements of each parameter that they depend on."""
_STRENGTH = 20.0
_signs: dict[torch.dtype, torch.Tensor] = {}


def seen(param: torch.Tensor) -> float:
    """A number from 0.5 to 1.5 that tells the values of a parameter from those of a step before.

    As a real gradient depends on where it was computed, though on few elements, spread over the
    tensor. A step of usual size changes it by some percent, rounding by less than itself.
    """
    if param.dtype not in _signs:
        alternating = torch.arange(SEEN) % 3 - 0.9  # their sum and those of neighbours are not 0
        _signs[param.dtype] = alternating.to(param.dtype)
    count = min(param.numel(), SEEN)
    if not count:
        return 1.0
    chosen = param.detach().as_strided((count,), (param.numel() // count,))
    total = chosen.dot(_signs[param.dtype][:count]).item()
    # A triangle wave: as steep everywhere.
    return 1 + math.asin(math.sin(_STRENGTH * total)) / math.pi


def tile(target: torch.Tensor, source: torch.Tensor) -> None:
    """Fills `target` with `source`, over and over."""
    flat, count, size = target.view(-1), target.numel(), source.numel()
    rows, rest = divmod(count, size)
    if rows:
        flat[: rows * size].view(rows, size).copy_(source.expand(rows, size))
    if rest:
        flat[rows * size :].copy_(source[:rest])


_SAME_TIME_S = 1e-6


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A stretch of the backward pass, with the gradients that are complete at its end."""

    backward_s: float
    params: tuple[tuple[str, int], ...] = ()
    """At most two names and places in the model's order: of two, autograd keeps the order."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """A stretch of the forward pass inside one module."""

    module: str
    forward_s: float
    units: tuple[Unit, ...]
    """In the order of the forward pass: the last one's gradients come first."""


@dataclass(frozen=True, kw_only=True)
class Body:
    """What a module does in one call: work of its own and calls of children, in order."""

    module: str
    parts: tuple[Work | Body, ...]


def plan(profile: Profile) -> Body:
    """The root's body. Modules without parameters lend their time to the call before them."""
    owners = {param.module for param in profile.parameters}
    owners |= {name.rpartition(".")[0] for name in profile.shared}
    units = _units(profile)
    works: list[Work] = []
    waiting_s = 0.0
    for position, call in enumerate(profile.calls):
        waiting_s += call.forward_s
        if call.module in owners or position in units:
            here = tuple(units.get(position, ()))
            works.append(Work(module=call.module, forward_s=0.0, units=here))
        if works:
            forward_s = works[-1].forward_s + waiting_s
            works[-1] = dataclasses.replace(works[-1], forward_s=forward_s)
            waiting_s = 0.0
    return _nest("", works)


def _units(profile: Profile) -> dict[int, list[Unit]]:
    """Units by the position of the call they belong to, in the order of the forward pass.

    Autograd goes backward through the calls. So a parameter belongs to a call of its module, or to
    a later one if its gradient comes earlier than those of modules that run later.
    """
    first = _first_calls(profile)
    place = {param.name: index for index, param in enumerate(profile.parameters)}
    chain = profile.gradients()
    times = [0.0, *(param.ready_s for param in chain)]
    waits = [max(0.0, later - earlier) for earlier, later in pairwise(times)]
    found: dict[int, list[Unit]] = {}
    position = 0
    for param, wait_s in zip(reversed(chain), reversed(waits), strict=True):
        position = max(position, first[param.name])
        unit = Unit(backward_s=wait_s, params=((param.name, place[param.name]),))
        found.setdefault(position, []).append(unit)
    found = {position: _paired(units) for position, units in found.items()}
    rest_s = profile.backward_s - times[-1]
    if rest_s > _SAME_TIME_S:
        found.setdefault(min(found, default=0), []).insert(0, Unit(backward_s=rest_s))
    return found


def _paired(units: Sequence[Unit]) -> list[Unit]:
    """Lets two parameters whose gradients come together share a unit."""
    result: list[Unit] = []
    for unit in units:
        later = result[-1] if result else None  # in the backward pass
        if later and len(later.params) == 1 and later.backward_s < _SAME_TIME_S:
            result[-1] = Unit(
                backward_s=unit.backward_s + later.backward_s, params=unit.params + later.params
            )
        else:
            result.append(unit)
    return result


def _first_calls(profile: Profile) -> dict[str, int]:
    """By parameter the position of the first call of a module that owns it."""
    calls: dict[str, int] = {}
    for position, call in enumerate(profile.calls):
        calls.setdefault(call.module, position)
    names = {param.name: [param.name] for param in profile.parameters}
    for alias, name in profile.shared.items():
        names[name].append(alias)

    def call_of(module: str) -> int:
        # The parameters of a module that is never called are read by the one around it.
        while module not in calls and module:
            module = module.rpartition(".")[0]
        return calls.get(module, 0)

    return {
        name: min(call_of(alias.rpartition(".")[0]) for alias in aliases)
        for name, aliases in names.items()
    }


def _nest(module: str, works: Sequence[Work]) -> Body:
    """Makes neighbours inside the same child of `module` one call of that child."""
    parts: list[Work | Body] = []
    prefix = f"{module}." if module else ""
    start = 0
    while start < len(works):
        if works[start].module == module:
            parts.append(works[start])
            start += 1
            continue
        child = prefix + works[start].module[len(prefix) :].partition(".")[0]
        end = start
        while end < len(works) and f"{works[end].module}.".startswith(f"{child}."):
            end += 1
        parts.append(_nest(child, works[start:end]))
        start = end
    return Body(module=module, parts=tuple(parts))
