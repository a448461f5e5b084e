"""What algorithms have in common whose ranks keep parameters of their own and average those."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dear.buckets.flat_values import FlatValues
from dear.buckets.grouping import MIB, fuse, layers
from dear.errors import UserError
from dear.lazy import torch
from dear.training.engine import Engine, refuse_lbfgs, trained_parameters
from dear.training.grad_scaling import GradScaling

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
