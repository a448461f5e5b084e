"""Each rank updates only what it owns, and keeps the optimizer's state of only that."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dear.buckets.flat import shaped
from dear.buckets.halves import AllReduced, Decoupled
from dear.buckets.updates import has_hooks, idle, run_hooks
from dear.comm.communicator import Communicator
from dear.lazy import torch

State = dict[str, Any]

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
# One number per parameter, in tensors without dimensions, as a parameter may have none.
_COUNTERS = ("step", "eta", "mu", "mu_product")


def element_wise(optimizer: torch.optim.Optimizer) -> bool:
    """True if each element's update depends on nothing but that element's own gradient and state.

    So it is for most of torch's optimizers. Another class says it of itself: `element_wise = True`.
    """
    kind = type(optimizer)
    declared = kind.__dict__.get("element_wise")
    if declared is not None:
        return bool(declared)
    known = kind in [getattr(torch.optim, name, None) for name in _ELEMENT_WISE]
    return known and not any(group.get("differentiable") for group in optimizer.param_groups)


@dataclass(frozen=True, kw_only=True)
class Segment:
    """What one rank owns of one parameter."""

    param: torch.nn.Parameter
    start: int
    """In elements of the parameter, in memory order."""
    stop: int
    tensor: torch.nn.Parameter
    """A flat parameter of these elements: what the optimizer updates, and knows as its own."""
    gradient: torch.Tensor


class Sharded:
    """Between two halves, each rank updates the part it owns: the second half carries parameters.

    The user's optimizer runs over the segments of one bucket at a time. Hyper-parameters are those
    of its own parameter groups, which stay the user's; its state belongs to segments, and is that
    of whole parameters, as plain torch has it, on its way in and out only. The rest is as for
    `dear.buckets.updates.Replicated`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        plain: type[torch.optim.Optimizer],
        parts: Sequence[Decoupled],
        communicator: Communicator,
        *,
        frozen: bool,
    ) -> None:
        self.parts = parts
        self.frozen = frozen
        self.unused: set[torch.nn.Parameter] = set()
        self._optimizer: Any = optimizer
        # Without the wrapper that runs step hooks.
        step = plain.step
        self._step = step.__wrapped__ if getattr(step, "hooked", False) else step
        self._communicator = communicator
        held = [group["params"] for group in optimizer.param_groups]
        place = {param: i for i, params in enumerate(held) for param in params}
        self._segments = [_segments(part) for part in parts]
        self._tables: list[dict[int, list[Segment]]] = []
        """For each bucket its segments by the optimizer's parameter group."""
        for segments in self._segments:
            table: dict[int, list[Segment]] = {}
            for segment in segments:
                table.setdefault(place[segment.param], []).append(segment)
            self._tables.append(table)

    def step(self, update: Callable[[], Any], arrival: Sequence[int]) -> set[int]:
        """See `Replicated`; of `update`, the optimizer's own step, nothing is used."""
        # Second halves start in one order on all ranks, as soon as it allows. Until then a rank
        # updates what has arrived; it waits for the oldest transfer only.
        started: set[int] = set()
        waiting = list(range(len(self.parts)))
        done: set[int] = set()
        following = 0
        oldest = iter(arrival)
        while waiting:
            ready = next((i for i in waiting if self.parts[i].reduced()), None)
            while ready is None:
                candidate = next(oldest)
                ready = None if candidate in done else candidate
            waiting.remove(ready)
            done.add(ready)
            self.parts[ready].finish_reduce()
            if not self.frozen and not idle(self.parts[ready], self.unused):
                self._update(ready, self.unused)
            while following in done:
                if not self.frozen and not idle(self.parts[following], self.unused):
                    self._start(following)
                    started.add(following)
                following += 1
        return started

    def step_averaged(self, update: Callable[[], Any]) -> Any:
        """Updates from gradients that are averages already; returns with nothing in flight."""
        if has_hooks(self._optimizer):
            return run_hooks(self._optimizer, self._step_averaged)
        return self._step_averaged()

    def finish(self, index: int) -> None:
        """Makes the parameters of a bucket current."""
        part = self.parts[index]
        part.finish_gather()
        part.bucket.touched()

    def clip(self, max_norm: float, norm_type: float) -> torch.Tensor:
        """Scales the shards so that all of them together have at most `max_norm`.

        Communicates one number, where `torch.nn.utils.clip_grad_norm_` would need whole gradients.

        Returns:
            The norm before, the same on all ranks.
        """
        for part in self.parts:
            part.finish_reduce()
        mine = [
            segment.gradient
            for part, segments in zip(self.parts, self._segments, strict=True)
            # What all ranks have is counted by one of them.
            if self._communicator.rank == 0 or not isinstance(part, AllReduced)
            for segment in segments
            if segment.param not in self.unused
        ]
        first = self.parts[0].shard
        norms = [torch.linalg.vector_norm(gradient, norm_type) for gradient in mine]
        norms = [norm.to(first.device).double() for norm in norms]
        own = torch.stack(norms) if norms else torch.zeros(1).double()
        own = torch.linalg.vector_norm(own, norm_type).to(first.device)
        if norm_type == math.inf:
            self._communicator.all_reduce(own, op="max").wait()
            total = own
        else:
            total = own.pow_(norm_type)
            self._communicator.all_reduce(total, op="sum").wait()
            total = total ** (1 / norm_type)
        scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
        for part in self.parts:
            part.shard.mul_(scale.to(part.shard.device, part.shard.real.dtype))
        return total.to(first.real.dtype)

    def take_state(self, before: Sharded | None = None) -> None:
        """Keeps of the optimizer's state what this rank needs.

        Args:
            before: whose segments the state belongs to; then this is a collective call. None: it is
                of whole parameters.
        """
        state = self._optimizer.state
        segments = [segment for group in self._segments for segment in group]
        if before is None:
            self.forget_state()
            for segment in segments:
                whole = state.pop(segment.param, None)
                if whole:
                    state[segment.tensor] = _cut_state(whole, segment)
            for part in self.parts:
                for param in part.bucket.params:
                    state.pop(param, None)
            return
        own = {segment.param: segment for segment in segments}
        moved = {
            own[param].tensor: _cut_state(whole, own[param])
            for param, whole in before.whole_state()
            if param in own
        }
        before.forget_state()
        state.update(moved)

    def forget_state(self) -> None:
        """Takes the segments' state out of the optimizer."""
        for segment in (segment for group in self._segments for segment in group):
            self._optimizer.state.pop(segment.tensor, None)

    def whole_state(self) -> Iterator[tuple[torch.nn.Parameter, State]]:
        """Every parameter that has state, with the whole of it, by bucket; a collective call."""
        pairs = list(zip(self.parts, self._segments, strict=True))
        mine = [self._described(part, owned) for part, owned in pairs]
        everybody = self._communicator.gather_objects(mine)
        for index, (part, owned) in enumerate(pairs):
            known: dict[int, State] = {}
            for described in everybody:
                for place, keys in described[index].items():
                    known.setdefault(place, {}).update(keys)
            if known:
                yield from self._gathered(part, owned, known)

    def _step_averaged(self) -> None:
        if self.frozen:
            return
        for part in self.parts:
            part.bucket.adopt()
            part.shard.copy_(part.bucket.gradients[part.owned])
        missing = {p for part in self.parts for p in part.bucket.params if p.grad is None}
        for index, part in enumerate(self.parts):
            if not missing.issuperset(part.bucket.params):
                self._update(index, missing)
                self._start(index)
        for index in range(len(self.parts)):
            self.finish(index)

    def _start(self, index: int) -> None:
        part = self.parts[index]
        part.start_gather(part.bucket.values)
        part.bucket.touched()

    def _update(self, index: int, unused: set[torch.nn.Parameter]) -> None:
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

    def _described(self, part: Decoupled, segments: Sequence[Segment]) -> dict[int, State]:
        """By place of the parameter: a dtype for what is kept by element, else the value itself."""
        result = {}
        for segment in segments:
            state = self._optimizer.state.get(segment.tensor)
            if state:
                result[part.bucket.place[segment.param]] = {
                    key: value.dtype if _by_element(value, segment.tensor) else value
                    for key, value in state.items()
                }
        return result

    def _gathered(
        self, part: Decoupled, segments: Sequence[Segment], known: dict[int, State]
    ) -> Iterator[tuple[torch.nn.Parameter, State]]:
        bucket = part.bucket
        kinds = {
            (key, value)
            for keys in known.values()
            for key, value in keys.items()
            if isinstance(value, torch.dtype)
        }
        whole: dict[tuple[str, torch.dtype], list[torch.Tensor]] = {}
        for key, dtype in sorted(kinds, key=str):
            flat = bucket.gradients.new_zeros(bucket.gradients.numel(), dtype=dtype)
            for segment in segments:
                value = self._optimizer.state.get(segment.tensor, {}).get(key)
                if _by_element(value, segment.tensor) and value.dtype == dtype:
                    offset = bucket.offsets[bucket.place[segment.param]]
                    flat[offset + segment.start : offset + segment.stop].copy_(value)
            part.start_gather(flat)
            part.finish_gather()
            whole[key, dtype] = bucket.views(flat)
        for place, keys in sorted(known.items()):
            param = bucket.params[place]
            yield (
                param,
                {
                    key: whole[key, value][place].clone()
                    if isinstance(value, torch.dtype)
                    else _own(value, param)
                    for key, value in keys.items()
                },
            )


def _segments(part: Decoupled) -> list[Segment]:
    bucket, own = part.bucket, part.owned
    result = []
    for param, offset in zip(bucket.params, bucket.offsets, strict=True):
        first, last = max(offset, own.start), min(offset + param.numel(), own.stop)
        if first >= last and param.numel():
            continue
        last = max(first, last)
        result.append(
            Segment(
                param=param,
                start=first - offset,
                stop=last - offset,
                tensor=torch.nn.Parameter(bucket.values[first:last]),
                gradient=part.shard[first - own.start : last - own.start],
            )
        )
    return result


def _cut_state(state: State, segment: Segment) -> State:
    """The segment's part of a parameter's state; what is not element by element is copied."""
    return {key: _cut(key, value, segment) for key, value in state.items()}


def _cut(key: str, value: Any, segment: Segment) -> Any:
    if not torch.is_tensor(value):
        return value
    param = segment.param
    if value.shape != param.shape or (value.dim() == 0 and key in _COUNTERS):
        return value.clone()
    flat = value.new_empty(param.numel())
    shaped(flat, 0, param).copy_(value)
    return flat[segment.start : segment.stop].clone()


def _own(value: Any, param: torch.nn.Parameter) -> Any:
    if not torch.is_tensor(value):
        return value
    return value.clone() if value.device.type == "cpu" else value.to(param.device, copy=True)


def _by_element(value: Any, tensor: torch.Tensor) -> bool:
    return torch.is_tensor(value) and value.dim() == 1 and value.shape == tensor.shape
