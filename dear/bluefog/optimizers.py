"""BlueFog's optimizer factories: they make any torch optimizer train over the job's topology.

Settings that may change from step to step are attributes of the returned optimizer, as in BlueFog:
`self_weight`, `src_weights`, `dst_weights` (ranks), `src_machine_weights`, `dst_machine_weights`,
`enable_topo_check`; with windows also `force_barrier`. None means the topology's value.
`neighbor_weights` and `send_neighbors` are older names of `src_weights` and `dst_weights`,
`neighbor_machine_weights` and `send_neighbor_machines` of `src_machine_weights` and
`dst_machine_weights`. After `optimizer.synchronize()` a step waits for nothing, with or without
`optimizer.skip_synchronize()`. `optimizer.turn_off_timeline()` and `turn_on_timeline()` switch the
spans of its parameters, which are on at first where there is a timeline.
"""

# ruff: noqa: N802 - BlueFog's names

from __future__ import annotations

import contextlib
import enum
import os
import time
from collections.abc import Callable, Collection
from typing import Any

from dear.algorithms.asynchronous.pull_get import PullGet
from dear.algorithms.asynchronous.push_sum import PushSum
from dear.algorithms.asynchronous.win_put import WinPut
from dear.algorithms.decentralized.neighbor import Neighbor
from dear.algorithms.synchronous.wfbp import AveragingEngine, Wfbp
from dear.bluefog import variables
from dear.bluefog.collectives import (
    Targets,
    check_neighbors,
    check_weights,
    chosen_part,
    either,
    factors,
)
from dear.bluefog.job import called, job
from dear.bluefog.variables import TIMELINE
from dear.bluefog.windows import Named
from dear.comm.neighbors import Exchange, Pending, Round
from dear.comm.windows import NeighborWindow
from dear.errors import UserError
from dear.lazy import torch
from dear.options import at_least, whole
from dear.training.engine import AnyEngine, Distributed, Replica, distribute
from dear.training.hooks import Hooks, at_end_of_backward
from dear.training.parameters.exchange import STREAMS, GraphExchange, Rounds, always
from dear.training.parameters.stepped import AdaptThenCombine, CombineThenAdapt
from dear.training.parameters.windows import Policy, WindowAlgorithm, WindowOptions


class CommunicationType(enum.Enum):
    """Ways to average parameters between steps."""

    neighbor_allreduce = "neighbor.allreduce"
    hierarchical_neighbor_allreduce = "hierarchical.neighbor.allreduce"
    allreduce = "allreduce"
    empty = "empty"


class _OfTheJob:
    """Sender of rounds that belongs to the job, so that closing an optimizer keeps it open."""

    def __init__(self, start: Callable[[torch.Tensor, Round], Pending]) -> None:
        self.start = start

    def close(self) -> None:
        return


def _with_timeline(optimizer: torch.optim.Optimizer, engine: AnyEngine) -> Distributed:
    """Makes the optimizer distributed, with methods that switch the spans of its parameters."""
    spans, knobs = _Spans(engine), distribute(optimizer, engine)
    vars(knobs).update(turn_on_timeline=spans.turn_on, turn_off_timeline=spans.turn_off)
    vars(knobs).update(skip_synchronize=contextlib.nullcontext)
    spans.turn_on()
    return knobs


class _Spans:
    """Spans `FORWARD` and `GRADIENT COMPT.` of an optimizer's parameters in the job's timeline.

    The first is the forward pass of the module that has the parameter. The second lasts from the
    end of the model's forward pass until the gradient is complete.
    """

    def __init__(self, engine: AnyEngine) -> None:
        self._engine = engine
        self._on = self._watches = False
        self._began: dict[torch.nn.Module, float] = {}
        self._ended = 0.0

    def turn_on(self) -> bool:
        """Returns False without a timeline."""
        self._on = TIMELINE in os.environ
        if self._on and not self._watches:
            self._watches, model, hooks = True, self._engine.model, self._engine.hooks
            self._names = {param: name for name, param in model.named_parameters()}
            for module in model.modules():
                hooks.before_forward([module], self._forward_begins)
                hooks.after_forward(module, self._forward_ends)
            hooks.on_gradient(self._engine.params, self._gradient_ends)
        return self._on

    def turn_off(self) -> None:
        self._on = False

    def _forward_begins(self, module: torch.nn.Module) -> None:
        self._began[module] = time.monotonic()

    def _forward_ends(self, module: torch.nn.Module) -> None:
        self._ended = time.monotonic()
        for param in module.parameters(recurse=False):
            self._add(param, "FORWARD", self._began[module])

    def _gradient_ends(self, param: torch.nn.Parameter) -> None:
        self._add(param, "GRADIENT COMPT.", self._ended)

    def _add(self, param: torch.nn.Parameter, activity: str, began: float) -> None:
        if self._on and param in self._names:
            job().timeline.add(self._names[param], activity, began, time.monotonic())


def _start_mean(values: torch.Tensor, part: Round) -> Pending:
    mixed = values.clone()
    work = job().communicator.all_reduce(mixed, op="mean")
    return Pending(work.wait, work.done, lambda target: target.copy_(mixed))


def _averaging(kind: CommunicationType, knobs: Any) -> GraphExchange:
    """Returns the exchange of `kind`; it follows the current attributes of the optimizer."""
    alone = always(Round(self_weight=1.0))
    if kind is CommunicationType.empty:
        return GraphExchange(alone, _OfTheJob(lambda values, part: Pending()))
    if kind is CommunicationType.allreduce:
        return GraphExchange(alone, _OfTheJob(_start_mean))
    if kind is CommunicationType.hierarchical_neighbor_allreduce:
        current = job()

        def part(steps: int) -> Round:
            names = ("src_machine_weights", "neighbor_machine_weights")
            sources = either(knobs.src_machine_weights, knobs.neighbor_machine_weights, *names)
            names = ("dst_machine_weights", "send_neighbor_machines")
            targets = either(knobs.dst_machine_weights, knobs.send_neighbor_machines, *names)
            weight = knobs.self_weight
            return chosen_part(current.machine_part, weight, sources, targets, "optimizer")

        return GraphExchange(part, _OfTheJob(current.machines.start))
    if kind is not CommunicationType.neighbor_allreduce:
        raise UserError(f"communication_type must be a bf.CommunicationType, got {kind!r}")
    messages = Exchange(job().communicator, STREAMS)
    return GraphExchange(_neighbor_rounds(messages, knobs), messages)


def _neighbor_rounds(messages: Exchange, knobs: Any) -> Rounds:
    checked = -1

    def part(steps: int) -> Round:
        nonlocal checked
        sources = either(
            knobs.src_weights, knobs.neighbor_weights, "src_weights", "neighbor_weights"
        )
        targets = either(knobs.dst_weights, knobs.send_neighbors, "dst_weights", "send_neighbors")
        chosen = chosen_part(job().part, knobs.self_weight, sources, targets, "optimizer")
        if targets is not None and knobs.enable_topo_check and checked != steps:
            checked = steps
            check_neighbors(messages, chosen)
        return chosen

    return part


def _combined(
    engine: type[CombineThenAdapt | AdaptThenCombine], words: str, doc: str
) -> Callable[..., torch.optim.Optimizer]:

    def make(
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        communication_type: CommunicationType = CommunicationType.neighbor_allreduce,
        num_steps_per_communication: int = 1,
    ) -> torch.optim.Optimizer:
        every = num_steps_per_communication
        whole("num_steps_per_communication", every)
        at_least("num_steps_per_communication", every, 1)
        options = Neighbor.Options(every=every, bucket_mb=variables.bucket_mb())
        replica = Replica(model, optimizer, job().communicator, options)
        knobs: Any = optimizer  # BlueFog's scripts set these attributes of the optimizer
        knobs.self_weight = knobs.src_weights = knobs.dst_weights = None
        knobs.neighbor_weights = knobs.send_neighbors = None
        knobs.src_machine_weights = knobs.dst_machine_weights = None
        knobs.neighbor_machine_weights = knobs.send_neighbor_machines = None
        knobs.enable_topo_check = True
        exchange = _averaging(communication_type, optimizer)
        return _with_timeline(optimizer, engine(replica, exchange, every=every))

    return called(f"Distributed{words}Optimizer", doc, make)


DistributedAdaptWithCombineOptimizer = _combined(
    CombineThenAdapt,
    "AdaptWithCombine",
    "AWC: `w <- average(w) - update(gradient at w)`; both passes hide the exchange.",
)
DistributedAdaptThenCombineOptimizer = _combined(
    AdaptThenCombine,
    "AdaptThenCombine",
    "ATC: `w <- average(w - update(gradient at w))`; each layer of the next forward pass waits.",
)


def _older_name(kind: CommunicationType) -> Callable[..., torch.optim.Optimizer]:
    """Returns the AWC factory with this kind of communication, under BlueFog's older name."""

    def make(
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        num_steps_per_communication: int = 1,
    ) -> torch.optim.Optimizer:
        return DistributedAdaptWithCombineOptimizer(
            optimizer, model, kind, num_steps_per_communication
        )

    words = kind.name.title().replace("_", "")
    return called(f"Distributed{words}Optimizer", f"AWC by `{kind}` (BlueFog's older name).", make)


DistributedAllreduceOptimizer = _older_name(CommunicationType.allreduce)
DistributedNeighborAllreduceOptimizer = _older_name(CommunicationType.neighbor_allreduce)
DistributedHierarchicalNeighborAllreduceOptimizer = _older_name(
    CommunicationType.hierarchical_neighbor_allreduce
)


def DistributedGradientAllreduceOptimizer(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, num_steps_per_communication: int = 1
) -> torch.optim.Optimizer:
    """Averages gradients over all ranks, during the backward pass: synchronous training.

    Args:
        num_steps_per_communication: backward passes per step; all but the last communicate nothing.
    """
    whole("num_steps_per_communication", num_steps_per_communication)
    at_least("num_steps_per_communication", num_steps_per_communication, 1)
    replica = Replica(model, optimizer, job().communicator, Wfbp.Options())
    return _with_timeline(optimizer, AccumulatingEngine(num_steps_per_communication, replica))


class AccumulatingEngine(AveragingEngine):
    """Engine that averages the sum of the gradients of `every` backward passes."""

    def __init__(self, every: int, replica: Replica[Wfbp.Options]) -> None:
        self._every = every
        self._passes = 0
        self._pausing = contextlib.ExitStack()
        self._in_pass = False
        # These hooks must run before the hooks of the averaging, so that these see a paused pass.
        self._first = Hooks()
        self._first.on_gradient(replica.params, self._arrived)
        super().__init__(replica, replica.params)

    def forget(self) -> None:
        self._end_pass()
        self._passes = 0
        super().forget()

    def close(self) -> None:
        super().close()
        self._first.remove()

    def _arrived(self, param: torch.nn.Parameter) -> None:
        if self._in_pass:
            return
        self._in_pass = True
        at_end_of_backward(self._end_pass)
        self._passes += 1
        if self._passes % self._every:
            self._pausing.enter_context(self.no_sync())

    def _end_pass(self) -> None:
        self._in_pass = False
        self._pausing.close()


class _KnobPolicy(Policy):
    """Policy that reads the optimizer's attributes."""

    def __init__(self, part: Round, optimizer: Any) -> None:
        super().__init__(part, waits=False)
        self._knobs = optimizer

    def waits(self) -> bool:
        return bool(self._knobs.force_barrier)

    def put_weights(self) -> dict[int, float]:
        chosen: Targets | None = self._knobs.dst_weights
        return super().put_weights() if chosen is None else factors(chosen)

    def mix_weights(self) -> tuple[float, dict[int, float]]:
        self_weight, sources = self._knobs.self_weight, self._knobs.src_weights
        check_weights(self_weight, sources, None, "optimizer")
        return super().mix_weights() if sources is None else (float(self_weight), dict(sources))


def _free_named(windows: Collection[NeighborWindow]) -> None:
    """Frees windows that still have a name; `bf.win_free()` may have freed the others."""
    named = [name for name, each in job().windows.items() if each.window in windows]
    for name in named:
        job().windows.pop(name).free()


def _windowed(
    algorithm: type[WindowAlgorithm[Any]], knobs: tuple[str, ...], doc: str
) -> Callable[..., torch.optim.Optimizer]:
    """Returns the factory of optimizers that train by `algorithm` and have attributes `knobs`."""
    stem = algorithm.__name__

    def make(
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        num_steps_per_communication: int = 1,
        window_prefix: str | None = None,
    ) -> torch.optim.Optimizer:
        every, prefix = num_steps_per_communication, window_prefix or stem
        whole("num_steps_per_communication", every)
        at_least("num_steps_per_communication", every, 1)
        current = job()
        options = WindowOptions(every=every, bucket_mb=variables.bucket_mb())
        replica = Replica(model, optimizer, current.communicator, options)
        for knob, value in {**dict.fromkeys(knobs), "force_barrier": False}.items():
            setattr(optimizer, knob, value)
        if prefix in {name.rpartition(".")[0] for name in current.windows}:
            raise UserError(f"windows {prefix}.* exist already; give another window_prefix")
        policy = _KnobPolicy(current.part(), optimizer)
        limit_s = options.finish_timeout_s
        exchange = algorithm.exchange(current.weights, policy, limit_s, _free_named)
        engine = algorithm.order(replica, exchange, every=every)
        for index, (bucket, window) in enumerate(exchange.windows.items()):
            current.windows[f"{prefix}.{index}"] = Named(window, bucket.values)
        return _with_timeline(optimizer, engine)

    return called(f"Distributed{stem}Optimizer", doc, make)


DistributedWinPutOptimizer = _windowed(
    WinPut,
    ("self_weight", "src_weights", "dst_weights"),
    """AWC through windows; no rank waits for another (the algorithm `win-put`).

    Attributes that may change: `self_weight` with `src_weights`, `dst_weights`, and `force_barrier`
    (wait for all ranks in each exchange).

    Args:
        window_prefix: prefix of the windows' names. The windows exist until `optimizer.close()`;
            until then the topology cannot change.
    """,
)
DistributedPullGetOptimizer = _windowed(
    PullGet,
    ("self_weight", "src_weights"),
    """Averages with parameters that it reads from the neighbours: the algorithm `pull-get`.

    Attributes that may change: `self_weight` with `src_weights`, and `force_barrier`.
    """,
)
DistributedPushSumOptimizer = _windowed(
    PushSum,
    (),
    """Stochastic gradient push: the algorithm `push-sum`. Attribute: `force_barrier`.""",
)
