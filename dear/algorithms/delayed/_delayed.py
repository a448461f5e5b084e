"""Updates with the gradients of earlier steps: communication beside everything that is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from dear.algorithms.delayed._delay_line import DelayLine, Watch
from dear.algorithms.delayed._held_back import Held, HeldBack, copied, unscale
from dear.buckets.grouping import MIB
from dear.buckets.unchanged import Unchanged, refuse_changed
from dear.buckets.updates import with_gradients
from dear.errors import UserError
from dear.lazy import torch
from dear.training.backward import BackwardSchedule
from dear.training.engine import Engine
from dear.training.grad_scaling import GradScaling
from dear.training.trace import Timeline

if TYPE_CHECKING:
    from torch.nn import Module, Parameter
    from torch.optim import Optimizer

    from dear.comm.communicator import Communicator

PENDING = "delayed_gradients"
"""Key of an optimizer's state dict, beside its own."""


class DelayedEngine(Engine):
    """Update t applies the averaged gradients of step t - delay; the first `delay` ones are none.

    The first pass only watches and is sent at its end; in later ones groups are copied and sent as
    they are complete. `step()` waits for the transfers of `delay` steps before only.

    Args:
        options: `delay`, `buffer_mb`, `cycle_time_ms`, `average` and `timeline` of `dadt`.
    """

    def __init__(
        self,
        model: Module,
        optimizer: Optimizer,
        communicator: Communicator,
        params: Sequence[Parameter],
        options: Any,
    ) -> None:
        super().__init__(model, communicator)
        self._optimizer: Any = optimizer
        self._params = list(params)
        self._options = options
        self._scaling = GradScaling(optimizer)
        self._timeline: Timeline | None = None
        if options.timeline is not None:
            self._timeline = Timeline(options.timeline, communicator.rank)
        self._step = 0
        self._line: DelayLine | None = None
        self._watch = Watch(model, params, communicator)
        self._pending = HeldBack(optimizer, self._params, options.delay)
        self._presented = False
        self._unchanged = Unchanged(())
        self._schedule = BackwardSchedule(
            self.hooks,
            [[param] for param in params],
            communicator,
            launch=self._launch,
            finish=self._end_pass,
            arrived=self._arrived,
            learn=False,
            sparse=True,
        )

    def step(self, update: Callable[[], Any]) -> Any:
        if self._presented:
            return self._step_presented(update)
        self._scaling.refuse()
        self._schedule.run_if_missing()
        self._schedule.restart()
        refuse_changed(self._unchanged.changed())
        self._push(None)
        if not self._pending.due:
            return None
        return self._apply(update)

    step_closure = Engine.step_after_closure

    def synchronize(self) -> None:
        if self._schedule.unsent:
            self._schedule.run_if_missing()
        if not self._schedule.passed:
            self._wait()
        elif not self._presented:
            self._present()

    def flush(self, update: Callable[[], Any]) -> None:
        self._presented = False
        while self._pending:
            self._apply(update)

    def no_sync(self) -> AbstractContextManager[None]:
        return self._schedule.paused()

    def forget(self) -> None:
        self._schedule.forget()
        self._presented = False

    def state_dict(self, plain: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        return {**plain(), PENDING: self._pending.saved()}

    def resume(self, state: dict[str, Any]) -> None:
        given = state.get(PENDING, [])
        self._pending.check(given)
        self._drop_pending()
        self._pending.load(given, self._step)

    def write_timeline(self) -> None:
        """Writes the file, if there is to be one, with all updates so far; waits for transfers."""
        if self._timeline is None:
            return
        if self._params[0].is_cuda:
            torch.cuda.synchronize(self._params[0].device)
        if self._line is not None:
            self._line.draw()
        self._timeline.write()

    def close(self) -> None:
        self._wait()
        self._drop_pending()
        self.write_timeline()
        self._scaling.close()
        self.hooks.remove()

    def _launch(self, unit: int) -> None:
        if self._line is not None:
            self._line.pack(unit)

    def _arrived(self, param: Parameter) -> None:
        if self._presented:
            raise UserError(
                "backward() after synchronize(): p.grad holds gradients of an earlier step; call "
                "step() or zero_grad() first"
            )
        if self._line is None:
            self._watch.arrived(param)

    def _end_pass(self) -> None:
        if self._line is None:
            self._make_line()
        if self._line is not None:
            self._line.end_pass()
        self._unchanged = Unchanged(self._params)
        self._unchanged.note()

    def _make_line(self) -> None:
        cycle_ms = self._options.cycle_time_ms
        cycle_s = None if cycle_ms is None else cycle_ms / 1e3
        found = self._watch.groups(self._options.buffer_mb * MIB, cycle_s)
        if found is None:
            return
        groups, sparse = found
        divisor = self.communicator.size if self._options.average else 1
        self._line = DelayLine(groups, sparse, self.communicator, divisor, self._timeline)
        units = [*groups, *([param] for param in sparse)]
        self._schedule.regroup(units, range(len(units)))
        for unit in range(len(units)):
            self._line.pack(unit)

    def _push(self, scale: torch.Tensor | None) -> None:
        """The gradients of this step, which are under way, join those that are held back."""
        self._unchanged = Unchanged(())  # lets the gradients go
        self._step += 1
        held = Held(step=self._step, scale=scale)
        if self._line is not None:
            held.lap = self._line.take()
        else:
            held.loaded = dict.fromkeys(self._params)
        self._pending.push(held)

    def _apply(self, update: Callable[[], Any]) -> Any:
        """The update of the oldest gradients that are held back."""
        held = self._pending.pop()
        gradients = held.gradients()
        began = self.communicator.clock()
        try:
            if held.scale is not None and not unscale(gradients, held.scale):
                return None
            return with_gradients(gradients, update)
        finally:
            self._release(held, began)

    def _release(self, held: Held, applied_s: float | None) -> None:
        if self._timeline is not None and applied_s is not None:
            ended = self.communicator.clock()
            self._timeline.add("update", f"step {held.step}", applied_s, ended)
        if self._line is not None:
            self._line.give_back(held, applied_s)

    def _present(self) -> None:
        """Makes each `p.grad` what the next update is to apply."""
        if self._unchanged.scaled_in_place():
            self._scaling.refuse_early_unscaling()
        refuse_changed(self._unchanged.changed())
        self._unchanged = Unchanged(())
        due = self._pending.next
        if due is not None:
            for param, gradient in due.gradients().items():
                param.grad = copied(gradient)
        else:
            for param in self._params:
                if param.grad is not None:
                    param.grad = torch.zeros_like(param.grad)
        self._presented = True

    def _step_presented(self, update: Callable[[], Any]) -> Any:
        optimizer = self._optimizer
        calling = hasattr(optimizer, "found_inf")
        if calling and optimizer.grad_scale is None:
            raise UserError(
                "scaler.unscale_(optimizer) divides by the present scale, and these gradients are "
                "of an earlier step: leave unscaling to scaler.step(optimizer)"
            )
        self._presented = False
        self._schedule.restart()
        self._push(optimizer.grad_scale.clone() if calling else None)
        if not self._pending.due:
            return None
        held = self._pending.pop()
        began = self.communicator.clock()
        try:
            if calling:
                optimizer.grad_scale = held.scale
            elif held.scale is not None:
                gradients = {param: param.grad for param in self._params}
                if not unscale(gradients, held.scale):
                    return None
            return self._scaling.step(update)
        finally:
            self._release(held, began)

    def _wait(self) -> None:
        self._pending.wait()
        if self._line is not None:
            self._line.wait()

    def _drop_pending(self) -> None:
        while self._pending:
            self._release(self._pending.pop(), None)
