"""Steps of a model in a trace of torch.profiler: the times of its modules and gradients.

A stretch of the forward pass is the time between two beginnings or ends of modules, as in
`common.profiling.recorder`. An operation belongs to the stretch in which it starts, and a node of
the backward pass to the stretch of the operation that created it: both have the same sequence
number. A kernel belongs to the stretch or node that launched it, so that the time of the GPU
counts, not the time of the launch. Where the trace has no kernels, the operations' times count.
"""

from __future__ import annotations

import functools
import re
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from common.profiling.recorder import Layers, Step
from common.profiling.traces.kineto import MODULE, RECORD, Event, Trace, Work, outermost

_NODE = "autograd::engine::evaluate_function: "
_GRADIENT = "torch::autograd::AccumulateGrad"
_STEP, _UPDATE = "ProfilerStep#", "Optimizer.step#"
_OUTSIDE = ""
_DTYPES = {
    "float": "float32",
    "double": "float64",
    "c10::Half": "float16",
    "c10::BFloat16": "bfloat16",
}
_MIXED = {"c10::BFloat16": "amp-bf16", "c10::Half": "amp-fp16"}
_TENSORS = {"SGD": 3, "Adam": 7, "AdamW": 7}
"""Values that an update reads or writes per parameter, by class of the optimizer: the parameter
twice, its gradient, and the state twice. SGD with momentum has 5."""
_MOMENTUM = ("aten::mul_", "aten::_foreach_mul_", "aten::_fused_sgd_")
"""Operations of SGD that only momentum needs."""


@dataclass(frozen=True, kw_only=True)
class _Pass:
    """Forward and backward pass."""

    calls: list[Event]
    """Calls of modules, by start; where the root is called, it is the first."""
    nodes: list[Event]
    """Nodes of the backward pass."""

    @property
    def begin(self) -> float:
        return self.calls[0].start

    @property
    def turn(self) -> float:
        """Begin of the backward pass."""
        return self.nodes[0].start


class Traced:
    """Steps of a model in a trace.

    Args:
        trace: one process on one device.
        structure: layers of the same model, in the order in which it calls them.
        inputs: shapes of the model's input tensors.
        model: name for messages.

    Raises:
        UserError: the trace has no modules, no backward pass or no shapes, or it is not of this
            model with this batch.
    """

    def __init__(
        self, trace: Trace, structure: Layers, inputs: Sequence[tuple[int, ...]], model: str
    ) -> None:
        self._trace, self._structure, self._model = trace, structure, model
        self._named = dict(structure.model.named_modules())
        nodes = outermost([op for op in trace.operations if op.name.startswith(_NODE)])
        self._shapes = _shapes(trace, nodes)
        self._passes = self._split(nodes)
        self._check_batch(inputs)
        self.steps = [self._step(index) for index in range(len(self._passes))]

    def layers(self) -> Layers:
        """Returns the medians over the steps, scaled to the median duration of each pass."""
        layers = Layers(self._structure.model, self.steps, self._structure.flops)
        passes = [(sum(step.forward_s), sum(step.backward_s)) for step in self.steps]
        layers.scale(*(statistics.median(times) for times in zip(*passes, strict=True)))
        return layers

    @property
    def dtype(self) -> str:
        """Dtype of the gradients, or the mixed precision of the operations."""
        kinds = {op.args["Input type"][0] for op in self._shapes.values()}
        kind = kinds.pop()
        if kinds or kind not in _DTYPES:
            raise self._trace.error(f"gradients of {', '.join({kind, *kinds})} are not supported")
        if kind == "float":
            for op in self._trace.operations:
                for lower, mixed in _MIXED.items():
                    if lower in op.args.get("Input type", ()):
                        return mixed
        return _DTYPES[kind]

    @functools.cached_property
    def update_s(self) -> float | None:
        """Seconds of an optimizer's update; None: the trace has none."""
        times = [
            sum(work.end - work.start for work in self._trace.work if _inside(work, update))
            for update in self._updates()
        ]
        return statistics.median(times) / 1e6 if times else None

    def updated_bytes_per_s(self) -> float | None:
        """Returns the memory bandwidth with which a replayed update takes the traced update's time.

        None: the trace has no update of an optimizer in `_TENSORS`.
        """
        kinds = {re.split("[#.]", update.name)[2] for update in self._updates()}
        if not self.update_s or len(kinds) != 1 or not kinds <= _TENSORS.keys():
            return None
        params = dict(self._structure.model.named_parameters())
        numel = sum(params[name].numel() for name in self._structure.ready)
        tensors = _TENSORS[kinds.pop()]
        if tensors == _TENSORS["SGD"] and any(
            op.name in _MOMENTUM and _inside(op, self._updates()[0])
            for op in self._trace.operations
        ):
            tensors += 2
        return 4 * numel * tensors / self.update_s

    def _updates(self) -> list[Event]:
        return [event for event in self._trace.ranges if event.name.startswith(_UPDATE)]

    def _split(self, nodes: Sequence[Event]) -> list[_Pass]:
        """Returns each forward pass that a backward pass follows, together with that pass."""
        if not nodes:
            raise self._trace.error("has no backward pass (no operation of autograd's engine)")
        groups = self._by_class() if self._trace.calls else self._by_name(nodes)
        profiled = [event for event in self._trace.ranges if event.name.startswith(_STEP)]
        ends = [*(group[0].start for group in groups[1:]), float("inf")]
        passes = []
        for group, end in zip(groups, ends, strict=True):
            if profiled and not any(step.start <= group[0].start < step.end for step in profiled):
                continue
            done = max(call.end for call in group)
            behind = [node for node in nodes if done <= node.start < end]
            if behind:
                passes.append(_Pass(calls=group, nodes=behind))
        if not passes:
            raise self._trace.error(f"has no backward pass after a call of {self._model}")
        return passes

    def _by_class(self) -> list[list[Event]]:
        """Returns the calls in each call of the root; they are named by class."""
        kind = type(self._structure.model).__name__
        calls = self._trace.calls
        roots = outermost([call for call in calls if _class_of(call) == kind])
        if not roots:
            others = sorted({_class_of(call) for call in outermost(calls)})
            raise self._trace.error(
                f"never calls {kind}, the class of model {self._model}; the outermost "
                f"modules in it are of class {', '.join(others)}"
            )
        return [[call for call in calls if _inside(call, root)] for root in roots]

    def _by_name(self, nodes: Sequence[Event]) -> list[list[Event]]:
        """Returns the ranges that have names of modules, split where a backward pass begins."""
        groups: list[list[Event]] = [[]]
        starts = [node.start for node in nodes]
        for event in self._trace.ranges:
            if event.name in self._named and event.name:
                before = groups[-1] and bisect_right(starts, groups[-1][-1].start)
                if groups[-1] and bisect_right(starts, event.start) > before:
                    groups.append([])
                groups[-1].append(event)
        if not groups[0]:
            raise self._trace.error(f"has no information on modules; {RECORD}")
        return groups

    def _check_batch(self, inputs: Sequence[tuple[int, ...]]) -> None:
        first = self._passes[0]
        seen = [
            tuple(dims)
            for op in self._operations(first)
            for dims in op.args.get("Input Dims", ())
            if dims and not isinstance(dims[0], list)
        ]
        if not set(inputs) & set(seen):
            raise self._trace.error(
                f"no operation has an input of shape {' or '.join(map(str, inputs))}, the "
                f"batch of model {self._model}; the first input in it is {seen[:1]}; change "
                "--batch or --sentence-len"
            )

    def _operations(self, both: _Pass) -> list[Event]:
        """Returns the operations of a forward pass and of the loss behind it."""
        every = self._trace.operations
        begin, end = (bisect_left(every, at, key=_start) for at in (both.begin, both.turn))
        return [op for op in every[begin:end] if op.thread == both.calls[0].thread]

    def _step(self, index: int) -> Step:
        """Returns the times of a pass, in seconds."""
        both = self._passes[index]
        labels, starts = _stretches(both.calls)
        names = self._names(labels)

        def stretch_at(at: float) -> int:
            return max(0, bisect_right(starts, at) - 1)

        owners = self._owners(both, stretch_at)
        node_starts = [node.start for node in both.nodes]
        forward, backward = [0.0] * len(names), [0.0] * len(names)
        spent: list[tuple[float, float]] = []
        for work, seconds in self._worked(both):
            if work.launched < both.turn:
                forward[stretch_at(work.launched)] += seconds
            else:
                backward[owners[bisect_right(node_starts, work.launched) - 1]] += seconds
                spent.append((work.launched, seconds))
        if not sum(forward) or not sum(backward):
            raise self._trace.error("the model's operations took no time on the device")
        spent.sort()
        launches = [at for at, _ in spent]
        sums = [0.0, *accumulate(seconds for _, seconds in spent)]
        gradients = [node for node in both.nodes if node.name == _NODE + _GRADIENT]
        return Step(
            modules=names,
            forward_s=forward,
            backward_s=backward,
            ready=[
                (name, sums[bisect_right(launches, node.end)])
                for name, node in zip(self._gradients(gradients), gradients, strict=True)
            ],
        )

    def _names(self, labels: list[str]) -> list[str]:
        """Returns the names of the stretches; raises `UserError` if the trace has other modules."""
        expected = self._structure.modules
        if not self._trace.calls:
            owners = {name.rpartition(".")[0] for name in self._structure.ready}
            missing = sorted(owners - {*labels})
            if missing:
                raise self._trace.error(
                    f"has no range {missing[0]}, a module of {self._model} with parameters "
                    f"({len(missing)} modules lack a range)"
                )
            return labels
        kinds = [type(self._named[name]).__name__ for name in expected]
        kinds[0] = kinds[-1] = _OUTSIDE
        for index, name in enumerate(expected):
            if labels[index : index + 1] != kinds[index : index + 1]:
                seen = labels[index] if index < len(labels) else "nothing"
                raise self._trace.error(
                    f"is not of model {self._model}: stretch {index} of its forward pass is "
                    f"in {seen or 'no module'}, where {self._model} has "
                    f"{kinds[index] or 'no module'} ({name or 'its root'})"
                )
        return expected

    def _owners(self, both: _Pass, stretch_at: Callable[[float], int]) -> list[int]:
        """Returns the stretch of each node; nodes without a number belong to the previous one."""
        created: dict[int, float] = {}
        for op in self._operations(both):
            if op.sequence is not None:
                created[op.sequence] = op.start  # the last with this number creates the node
        numbers = sorted(created)
        owners, owner = [], stretch_at(both.turn)
        for node in both.nodes:
            if node.sequence is not None:
                position = bisect_right(numbers, node.sequence) - 1
                if position < 0:
                    raise self._trace.error(
                        f"a backward pass of {self._model} has {node.name}, which no "
                        "operation of the forward pass before it created; several forward passes "
                        "for one backward pass are not supported"
                    )
                owner = stretch_at(created[numbers[position]])
            owners.append(owner)
        return owners

    def _worked(self, both: _Pass) -> list[tuple[Work, float]]:
        """Returns the work of a pass in seconds; what overlaps earlier work counts once."""
        threads = {both.calls[0].thread, *(node.thread for node in both.nodes)}
        until, worked = 0.0, []
        for work in self._trace.work:
            if both.begin <= work.launched < both.nodes[-1].end and work.thread in threads:
                worked.append((work, max(0.0, work.end - max(work.start, until)) / 1e6))
                until = max(until, work.end)
        return worked

    def _gradients(self, nodes: Sequence[Event]) -> list[str]:
        """Returns the parameter of each node that accumulates a gradient.

        It is the next one in the model's order that has the gradient's shape.
        """
        params = dict(self._structure.model.named_parameters())
        left = list(self._structure.ready)
        names = []
        for node in nodes:
            shape = tuple(self._shapes[node.start].args["Input Dims"][0])
            name = next((name for name in left if tuple(params[name].shape) == shape), None)
            if name is None:
                expected = f"{tuple(params[left[0]].shape)} ({left[0]})" if left else "no more"
                raise self._trace.error(
                    f"is not of model {self._model}: gradient {len(names)} has the shape "
                    f"{shape}, where {self._model} has {expected}"
                )
            left.remove(name)
            names.append(name)
        if left:
            raise self._trace.error(
                f"a backward pass has {len(names)} gradients, where {self._model} has "
                f"{len(names) + len(left)}; the first without is {left[0]}"
            )
        return names


def _start(event: Event) -> float:
    return event.start


def _class_of(call: Event) -> str:
    """Returns `Linear` for a call named `nn.Module: Linear_0`."""
    return call.name.removeprefix(MODULE).rpartition("_")[0]


def _inside(event: Event | Work, around: Event) -> bool:
    at = event.launched if isinstance(event, Work) else event.start
    return event.thread == around.thread and around.start <= at < around.end


def _shapes(trace: Trace, nodes: Sequence[Event]) -> dict[float, Event]:
    """Returns, by the start of a gradient's node, the operation that has the gradient's shapes."""
    gradients = [node for node in nodes if node.name == _NODE + _GRADIENT]
    applied = [op for op in trace.operations if op.name == _GRADIENT]
    if not all(op.args.get("Input Dims") for op in applied):
        raise trace.error(f"has no shapes; {RECORD}")
    starts = [op.start for op in applied]
    return {node.start: applied[bisect_left(starts, node.start)] for node in gradients}


def _stretches(calls: Sequence[Event]) -> tuple[list[str], list[float]]:
    """Returns the innermost module of each stretch, by class or name, and its start."""
    labels, starts = [_OUTSIDE], [calls[0].start]
    running: list[tuple[str, float]] = []

    def leave() -> None:
        _, end = running.pop()
        labels.append(running[-1][0] if running else _OUTSIDE)
        starts.append(end)

    for call in calls:
        while running and running[-1][1] <= call.start:
            leave()
        running.append((_class_of(call) if call.name.startswith(MODULE) else call.name, call.end))
        labels.append(running[-1][0])
        starts.append(call.start)
    while running:
        leave()
    return labels, starts
