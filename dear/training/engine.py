"""Between an optimizer and its caller: where an algorithm's engine hooks into the training loop.

`distribute` changes the class of the user's optimizer, so what the script calls comes by here, goes
to the engine of the algorithm, and turns back into the optimizer's own step:

    script                 here                                engine
    optimizer.step() ----> _Distributed.step ----------------> Engine.step(update)
                           update = the class's own step           waits for gradients
                           <------------------------------------- update()   now, or a part of it
                                                                   later, when a forward needs it
    optimizer.zero_grad() -> _Distributed.zero_grad ----------> Engine.forget()
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from dear.comm.communicator import Communicator
from dear.cost.foreign import Sender
from dear.errors import UserError
from dear.lazy import torch
from dear.training.hooks import Hooks


@dataclass
class Replica:
    """What one rank trains, and its way to the others."""

    model: torch.nn.Module
    optimizer: Any
    """None: the owner of the engine updates."""
    communicator: Communicator
    options: Any
    """Of the algorithm."""
    params: list[torch.nn.Parameter] = field(init=False)
    """Those that the optimizer updates and that need a gradient, in the model's order."""

    def __post_init__(self) -> None:
        self.params = _trained(self.model, self.optimizer)


class Engine:
    """What an algorithm does at the moments when the training loop touches its optimizer.

    As it stands it is the engine of a world of one: the plain optimizer, without hooks.
    """

    def __init__(self, replica: Replica) -> None:
        self.model, self.params = replica.model, replica.params
        self.optimizer, self.options = replica.optimizer, replica.options
        self.communicator = replica.communicator
        self.hooks = Hooks()

    @property
    def held(self) -> list[torch.nn.Parameter]:
        """All parameters of the optimizer, in the order of its groups."""
        return _held(self.optimizer)

    def step(self, update: Callable[[], Any]) -> Any:
        """Brings gradients together and calls `update`, the optimizer's own step, or defers it."""
        return update()

    def step_closure(self, update: Callable[[Callable[[], Any]], Any], closure: Any) -> Any:
        """The same for `step(closure)`, where the optimizer itself calls for backward passes."""
        return update(closure)

    def settle(self) -> None:
        """Makes the parameters current; for engines whose `step` does not."""
        return

    def forget(self) -> None:
        """The gradients so far have been discarded; for engines that keep account of them."""
        return

    def flush(self, update: Callable[[], Any]) -> None:
        """Applies gradients that are held back for later steps; for engines that hold any back."""
        return

    def state_dict(self, plain: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What `plain`, the optimizer's own, returns when its state is whole and current."""
        self.settle()
        kept = self.optimizer.state
        self.optimizer.state = self.whole_state()
        try:
            return plain()
        finally:
            self.optimizer.state = kept

    def whole_state(self) -> dict[torch.nn.Parameter, Any]:
        """The optimizer's state as plain training would have it, where ranks keep parts of it."""
        return self.optimizer.state

    def load_state_dict(self, plain: Callable[[], None]) -> None:
        """Lets `plain`, the optimizer's own, take in a state."""
        self.settle()
        plain()

    def resume(self, state: dict[str, Any]) -> None:
        """Takes up what `state_dict` has put into `state` beside the optimizer's own."""
        return

    def clip_grad_norm(
        self, params: Sequence[torch.nn.Parameter], max_norm: float, norm_type: float
    ) -> Any:
        """Clips the averaged gradients of `params`; returns their norm before."""
        self.synchronize()
        return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type)

    def statistics(self) -> dict[str, Any]:
        """What the algorithm has counted so far, by name; most count nothing."""
        return {}

    def findings(self) -> dict[str, Any]:
        """What the algorithm has measured and decided by itself, by name; rank 0's word holds.

        JSON values. Keys that end in `_s` are seconds of this machine; `wall_s` stays so where
        time is scaled.
        """
        return {}

    def sender(self) -> Sender | None:
        """What sends in place of the communicator, where its costs are not the communicator's."""
        return None

    def groups(self) -> list[tuple[int, Sequence[torch.nn.Parameter]]]:
        """What travels together at present, in the order in which it is started.

        Bytes of each group and its parameters (none where they are not known); nothing of engines
        that leave it to a library, or send nothing.
        """
        return []

    def some_groups(self) -> frozenset[int] | None:
        """Places in `groups()` of the groups whose transfers include those that the algorithm
        states with `buckets="some"` (`dear.cost.overlap.Transfer`); None: the engine does not
        tell."""
        return None

    def synchronize(self) -> None:
        """Leaves nothing in flight: parameters current, gradients averaged."""
        self.settle()

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside it only accumulate, as they do where they communicate nothing."""
        return contextlib.nullcontext()

    def close(self) -> None:
        """Synchronizes and takes the algorithm out of model and optimizer."""
        self.synchronize()
        self.hooks.remove()


def step_after_closure(
    engine: Engine, update: Callable[[Callable[[], Any] | None], Any], closure: Callable[[], Any]
) -> Any:
    """Runs the closure before the step: `step_closure` of engines that need whole backward passes.

    Optimizers other than LBFGS call the closure once, before they update.
    """
    with torch.enable_grad():
        loss = closure()
    engine.step(lambda: update(None))
    return loss


class _Distributed:
    """Mixed into the class of the user's optimizer; see `distribute`."""

    _engine: Engine
    _managed: set[torch.nn.Parameter]
    """Trainable parameters at the time of wrapping: those that the engine communicates."""
    _local: contextlib.ExitStack | None = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        _check_all_managed(self)
        if closure is None:
            return self._engine.step(super().step)
        return self._engine.step_closure(super().step, closure)

    # Optimizer.load_state_dict wraps the class's step to run step hooks unless it finds this mark;
    # the plain step, which is called from here, runs them already.
    step.hooked = True

    def synchronize(self) -> None:
        """Ends all communication: afterwards parameters are current and gradients are averages.

        Call it between `backward()` and `step()` to read or change gradients (clipping, GradScaler)
        and before reading parameters other than through a forward or a state dict.
        """
        self._engine.synchronize()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Between `backward()` and `step()`: scales the averaged gradients of all parameters.

        The same as `synchronize()` and `torch.nn.utils.clip_grad_norm_`; some algorithms need less
        communication for it.

        Args:
            max_norm: the largest norm that all gradients together may have.
            norm_type: the p of the norm; may be `inf`.

        Returns:
            The norm before, on all ranks.
        """
        return self._engine.clip_grad_norm(_held(self), max_norm, norm_type)

    def statistics(self) -> dict[str, Any]:
        """What the algorithm has counted so far on this rank, by name (JSON); `{}` if nothing."""
        return self._engine.statistics()

    def findings(self) -> dict[str, Any]:
        """What the algorithm has measured and decided by itself; rank 0's word holds."""
        return self._engine.findings()

    def sender(self) -> Sender | None:
        """The engine of a library's own that sends in place of the communicator; for measuring."""
        return self._engine.sender()

    def groups(self) -> list[tuple[int, Sequence[torch.nn.Parameter]]]:
        """What travels together at present: bytes and parameters, as they are started."""
        return self._engine.groups()

    def some_groups(self) -> frozenset[int] | None:
        """Places in `groups()` of those with transfers that others lack; None: it is not told."""
        return self._engine.some_groups()

    def no_sync(self) -> AbstractContextManager[None]:
        """Gradient accumulation: backward passes inside communicate nothing."""
        return self._engine.no_sync()

    @property
    def local(self) -> bool:
        """Set to True, backward passes communicate nothing, as within `no_sync()`; MG-WFBP's way of
        accumulation. False again before the last one."""
        return self._local is not None

    @local.setter
    def local(self, value: bool) -> None:
        if value == self.local:
            return
        if value:
            self._local = contextlib.ExitStack()
            self._local.enter_context(self._engine.no_sync())
        else:
            left, self._local = self._local, None
            left.close()

    def flush(self) -> None:
        """Applies the gradients of steps that a delayed algorithm has not applied yet.

        At the end of training, so that no gradient is lost; with other algorithms it does nothing.
        """
        self._engine.flush(super().step)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._engine.forget()
        super().zero_grad(set_to_none)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise UserError("a distributed optimizer cannot be copied; copy its state_dict()")

    def close(self) -> None:
        """Flushes and takes the algorithm out again; the optimizer is the plain one it was."""
        self.flush()
        self._engine.close()
        del self._engine, self._managed
        _change_class(self, type(self).__mro__[2])

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        plain = super().state_dict
        return self._engine.state_dict(lambda: plain(*args, **kwargs))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        plain = super().load_state_dict
        self._engine.load_state_dict(lambda: plain(state_dict))
        self._engine.resume(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise UserError(
            "a distributed optimizer takes no further parameter groups: close() it, add the group, "
            "and wrap it again"
        )


def distribute(optimizer: torch.optim.Optimizer, engine: Engine) -> torch.optim.Optimizer:
    """Puts `engine` between `optimizer` and its caller and returns the same object.

    Identity is kept, so that schedulers, scalers and loggers made before keep working. The class
    becomes a subclass of the optimizer's own.
    """
    plain = type(optimizer)
    name = f"Distributed{plain.__name__}"
    _change_class(optimizer, type(name, (_Distributed, plain), {"__doc__": plain.__doc__}))
    optimizer._engine = engine
    optimizer._managed = set(_trainable(optimizer))
    return optimizer


class GradScaling:
    """Lets an engine see that `scaler.step(optimizer)` is calling, and with what.

    A GradScaler unscales gradients in place (without a trace in their version counters) and judges
    on each rank whether they are finite. Both must happen to averaged gradients, or ranks would
    skip different steps. An optimizer that says it can take a scale is called in any case and told
    the scale and the judgement, in its attributes `grad_scale` and `found_inf`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer: Any = optimizer
        self._takes_scale = getattr(optimizer, "_step_supports_amp_scaling", False)
        optimizer._step_supports_amp_scaling = True

    def refuse(self) -> None:
        """Raises `UserError` if a scaler is calling; for gradients that are not averaged yet."""
        if hasattr(self._optimizer, "found_inf"):
            self.refuse_early_unscaling()

    def refuse_early_unscaling(self) -> None:
        """Raises `UserError`: this rank's own gradients were unscaled instead of the averages."""
        raise UserError(
            "call optimizer.synchronize() before scaler.unscale_(optimizer) or "
            "scaler.step(optimizer): all ranks must judge the same averaged gradient"
        )

    def step(self, update: Callable[[], Any]) -> Any:
        """Does what the scaler asks for with averaged gradients: unscale, then update or skip."""
        optimizer = self._optimizer
        if not hasattr(optimizer, "found_inf") or self._takes_scale:
            return update()
        if optimizer.found_inf.item():
            return None
        asked = optimizer.found_inf, optimizer.grad_scale
        if optimizer.grad_scale is not None:
            for param in _held(optimizer):
                if param.grad is not None:
                    param.grad.div_(optimizer.grad_scale)
        optimizer.found_inf = optimizer.grad_scale = None  # done; the optimizer cannot take them
        try:
            return update()
        finally:
            optimizer.found_inf, optimizer.grad_scale = asked

    def close(self) -> None:
        """Lets the optimizer say again what it said."""
        self._optimizer._step_supports_amp_scaling = self._takes_scale


def _change_class(optimizer: Any, to: type) -> None:
    optimizer.__class__ = to
    if "step" not in optimizer.__dict__:
        return
    # An LR scheduler has put a wrapper of the former class's step into the instance. It looks for
    # its own mark there, and for a note that the optimizer has stepped.
    marked = hasattr(optimizer.__dict__.pop("step"), "_wrapped_by_lr_sched")

    def step(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True
        return type(optimizer).step(optimizer, *args, **kwargs)

    step._wrapped_by_lr_sched = marked
    optimizer.step = step


def _trained(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None
) -> list[torch.nn.Parameter]:
    if optimizer is None:
        return [param for param in model.parameters() if param.requires_grad]
    if isinstance(optimizer, _Distributed):
        raise UserError("this optimizer is distributed already; close() it first")
    wanted = set(_trainable(optimizer))
    params = [param for param in model.parameters() if param in wanted]
    if len(params) != len(wanted):
        raise UserError(
            f"{len(wanted) - len(params)} of the optimizer's parameters are not in the model; "
            "pass the model whose parameters the optimizer was made with"
        )
    if not params:
        raise UserError("nothing to train: no parameter of the optimizer requires a gradient")
    return params


def refuse_lbfgs(optimizer: torch.optim.Optimizer, what: str) -> None:
    """Raises `UserError` if `optimizer` is LBFGS, which `what` (an algorithm) cannot train with."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UserError(
            f"{what} cannot train with LBFGS, whose step runs several backward passes of its own; "
            "use algorithm='allreduce'"
        )


def grouped(
    groups: Iterable[Sequence[torch.nn.Parameter]],
) -> list[tuple[int, Sequence[torch.nn.Parameter]]]:
    """For `Engine.groups`: with the bytes of each."""
    return [(sum(param.nbytes for param in params), params) for params in groups]


def _held(optimizer: Any) -> list[torch.nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _trainable(optimizer: Any) -> list[torch.nn.Parameter]:
    return [param for param in _held(optimizer) if param.requires_grad]


def _check_all_managed(optimizer: Any) -> None:
    for param in _held(optimizer):
        if param.grad is not None and param not in optimizer._managed:
            raise UserError(
                f"a parameter of shape {tuple(param.shape)} was frozen when the optimizer was "
                "distributed and has a gradient now; close() and wrap again after unfreezing"
            )
