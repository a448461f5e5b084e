"""Gradients on their way to the update: the backward pass as events, and the engines on top of it.

What an algorithm does is told by moments, which it overrides:

    loss.backward()       arrived(param)  a gradient is there, also under `no_sync()`
                          ready(unit)     all gradients of a unit are there (on every rank in the
                                          same order): start its transfer
                          passed()        the pass is over, and every unit was ready
    optimizer.step()      apply(update)   gradients are final or under way: update, or begin to
    optimizer.synchronize()  arrive()     let `p.grad` be the mean, for those who want to see it
    model(x)              finish(unit)    a module is about to read what `apply` has put off
    optimizer.zero_grad() drop()          what a pass that an error ended has left under way
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dear.buckets.flat import Bucket
from dear.comm.communicator import Communicator
from dear.errors import UserError
from dear.lazy import torch
from dear.training.engine import Engine, GradScaling, Replica, grouped, step_after_closure
from dear.training.hooks import Hooks, ReaderMap, at_end_of_backward


class BackwardSchedule:
    """Calls `launch(unit)` as units of parameters get their gradients, `finish()` after the pass.

    A unit is a group of parameters that travel together. Ranks may see gradients in different
    orders or lack some; collectives must still match. So units are launched in one agreed order,
    each when it and all before it are complete; what is missing at the end of the pass is launched
    then. The order is the reverse of registration in the first pass and afterwards the order in
    which rank 0's units were complete in it.

    Args:
        finish: called when a pass has ended and every unit is launched.
        arrived: called for each gradient that arrives, also under `paused`, before all else.
        learn: take the order from the first pass; without it the owner gives one to `regroup`.
        sparse: the owner communicates sparse gradients too; otherwise they are refused.

    A pass is one `backward()` outside `paused()`. Gradients accumulate in `p.grad` over passes as
    in plain torch.
    """

    def __init__(
        self,
        hooks: Hooks,
        units: Sequence[Sequence[torch.nn.Parameter]],
        communicator: Communicator,
        *,
        launch: Callable[[int], None],
        finish: Callable[[], None] = lambda: None,
        arrived: Callable[[torch.nn.Parameter], None] | None = None,
        learn: bool = True,
        sparse: bool = False,
    ) -> None:
        self._communicator = communicator
        self._launch = launch
        self._finish = finish
        self._arrived = arrived
        self._sparse = sparse
        self._set_units(units)
        self.order: Sequence[int] = list(reversed(range(len(units))))
        """Units as they are launched, on all ranks."""
        self._learnt = not learn
        self._in_pass = False
        self._seen: set[torch.nn.Parameter] = set()
        """Whose gradients have arrived in this pass."""
        self._paused = False
        self.passed = False
        """True if a pass has ended since `restart`."""
        self.unsent = False
        """True if gradients have been added under `paused` since the last pass."""
        hooks.on_gradient(self._unit_of, self._on_gradient)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Backward passes inside communicate nothing; the next pass outside carries their sum."""
        self._paused, before = True, self._paused
        try:
            yield
        finally:
            self._paused = before

    def regroup(self, units: Sequence[Sequence[torch.nn.Parameter]], order: Sequence[int]) -> None:
        """Other units of the same parameters, launched in `order` from the next pass on."""
        self._set_units(units)
        self.order = order
        self._learnt = True

    def launched(self) -> list[Sequence[torch.nn.Parameter]]:
        """The units in the order in which they are launched."""
        return [self._units[unit] for unit in self.order]

    def restart(self) -> None:
        """Forgets the last pass: the next step needs a new one."""
        self.passed = False

    def forget(self) -> None:
        """Forgets gradients that have been discarded, also those of a pass that an error ended."""
        self._in_pass = self.passed = self.unsent = False

    def run_if_missing(self) -> None:
        """Communicates the gradients there are if no pass since `restart` has carried them all.

        So gradients accumulated under `paused` are never lost, and a rank whose loss did not depend
        on the model still takes part in the step.
        """
        if not self.passed or self.unsent:
            self._begin()
            self._end()

    def _set_units(self, units: Sequence[Sequence[torch.nn.Parameter]]) -> None:
        self._units = units
        self._unit_of = {param: i for i, unit in enumerate(units) for param in unit}

    def _begin(self) -> None:
        self._in_pass = True
        self.unsent = False
        self._next = 0
        self._seen.clear()
        self._missing = [len(unit) for unit in self._units]
        self._completed: list[int] = []

    def _on_gradient(self, param: torch.nn.Parameter) -> None:
        if param.grad.layout is not torch.strided and not self._sparse:
            raise UserError(
                f"sparse gradient of shape {tuple(param.shape)}: only dense gradients are "
                "communicated; build the embedding with sparse=False"
            )
        if self._arrived is not None:
            self._arrived(param)
        if self._paused:
            self.unsent = True
            return
        if not self._in_pass:
            self._begin()
            at_end_of_backward(self._end)
        if param in self._seen:
            self._in_pass = False
            raise UserError(
                f"a parameter of shape {tuple(param.shape)} got its gradient twice in one backward "
                "pass (reentrant checkpointing?); use torch.utils.checkpoint with "
                "use_reentrant=False"
            )
        self._seen.add(param)
        unit = self._unit_of[param]
        self._missing[unit] -= 1
        if self._missing[unit] == 0:
            self._completed.append(unit)
        while self._next < len(self.order) and self._missing[self.order[self._next]] == 0:
            self._launch_next()

    def _launch_next(self) -> None:
        self._next += 1
        self._launch(self.order[self._next - 1])

    def _end(self) -> None:
        if not self._in_pass:  # an error in the pass has ended it already
            return
        while self._next < len(self.order):
            self._launch_next()
        self._in_pass = False
        self.passed = True
        self._finish()
        if not self._learnt:
            self._learn()

    def _learn(self) -> None:
        seen = set(self._completed)
        rest = [unit for unit in self.order if unit not in seen]
        self.order = self._communicator.broadcast_object(self._completed + rest)
        self._learnt = True


class GradientEngine(Engine):
    """Averages gradients in the backward pass: after `passed()` each `p.grad` is the mean.

    Args:
        units: parameters that travel together; see `BackwardSchedule`, also for the rest.
    """

    arrived: Callable[[torch.nn.Parameter], None] | None = None
    """`arrived(param)`: see above. None: nobody wants to know."""

    def __init__(
        self,
        replica: Replica,
        units: Sequence[Sequence[torch.nn.Parameter]],
        *,
        learn: bool = False,
        sparse: bool = False,
    ) -> None:
        super().__init__(replica)
        self.schedule = BackwardSchedule(
            self.hooks,
            units,
            self.communicator,
            launch=self.ready,
            finish=self.passed,
            arrived=self.arrived,
            learn=learn,
            sparse=sparse,
        )

    def groups(self) -> list[tuple[int, Sequence[torch.nn.Parameter]]]:
        return grouped(self.schedule.launched())

    def ready(self, unit: int) -> None:
        """All gradients of `unit` are there, or missing at the end of the pass: start."""
        raise NotImplementedError

    def passed(self) -> None:
        """A backward pass is over, and every unit has been started."""

    def stepped(self) -> None:
        """A step has ended."""

    def drop(self) -> None:
        """Waits for what a pass that ended early has left under way, and forgets it."""

    def step(self, update: Callable[[], Any]) -> Any:
        self.schedule.run_if_missing()
        self.schedule.restart()
        result = update()
        self.stepped()
        return result

    def step_closure(self, update: Callable[[Callable[[], Any]], Any], closure: Any) -> Any:
        self.schedule.restart()
        result = update(closure)
        self.stepped()
        return result

    def synchronize(self) -> None:
        """Averages what was accumulated under `no_sync`; the rest `backward()` has averaged."""
        if self.schedule.unsent:
            self.schedule.run_if_missing()

    def clip_grad_norm(
        self, params: Sequence[torch.nn.Parameter], max_norm: float, norm_type: float
    ) -> Any:
        # A rank whose loss did not depend on the model has averages to clip, too.
        self.schedule.run_if_missing()
        return super().clip_grad_norm(params, max_norm, norm_type)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return self.schedule.paused()

    def forget(self) -> None:
        self.drop()
        self.schedule.forget()


class DeferredEngine(GradientEngine):
    """Transfers go on after the pass, updates perhaps after `step()`.

    Until then `p.grad` is this rank's own gradient, which nobody may change unnoticed: `buckets`
    watch. After `synchronize()` gradients are means, and final.
    """

    def __init__(self, replica: Replica, units: Sequence[Sequence[torch.nn.Parameter]]) -> None:
        self.buckets: Sequence[Bucket] = [Bucket(replica.params)]
        """What watches the gradients: at first one without flat memory."""
        self.averaged = False
        """`p.grad` are the means."""
        self.pending: set[int] = set()
        """What `finish` must still be called for."""
        self.readers = ReaderMap(replica.model, replica.params)
        super().__init__(replica, units)
        self.scaling = GradScaling(self.optimizer)
        self.hooks.before_state_dict(self.model, self.settle)

    def complete_pass(self) -> None:
        """Every transfer is under way afterwards."""
        self.schedule.run_if_missing()

    def apply(self, update: Callable[[], Any]) -> Any:
        """Updates, or leaves that to `finish` for what it puts into `pending`."""
        raise NotImplementedError

    def apply_averaged(self, update: Callable[[], Any]) -> Any:
        """Updates from `p.grad`, which are means; nothing is in flight before or afterwards."""
        return update()

    def arrive(self) -> None:
        """Lets each `p.grad` be the mean over ranks, None where no rank has one."""
        raise NotImplementedError

    def finish(self, index: int) -> None:
        """Makes the parameters of a bucket current."""

    def step(self, update: Callable[[], Any]) -> Any:
        if self.averaged and not self.schedule.unsent:
            # The caller has synchronized, and perhaps clipped: the gradients are final.
            result = self.step_averaged(update)
        else:
            self.scaling.refuse()
            self.complete_pass()
            self.schedule.restart()
            self.settle()
            self.refuse_touched(waiting=False)
            result = self.apply(update)
        for bucket in self.buckets:
            bucket.forget()
        self.readers.freeze()
        self.stepped()
        return result

    step_closure = step_after_closure

    def step_averaged(self, update: Callable[[], Any]) -> Any:
        """Updates from means as a GradScaler, if one is calling, wants it."""
        self.averaged = False
        self.schedule.restart()
        self.settle()
        return self.scaling.step(lambda: self.apply_averaged(update))

    def settle(self) -> None:
        for index in sorted(self.pending):
            self._finish(index)

    def synchronize(self) -> None:
        self.settle()
        super().synchronize()
        if self.schedule.passed and not self.averaged:
            self.complete_pass()
            self.refuse_touched()
            self.arrive()
            self.averaged = True

    def forget(self) -> None:
        super().forget()
        self.averaged = False

    def close(self) -> None:
        super().close()
        self.readers.freeze()
        self.scaling.close()

    def refuse_touched(self, waiting: bool = True) -> None:
        """Raises `UserError` if gradients are not those that have been sent.

        Args:
            waiting: also if a GradScaler has been at them, which waits for the device to see.
        """
        if waiting and any(bucket.scaled_in_place() for bucket in self.buckets):
            self.scaling.refuse_early_unscaling()
        for bucket in self.buckets:
            bucket.refuse_changed()

    def finish_unread(self) -> None:
        """Makes current what no module is known to read, before it is too late."""
        for index in self.readers.unread() & self.pending:
            self._finish(index)

    def before_forward(self, module: torch.nn.Module) -> None:
        """A hook for modules that may read parameters: waits for those of `module`."""
        if self.pending:
            for index in self.readers.due(module, self.pending):
                self._finish(index)

    def _finish(self, index: int) -> None:
        self.pending.discard(index)
        self.finish(index)
