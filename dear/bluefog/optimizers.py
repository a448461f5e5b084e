"""BlueFog's optimizer factories: any torch optimizer, trained over the job's topology.

What may change from step to step is an attribute of the returned optimizer, as in BlueFog:
`self_weight`, `src_weights`, `dst_weights` (ranks), `src_machine_weights`, `dst_machine_weights`,
`enable_topo_check`; for those with windows also `force_barrier`. None leaves it to the topology.
`neighbor_weights` and `send_neighbors` are older names of `src_weights` and `dst_weights`. A step
after `optimizer.synchronize()` waits for nothing, with or without `optimizer.skip_synchronize()`.
"""

# ruff: noqa: N802 - the names that BlueFog's users know

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from dear.algorithms.asynchronous.pull_get import PullGetEngine
from dear.algorithms.asynchronous.push_sum import PushSumEngine
from dear.algorithms.asynchronous.win_put import WinPutEngine
from dear.algorithms.decentralized.neighbor import Neighbor
from dear.algorithms.synchronous.wfbp import AveragingEngine, Wfbp
from dear.bluefog.collectives import (
    Targets,
    check_neighbors,
    check_weights,
    chosen_part,
    either,
    factors,
)
from dear.bluefog.job import called, job
from dear.bluefog.windows import Named
from dear.comm.neighbors import Exchange, Pending, Round
from dear.errors import UserError
from dear.lazy import torch
from dear.options import at_least
from dear.training.engine import Replica, distribute
from dear.training.hooks import Hooks, at_end_of_backward
from dear.training.one_sided import WindowEngine, WindowOptions
from dear.training.parameters import STREAMS, Order, ParameterEngine, Rounds


class CommunicationType(enum.Enum):
    """What happens to parameters between steps."""

    neighbor_allreduce = "neighbor.allreduce"
    hierarchical_neighbor_allreduce = "hierarchical.neighbor.allreduce"
    allreduce = "allreduce"
    empty = "empty"


def _averaging(kind: CommunicationType, knobs: Any) -> tuple[Any, Rounds]:
    """What starts rounds, and this rank's part: as the optimizer's attributes say at the time."""
    alone = Round(self_weight=1.0)
    stays = {"close": lambda: None}  # of the job, not of one optimizer
    if kind is CommunicationType.empty:
        return SimpleNamespace(start=lambda values, part: Pending(), **stays), lambda turn: alone
    if kind is CommunicationType.allreduce:
        return SimpleNamespace(start=_start_mean, **stays), lambda turn: alone
    if kind is CommunicationType.hierarchical_neighbor_allreduce:
        own = job()
        return SimpleNamespace(start=own.machines.start, **stays), lambda turn: chosen_part(
            own.machine_part,
            knobs.self_weight,
            knobs.src_machine_weights,
            knobs.dst_machine_weights,
            "optimizer",
        )
    if kind is not CommunicationType.neighbor_allreduce:
        raise UserError(f"communication_type must be a bf.CommunicationType, got {kind!r}")
    exchange = Exchange(job().communicator, STREAMS)
    checked = -1

    def part(turn: int) -> Round:
        nonlocal checked
        sources = either(
            knobs.src_weights, knobs.neighbor_weights, "src_weights", "neighbor_weights"
        )
        targets = either(knobs.dst_weights, knobs.send_neighbors, "dst_weights", "send_neighbors")
        chosen = chosen_part(job().part, knobs.self_weight, sources, targets, "optimizer")
        if targets is not None and knobs.enable_topo_check and checked != turn:
            checked = turn
            check_neighbors(exchange, chosen)
        return chosen

    return exchange, part


def _start_mean(values: torch.Tensor, part: Round) -> Pending:
    """Starts the mean over all ranks."""
    mixed = values.clone()
    work = job().communicator.all_reduce(mixed, op="mean")
    return Pending(work.wait, work.done, lambda target: target.copy_(mixed))


def _combined(order: Order, words: str, doc: str) -> Callable[..., torch.optim.Optimizer]:
    """The factory of optimizers that average and update in this order."""

    def make(
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        communication_type: CommunicationType = CommunicationType.neighbor_allreduce,
        num_steps_per_communication: int = 1,
    ) -> torch.optim.Optimizer:
        every = num_steps_per_communication
        at_least("num_steps_per_communication", every, 1)
        replica = Replica(model, optimizer, job().communicator, Neighbor.Options(every=every))
        optimizer.self_weight = optimizer.src_weights = optimizer.dst_weights = None
        optimizer.neighbor_weights = optimizer.send_neighbors = None
        optimizer.skip_synchronize = contextlib.nullcontext
        optimizer.src_machine_weights = optimizer.dst_machine_weights = None
        optimizer.enable_topo_check = True
        exchange, rounds = _averaging(communication_type, optimizer)
        return distribute(optimizer, ParameterEngine(replica, rounds, exchange, order))

    return called(f"Distributed{words}Optimizer", doc, make)


DistributedAdaptWithCombineOptimizer = _combined(
    "combine-then-adapt",
    "AdaptWithCombine",
    "AWC: `w <- average(w) - update(gradient at w)`; the exchange runs during both passes.",
)
DistributedAdaptThenCombineOptimizer = _combined(
    "adapt-then-combine",
    "AdaptThenCombine",
    "ATC: `w <- average(w - update(gradient at w))`; the next forward pass awaits it by layers.",
)


def _older_name(kind: CommunicationType) -> Callable[..., torch.optim.Optimizer]:
    """AWC of one kind, which BlueFog's older names say."""

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
    at_least("num_steps_per_communication", num_steps_per_communication, 1)
    replica = Replica(model, optimizer, job().communicator, Wfbp.Options())
    return distribute(optimizer, AccumulatingEngine(num_steps_per_communication, replica))


class AccumulatingEngine(AveragingEngine):
    """Averages in every so many backward passes since `zero_grad()`, the sum of all of them."""

    def __init__(self, every: int, replica: Replica) -> None:
        self._every = every
        self._passes = 0
        self._pausing = contextlib.ExitStack()
        self._in_pass = False
        # Before the hooks of the averaging, which must find the pass paused.
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


class _Knobs(WindowEngine):
    """A window engine whose weights are the optimizer's attributes."""

    knobs: tuple[str, ...] = ("self_weight", "src_weights")

    def mix_weights(self) -> tuple[float, dict[int, float]]:
        own, sources = self.optimizer.self_weight, self.optimizer.src_weights
        check_weights(own, sources, None, "optimizer")
        return super().mix_weights() if sources is None else (float(own), dict(sources))

    def waits(self) -> bool:
        return bool(self.optimizer.force_barrier)

    def release(self) -> None:
        mine = set(self.windows.values())
        for name in [name for name, each in job().windows.items() if each.window in mine]:
            job().windows.pop(name).free()  # those that are not there bf.win_free() has freed
        super().release()


class _WinPut(_Knobs, WinPutEngine):
    """AWC through windows, waiting for nobody: the algorithm `win-put`.

    Attributes that may change: `self_weight` and `src_weights`, `dst_weights`, and `force_barrier`
    (wait for all ranks in each exchange).

    Args:
        window_prefix: of the names of its windows, which keep the topology as it is until
            `optimizer.close()`.
    """

    knobs = ("self_weight", "src_weights", "dst_weights")

    def put_weights(self) -> dict[int, float]:
        chosen: Targets | None = self.optimizer.dst_weights
        return super().put_weights() if chosen is None else factors(chosen)


class _PullGet(_Knobs, PullGetEngine):
    """Reads what neighbours show: the algorithm `pull-get`.

    Attributes that may change: `self_weight` and `src_weights`, and `force_barrier`.
    """


class _PushSum(_Knobs, PushSumEngine):
    """Stochastic gradient push: the algorithm `push-sum`. Attribute: `force_barrier`."""

    knobs = ()


def _windowed(kind: type[_Knobs]) -> Callable[..., torch.optim.Optimizer]:
    """The factory of optimizers with such an engine, whose docstring is the factory's."""
    stem = kind.__name__.strip("_")

    def make(
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        num_steps_per_communication: int = 1,
        window_prefix: str | None = None,
    ) -> torch.optim.Optimizer:
        every, prefix = num_steps_per_communication, window_prefix or stem
        at_least("num_steps_per_communication", every, 1)
        current = job()
        replica = Replica(model, optimizer, current.communicator, WindowOptions(every=every))
        for knob in kind.knobs:
            setattr(optimizer, knob, None)
        optimizer.force_barrier = False
        if prefix in {name.rpartition(".")[0] for name in current.windows}:
            raise UserError(f"there are windows {prefix}.* already; give another window_prefix")
        engine = kind(replica, current.weights)
        for index, (bucket, window) in enumerate(engine.windows.items()):
            current.windows[f"{prefix}.{index}"] = Named(window, bucket.values)
        return distribute(optimizer, engine)

    return called(f"Distributed{stem}Optimizer", kind.__doc__, make)


DistributedWinPutOptimizer = _windowed(_WinPut)
DistributedPullGetOptimizer = _windowed(_PullGet)
DistributedPushSumOptimizer = _windowed(_PushSum)
