"""Updates that wait until a layer is needed: communication goes on into the next forward pass."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from dear.buckets.grouping import FlatBuffer
from dear.buckets.unchanged import Unchanged, refuse_changed
from dear.buckets.updates import PartialUpdate, with_gradients
from dear.lazy import torch
from dear.training.backward import BackwardSchedule
from dear.training.engine import Engine
from dear.training.grad_scaling import GradScaling
from dear.training.readers import ReaderMap

if TYPE_CHECKING:
    from torch.nn import Module, Parameter
    from torch.optim import Optimizer

    from dear.comm.communicator import Communicator


class PackedGradients:
    """A copy of a group's gradients to send, which notices if the gradients change meanwhile."""

    def __init__(self, params: Sequence[Parameter], world_size: int) -> None:
        self.buffer = FlatBuffer(params, world_size)
        self._unchanged = Unchanged(self.buffer.params)

    def pack(self) -> None:
        """Copies the gradients there are."""
        self.buffer.pack()
        self._unchanged.note()

    def check_unchanged(self) -> None:
        """Raises `UserError` if a gradient has changed since `pack`; then forgets what it was."""
        refuse_changed(self._unchanged.changed())
        self._unchanged = Unchanged(self.buffer.params)

    def scaled_in_place(self) -> bool:
        """True if a gradient's values are not those that were packed; waits for the device."""
        return self._unchanged.scaled_in_place()


class DeferredEngine(Engine):
    """Averages groups of gradients while both passes run.

    `step()` waits for nothing. The update of a group is made when the first module that may read
    one of its parameters is about to run, with the hyper-parameters that `step()` saw.

    Args:
        units: lists of groups that are complete together in the backward pass, at first.
    """

    def __init__(
        self,
        model: Module,
        optimizer: Optimizer,
        communicator: Communicator,
        groups: Sequence[Sequence[Parameter]],
        units: Sequence[Sequence[int]],
    ) -> None:
        super().__init__(model, communicator)
        self.groups = [PackedGradients(params, communicator.size) for params in groups]
        self._update = PartialUpdate(optimizer, type(optimizer))
        self._pending: set[int] = set()
        self._averaged = False
        self._in_pass = False
        self._scaling = GradScaling(optimizer)
        self._units = [list(unit) for unit in units]
        self._schedule = BackwardSchedule(
            self.hooks,
            [self._params_of(unit) for unit in self._units],
            communicator,
            launch=self._launch,
            finish=self._passed,
            learn=False,
        )
        self._readers = ReaderMap(model, [param for params in groups for param in params])
        self._readers.set_groups(groups)
        self.hooks.before_forward(model.modules(), self._before_forward)
        self.hooks.before_state_dict(model, self.settle)

    @abstractmethod
    def _begin_pass(self) -> None:
        """The first gradients of a backward pass are about to be sent; the last pass is over."""

    @abstractmethod
    def _send(self, index: int) -> None:
        """Sends the packed gradients of a group."""

    @abstractmethod
    def _await(self, index: int) -> None:
        """Returns when the buffer of a group holds what all ranks agree on."""

    @abstractmethod
    def _drop(self) -> None:
        """Forgets what a pass that ended early has not sent yet."""

    def first_uses(self) -> list[int]:
        """Groups as the first forward passes read them; those never seen come last."""
        group_of = {p: i for i, group in enumerate(self.groups) for p in group.buffer.params}
        order = dict.fromkeys(group_of[param] for param in self._readers.order())
        order.update(dict.fromkeys(range(len(self.groups))))
        return list(order)

    def send_early(self, order: Sequence[int]) -> None:
        """From the next pass on, groups are sent one by one as they are complete, in `order`."""
        self._units = [[index] for index in range(len(self.groups))]
        self._schedule.regroup([self._params_of(unit) for unit in self._units], list(order))

    def _params_of(self, unit: Sequence[int]) -> list[Parameter]:
        return [param for index in unit for param in self.groups[index].buffer.params]

    def step(self, update: Callable[[], Any]) -> Any:
        if self._averaged and not self._schedule.unsent:
            # The caller has synchronized, and perhaps clipped: the gradients are final.
            self._averaged = False
            self._schedule.restart()
            return self._scaling.step(update)
        self._scaling.refuse()
        self._schedule.run_if_missing()
        self._schedule.restart()
        for group in self.groups:
            group.check_unchanged()
        self._readers.freeze()
        if not self._update.possible():
            return with_gradients(self._means(), update)
        self._update.note()
        self._pending = set(range(len(self.groups)))
        for index in self._readers.unread():
            self._apply(index)
        return None

    step_closure = Engine.step_after_closure

    def settle(self) -> None:
        for index in sorted(self._pending):
            self._apply(index)

    def synchronize(self) -> None:
        self.settle()
        if self._schedule.unsent:
            self._schedule.run_if_missing()
        if self._schedule.passed and not self._averaged:
            if any(group.scaled_in_place() for group in self.groups):
                self._scaling.refuse_early_unscaling()
            for group in self.groups:
                group.check_unchanged()
            for param, gradient in self._means().items():
                param.grad = None if gradient is None else gradient.clone()
            self._averaged = True

    def no_sync(self) -> AbstractContextManager[None]:
        return self._schedule.paused()

    def forget(self) -> None:
        self._schedule.forget()
        self._averaged = False
        if self._in_pass:
            self._in_pass = False
            self._drop()

    def close(self) -> None:
        super().close()
        for index in range(len(self.groups)):  # a pass without a step may be under way
            self._await(index)
        self._readers.freeze()
        self._scaling.close()

    def _launch(self, unit: int) -> None:
        if not self._in_pass:
            self._in_pass = True
            self._averaged = False
            # Layers that did not run since the last step; and a pass that this one supersedes.
            self.settle()
            for index in range(len(self.groups)):
                self._await(index)
            self._begin_pass()
        for index in self._units[unit]:
            self.groups[index].pack()
            self._send(index)

    def _passed(self) -> None:
        self._in_pass = False

    def _before_forward(self, module: Module) -> None:
        self._readers.called(module)
        if not self._pending:
            return
        if not (self.model.training and torch.is_grad_enabled()):
            # An evaluation may read parameters where training never does.
            self.settle()
        else:
            for index in sorted(self._readers.groups_of(module) & self._pending):
                self._apply(index)

    def _apply(self, index: int) -> None:
        self._pending.discard(index)
        self._update.run(self._mean(index))

    def _mean(self, index: int) -> dict[Parameter, torch.Tensor | None]:
        with torch.inference_mode(False):
            self._await(index)
            return dict(self.groups[index].buffer.gradients())

    def _means(self) -> dict[Parameter, torch.Tensor | None]:
        means: dict[Parameter, torch.Tensor | None] = {}
        for index in range(len(self.groups)):
            means |= self._mean(index)
        return means
