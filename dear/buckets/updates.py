"""Optimizer updates of some parameters at a time: later, or between two halves of an all-reduce.

`halves` defines the two halves; a part is one bucket with its two halves.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dear.buckets.flat import shaped, with_gradients
from dear.buckets.halves import AllReduced, Decoupled
from dear.comm.communicator import Communicator
from dear.comm.flight.recorder import note_bucket
from dear.errors import UserError
from dear.lazy import torch

State = dict[str, Any]

_ELEMENT_WISE = "SGD Adam AdamW RMSprop Adagrad Adadelta Adamax NAdam RAdam Rprop ASGD"
# State of one number per parameter, in 0-d tensors. A 0-d parameter has other state of that shape.
_COUNTERS = ("step", "eta", "mu", "mu_product")


def has_hooks(optimizer: Any) -> bool:
    """Returns True if the optimizer has step hooks; these expect all parameters and gradients."""
    before, after = _hooks(optimizer)
    return bool(before or after)


def run_hooks(optimizer: Any, update: Callable[[], Any]) -> Any:
    """Runs `update()` between the optimizer's step hooks, as `optimizer.step()` would."""
    before, after = _hooks(optimizer)
    for hook in before:
        hook(optimizer, (), {})
    result = update()
    for hook in after:
        hook(optimizer, (), {})
    return result


def _hooks(optimizer: Any) -> tuple[list[Any], list[Any]]:
    from torch.optim import optimizer as base

    local = optimizer._optimizer_step_pre_hooks
    before = [*base._global_optimizer_pre_hooks.values(), *local.values()]
    local = optimizer._optimizer_step_post_hooks
    return before, [*local.values(), *base._global_optimizer_post_hooks.values()]


class PartialUpdate:
    """Runs an optimizer later, for one group of parameters at a time.

    Args:
        plain: the optimizer's original class.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, plain: type[torch.optim.Optimizer]
    ) -> None:
        self._optimizer: Any = optimizer
        self._plain = plain
        self._hyperparameters: list[dict[str, Any]] = []
        self._group_of: dict[torch.nn.Parameter, int] = {}

    def possible(self) -> bool:
        """Returns True if updates group by group give the same result as one update of all.

        This is known for torch's optimizers (except LBFGS) and for classes that declare
        `element_wise`. With step hooks the result is False, since hooks expect the whole step.
        """
        supported = f"{self._plain.__module__}.".startswith("torch.optim.")
        supported = supported or bool(self._plain.__dict__.get("element_wise"))
        return supported and not has_hooks(self._optimizer)

    def note(self) -> None:
        """Copies the groups: schedulers change hyper-parameters in place, scripts the members."""
        self._hyperparameters = [
            {
                key: value.clone() if torch.is_tensor(value) else value
                for key, value in group.items()
                if key != "params"
            }
            for group in self._optimizer.param_groups
        ]
        self._group_of = {
            param: i
            for i, group in enumerate(self._optimizer.param_groups)
            for param in group["params"]
        }

    def run(self, gradients: Mapping[torch.nn.Parameter, torch.Tensor | None]) -> None:
        """Updates the parameters in `gradients`, with the groups of the last `note`.

        The script may have taken parameters out of all groups.
        """
        groups = self._optimizer.param_groups
        parts = [{**hyper, "params": []} for hyper in self._hyperparameters]
        for param in gradients:
            if param in self._group_of:
                parts[self._group_of[param]]["params"].append(param)
        self._optimizer.param_groups = parts
        device = next(iter(gradients)).device.type
        try:
            # The first step creates state, which must not be inference tensors. The update must not
            # run in the lower precision of a surrounding forward pass.
            with torch.inference_mode(False), torch.autocast(device, enabled=False):
                with_gradients(gradients, lambda: self._plain.step(self._optimizer))
        finally:
            self._optimizer.param_groups = groups


class Between(ABC):
    """Work between the two halves; buckets are in the order in which forward passes read them.

    Args:
        plain: the optimizer's original class.
        unused: called with parameters whose first halves have ended (without arguments: all).
            Returns those that no rank has a gradient for in this step, and maybe others.
        frozen: leave out updates and second halves, which is wrong on purpose (it measures them).
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
        """Starts the second halves; returns the buckets that the caller must `finish`.

        Args:
            update: the optimizer's own step, with its hooks.
            arrival: buckets in the order in which their first halves end.
        """

    @abstractmethod
    def step_averaged(self, update: Callable[[], Any]) -> Any:
        """Updates from gradients that are averages already; waits for all transfers it starts."""

    @abstractmethod
    def finish(self, index: int) -> None:
        """Completes the second half of a bucket, so that its parameters are up to date."""

    def idle(self, index: int, unused: set[torch.nn.Parameter]) -> bool:
        """Returns True if no rank has a gradient for any parameter of the bucket."""
        return bool(unused) and unused.issuperset(self.parts[index].bucket.params)


class Replicated(Between):
    """Updates all parameters on every rank; the second half carries mean gradients.

    With torch's own optimizers, a bucket is updated just before its layers run, with the
    hyper-parameters of the `step()` call. Other optimizers update in `step()`, see
    `PartialUpdate.possible`.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._idle: set[torch.nn.Parameter] = set()
        """Parameters of the current step that no rank has a gradient for."""
        self._partial = PartialUpdate(self._optimizer, self._plain)
        self._means = [
            self._communicator.allocate(part.bucket.gradients, part.bucket.gradients.numel())
            for part in self.parts
        ]
        for part, mean in zip(self.parts, self._means, strict=True):
            note_bucket(part.bucket.params, mean)
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
    """Returns True if each element's update depends only on its own gradient and state.

    This is known for most of torch's optimizers. Other classes declare it: `element_wise = True`.
    """
    kind = type(optimizer)
    declared = kind.__dict__.get("element_wise")
    if declared is not None:
        return bool(declared)
    listed = kind in [getattr(torch.optim, name, None) for name in _ELEMENT_WISE.split()]
    return listed and not any(group.get("differentiable") for group in optimizer.param_groups)


@dataclass(frozen=True, kw_only=True)
class Segment:
    """The part of one parameter that one rank owns."""

    param: torch.nn.Parameter
    start: int
    """First element of the part, in the parameter's memory order."""
    stop: int
    tensor: torch.nn.Parameter
    """Flat parameter with these elements; the optimizer updates it in place of `param`."""
    gradient: torch.Tensor


class Sharded(Between):
    """Updates of a rank's own segments only; all-gathers then send the parameters.

    The user's optimizer updates the segments of one bucket at a time. Hyper-parameters come from
    its own parameter groups, which the user may change. The optimizer's state belongs to segments.
    Loading and saving convert it from and to plain torch's state of whole parameters.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # The unwrapped step: the wrapper would run the step hooks once per bucket.
        step = self._plain.step
        self._step = step.__wrapped__ if getattr(step, "hooked", False) else step
        self._segments = [_segments(part) for part in self.parts]
        self._loaded: dict[torch.nn.Parameter, State] = {}
        """State of whole parameters that was loaded since the last update."""
        self._tables: list[dict[int, list[Segment]]] = []
        """Segments of each bucket by the index of the optimizer's parameter group."""
        self._place: dict[torch.nn.Parameter, int] = {}
        """Index of each parameter's group."""
        self._follow_groups()

    def _follow_groups(self) -> None:
        """Sorts segments by the groups of their parameters; a script may have changed these."""
        params_by_group = [group["params"] for group in self._optimizer.param_groups]
        place = {param: i for i, params in enumerate(params_by_group) for param in params}
        if place == self._place:
            return
        self._place, self._tables = place, []
        for segments in self._segments:
            table: dict[int, list[Segment]] = {}
            for segment in segments:
                if segment.param in place:
                    table.setdefault(place[segment.param], []).append(segment)
            self._tables.append(table)

    def step(self, update: Callable[[], Any], arrival: Sequence[int]) -> set[int]:
        self._follow_groups()
        # `update` is not used: if there are step hooks, the engine calls `step_averaged` instead.
        # All ranks start second halves in the same order, as early as this order allows. Meanwhile
        # a rank updates the buckets that have arrived, and blocks only on the oldest transfer.
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
        """Scales the shards so that the norm of all mean gradients is at most `max_norm`.

        Scales this rank's own gradients, too, since another pass or step may use them once more.
        Communicates one number; `torch.nn.utils.clip_grad_norm_` would need whole gradients.
        Returns:
            The norm before scaling, the same on all ranks (0-d tensor).
        """
        for part in self.parts:
            part.finish_reduce()
        unused = self._unused()
        self._follow_groups()
        gradients = [
            segment.gradient
            for part, segments in zip(self.parts, self._segments, strict=True)
            # All ranks hold the mean of an AllReduced bucket; only rank 0 counts it.
            if self._communicator.rank == 0 or not isinstance(part, AllReduced)
            for segment in segments
            if segment.param in self._place and segment.param not in unused
        ]
        first = self.parts[0].shard
        norms = [torch.linalg.vector_norm(gradient, norm_type) for gradient in gradients]
        norms = [norm.to(first.device).double() for norm in norms]
        norm = torch.stack(norms) if norms else torch.zeros(1).double()
        norm = torch.linalg.vector_norm(norm, norm_type).to(first.device)
        if norm_type == math.inf:
            self._communicator.all_reduce(norm, op="max").wait()
            total = norm
        else:
            total = norm.pow_(norm_type)
            self._communicator.all_reduce(total, op="sum").wait()
            total = total ** (1 / norm_type)
        scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
        for part in self.parts:
            factor = scale.to(part.shard.device, part.shard.real.dtype)
            part.shard.mul_(factor)
            part.bucket.gradients.mul_(factor)
            part.bucket.note()
        rounded: torch.Tensor = total.to(first.real.dtype)
        return rounded

    def take_state(self, before: Sharded | None = None) -> None:
        """Keeps the part of the optimizer's state that this rank needs.

        Args:
            before: the object whose segments the state belongs to; the call is then collective.
                None: the state belongs to whole parameters.
        """
        state = self._optimizer.state
        segments = {segment.param: segment for owned in self._segments for segment in owned}
        if before is None:
            self.forget_state()
            params = (param for part in self.parts for param in part.bucket.params)
            self._loaded = {param: state.pop(param) for param in params if param in state}
            states = iter(self._loaded.items())
        else:
            states = before.whole_state()
            self._loaded = before._loaded if is_untouched(self._optimizer) else {}
        moved: dict[object, State] = {
            segments[param].tensor: {
                key: _cut(key, value, segments[param]) for key, value in whole.items()
            }
            for param, whole in states
            if whole and param in segments
        }
        if before is not None:
            before.forget_state()
        cut = {param for part in self.parts for param in part.bucket.params}
        self._optimizer.state = _SegmentState(cut, {**state, **moved})

    def forget_state(self) -> None:
        """Removes the state of the segments from the optimizer."""
        for segment in (segment for group in self._segments for segment in group):
            self._optimizer.state.pop(segment.tensor, None)

    def whole_state(self) -> Iterator[tuple[torch.nn.Parameter, State]]:
        """Yields each parameter that has state, with its whole state, by bucket; collective.

        A rank that has loaded state since the last update yields the loaded state: it may be the
        only rank that has loaded, and may broadcast the state next.
        """
        loaded = self._loaded if is_untouched(self._optimizer) else {}
        pairs = list(zip(self.parts, self._segments, strict=True))
        report = [self._described(part, owned) for part, owned in pairs]
        reports = self._communicator.gather_objects(report)
        for index, (part, owned) in enumerate(pairs):
            states: dict[int, State] = {}
            for rank_report in reports:
                for place, keys in rank_report[index].items():
                    states.setdefault(place, {}).update(keys)
            gathered = self._gathered(part, owned, states) if states else ()
            if not loaded:
                yield from gathered
            else:
                deque(gathered, maxlen=0)  # its collectives must run even if the result is unused
        yield from loaded.items()

    def _step_averaged(self) -> None:
        if self.frozen:
            return
        self._follow_groups()
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
        self._loaded = {}
        optimizer = self._optimizer
        groups = optimizer.param_groups
        saved = []
        try:
            optimizer.param_groups = []
            for place, segments in self._tables[index].items():
                group = groups[place]
                saved.append((group, group["params"]))
                group["params"] = [segment.tensor for segment in segments]
                optimizer.param_groups.append(group)
                for segment in segments:
                    segment.tensor.grad = None if segment.param in unused else segment.gradient
            if saved:
                self._step(optimizer)
        finally:
            for group, params in saved:
                group["params"] = params
            optimizer.param_groups = groups

    def _described(self, part: Decoupled, segments: Sequence[Segment]) -> dict[int, State]:
        """Returns state by parameter index: element-wise state as its dtype, other state as is."""
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
        self, part: Decoupled, segments: Sequence[Segment], states: dict[int, State]
    ) -> Iterator[tuple[torch.nn.Parameter, State]]:
        bucket = part.bucket
        kinds = {
            (key, value)
            for keys in states.values()
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
        for place, keys in sorted(states.items()):
            param, state = bucket.params[place], {}
            for key, value in keys.items():
                by_element = isinstance(value, torch.dtype)
                state[key] = (
                    whole[key, value][place].clone() if by_element else beside(value, param)
                )
            yield param, state


class WatchedState(defaultdict[Any, State]):
    """State that notes if the script clears it. A copy is a plain `defaultdict`."""

    def __init__(self, known: Mapping[Any, State]) -> None:
        super().__init__(dict, known)
        self.cleared = False

    def clear(self) -> None:
        super().clear()
        self.cleared = True

    def copy(self) -> defaultdict[Any, State]:  # type: ignore[override]
        return defaultdict(dict, self)

    __copy__ = copy  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return (defaultdict, (dict, dict(self)))


def is_untouched(optimizer: torch.optim.Optimizer) -> bool:
    """Returns True unless the script has cleared or replaced the optimizer's `WatchedState`."""
    return not getattr(optimizer.state, "cleared", True)


class _SegmentState(WatchedState):
    """State of segments; refuses what would not reset the state of a whole parameter.

    Args:
        params: parameters whose state belongs to segments.
    """

    def __init__(self, params: set[torch.nn.Parameter], known: Mapping[object, State]) -> None:
        super().__init__(known)
        self._params = params

    def __setitem__(self, key: object, value: State) -> None:
        self._refuse(key)
        super().__setitem__(key, value)

    def __delitem__(self, key: object) -> None:
        self._refuse(key)
        super().__delitem__(key)

    def pop(self, key: object, *default: object) -> object:  # type: ignore[override]
        self._refuse(key)
        removed: object = super().pop(key, *default)
        return removed

    def __missing__(self, key: object) -> State:
        return {} if key in self._params else super().__missing__(key)

    def _refuse(self, key: object) -> None:
        if key in self._params:
            raise UserError(
                "each rank has a part of the optimizer's state, so optimizer.state has no entries "
                "of single parameters: change the result of optimizer.state_dict() and load it by "
                "load_state_dict(), or use update='replicated'"
            )


def _segments(part: Decoupled) -> list[Segment]:
    bucket, owned = part.bucket, part.owned
    result = []
    for param, offset in zip(bucket.params, bucket.offsets, strict=True):
        first, last = max(offset, owned.start), min(offset + param.numel(), owned.stop)
        if first >= last and param.numel():
            continue
        last = max(first, last)
        result.append(
            Segment(
                param=param,
                start=first - offset,
                stop=last - offset,
                tensor=torch.nn.Parameter(bucket.values[first:last]),
                gradient=part.shard[first - owned.start : last - owned.start],
            )
        )
    return result


def _cut(key: str, value: Any, segment: Segment) -> Any:
    """Returns the segment's part of element-wise state, or a copy of other state."""
    if not torch.is_tensor(value):
        return value
    param = segment.param
    if value.shape != param.shape or (value.dim() == 0 and key in _COUNTERS):
        return value.clone()
    flat = value.new_empty(param.numel())
    shaped(flat, 0, param).copy_(value)
    return flat[segment.start : segment.stop].clone()


def beside(value: Any, param: torch.nn.Parameter) -> Any:
    """Returns a copy of a state value on the parameter's device; CPU tensors stay on the CPU."""
    if not torch.is_tensor(value):
        return value
    return value.clone() if value.device.type == "cpu" else value.to(param.device, copy=True)


def _by_element(value: Any, tensor: torch.Tensor) -> bool:
    return torch.is_tensor(value) and value.dim() == 1 and value.shape == tensor.shape
