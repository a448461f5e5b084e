"""Merged gradients, sent during the backward pass after a plan made from measured times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from dear.algorithms.synchronous._exchanges import Exchange, ReducedExchange, make_exchange
from dear.buckets.compression import HalfOptions, refuse_types
from dear.buckets.grouping import MIB, fuse
from dear.buckets.merging import Plan
from dear.training.alone import AloneEngine
from dear.training.backward import BackwardSchedule
from dear.training.backward_times import BackwardProfile, LayerTimes
from dear.training.engine import Engine, distribute, trained_parameters

if TYPE_CHECKING:
    from torch.nn import Module, Parameter
    from torch.optim import Optimizer

    from dear.comm.communicator import Communicator

    Planner = Callable[[list[Parameter], BackwardProfile], Plan]

PROFILING_MB = 25


class MergedEngine(Engine):
    """Averages groups of gradients as they arrive; the groups are found while the first steps run.

    In the first `profile_steps` steps everything is sent when the backward pass has ended, so that
    nothing disturbs the times at which gradients arrive. Then `plan` is called on every rank,
    rank 0's result holds everywhere, and the groups stay.

    Args:
        plan: groups of places in the profile's order. It may call collectives, so every rank calls
            it; only rank 0's profile and result count.
        options: a `CompressedOptions`, which hold once the plan is there, with `profile_steps`.
    """

    def __init__(
        self,
        model: Module,
        communicator: Communicator,
        params: Sequence[Parameter],
        *,
        plan: Planner,
        options: Any,
    ) -> None:
        super().__init__(model, communicator)
        self._params = list(params)
        self._plan = plan
        self._options = options
        self._steps_left = options.profile_steps
        self._times: LayerTimes | None = LayerTimes(model, params, communicator)
        first = fuse([self._params], PROFILING_MB * MIB)
        self._exchanges: list[Exchange] = [
            ReducedExchange(group, communicator, HalfOptions()) for group in first
        ]
        self._started: list[Exchange] = []
        self._schedule = BackwardSchedule(
            self.hooks,
            [self._params],
            communicator,
            launch=self._launch,
            finish=self._finish,
            learn=False,
        )

    def _launch(self, unit: int) -> None:
        # Before there is a plan, the only unit is the whole model.
        chosen = self._exchanges if self._times is not None else [self._exchanges[unit]]
        for exchange in chosen:
            exchange.start()
            self._started.append(exchange)

    def _finish(self) -> None:
        for exchange in self._started:
            exchange.finish()
        self._started.clear()

    def step(self, update: Callable[[], Any]) -> Any:
        self._schedule.run_if_missing()
        self._schedule.restart()
        result = update()
        self._count_step()
        return result

    def step_closure(self, update: Callable[[Callable[[], Any]], Any], closure: Any) -> Any:
        self._schedule.restart()
        result = update(closure)
        self._count_step()
        return result

    def synchronize(self) -> None:
        """Averages what was accumulated under `no_sync`; the rest `backward()` has averaged."""
        if self._schedule.unsent:
            self._schedule.run_if_missing()

    def forget(self) -> None:
        while self._started:
            self._started.pop().drop()
        self._schedule.forget()

    def no_sync(self) -> AbstractContextManager[None]:
        return self._schedule.paused()

    def close(self) -> None:
        super().close()
        if self._times is not None:
            self._times.stop()

    def planned_groups(self) -> list[list[Parameter]] | None:
        """The planned groups in the order in which they are sent; None before there is a plan."""
        if self._times is not None:
            return None
        return [exchange.buffer.params for exchange in self._exchanges]

    def _count_step(self) -> None:
        if self._times is None:
            return
        self._steps_left -= 1
        if self._steps_left > 0:
            return
        profile = self._times.stop() or _unknown(len(self._params))
        self._times = None
        order, groups = self.communicator.broadcast_object(
            (profile.order, self._plan([self._params[i] for i in profile.order], profile))
        )
        params = [self._params[i] for i in order]
        for param in params:  # they are views of the buffers that go now
            param.grad = None if param.grad is None else param.grad.clone()
        self._exchanges.clear()
        self._exchanges = [
            make_exchange([params[i] for i in group], self.communicator, self._options)
            for group in groups
        ]
        units = [exchange.buffer.params for exchange in self._exchanges]
        self._schedule.regroup(units, range(len(units)))


def merge_gradients(
    model: Module, optimizer: Optimizer, communicator: Communicator, options: Any, plan: Planner
) -> Optimizer:
    """`optimizer` with a `MergedEngine` for all it trains; alone there is nothing to merge.

    Args:
        options: a `CompressedOptions` with `profile_steps`.
    """
    params = trained_parameters(model, optimizer)
    refuse_types(params, options)
    if communicator.size == 1:
        return distribute(optimizer, AloneEngine(model, communicator))
    engine = MergedEngine(
        model,
        communicator,
        params,
        plan=plan,
        options=options,
    )
    return distribute(optimizer, engine)


def _unknown(count: int) -> BackwardProfile:
    """What a rank that has not run a backward pass must take: the reverse order, all at once."""
    return BackwardProfile(
        order=list(reversed(range(count))), arrivals_s=[0.0] * count, forward_s=0.0, backward_s=0.0
    )
