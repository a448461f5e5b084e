"""When each gradient arrives in a backward pass, measured while the first steps train."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dear.comm.communicator import Communicator
from dear.lazy import torch
from dear.training.hooks import Hooks, at_end_of_backward


@dataclass(frozen=True, kw_only=True)
class BackwardProfile:
    """The passes of one rank, medians; parameters by their place in the list that was watched."""

    order: list[int]
    """Parameters as their gradients arrive; those that never got one come last."""
    arrivals_s: list[float]
    """In that order, never falling: seconds from the start of the backward pass."""
    forward_s: float
    backward_s: float


class LayerTimes:
    """Watches passes from its construction until `stop`.

    The backward pass is taken to start where the model's forward ends: the loss counts with it.
    On CUDA the times are the device's. Nothing should communicate during a pass that is watched.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        params: Sequence[torch.nn.Parameter],
        communicator: Communicator,
    ) -> None:
        self._params = list(params)
        self._cuda = params[0].device.type == "cuda"
        self._clock = communicator.clock
        self._hooks = Hooks()
        self._index = {param: i for i, param in enumerate(self._params)}
        self._began: Any = None
        self._turned: Any = None
        self._marks: dict[int, Any] = {}
        self._in_pass = False
        self._passes: list[tuple[Any, Any, dict[int, Any], Any]] = []
        self._hooks.before_forward([model], self._before_forward)
        self._hooks.after_forward(model, self._after_forward)
        self._hooks.on_gradient(self._params, self._on_gradient)

    def stop(self) -> BackwardProfile | None:
        """Takes the hooks out; None if no backward pass has been seen."""
        self._hooks.remove()
        if not self._passes:
            return None
        if self._cuda:
            torch.cuda.synchronize(self._params[0].device)
        # The low median: of two passes the faster, since the first allocates.
        middle, between, passes = statistics.median_low, self._between, self._passes
        forward = middle(between(began, turned) for began, turned, _, _ in passes)
        backward = middle(between(turned, end) for _, turned, _, end in passes)
        arrivals = []
        for i in range(len(self._params)):
            seen = [between(turned, marks[i]) for _, turned, marks, _ in passes if i in marks]
            arrivals.append(middle(seen) if seen else None)
        never = max([backward, *(time for time in arrivals if time is not None)])
        # Among parameters that arrive together, the last registered came first, as in the pass.
        order = sorted(
            range(len(arrivals)),
            key=lambda i: (arrivals[i] is None, arrivals[i] or 0.0, -i),
        )
        return BackwardProfile(
            order=order,
            arrivals_s=[never if arrivals[i] is None else arrivals[i] for i in order],
            forward_s=forward,
            backward_s=backward,
        )

    def _before_forward(self, module: torch.nn.Module) -> None:
        self._began = self._now()
        self._in_pass = False  # one that an error ended

    def _after_forward(self, module: torch.nn.Module) -> None:
        self._turned = self._now()

    def _on_gradient(self, param: torch.nn.Parameter) -> None:
        if self._turned is None:  # a gradient of something else than this model's forward
            return
        if not self._in_pass:
            self._in_pass = True
            self._marks = {}
            at_end_of_backward(self._end)
        self._marks[self._index[param]] = self._now()

    def _end(self) -> None:
        if self._in_pass:
            self._in_pass = False
            self._passes.append((self._began, self._turned, self._marks, self._now()))

    def _now(self) -> Any:
        if not self._cuda:
            return self._clock()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, first: Any, second: Any) -> float:
        return first.elapsed_time(second) / 1e3 if self._cuda else second - first
