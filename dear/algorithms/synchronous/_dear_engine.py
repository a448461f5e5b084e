"""When each half of each group starts and ends in the training loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from dear.algorithms.synchronous._clipping import clip_shards
from dear.algorithms.synchronous._dear_layout import Layout
from dear.buckets.halves import AllReduced
from dear.buckets.sharding import has_hooks
from dear.buckets.unchanged import Unchanged, refuse_changed
from dear.buckets.usage import Usage
from dear.errors import UserError
from dear.lazy import torch
from dear.training.backward import BackwardSchedule
from dear.training.engine import Engine
from dear.training.grad_scaling import GradScaling

if TYPE_CHECKING:
    from torch.nn import Module, Parameter
    from torch.optim import Optimizer

    from dear.algorithms.synchronous._dear_groups import Manner
    from dear.comm.communicator import Communicator
    from dear.training.regrouping import Regrouping


class DearEngine(Engine):
    """The first passes only watch; groups are laid out before the first step, in the order seen.

    From then on first halves start in backward passes, `step()` ends them, updates (or leaves that
    to the next forward pass) and starts second halves, and a module that is about to run waits for
    those of the parameters that it reads.
    """

    def __init__(
        self,
        model: Module,
        optimizer: Optimizer,
        communicator: Communicator,
        params: list[Parameter],
        manner: Manner,
        regrouping: Regrouping,
    ) -> None:
        super().__init__(model, communicator)
        self._optimizer = optimizer
        self._layout = Layout(model, optimizer, communicator, params, manner, regrouping)
        self._groups = self._layout.groups
        self._readers = self._layout.readers
        self._scaling = GradScaling(optimizer)
        self._usage = Usage(params, communicator)
        self._pending: set[int] = set()
        self._watched: set[Module] = set()
        self._averaged = False
        self._first = Unchanged(params)
        self._schedule = BackwardSchedule(
            self.hooks,
            [[param] for param in params],
            communicator,
            launch=self._launch,
            finish=self._end_pass,
            arrived=self._layout.arrived,
            learn=False,
        )
        self.hooks.before_state_dict(model, self.settle)

    def step(self, update: Callable[[], Any]) -> Any:
        if not (self._averaged and not self._schedule.unsent):
            self._scaling.refuse()
            self._complete_pass()
            hooked = self._groups.sharded and has_hooks(self._optimizer)
            if not hooked:
                return self._step(update)
            self._average()
        # Gradients are averages, and final: the caller may have clipped them.
        self._averaged = False
        self._schedule.restart()
        self.settle()
        result = self._scaling.step(lambda: self._groups.update.step_averaged(update))
        self._end_step()
        return result

    def _step(self, update: Callable[[], Any]) -> None:
        self._schedule.restart()
        self.settle()
        self._check_unchanged()
        groups = self._groups.update
        groups.unused = self._usage.unused()
        self._pending = groups.step(update, self._layout.arrival)
        for index in self._pending & self._readers.unread():
            self._finish(index)
        self._end_step()

    step_closure = Engine.step_after_closure

    def settle(self) -> None:
        for index in sorted(self._pending):
            self._finish(index)

    def synchronize(self) -> None:
        self.settle()
        if self._schedule.unsent:
            self._schedule.run_if_missing()
        if self._schedule.passed and not self._averaged:
            self._complete_pass()
            self._average()

    def clip_grad_norm(self, params: Sequence[Parameter], max_norm: float, norm_type: float) -> Any:
        whole = self._averaged and not self._schedule.unsent
        if whole or not self._groups.sharded or self.communicator.size == 1 or norm_type <= 0:
            return super().clip_grad_norm(params, max_norm, norm_type)
        self.settle()
        self._complete_pass()
        self._refuse_scaled()
        self._check_unchanged()
        return clip_shards(
            self._groups, self.communicator, self._usage.unused(), max_norm, norm_type
        )

    def no_sync(self) -> AbstractContextManager[None]:
        return self._schedule.paused()

    def forget(self) -> None:
        self._schedule.forget()
        self._averaged = False

    def state_dict(self, plain: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        self.settle()
        if not self._layout.made:
            return plain()
        kept = self._optimizer.state
        whole = self._groups.whole_state()
        self._optimizer.state = {**_of_parameters(self._optimizer), **whole}
        try:
            return plain()
        finally:
            self._optimizer.state = kept

    def load_state_dict(self, plain: Callable[[], None]) -> None:
        self.settle()
        plain()
        if self._layout.made:
            self._groups.shard_state()

    def close(self) -> None:
        super().close()
        self._readers.freeze()
        self._scaling.close()
        if self._layout.made:
            self._groups.release()

    def _complete_pass(self) -> None:
        """Every group's first half is under way afterwards."""
        self._schedule.run_if_missing()
        if not self._layout.made:
            self._refuse_scaled()
            self._check_unchanged()
            self._make()
            for index in self._layout.arrival:
                self._launch(index)
        elif not self._layout.reclaimed():
            raise UserError(
                "parameters were moved to another device or type between the backward pass and "
                "step(); move the model before the forward pass"
            )

    def _average(self) -> None:
        self._refuse_scaled()
        self._check_unchanged()
        unused = self._usage.unused()
        for index in self._layout.arrival:
            part = self._groups.parts[index]
            part.finish_reduce()
            part.start_gather_mean(part.group.gradients)
        for part in self._groups.parts:
            part.finish_gather()
            for param, view in zip(part.group.params, part.group.gradient_views, strict=True):
                param.grad = None if param in unused else view
        self._averaged = True

    def _refuse_scaled(self) -> None:
        if any(noted.scaled_in_place() for noted in self._noted()):
            self._scaling.refuse_early_unscaling()

    def _check_unchanged(self) -> None:
        for noted in self._noted():
            refuse_changed(noted.changed())

    def _noted(self) -> list[Any]:
        if not self._layout.made:
            return [self._first]
        return [part.group for part in self._groups.parts]

    def _end_pass(self) -> None:
        if not self._layout.made:
            self._first.note()

    def _launch(self, index: int) -> None:
        if not self._layout.made:
            return
        self._averaged = False
        part = self._groups.parts[index]
        if index == self._layout.arrival[-1]:
            self._usage.start(part if isinstance(part, AllReduced) else None)
        part.group.note()
        part.start_reduce()

    def _before_forward(self, module: Module) -> None:
        if module is self.model and not self._layout.reclaimed():
            self._remake()
        if not self._pending:
            return
        self._readers.called(module)
        if not (self.model.training and torch.is_grad_enabled()):
            # An evaluation may read parameters where training never does.
            self.settle()
        else:
            for index in sorted(self._readers.groups_of(module) & self._pending):
                self._finish(index)

    def _finish(self, index: int) -> None:
        self._pending.discard(index)
        self._groups.update.finish(index)

    def _end_step(self) -> None:
        self._readers.freeze()
        if self._layout.after_step():
            self._remake()

    def _make(self) -> None:
        self._first = Unchanged(())  # it holds the gradients, which move
        self._layout.make()
        self._schedule.regroup(self._layout.members, self._layout.arrival)
        self._watch_forwards()

    def _remake(self) -> None:
        self.settle()
        self._layout.remake()
        self._schedule.regroup(self._layout.members, self._layout.arrival)
        self._watch_forwards()

    def _watch_forwards(self) -> None:
        """Modules wait where a group has something to do after `step()`."""
        modules = self._readers.modules() if self._groups.lasting else [self.model]
        new = [module for module in modules if module not in self._watched]
        self._watched.update(new)
        self.hooks.before_forward(new, self._before_forward)


def _of_parameters(optimizer: Any) -> dict[Any, Any]:
    """State that is not sharded: that of parameters that nobody trains."""
    held = {param for group in optimizer.param_groups for param in group["params"]}
    return {param: state for param, state in optimizer.state.items() if param in held}
