"""Events of the backward pass, and base classes of the engines that average gradients.

An algorithm overrides these methods. Those marked with * exist only in a `DeferredEngine`:

    loss.backward()       arrived(param)  a gradient arrived, also under `no_sync()`
                          ready(unit)     all gradients of a unit arrived: start its transfer; the
                                          order is the same on every rank
                          passed()        the pass has ended, and every unit was ready
    optimizer.step()      apply(update) * gradients are final or still travel: update, or begin to
    optimizer.synchronize()  arrive() *   set `p.grad` to the mean
    model(x)              finish(unit) *  a module is about to read parameters that `apply` deferred
    optimizer.zero_grad() drop()          forget the transfers of a pass that ended with an error;
                                          also before a pass that follows it without `zero_grad()`
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

from dear.buckets.flat import Bucket
from dear.comm.communicator import Communicator
from dear.errors import UserError
from dear.lazy import torch
from dear.training.engine import (
    Closure,
    ClosureUpdate,
    Engine,
    GradScaling,
    OptionsT_co,
    Replica,
    Update,
    grouped,
    step_after_closure,
)
from dear.training.hooks import Hooks, ReaderMap, at_end_of_backward, refuse_later_hooks
from dear.training.inflight import InFlight


class BackwardSchedule:
    """Calls `launch(unit)` for units that are complete, and `finish()` after a backward pass.

    A unit is a group of parameters that travel together. It is complete when all its gradients have
    arrived. Ranks may get gradients in different orders, or lack some, but collectives must match.
    Therefore all ranks launch units in the same order. A unit is launched when it and all units
    before it are complete, or at the end of the pass. The first pass uses the reverse order of
    registration. Later passes use the order in which rank 0's units were complete in the first.

    Args:
        finish: called when a pass has ended and every unit is launched.
        drop: called if a pass begins after one that ended with an error.
        arrived: called first for each gradient that arrives, also under `paused`.
        learn: True takes the order from the first pass; False: the owner calls `regroup`.
        sparse: True if the owner communicates sparse gradients, too; False refuses them.

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
        drop: Callable[[], None] = lambda: None,
        arrived: Callable[[torch.nn.Parameter], None] | None = None,
        learn: bool = True,
        sparse: bool = False,
    ) -> None:
        self._communicator = communicator
        self._launch = launch
        self._finish = finish
        self._drop = drop
        self._arrived = arrived
        self._sparse = sparse
        self._set_units(units)
        self.order: Sequence[int] = list(reversed(range(len(units))))
        """Units in the order in which all ranks launch them."""
        self._learnt = not learn
        self._in_pass = self._unfinished = False
        """`_unfinished`: the last pass has not ended, or has ended with an error."""
        self._awaited: dict[torch.nn.Parameter, int] = {}
        """Units of the parameters whose gradients have not arrived in this pass."""
        self._paused = False
        self.passed = False
        """True if a pass has ended since `restart`."""
        self.unsent = False
        """True if gradients have been added under `paused` since the last pass."""
        self._last: torch.Tensor | None = None
        """Some elements of a gradient of the last step (`_sample`)."""
        self.carries_all = True
        """False if other messages than those of the units carry gradients, too."""
        self._asked = False
        """True if `synchronize()` found no gradients of this rank since the last step or pass."""
        hooks.on_gradient(self._unit_of, self._on_gradient)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Returns a context whose passes send nothing; the next pass outside sends the sum."""
        self._paused, before = True, self._paused
        try:
            yield
        finally:
            self._paused = before

    @property
    def sends_nothing(self) -> bool:
        """True within `paused()`."""
        return self._paused

    def regroup(self, units: Sequence[Sequence[torch.nn.Parameter]], order: Sequence[int]) -> None:
        """Replaces the units, which are launched in `order` from the next pass on."""
        self._set_units(units)
        self.order = order
        self._learnt = True

    def launched(self) -> list[Sequence[torch.nn.Parameter]]:
        """Returns the units in the order in which they are launched."""
        return [self._units[unit] for unit in self.order]

    def restart(self) -> None:
        """Forgets the last pass: the next step needs a new one."""
        self.passed = self._asked = False
        self._last = self._sample()

    def forget(self) -> None:
        """Forgets discarded gradients, also those of a pass that ended with an error."""
        if self._in_pass:
            self._communicator.follow(False)
        self._in_pass = self._unfinished = self.passed = self.unsent = self._asked = False

    def synchronized(self) -> None:
        """Notes a call of `synchronize()`, which averages nothing without a pass."""
        self._asked = self.carries_all and not self.passed and self._communicator.size > 1

    def refuse_unaveraged(self) -> None:
        """Raises `UserError` in a step without a pass if the script has synchronized before.

        The other ranks have averages since then, and may have changed them.
        """
        accounted = self.passed or self.unsent or self._unfinished
        if self._asked and not accounted and not self._set_by_script():
            raise UserError(
                "no gradient has reached this rank's parameters since synchronize(), which had "
                "nothing to average, but other ranks may have clipped their averages: if "
                "synchronize() belonged to the step before, call zero_grad() after it; if this "
                "rank has no loss, clip with optimizer.clip_grad_norm_() on every rank"
            )

    def _set_by_script(self) -> bool:
        """Returns True if there are gradients other than 0 that are not those of the last step."""
        last, now = self._last, self._sample()
        if last is not None and now is not None and torch.equal(last, now.to(last)):
            return False
        held = (param.grad for param in self._unit_of if param.grad is not None)
        return any(torch.any(grad.to_dense()) for grad in held)

    def _sample(self) -> torch.Tensor | None:
        """Returns a copy of the first elements of a gradient; None without a dense gradient.

        A script may write to `p.grad.data`, which raises no version counter.
        """
        for param in self._unit_of:
            if param.grad is not None and param.grad.layout is torch.strided:
                return param.grad.detach()[(slice(4),) * param.dim()].clone()
        return None

    def run_if_missing(self) -> None:
        """Communicates the current gradients unless a pass since `restart` has sent all of them.

        So gradients accumulated under `paused` are never lost. A rank whose loss did not depend on
        the model still takes part in the step.
        """
        if not self.passed or self.unsent:
            self._begin()
            self._end()

    def _set_units(self, units: Sequence[Sequence[torch.nn.Parameter]]) -> None:
        self._units = units
        self._unit_of = {param: i for i, unit in enumerate(units) for param in unit}

    def _begin(self) -> None:
        if self._unfinished:
            self._drop()
        self._in_pass = self._unfinished = True
        self._asked = False
        self._communicator.follow(True)
        self.unsent = False
        self._next = 0
        self._awaited = dict(self._unit_of)
        self._missing = [len(unit) for unit in self._units]
        self._completed: list[int] = []

    def _on_gradient(self, param: torch.nn.Parameter) -> None:
        gradient = gradient_of(param)
        if gradient.requires_grad:
            refuse_graph()
        if gradient.layout is not torch.strided and not self._sparse:
            refuse_sparse(param)
        if self._arrived is not None:
            self._arrived(param)
        if self._paused:
            self.unsent, self._asked = True, False
            return
        if not self._in_pass:
            refuse_later_hooks(self._unit_of)
            self._begin()
            at_end_of_backward(self._end)
        unit = self._awaited.pop(param, None)
        if unit is None:
            self._in_pass = False
            raise UserError(
                f"a parameter of shape {tuple(param.shape)} got its gradient twice in one backward "
                "pass (reentrant checkpointing?); use torch.utils.checkpoint with "
                "use_reentrant=False. After a pass that ended with an error, call "
                "optimizer.zero_grad()"
            )
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
        self._communicator.follow(False)
        self._in_pass = self._unfinished = False
        self.passed = True
        self._finish()
        if not self._learnt:
            self._learn()

    def _learn(self) -> None:
        seen = set(self._completed)
        rest = [unit for unit in self.order if unit not in seen]
        self.order = self._communicator.broadcast_object(self._completed + rest)
        self._learnt = True


def refuse_graph() -> NoReturn:
    """Raises `UserError` for gradients that carry a graph."""
    raise UserError(
        "backward(create_graph=True) gives gradients a graph, but an average over ranks has none; "
        "use torch.autograd.grad(..., create_graph=True) for the penalty, and call backward() on "
        "the sum of loss and penalty"
    )


def refuse_sparse(param: torch.nn.Parameter) -> NoReturn:
    """Raises `UserError` for a parameter whose gradient is sparse."""
    raise UserError(
        f"sparse gradient of shape {tuple(param.shape)}: only dense gradients are communicated; "
        "build the embedding with sparse=False"
    )


def gradient_of(param: torch.nn.Parameter) -> torch.Tensor:
    """Returns `param.grad`, which must not be None."""
    assert param.grad is not None
    return param.grad


class GradientEngine(Engine[OptionsT_co]):
    """Base of the engines that average gradients: after `passed()`, each `p.grad` is the mean.

    Args:
        units: groups of parameters that travel together.
        learn, sparse: as for `BackwardSchedule`.
    """

    arrived: Callable[[torch.nn.Parameter], None] | None = None
    """Method `arrived(param)`; None: the algorithm does not need it."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        never = {"apply", "arrive", "finish"} & vars(cls).keys()
        if never and "DeferredEngine" not in [base.__name__ for base in cls.__mro__]:
            raise UserError(
                f"{cls.__name__} overrides {min(never)}(), which only a DeferredEngine calls: "
                "derive from DeferredEngine, or average in passed()"
            )

    def __init__(
        self,
        replica: Replica[OptionsT_co],
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
            drop=self.drop,
            arrived=self.arrived,
            learn=learn,
            sparse=sparse,
        )

    def groups(self) -> list[tuple[int, Sequence[torch.nn.Parameter]]]:
        return grouped(self.schedule.launched())

    def ready(self, unit: int) -> None:
        """Starts the transfer of `unit`: all its gradients arrived, or the pass has ended."""
        raise NotImplementedError

    def passed(self) -> None:
        """Ends a backward pass; every unit was started."""

    def stepped(self) -> None:
        """Ends a step."""

    def drop(self) -> None:
        """Waits for the transfers of a pass that ended early, and forgets them."""

    def step(self, update: Update) -> object:
        self.schedule.refuse_unaveraged()
        self.schedule.run_if_missing()
        self.schedule.restart()
        result = update()
        self.stepped()
        return result

    def step_closure(self, update: ClosureUpdate, closure: Closure) -> object:
        self.schedule.restart()
        result = update(closure)
        self.stepped()
        return result

    def synchronize(self) -> None:
        """Averages gradients that `no_sync` accumulated; `backward()` has averaged the others."""
        if self.schedule.unsent:
            self.schedule.run_if_missing()
        self.schedule.synchronized()

    def clip_grad_norm(
        self, params: Sequence[torch.nn.Parameter], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        # If this rank's loss did not depend on the model, it still has averages to clip.
        self.schedule.run_if_missing()
        return super().clip_grad_norm(params, max_norm, norm_type)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return self.schedule.paused()

    def forget(self) -> None:
        self.drop()
        self.schedule.forget()


class DeferredEngine(GradientEngine[OptionsT_co]):
    """Base of the engines whose transfers outlast the pass, and whose updates may outlast `step()`.

    Until the update, `p.grad` is this rank's own gradient; `buckets` detect changes of it. After
    `synchronize()` gradients are means, and `step()` uses them as they are.
    """

    def __init__(
        self, replica: Replica[OptionsT_co], units: Sequence[Sequence[torch.nn.Parameter]]
    ) -> None:
        self.buckets: Sequence[Bucket] = [Bucket(replica.params)]
        """Buckets that detect changed gradients; initially one bucket without flat memory."""
        self.averaged = False
        """True while each `p.grad` is the mean."""
        self.pending: set[int] = set()
        """Units for which `finish` is still to be called."""
        self.in_flight = InFlight(self.settle)
        self.readers = ReaderMap(replica.model, replica.params, self.settle)
        super().__init__(replica, units)
        self.scaling = GradScaling(self.optimizer)
        self.hooks.before_state_dict(self.model, self.settle)

    def complete_pass(self) -> None:
        """Starts the transfers that have not started yet."""
        self.schedule.run_if_missing()

    def apply(self, update: Update) -> object:
        """Updates, or adds units to `pending` and lets `finish` update them."""
        raise NotImplementedError

    def apply_averaged(self, update: Update) -> object:
        """Updates from the means in `p.grad`; no transfer is pending before or afterwards."""
        return update()

    def arrive(self) -> None:
        """Sets each `p.grad` to the mean over ranks, or to None if no rank has a gradient."""
        raise NotImplementedError

    def finish(self, index: int) -> None:
        """Makes the parameters of a bucket current."""

    def step(self, update: Update) -> object:
        with self._in_update():
            if self.averaged and not self.schedule.unsent:
                # The script has synchronized, and may have clipped: use the gradients as they are.
                result = self.step_averaged(update)
            else:
                self.scaling.refuse()
                self.schedule.refuse_unaveraged()
                self.complete_pass()
                self.schedule.restart()
                self.settle()
                self.refuse_touched(waiting=False)
                result = self.apply(update)
        for bucket in self.buckets:
            bucket.forget()
        self.readers.freeze()
        self.stepped()
        for index in self.pending:
            self.in_flight.launch(self.buckets[index].params)
        return result

    step_closure = step_after_closure

    def step_averaged(self, update: Update) -> object:
        """Updates from means; if a GradScaler is calling, does what it asks."""
        self.averaged = False
        self.schedule.restart()
        self.settle()
        return self.scaling.step(lambda: self.apply_averaged(update))

    def settle(self) -> None:
        for index in sorted(self.pending):
            self._finish(index)

    @contextlib.contextmanager
    def _in_update(self) -> Iterator[None]:
        self.updating, before = True, self.updating
        try:
            yield
        finally:
            self.updating = before

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
        """Raises `UserError` if gradients have changed since they were sent.

        Args:
            waiting: True also detects changes by a GradScaler; this waits for the device.
        """
        if waiting and any(bucket.scaled_in_place() for bucket in self.buckets):
            self.scaling.refuse_early_unscaling()
        for bucket in self.buckets:
            bucket.refuse_changed()

    def finish_unread(self) -> None:
        """Finishes the units with a parameter that no module is known to read."""
        for index in self.readers.unread() & self.pending:
            self._finish(index)

    def before_forward(self, module: torch.nn.Module) -> None:
        """Finishes the units that `module` reads; a hook before its forward pass."""
        if self.pending:
            for index in self.readers.due(module, self.pending):
                self._finish(index)

    def _finish(self, index: int) -> None:
        if index in self.pending:  # an earlier call may have finished several
            self.pending.discard(index)
            self.in_flight.land(self.buckets[index].params)
            with self._in_update():
                self.finish(index)
