"""BlueFog's optimizer factories: any torch optimizer, trained over the job's topology.

What may change from step to step is an attribute of the returned optimizer, as in BlueFog:
`self_weight`, `src_weights`, `dst_weights` (ranks), `src_machine_weights`, `dst_machine_weights`,
`enable_topo_check`. None leaves it to the topology.
"""

# ruff: noqa: N802 - the names that BlueFog's users know

from __future__ import annotations

import contextlib
import enum
from typing import TYPE_CHECKING, Any

import torch

from dear.algorithms.synchronous.wfbp import AveragingEngine, Wfbp
from dear.bluefog.collectives import Targets, check_neighbors, check_weights, chosen_part, factors
from dear.bluefog.job import job
from dear.bluefog.windows import register
from dear.comm.mixers import STREAMS, MeanMixer, Mixer, NoMixer
from dear.comm.neighbors import Exchange, Pending
from dear.errors import UserError
from dear.options import at_least
from dear.topology.graphs import uniform
from dear.training.combining import AtcEngine, AwcEngine
from dear.training.engine import distribute, trained_parameters
from dear.training.graph_options import BUCKET_MB
from dear.training.hooks import Hooks, at_end_of_backward
from dear.training.one_sided import PullGetEngine, PushSumEngine, WindowEngine, WinPutEngine

if TYPE_CHECKING:
    from torch.nn import Module, Parameter
    from torch.optim import Optimizer


class CommunicationType(enum.Enum):
    """What happens to parameters between steps."""

    neighbor_allreduce = "neighbor.allreduce"
    hierarchical_neighbor_allreduce = "hierarchical.neighbor.allreduce"
    allreduce = "allreduce"
    empty = "empty"


_KNOBS = (
    "self_weight",
    "src_weights",
    "dst_weights",
    "src_machine_weights",
    "dst_machine_weights",
)


class KnobMixer(Mixer):
    """Averages over the job's topology, or as the optimizer's attributes say at the time."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._exchange = Exchange(job().communicator, STREAMS)
        self._checked = -1

    def start(self, values: torch.Tensor, step: int) -> Pending:
        knobs = self._optimizer
        part = chosen_part(
            job().part, knobs.self_weight, knobs.src_weights, knobs.dst_weights, "optimizer"
        )
        if knobs.dst_weights is not None and knobs.enable_topo_check and self._checked != step:
            self._checked = step
            check_neighbors(self._exchange, part)
        return self._exchange.start(values, part)

    def close(self) -> None:
        self._exchange.close()


class MachineKnobMixer(Mixer):
    """The same for machines; the job's own machines, which stay."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._machines = job().machines

    def start(self, values: torch.Tensor, step: int) -> Pending:
        knobs = self._optimizer
        part = chosen_part(
            job().machine_part,
            knobs.self_weight,
            knobs.src_machine_weights,
            knobs.dst_machine_weights,
            "optimizer",
        )
        return self._machines.start(values, part)


def _mixer(kind: CommunicationType, optimizer: Optimizer) -> Mixer:
    if kind is CommunicationType.neighbor_allreduce:
        return KnobMixer(optimizer)
    if kind is CommunicationType.hierarchical_neighbor_allreduce:
        return MachineKnobMixer(optimizer)
    if kind is CommunicationType.allreduce:
        return MeanMixer(job().communicator)
    if kind is CommunicationType.empty:
        return NoMixer()
    raise UserError(f"communication_type must be a bf.CommunicationType, got {kind!r}")


def _every(steps: int) -> int:
    at_least("num_steps_per_communication", steps, 1)
    return steps


def _give_knobs(optimizer: Any) -> None:
    for knob in _KNOBS:
        setattr(optimizer, knob, None)
    optimizer.enable_topo_check = True


def DistributedAdaptWithCombineOptimizer(
    optimizer: Optimizer,
    model: Module,
    communication_type: CommunicationType = CommunicationType.neighbor_allreduce,
    num_steps_per_communication: int = 1,
) -> Optimizer:
    """AWC: `w <- average(w) - update(gradient at w)`; the exchange runs during both passes."""
    return _combined(
        AwcEngine, optimizer, model, communication_type, _every(num_steps_per_communication)
    )


def DistributedAdaptThenCombineOptimizer(
    optimizer: Optimizer,
    model: Module,
    communication_type: CommunicationType = CommunicationType.neighbor_allreduce,
    num_steps_per_communication: int = 1,
) -> Optimizer:
    """ATC: `w <- average(w - update(gradient at w))`; the next forward pass awaits it by layers."""
    return _combined(
        AtcEngine, optimizer, model, communication_type, _every(num_steps_per_communication)
    )


def _combined(
    engine: type[AwcEngine] | type[AtcEngine],
    optimizer: Optimizer,
    model: Module,
    kind: CommunicationType,
    every: int,
) -> Optimizer:
    trained_parameters(model, optimizer)
    _give_knobs(optimizer)
    made = engine(
        model,
        optimizer,
        job().communicator,
        _mixer(kind, optimizer),
        bucket_mb=BUCKET_MB,
        every=every,
    )
    return distribute(optimizer, made)


def DistributedAllreduceOptimizer(
    optimizer: Optimizer, model: Module, num_steps_per_communication: int = 1
) -> Optimizer:
    """AWC with the mean over all ranks (BlueFog's older name)."""
    return DistributedAdaptWithCombineOptimizer(
        optimizer, model, CommunicationType.allreduce, num_steps_per_communication
    )


def DistributedNeighborAllreduceOptimizer(
    optimizer: Optimizer, model: Module, num_steps_per_communication: int = 1
) -> Optimizer:
    """AWC over the topology (BlueFog's older name)."""
    return DistributedAdaptWithCombineOptimizer(
        optimizer, model, CommunicationType.neighbor_allreduce, num_steps_per_communication
    )


def DistributedHierarchicalNeighborAllreduceOptimizer(
    optimizer: Optimizer, model: Module, num_steps_per_communication: int = 1
) -> Optimizer:
    """AWC over the machine topology (BlueFog's older name)."""
    return DistributedAdaptWithCombineOptimizer(
        optimizer,
        model,
        CommunicationType.hierarchical_neighbor_allreduce,
        num_steps_per_communication,
    )


def DistributedGradientAllreduceOptimizer(
    optimizer: Optimizer, model: Module, num_steps_per_communication: int = 1
) -> Optimizer:
    """Averages gradients over all ranks, during the backward pass: synchronous training.

    Args:
        num_steps_per_communication: backward passes per step; all but the last communicate nothing.
    """
    every = _every(num_steps_per_communication)
    params = trained_parameters(model, optimizer)
    return distribute(optimizer, AccumulatingEngine(every, model, params))


class AccumulatingEngine(AveragingEngine):
    """Averages in every so many backward passes since `zero_grad()`, the sum of all of them."""

    def __init__(self, every: int, model: Module, params: list[Parameter]) -> None:
        self._every = every
        self._passes = 0
        self._pausing = contextlib.ExitStack()
        self._in_pass = False
        # Before the hooks of the averaging, which must find the pass paused.
        self._first = Hooks()
        self._first.on_gradient(params, self._arrived)
        super().__init__(model, job().communicator, params, Wfbp.Options(), overlap=True)

    def forget(self) -> None:
        self._end_pass()
        self._passes = 0
        super().forget()

    def close(self) -> None:
        super().close()
        self._first.remove()

    def _arrived(self, param: Parameter) -> None:
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


class _Knobs(WindowEngine):
    """A window engine whose weights are the optimizer's attributes."""

    names: list[str]
    """Of its windows, among those of `dear.bluefog.windows`."""
    knobs: tuple[str, ...] = ("self_weight", "src_weights")

    def mix_weights(self) -> tuple[float, dict[int, float]]:
        own, sources = self.optimizer.self_weight, self.optimizer.src_weights
        check_weights(own, sources, None, "optimizer")
        return super().mix_weights() if sources is None else (float(own), dict(sources))

    def waits(self) -> bool:
        return bool(self.optimizer.force_barrier)

    def release(self) -> None:
        for name in self.names:
            if name in job().windows:  # otherwise bf.win_free() has freed it
                job().windows.pop(name).free()


class _WinPut(_Knobs, WinPutEngine):
    """Of `DistributedWinPutOptimizer`."""

    knobs = ("self_weight", "src_weights", "dst_weights")

    def put_weights(self) -> dict[int, float]:
        chosen: Targets | None = self.optimizer.dst_weights
        return super().put_weights() if chosen is None else factors(chosen)


class _PullGet(_Knobs, PullGetEngine):
    """Of `DistributedPullGetOptimizer`."""


class _PushSum(_Knobs, PushSumEngine):
    """Of `DistributedPushSumOptimizer`."""

    knobs = ()


def DistributedWinPutOptimizer(
    optimizer: Optimizer,
    model: Module,
    num_steps_per_communication: int = 1,
    window_prefix: str | None = None,
) -> Optimizer:
    """AWC through windows, waiting for nobody: the algorithm `win-put`.

    Attributes that may change: `self_weight` and `src_weights`, `dst_weights`, and `force_barrier`
    (wait for all ranks in each exchange).

    Args:
        window_prefix: of the names of its windows, which keep the topology as it is until
            `optimizer.close()`.
    """
    return _windowed(_WinPut, optimizer, model, num_steps_per_communication, window_prefix)


def DistributedPullGetOptimizer(
    optimizer: Optimizer,
    model: Module,
    num_steps_per_communication: int = 1,
    window_prefix: str | None = None,
) -> Optimizer:
    """Reads what neighbours show: the algorithm `pull-get`.

    Attributes that may change: `self_weight` and `src_weights`, and `force_barrier`.
    """
    return _windowed(_PullGet, optimizer, model, num_steps_per_communication, window_prefix)


def DistributedPushSumOptimizer(
    optimizer: Optimizer,
    model: Module,
    num_steps_per_communication: int = 1,
    window_prefix: str | None = None,
) -> Optimizer:
    """Stochastic gradient push: the algorithm `push-sum`. Attribute: `force_barrier`."""
    return _windowed(_PushSum, optimizer, model, num_steps_per_communication, window_prefix)


def _windowed(
    kind: type[_Knobs], optimizer: Any, model: Module, steps: int, prefix: str | None
) -> Optimizer:
    trained_parameters(model, optimizer)
    current = job()
    for knob in kind.knobs:
        setattr(optimizer, knob, None)
    optimizer.force_barrier = False
    graph = current.topology if current.weighted else uniform(current.topology)
    stem = prefix or kind.__name__.strip("_")
    taken = {name.rpartition(".")[0] for name in current.windows}
    if stem in taken:
        raise UserError(f"there are windows {stem}.* already; give another window_prefix")
    engine: Any = kind(
        model, optimizer, current.communicator, graph, bucket_mb=BUCKET_MB, every=_every(steps)
    )
    engine.names = []
    for index, (window, flat) in enumerate(zip(engine.windows, engine.flats, strict=True)):
        name = f"{stem}.{index}"
        register(name, window, flat.values)
        engine.names.append(name)
    return distribute(optimizer, engine)
