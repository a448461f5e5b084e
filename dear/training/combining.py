"""Decentralized SGD: a step with the own gradient and a round of averaging, in either order."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dear.buckets.flat_values import FlatValues
from dear.buckets.grouping import MIB, fuse, layers
from dear.comm.mixers import Mixer
from dear.comm.neighbors import Pending
from dear.errors import UserError
from dear.lazy import torch
from dear.training.engine import Engine, refuse_lbfgs, trained_parameters
from dear.training.grad_scaling import GradScaling
from dear.training.readers import ReaderMap

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer

    from dear.comm.communicator import Communicator

STATE_KEY = "replica"
"""Where an optimizer's state dict keeps what the engine needs besides to go on."""


class ReplicaEngine(Engine):
    """Each rank steps with its own gradient; parameters are exchanged as flat buffers.

    The optimizer's state dict holds the number of steps (which decides whose turn it is in a
    topology that changes) and what `saved` adds; ranks differ, so each saves its own. A plain
    optimizer's state dict can be loaded too; then counting starts again.

    Args:
        bucket_mb: parameters travel in buffers of about so many MiB.

    Raises:
        UserError: the optimizer is LBFGS, or nothing is to be trained.
    """

    def __init__(
        self, model: Module, optimizer: Optimizer, communicator: Communicator, bucket_mb: float
    ) -> None:
        params = trained_parameters(model, optimizer)
        refuse_lbfgs(optimizer, "averaging parameters step by step")
        super().__init__(model, communicator)
        self.optimizer: Any = optimizer
        groups = fuse(layers(model, params), bucket_mb * MIB)
        self.flats = [FlatValues(group, communicator) for group in groups]
        self.groups = groups
        self.steps = 0
        """Steps taken so far."""
        self.scaling = GradScaling(optimizer)
        self._optimizer_hooks = [
            optimizer.register_state_dict_post_hook(self._save),
            optimizer.register_load_state_dict_pre_hook(self._load),
        ]

    step_closure = Engine.step_after_closure

    def synchronize(self) -> None:
        self.settle()

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()  # backward passes communicate nothing anyway

    def saved(self) -> dict[str, Any]:
        """What must be kept to go on identically, besides parameters and optimizer state."""
        return {"steps": self.steps}

    def restore(self, saved: dict[str, Any] | None) -> None:
        """Goes on from what `saved` returned; None: from the parameters alone."""
        self.steps = 0 if saved is None else saved["steps"]

    def refuse_scaler(self) -> None:
        """Raises `UserError` if a GradScaler is calling; for engines that sum gradients up."""
        if hasattr(self.optimizer, "found_inf"):
            raise UserError(
                "this algorithm keeps sums of gradients, which a GradScaler that skips steps of "
                "single ranks would break; train in bfloat16 or float32 without a scaler"
            )

    @abstractmethod
    def release(self) -> None:
        """Lets go of what communicates."""

    def close(self) -> None:
        super().close()
        for handle in self._optimizer_hooks:
            handle.remove()
        self.scaling.close()
        self.release()
        for flat in self.flats:
            flat.release()

    def before_training_forward(self, call: Callable[[], None]) -> None:
        """`call()` whenever the whole model is about to run in a training step."""

        def before(module: Module) -> None:
            if module.training and torch.is_grad_enabled():
                call()

        self.hooks.before_forward([self.model], before)

    def _save(self, optimizer: Any, state_dict: dict[str, Any]) -> None:
        state_dict[STATE_KEY] = self.saved()

    def _load(self, optimizer: Any, state_dict: dict[str, Any]) -> None:
        self.restore(state_dict.pop(STATE_KEY, None))


def versions(flats: list[FlatValues]) -> list[int]:
    """Of all parameters; in-place changes raise them."""
    return [param._version for flat in flats for param in flat.params]


def refuse_changed_values(flats: list[FlatValues], noted: list[int]) -> None:
    """Raises `UserError` if a parameter has changed since its versions were `noted`."""
    if versions(flats) != noted:
        raise UserError(
            "parameters were changed between a training forward and step(), while they were being "
            "sent to the neighbours; load or change them after step()"
        )


class MixingEngine(ReplicaEngine):
    """Base of the engines whose averaging is a mixer's.

    Args:
        every: only each so many steps averages, the last of them; the others are local.
    """

    def __init__(
        self,
        model: Module,
        optimizer: Optimizer,
        communicator: Communicator,
        mixer: Mixer,
        *,
        bucket_mb: float,
        every: int = 1,
    ) -> None:
        super().__init__(model, optimizer, communicator, bucket_mb)
        self.mixer = mixer
        self.every = every

    def release(self) -> None:
        self.mixer.close()


class AwcEngine(MixingEngine):
    """Adapt with combine: `x <- average(x) - update(gradient at x)`.

    The exchange starts when the model is about to run and is awaited in `step()`, so both passes
    hide it.
    """

    def __init__(self, model: Module, *args: Any, **options: Any) -> None:
        super().__init__(model, *args, **options)
        self._pending: list[Pending] = []
        self._noted: list[int] = []
        self.before_training_forward(self._start)

    def step(self, update: Callable[[], Any]) -> Any:
        self._start()
        if self._pending:
            refuse_changed_values(self.flats, self._noted)
        pending, self._pending = self._pending, []
        for flat, exchange in zip(self.flats, pending, strict=False):
            exchange.finish(flat.values)
            flat.touched()
        self.steps += 1
        return self.scaling.step(update)

    def settle(self) -> None:
        for exchange in self._pending:
            exchange.wait()

    def _start(self) -> None:
        if self._pending or self.steps % self.every != self.every - 1:
            return
        for flat in self.flats:
            flat.reclaim()
        self._noted = versions(self.flats)
        self._pending = [
            self.mixer.start(flat.values, self.steps // self.every) for flat in self.flats
        ]


class AtcEngine(MixingEngine):
    """Adapt, then combine: `x <- average(x - update(gradient at x))`.

    The exchange starts in `step()`, after the update. A module that is about to run waits for the
    parameters that it reads; everything else that reads parameters waits for all.
    """

    def __init__(self, model: Module, *args: Any, **options: Any) -> None:
        super().__init__(model, *args, **options)
        self._pending: dict[int, Pending] = {}
        self._readers = ReaderMap(model, [param for group in self.groups for param in group])
        self._readers.set_groups(self.groups)
        self.hooks.before_forward(model.modules(), self._before_forward)
        self.hooks.before_state_dict(model, self.settle)

    def step(self, update: Callable[[], Any]) -> Any:
        self.settle()
        self._readers.freeze()
        for flat in self.flats:
            flat.reclaim()
        result = self.adapt(update)
        self.steps += 1
        if self.steps % self.every == 0:
            turn = self.steps // self.every - 1
            for index in range(len(self.flats)):
                self._pending[index] = self.mixer.start(self.message(index), turn)
            for index in self._readers.unread() & set(self._pending):
                self._finish(index)
        return result

    def adapt(self, update: Callable[[], Any]) -> Any:
        """The local part of the step; `update` is the optimizer's own."""
        return self.scaling.step(update)

    def message(self, index: int) -> torch.Tensor:
        """The flat buffer that is exchanged and averaged for a group of parameters."""
        return self.flats[index].values

    def arrived(self, index: int) -> None:
        """A group's message is what the round says; makes the parameters so."""

    def settle(self) -> None:
        for index in sorted(self._pending):
            self._finish(index)

    def close(self) -> None:
        super().close()
        self._readers.freeze()

    def _before_forward(self, module: Module) -> None:
        self._readers.called(module)
        if not self._pending:
            return
        if not (self.model.training and torch.is_grad_enabled()):
            # An evaluation may read parameters where training never does.
            self.settle()
        else:
            for index in sorted(self._readers.groups_of(module) & set(self._pending)):
                self._finish(index)

    def _finish(self, index: int) -> None:
        # State must outlive an evaluation that settles.
        with torch.inference_mode(False), torch.no_grad():
            self._pending.pop(index).finish(self.message(index))
            self.arrived(index)
        self.flats[index].touched()
