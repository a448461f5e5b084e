"""An optimizer's update of a part: some parameters, later; or of all, between two halves."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dear.buckets.flat import shaped, with_gradients
from dear.buckets.halves import AllReduced, Decoupled
from dear.comm.communicator import Communicator, buffer
from dear.lazy import torch

State = dict[str, Any]

_ELEMENT_WISE = "SGD Adam AdamW RMSprop Adagrad Adadelta Adamax NAdam RAdam Rprop ASGD"
# One number per parameter, in tensors without dimensions, as a parameter may have none.
_COUNTERS = ("step", "eta", "mu", "mu_product")


def has_hooks(optimizer: Any) -> bool:
    """True if there are step hooks, which expect all parameters and gradients at once."""
    before, after = _hooks(optimizer)
    return bool(before or after)


def run_hooks(optimizer: Any, update: Callable[[], Any]) -> Any:
    """`update()` between the optimizer's step hooks, if any, as its own step would run them."""
    before, after = _hooks(optimizer)
    for hook in before:
        hook(optimizer, (), {})
    result = update()
    for hook in after:
        hook(optimizer, (), {})
    return result


def _hooks(optimizer: Any) -> tuple[list[Any], list[Any]]:
    from torch.optim import optimizer as base

    every, own = base._global_optimizer_pre_hooks, optimizer._optimizer_step_pre_hooks
    before = [*every.values(), *own.values()]
    every, own = base._global_optimizer_post_hooks, optimizer._optimizer_step_post_hooks
    return before, [*own.values(), *every.values()]


class PartialUpdate:
    """Lets `optimizer` update group by group, later than its `step()` was called.

    Args:
        plain: the optimizer's own class.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, plain: type[torch.optim.Optimizer]
    ) -> None:
        self._optimizer: Any = optimizer
        self._plain = plain
        self._hyperparameters: list[dict[str, Any]] = []

    def possible(self) -> bool:
        """True if updating group by group equals updating all parameters at once.

        So it is for torch's own optimizers (but for LBFGS), and for those that say of themselves
        that they are `element_wise`. Of others it is not known, and step hooks expect the whole
        step.
        """
        known = f"{self._plain.__module__}.".startswith("torch.optim.")
        known = known or bool(self._plain.__dict__.get("element_wise"))
        return known and not has_hooks(self._optimizer)

    def note(self) -> None:
        """Keeps the hyper-parameters: schedulers change them later, some in place."""
        self._hyperparameters = [
            {
                key: value.clone() if torch.is_tensor(value) else value
                for key, value in group.items()
                if key != "params"
            }
            for group in self._optimizer.param_groups
        ]

    def run(self, gradients: Mapping[torch.nn.Parameter, torch.Tensor | None]) -> None:
        """Updates the parameters in `gradients`, with the hyper-parameters of the last `note`."""
        groups = self._optimizer.param_groups
        self._optimizer.param_groups = [
            {**hyper, "params": [param for param in group["params"] if param in gradients]}
            for hyper, group in zip(self._hyperparameters, groups, strict=True)
        ]
        device = next(iter(gradients)).device.type
        try:
            # State made by the first step must outlive an evaluation, and the update is no part of
            # a forward pass that runs in lower precision.
            with torch.inference_mode(False), torch.autocast(device, enabled=False):
                with_gradients(gradients, lambda: self._plain.step(self._optimizer))
        finally:
            self._optimizer.param_groups = groups


class Between(ABC):
    """What ranks do between the two halves. Buckets have the order in which forward passes read.

    Args:
        plain: the optimizer's own class.
        unused: which parameters no rank has a gradient for in this step: of those given, or of all
            without any, and perhaps others. Asked once the first halves of those given have ended.
        frozen: leave updates and second halves out: wrong on purpose.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        plain: type[torch.optim.Optimizer],
        parts: Sequence[Decoupled],
        communicator: Communicator,
        *,
        unused: Callable[..., set[torch.nn.Parameter]],
        frozen: bool,
    ) -> None:
        self._optimizer: Any = optimizer
        self._plain: Any = plain
        self.parts = parts
        self._communicator = communicator
        self.frozen = frozen
        self._unused = unused

    @abstractmethod
    def step(self, update: Callable[[], Any], arrival: Sequence[int]) -> set[int]:
        """Starts second halves; returns the buckets that `finish` must be called for.

        Args:
            update: the optimizer's own step, with its hooks.
            arrival: buckets in the order in which their first halves end.
        """

    @abstractmethod
    def step_averaged(self, update: Callable[[], Any]) -> Any:
        """Updates from gradients that are averages already; returns with nothing in flight."""

    @abstractmethod
    def finish(self, index: int) -> None:
        """Makes the parameters of a bucket current."""

    def idle(self, index: int, unused: set[torch.nn.Parameter]) -> bool:
        """True if no rank has a gradient for anything in the bucket: nothing to update."""
        return bool(unused) and unused.issuperset(self.parts[index].bucket.params)


class Replicated(Between):
    """Every rank updates everything: the second half carries mean gradients.

    With torch's own optimizers a bucket is updated just before its layers run, with the
    hyper-parameters that `step()` saw; others update in `step()` (see `PartialUpdate.possible`).
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._idle: set[torch.nn.Parameter] = set()
        """The unused parameters of the step that `finish` ends."""
        self._partial = PartialUpdate(self._optimizer, self._plain)
        self._means = [
            buffer(part.bucket.gradients, part.bucket.gradients.numel(), self._communicator)
            for part in self.parts
        ]
        self._views = [
            part.bucket.views(mean) for part, mean in zip(self.parts, self._means, strict=True)
        ]

    def step(self, update: Callable[[], Any], arrival: Sequence[int]) -> set[int]:
        for index in arrival:
            self.parts[index].finish_reduce()
        if self.frozen:
            return set()
        self._idle = self._unused()
        started = [i for i in range(len(self.parts)) if not self.idle(i, self._idle)]
        for index in started:
            self.parts[index].start_gather_mean(self._means[index])
        if not self._partial.possible():
            means: dict[torch.nn.Parameter, torch.Tensor | None] = {}
            for index in range(len(self.parts)):
                means |= self._take(index)
            with_gradients(means, update)
            return set()
        self._partial.note()
        return set(started)

    def step_averaged(self, update: Callable[[], Any]) -> Any:
        return None if self.frozen else update()

    def finish(self, index: int) -> None:
        self._partial.run(self._take(index))

    def _take(self, index: int) -> dict[torch.nn.Parameter, torch.Tensor | None]:
        with torch.inference_mode(False):
            self.parts[index].finish_gather()
        pairs = zip(self.parts[index].bucket.params, self._views[index], strict=True)
        return {param: None if param in self._idle else view for param, view in pairs}


def element_wise(optimizer: torch.optim.Optimizer) -> bool:
    """True if each element's update depends on nothing but that element's own gradient and state.

    So it is for most of torch's optimizers. Another class says it of itself: `element_wise = True`.
    """
    kind = type(optimizer)
    declared = kind.__dict__.get("element_wise")
    if declared is not None:
        return bool(declared)
    known = kind in [getattr(torch.optim, name, None) for name in _ELEMENT_WISE.split()]
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


class Sharded(Between):
    """Each rank updates the part it owns: the second half carries parameters.

    The user's optimizer runs over the segments of one bucket at a time. Hyper-parameters are those
    of its own parameter groups, which stay the user's; its state belongs to segments, and is that
    of whole parameters, as plain torch has it, on its way in and out only.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # Without the wrapper that runs step hooks.
        step = self._plain.step
        self._step = step.__wrapped__ if getattr(step, "hooked", False) else step
        held = [group["params"] for group in self._optimizer.param_groups]
        place = {param: i for i, params in enumerate(held) for param in params}
        self._segments = [_segments(part) for part in self.parts]
        self._tables: list[dict[int, list[Segment]]] = []
        """For each bucket its segments by the optimizer's parameter group."""
        for segments in self._segments:
            table: dict[int, list[Segment]] = {}
            for segment in segments:
                table.setdefault(place[segment.param], []).append(segment)
            self._tables.append(table)

    def step(self, update: Callable[[], Any], arrival: Sequence[int]) -> set[int]:
        # Second halves start in one order on all ranks, as soon as it allows. Until then a rank
        # updates what has arrived; it waits for the oldest transfer only.
        started: set[int] = set()
        waiting = list(range(len(self.parts)))
        done: set[int] = set()
        busy: set[int] = set()
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
            unused = self._unused(self.parts[ready].bucket.params)
            if not self.frozen and not self.idle(ready, unused):
                busy.add(ready)
                self._update(ready, unused)
            while following in done:
                if following in busy:
                    self._start(following)
                    started.add(following)
                following += 1
        return started

    def step_averaged(self, update: Callable[[], Any]) -> Any:
        return run_hooks(self._optimizer, self._step_averaged)

    def finish(self, index: int) -> None:
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
        unused = self._unused()
        mine = [
            segment.gradient
            for part, segments in zip(self.parts, self._segments, strict=True)
            # What all ranks have is counted by one of them.
            if self._communicator.rank == 0 or not isinstance(part, AllReduced)
            for segment in segments
            if segment.param not in unused
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
        own = {segment.param: segment for owned in self._segments for segment in owned}
        if before is None:
            self.forget_state()
            params = (param for part in self.parts for param in part.bucket.params)
            found = ((param, state.pop(param, None)) for param in params)
        else:
            found = before.whole_state()
        moved = {
            own[param].tensor: {key: _cut(key, value, own[param]) for key, value in whole.items()}
            for param, whole in found
            if whole and param in own
        }
        if before is not None:
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
            param, state = bucket.params[place], {}
            for key, value in keys.items():
                by_element = isinstance(value, torch.dtype)
                state[key] = (
                    whole[key, value][place].clone() if by_element else beside(value, param)
                )
            yield param, state


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


def _cut(key: str, value: Any, segment: Segment) -> Any:
    """The segment's part of a parameter's state; what is not element by element is copied."""
    if not torch.is_tensor(value):
        return value
    param = segment.param
    if value.shape != param.shape or (value.dim() == 0 and key in _COUNTERS):
        return value.clone()
    flat = value.new_empty(param.numel())
    shaped(flat, 0, param).copy_(value)
    return flat[segment.start : segment.stop].clone()


def beside(value: Any, param: torch.nn.Parameter) -> Any:
    """A copy of state of some rank, beside the parameter; counters on the CPU stay there."""
    if not torch.is_tensor(value):
        return value
    return value.clone() if value.device.type == "cpu" else value.to(param.device, copy=True)


def _by_element(value: Any, tensor: torch.Tensor) -> bool:
    return torch.is_tensor(value) and value.dim() == 1 and value.shape == tensor.shape
