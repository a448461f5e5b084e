"""Measures the layers of a model on this machine's device."""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Generic, TypedDict, TypeVar

import torch
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from common.models.profile import Call, Jitter, ProfiledParameter
from common.models.workload import Workload
from dear.errors import UserError

_SHORTEST_SHARE = 1e-5
_COPIED_BYTES, _COPIES = 256 << 20, 11


Mark = TypeVar("Mark")


class Clock(ABC, Generic[Mark]):
    """Clock of a step: wall time, events of a GPU, or counted operations."""

    def prepare(self) -> None:
        """Prepares for a step with hooks."""

    @abstractmethod
    def mark(self) -> Mark:
        """Returns a reading; it must be cheap, because it is taken in the middle of a step."""

    @abstractmethod
    def seconds(self, earlier: Mark, later: Mark) -> float:
        """Returns the seconds between two readings; called after the step."""


class WallClock(Clock[float]):
    """Clock of a CPU: a call returns when its work has ended, so the wall time is right."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, earlier: float, later: float) -> float:
        return later - earlier


class CudaClock(Clock[torch.cuda.Event]):
    """Clock of CUDA events in the current stream, which reads the GPU's time without waiting."""

    def prepare(self) -> None:
        """Keeps the GPU busy for about 0.1 s, so that it never waits for the host in the step."""
        torch.cuda._sleep(150_000_000)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, earlier: torch.cuda.Event, later: torch.cuda.Event) -> float:
        later.synchronize()
        return earlier.elapsed_time(later) / 1e3


def record(
    workload: Workload, device: torch.device, *, warmup: int, steps: int
) -> tuple[Layers, float]:
    """Times the layers of a model.

    The duration of the passes comes from `steps` steps without hooks, and the share of each layer
    from as many steps with hooks.

    Returns:
        The layers, and the factor by which the hooks made the step longer.
    """
    clock = _clock_of(device)
    for _ in range(warmup):
        _plain_step(workload, clock)
    # Readings are evaluated at the end, because this waits for the GPU.
    marks = [_plain_step(workload, clock) for _ in range(steps)]
    plain = [[clock.seconds(*pair) for pair in pairwise(step)] for step in marks]
    stretches = Stretches(workload.model, clock)
    try:
        hooked = []
        for _ in range(1 + steps):
            clock.prepare()
            hooked.append(hooked_step(workload, stretches))
    finally:
        stretches.remove()
    layers = Layers(workload.model, hooked[1:])
    layers.jitter = Jitter.of([sum(times) for times in plain])
    before = layers.forward_s + layers.backward_s
    layers.scale(*(statistics.median(times) for times in zip(*plain, strict=True)))
    return layers, before / (layers.forward_s + layers.backward_s)


def _clock_of(device: torch.device) -> Clock[Any]:
    return CudaClock() if device.type == "cuda" else WallClock()


def failing(model: str, error: Exception) -> UserError:
    """Returns the error for a model whose step raises an exception, in one line."""
    text = " ".join(str(error).split())[:400]
    return UserError(
        f"model {model}: fails in its forward or backward pass: {type(error).__name__}: {text}"
    )


def memory_bytes_per_s(device: torch.device) -> float:
    """Returns the bytes that the device reads and writes per second.

    It is the median over copies of a tensor larger than the caches; each byte of it is read once
    and written once.
    """
    clock = _clock_of(device)
    source = torch.ones(_COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    marks = []
    for _ in range(_COPIES):
        began = clock.mark()
        target.copy_(source)
        marks.append((began, clock.mark()))
    # The first copy includes the allocation of memory.
    times = [clock.seconds(*pair) for pair in marks[1:]]
    return 2 * _COPIED_BYTES / statistics.median(times)


def _plain_step(workload: Workload, clock: Clock[Mark]) -> list[Mark]:
    """Runs a step; returns readings before, between and after forward and backward pass."""
    workload.model.zero_grad()
    marks = [clock.mark()]
    loss = workload.loss()
    marks.append(clock.mark())
    loss.backward()
    marks.append(clock.mark())
    return marks


def hooked_step(workload: Workload, stretches: Stretches[Mark]) -> Step:
    """Runs one forward and backward pass, and returns the times of their stretches.

    A stretch is the time between two hooks, in which one module runs.
    """
    workload.model.zero_grad()
    stretches.begin_forward()
    loss = workload.loss()
    stretches.begin_backward()
    loss.backward()
    return stretches.end()


class Fields(TypedDict):
    """Fields of a `Profile` that describe its layers and their times."""

    modules: tuple[str, ...]
    calls: tuple[Call, ...]
    parameters: tuple[ProfiledParameter, ...]
    shared: dict[str, str]
    flops: int | None
    jitter: Jitter | None


class Layers:
    """Layers of a model, with the medians of their times over several steps.

    Args:
        flops: multiplications and additions of a step; None: not counted.

    Attributes:
        modules: innermost running module of each stretch.
        jitter: spread of the steps' compute; None for a single step.
    """

    def __init__(
        self, model: torch.nn.Module, steps: Sequence[Step], flops: int | None = None
    ) -> None:
        orders = {(*step.modules, None, *(name for name, _ in step.ready)) for step in steps}
        if len(orders) != 1:
            raise UserError("no profile: the order of the model's layers differs between steps")
        self.model, self.flops = model, flops
        self.modules = steps[0].modules
        self.jitter = Jitter.of([sum(step.forward_s) + sum(step.backward_s) for step in steps])
        self._forward = _medians([step.forward_s for step in steps])
        self._backward = _medians([step.backward_s for step in steps])
        ready = _medians([[at for _, at in step.ready] for step in steps])
        self._ready: dict[str, float] = {}
        latest = 0.0
        for (name, _), at in zip(steps[0].ready, ready, strict=True):
            latest = self._ready[name] = max(latest, at)
        self._backward_s = statistics.median(sum(step.backward_s) for step in steps)

    @property
    def ready(self) -> list[str]:
        """Parameters in the order in which their gradients become complete."""
        return list(self._ready)

    @property
    def forward_s(self) -> float:
        return sum(self._forward)

    @property
    def backward_s(self) -> float:
        return sum(self._backward)

    def scale(self, forward_s: float, backward_s: float) -> None:
        """Scales all times so that the passes take these times."""
        forward, backward = forward_s / self.forward_s, backward_s / self.backward_s
        self._forward = [seconds * forward for seconds in self._forward]
        self._backward = [seconds * backward for seconds in self._backward]
        factor = backward_s / self._backward_s
        self._ready = {name: min(at * factor, backward_s) for name, at in self._ready.items()}
        self._backward_s = backward_s

    def fields(self) -> Fields:
        """Returns the fields of a `Profile` for the layers and their times."""
        calls = self._calls()
        positions = {name: position for position, name in enumerate(self._ready)}
        parameters = tuple(
            ProfiledParameter(
                name=name,
                shape=tuple(param.shape),
                position=positions.get(name),
                ready_s=self._ready.get(name),
            )
            for name, param in self.model.named_parameters()
        )
        first = {param: name for name, param in self.model.named_parameters()}
        every = self.model.named_parameters(remove_duplicate=False)
        needed = {call.module for call in calls} | {param.module for param in parameters}
        return {
            "modules": tuple(name for name, _ in self.model.named_modules() if name in needed),
            "calls": tuple(calls),
            "parameters": parameters,
            "shared": {name: first[param] for name, param in every if first[param] != name},
            "frozen": tuple(
                name for name, param in self.model.named_parameters() if not param.requires_grad
            ),
            "flops": self.flops,
            "jitter": self.jitter,
        }

    def _calls(self) -> list[Call]:
        """Returns the stretches; the time of very short ones is added to the previous one."""
        # A stretch in which parameters are first read is kept.
        needed = {name.rpartition(".")[0] for name, _ in self.model.named_parameters()}
        shortest = _SHORTEST_SHARE * (self.forward_s + self.backward_s)
        kept: list[tuple[str, list[float]]] = []
        early = [0.0, 0.0]
        for name, *times in zip(self.modules, self._forward, self._backward, strict=True):
            if sum(times) >= shortest or name in needed:
                needed.discard(name)
                kept.append((name, [a + b for a, b in zip(times, early, strict=True)]))
                early = [0.0, 0.0]
            else:
                into = kept[-1][1] if kept else early
                into[:] = [a + b for a, b in zip(into, times, strict=True)]
        return [
            Call(module=name, forward_s=forward, backward_s=backward)
            for name, (forward, backward) in kept
        ]


def _medians(rows: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.median(column) for column in zip(*rows, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Step:
    """Times of one training step in seconds. Both passes have the same stretches."""

    modules: list[str]
    """Innermost running module of each stretch, in the order of the forward pass."""
    forward_s: list[float]
    backward_s: list[float]
    ready: list[tuple[str, float]]
    """Parameters in the order in which their gradients become complete, with the time since the
    start of the backward pass."""


class Stretches(Generic[Mark]):
    """Hooks that read a clock whenever a module of a model begins or ends, in both passes.

    In the backward pass, a stretch begins when the gradient of a tensor that the stretch has
    computed in the forward pass is complete: then its part of the graph runs next.
    """

    def __init__(self, model: torch.nn.Module, clock: Clock[Mark]) -> None:
        self._clock = clock
        self._handles: list[RemovableHandle] = []
        for name, module in model.named_modules():
            self._hook_module(name, module)
        for name, param in model.named_parameters():
            if param.requires_grad:
                self._hook_param(name, param)

    def begin_forward(self) -> None:
        """Starts a step, outside of all modules."""
        self._recomputing = False
        self._running = [""]
        self._starts = [("", self._clock.mark())]
        self._nodes: set[Node] = set()
        self._entered: list[tuple[int, Mark]] = []
        self._ready: list[tuple[str, Mark]] = []

    def begin_backward(self) -> None:
        """Ends the forward pass; the loss belongs to the last stretch. A module that is called
        from now on is recomputed (gradient checkpointing); its time is that of the backward pass.
        """
        self._recomputing = True
        self._forward_end = self._clock.mark()
        self._entered.append((len(self._starts) - 1, self._clock.mark()))

    def end(self) -> Step:
        """Ends the backward pass, and returns the times."""
        end = self._clock.mark()
        self._nodes.clear()
        seconds = self._clock.seconds
        starts = [mark for _, mark in self._starts] + [self._forward_end]
        backward = [0.0] * len(self._starts)
        entered = [*self._entered, (-1, end)]
        for (stretch, mark), (_, until) in pairwise(entered):
            backward[stretch] += seconds(mark, until)
        begin = self._entered[0][1]
        return Step(
            modules=[name for name, _ in self._starts],
            forward_s=[seconds(*pair) for pair in pairwise(starts)],
            backward_s=backward,
            ready=[(name, seconds(begin, mark)) for name, mark in self._ready],
        )

    def remove(self) -> None:
        """Removes all hooks."""
        while self._handles:
            self._handles.pop().remove()

    def _hook_module(self, name: str, module: torch.nn.Module) -> None:
        def enter(module: torch.nn.Module, args: object, kwargs: object) -> None:
            if self._recomputing:
                return
            self._boundary((args, kwargs))
            self._running.append(name)
            self._starts.append((name, self._clock.mark()))

        def leave(module: torch.nn.Module, args: object, output: object) -> None:
            if self._recomputing:
                return
            self._boundary(output)
            self._running.pop()
            self._starts.append((self._running[-1], self._clock.mark()))

        self._handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        self._handles.append(module.register_forward_hook(leave))

    def _hook_param(self, name: str, param: torch.nn.Parameter) -> None:
        def ready(param: torch.Tensor) -> None:
            self._ready.append((name, self._clock.mark()))

        self._handles.append(param.register_post_accumulate_grad_hook(ready))

    def _boundary(self, values: object) -> None:
        """Adds hooks that fire when the backward pass enters the stretch that ends now."""
        stretch = len(self._starts) - 1
        for tensor in tensors(values):
            node = tensor.grad_fn
            if node is not None and node not in self._nodes:
                self._nodes.add(node)  # a reference, so that its identity is not reused
                node.register_prehook(
                    lambda gradients: self._entered.append((stretch, self._clock.mark()))
                )


def tensors(value: object) -> Iterator[torch.Tensor]:
    """Yields all tensors in a value of nested dictionaries, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors(item)
