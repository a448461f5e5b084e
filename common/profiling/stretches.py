"""Splits a training step into stretches, each the time in which one module ran and no other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """What a step is measured with: wall time, a GPU's events, or counted operations."""

    def mark(self) -> Any:
        """A reading; cheap, since it is taken in the middle of the step."""

    def seconds(self, earlier: Any, later: Any) -> float:
        """Between two readings; asked for after the step."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One training step, split. Both passes have the same stretches; seconds."""

    modules: list[str]
    """Per stretch the innermost module that runs, in the order of the forward pass."""
    forward_s: list[float]
    backward_s: list[float]
    ready: list[tuple[str, float]]
    """Parameters in the order in which their gradients are complete, from the backward's start."""


class Stretches:
    """Hooks a model so that a clock is read whenever a module begins or ends, in both passes.

    In the backward pass the stretch of the forward pass that made a tensor begins when the gradient
    of that tensor is there: the first node of the stretch's part of the graph is about to run.
    """

    def __init__(self, model: torch.nn.Module, clock: Clock) -> None:
        self._clock = clock
        self._handles: list[Any] = []
        for name, module in model.named_modules():
            self._hook_module(name, module)
        for name, param in model.named_parameters():
            if param.requires_grad:
                self._hook_param(name, param)

    def begin_forward(self) -> None:
        """The step begins, outside of all modules."""
        self._running = [""]
        self._starts = [("", self._clock.mark())]
        self._nodes: dict[Any, None] = {}
        self._entered: list[tuple[int, Any]] = []
        self._ready: list[tuple[str, Any]] = []

    def begin_backward(self) -> None:
        """The loss is there; its own part of the graph belongs to the last stretch."""
        self._forward_end = self._clock.mark()
        self._entered.append((len(self._starts) - 1, self._clock.mark()))

    def end(self) -> Step:
        """The backward pass has ended."""
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
        """Takes out all hooks."""
        while self._handles:
            self._handles.pop().remove()

    def _hook_module(self, name: str, module: torch.nn.Module) -> None:
        def enter(module: Any, args: Any, kwargs: Any) -> None:
            self._boundary((args, kwargs))
            self._running.append(name)
            self._starts.append((name, self._clock.mark()))

        def leave(module: Any, args: Any, output: Any) -> None:
            self._boundary(output)
            self._running.pop()
            self._starts.append((self._running[-1], self._clock.mark()))

        self._handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        self._handles.append(module.register_forward_hook(leave))

    def _hook_param(self, name: str, param: torch.nn.Parameter) -> None:
        def ready(param: Any) -> None:
            self._ready.append((name, self._clock.mark()))

        self._handles.append(param.register_post_accumulate_grad_hook(ready))

    def _boundary(self, values: Any) -> None:
        """Watches for the backward pass to come to the stretch that ends now."""
        stretch = len(self._starts) - 1
        for tensor in _tensors(values):
            node = tensor.grad_fn
            if node is not None and node not in self._nodes:
                self._nodes[node] = None  # keeps it, or another might get its identity
                node.register_prehook(
                    lambda gradients, stretch=stretch: self._entered.append(
                        (stretch, self._clock.mark())
                    )
                )


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
