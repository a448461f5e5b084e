"""An optimizer's update of only the part of the parameters that this rank owns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dear.lazy import torch

if TYPE_CHECKING:
    from torch.nn import Parameter
    from torch.optim import Optimizer

    from dear.buckets.halves import Decoupled

_ELEMENT_WISE = (
    "SGD",
    "Adam",
    "AdamW",
    "RMSprop",
    "Adagrad",
    "Adadelta",
    "Adamax",
    "NAdam",
    "RAdam",
    "Rprop",
    "ASGD",
)


def element_wise(optimizer: Optimizer) -> bool:
    """True if each element's update depends on nothing but that element's own gradient and state.

    So it is for most of torch's optimizers. Another class says it of itself: `element_wise = True`.
    """
    kind = type(optimizer)
    declared = kind.__dict__.get("element_wise")
    if declared is not None:
        return bool(declared)
    known = kind in [getattr(torch.optim, name, None) for name in _ELEMENT_WISE]
    return known and not any(group.get("differentiable") for group in optimizer.param_groups)


def plain_step(kind: type[Optimizer]) -> Callable[[Any], Any]:
    """The class's own step, without the wrapper that runs step hooks."""
    step = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def run_hooks(optimizer: Any, update: Callable[[], Any]) -> Any:
    """`update()` between the optimizer's step hooks, as its own step would run them."""
    from torch.optim import optimizer as base

    for hook in (
        *base._global_optimizer_pre_hooks.values(),
        *optimizer._optimizer_step_pre_hooks.values(),
    ):
        hook(optimizer, (), {})
    result = update()
    for hook in (
        *optimizer._optimizer_step_post_hooks.values(),
        *base._global_optimizer_post_hooks.values(),
    ):
        hook(optimizer, (), {})
    return result


def has_hooks(optimizer: Any) -> bool:
    """True if there are step hooks, which expect all parameters and gradients at once."""
    from torch.optim import optimizer as base

    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or base._global_optimizer_pre_hooks
        or base._global_optimizer_post_hooks
    )


@dataclass(frozen=True, kw_only=True)
class Segment:
    """What one rank owns of one parameter."""

    param: Parameter
    start: int
    """In elements of the parameter, in memory order."""
    stop: int
    tensor: Parameter
    """A flat parameter of these elements: what the optimizer updates, and knows as its own."""
    gradient: torch.Tensor


class ShardedUpdate:
    """Runs the user's optimizer over the segments of one group at a time.

    Hyper-parameters are those of the optimizer's own parameter groups, which stay the user's; its
    state belongs to segments (see `dear.buckets.sharded_state`).
    """

    def __init__(
        self, optimizer: Optimizer, plain: type[Optimizer], parts: Sequence[Decoupled]
    ) -> None:
        self._optimizer = optimizer
        self._step = plain_step(plain)
        held = [group["params"] for group in optimizer.param_groups]
        place = {param: i for i, params in enumerate(held) for param in params}
        self.segments = [_segments(part) for part in parts]
        self._tables: list[dict[int, list[Segment]]] = []
        for segments in self.segments:
            table: dict[int, list[Segment]] = {}
            for segment in segments:
                table.setdefault(place[segment.param], []).append(segment)
            self._tables.append(table)

    def run(self, index: int, unused: set[Parameter]) -> None:
        """Updates this rank's part of group `index` but for `unused` parameters."""
        optimizer = self._optimizer
        groups = optimizer.param_groups
        kept = []
        try:
            optimizer.param_groups = []
            for place, segments in self._tables[index].items():
                group = groups[place]
                kept.append((group, group["params"]))
                group["params"] = [segment.tensor for segment in segments]
                optimizer.param_groups.append(group)
                for segment in segments:
                    segment.tensor.grad = None if segment.param in unused else segment.gradient
            if kept:
                self._step(optimizer)
        finally:
            for group, params in kept:
                group["params"] = params
            optimizer.param_groups = groups


def _segments(part: Decoupled) -> list[Segment]:
    group, own = part.group, part.owned
    result = []
    for param, offset in zip(group.params, group.offsets, strict=True):
        first, last = max(offset, own.start), min(offset + param.numel(), own.stop)
        if first >= last and param.numel():
            continue
        last = max(first, last)
        tensor = torch.nn.Parameter(group.values[first:last])
        result.append(
            Segment(
                param=param,
                start=first - offset,
                stop=last - offset,
                tensor=tensor,
                gradient=part.shard[first - own.start : last - own.start],
            )
        )
    return result
