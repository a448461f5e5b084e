"""Engines of algorithms, and the class that connects an engine to the user's optimizer.

`distribute` changes the class of the user's optimizer. Calls of the script then reach the engine of
the algorithm. The engine calls the optimizer's own step:

    script                 here                                engine
    optimizer.step() ----> Distributed.step -----------------> Engine.step(update)
                           update = the class's own step           waits for gradients
                           <------------------------------------- update()   now, or in parts
                                                                   before the next forward
    optimizer.zero_grad() -> Distributed.zero_grad -----------> Engine.forget()
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from inspect import getattr_static
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    NoReturn,
    SupportsIndex,
    TypeAlias,
    TypeGuard,
    TypeVar,
    cast,
)

from dear.buckets.agreement import agree, described, tables
from dear.comm import runtime
from dear.comm.communicator import Communicator
from dear.comm.flight import recorder
from dear.cost.foreign import Sender
from dear.errors import UserError
from dear.lazy import torch
from dear.options import Options
from dear.training.hooks import Hooks

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.optim.optimizer import StateDict

    OptimizerBase = torch.optim.Optimizer
else:
    OptimizerBase = object

OptionsT_co = TypeVar("OptionsT_co", bound=Options, covariant=True)
OtherT = TypeVar("OtherT", bound=Options)
Update = Callable[[], object]
"""An optimizer's own step, without a closure."""
Closure = Callable[[], float]
"""Forward and backward passes that an optimizer runs in its step; returns the loss (a float to
torch)."""
ClosureUpdate = Callable[[Closure | None], object]
"""An optimizer's own step, with or without a closure."""
TAKES_SCALE = "_step_supports_amp_scaling"
"""Attribute of an optimizer that unscales gradients, and skips steps, in place of a GradScaler."""


class Replica(Generic[OptionsT_co]):
    """One rank's model and optimizer, its communicator, and the options of the algorithm.

    Args:
        optimizer: updates the parameters; None: the owner of the engine updates them.
        refuse: raises `UserError` for what the algorithm cannot train.

    Raises:
        UserError: on all ranks, if one refuses or trains other parameters.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        communicator: Communicator,
        options: OptionsT_co,
        refuse: Callable[[Replica[OptionsT_co]], None] = lambda replica: None,
    ) -> None:
        self.model, self.communicator, self.options = model, communicator, options
        self.has_optimizer = optimizer is not None
        self._optimizer = optimizer
        try:
            self.params = _trained(model, optimizer)
            """Parameters that the optimizer updates and that need a gradient, in model order."""
            refuse(self)
        except UserError as error:
            tables(str(error), communicator)
            raise
        flight = recorder.current()
        if flight is not None:
            flight.parameters(model.named_parameters())
        chosen = set(self.params)
        named = (pair for pair in model.named_parameters() if pair[1] in chosen)
        agree(described(named), communicator)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        assert self._optimizer is not None, "the engine's owner updates the parameters"
        return self._optimizer

    def with_options(self, options: OtherT) -> Replica[OtherT]:
        """Returns the same replica with options of another algorithm."""
        other = cast(Replica[OtherT], copy.copy(self))
        other.options = options
        return other


class Engine(Generic[OptionsT_co]):
    """Actions of an algorithm when the training loop calls the optimizer.

    This base class is the engine of a world of one: the plain optimizer, without hooks.
    """

    pending: Collection[int] = ()
    """Units whose updates are still to be completed."""
    updating = False
    """True while updates run, which use the optimizer's state themselves."""

    def __init__(self, replica: Replica[OptionsT_co]) -> None:
        self.replica, self.options = replica, replica.options
        self.model, self.params = replica.model, replica.params
        self.communicator = replica.communicator
        self.no_scaler = replica.options.no_scaler if self.communicator.size > 1 else None
        """Reason why a GradScaler cannot be used; None: it can."""
        self.hooks = Hooks()
        runtime.at_end(self.settle)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.replica.optimizer

    def step(self, update: Update) -> object:
        """Averages gradients and calls `update`, the optimizer's own step, or defers it."""
        return update()

    def step_closure(self, update: ClosureUpdate, closure: Closure) -> object:
        """Makes a step for `step(closure)`; the closure runs the forward and backward passes."""
        return update(closure)

    def settle(self) -> None:
        """Completes pending updates, in engines whose `step` leaves some."""

    def forget(self) -> None:
        """Discards the record of the gradients, in engines that keep one."""

    def flush(self, update: Update) -> None:
        """Applies gradients that are kept for later steps, in engines that keep some."""

    def state_dict(self, plain: Callable[[], StateDict]) -> StateDict:
        """Returns the result of `plain`, the optimizer's own method, with complete state."""
        self.settle()
        kept = self.optimizer.state
        self.optimizer.state = defaultdict(dict, self.whole_state())
        try:
            return plain()
        finally:
            self.optimizer.state = kept

    def whole_state(self) -> Mapping[torch.Tensor, dict[str, object]]:
        """Returns the optimizer's state as in plain training, even if ranks keep parts of it."""
        return self.optimizer.state

    def check_state(self, state: StateDict) -> None:
        """Raises `UserError` before a state is loaded that `resume` could not restore."""

    def load_state_dict(self, plain: Callable[[], None]) -> None:
        """Loads a state with `plain`, the optimizer's own method."""
        self.settle()
        plain()

    def resume(self, state: StateDict) -> None:
        """Restores the entries of `state` that `state_dict` added to the optimizer's own."""

    def clip_grad_norm(
        self, params: Sequence[torch.nn.Parameter], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        """Clips the averaged gradients of `params`; returns their norm before clipping."""
        self.synchronize()
        return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type)

    def statistics(self) -> dict[str, object]:
        """Returns the algorithm's counts so far, by name; most algorithms count nothing."""
        return {}

    def findings(self) -> dict[str, object]:
        """Returns the algorithm's own measurements and choices by name; rank 0's values count.

        Values are JSON. Keys that end in `_s` are seconds of this machine. An emulation scales
        them, except for `wall_s`.
        """
        return {}

    def sender(self) -> Sender | None:
        """Returns the library that sends in place of the communicator, or None."""
        return None

    def groups(self) -> list[tuple[int, Sequence[torch.nn.Parameter]]]:
        """Returns the groups that travel together now, in the order in which they start.

        An entry has the bytes of the group and its parameters ([] if unknown). The list is empty if
        the engine sends nothing or leaves the grouping to a library.
        """
        return []

    def some_groups(self) -> frozenset[int] | None:
        """Returns the indices in `groups()` of the groups for which the algorithm declares
        transfers with `buckets="some"` (`dear.cost.overlap.Transfer`); None: unknown."""
        return None

    def synchronize(self) -> None:
        """Waits for all transfers; then parameters are up to date, and gradients averaged."""
        self.settle()

    def no_sync(self) -> AbstractContextManager[None]:
        """Returns a context in which backward passes accumulate gradients and send none."""
        return contextlib.nullcontext()

    def close(self) -> None:
        """Synchronizes, and removes the algorithm from model and optimizer."""
        runtime.forget(self)
        self.synchronize()
        self.hooks.remove()


AnyEngine: TypeAlias = "Engine[Options]"


def step_after_closure(engine: AnyEngine, update: ClosureUpdate, closure: Closure) -> object:
    """Runs the closure and then a step; `step_closure` of engines that need whole backward passes.

    Optimizers other than LBFGS call the closure once, before they update.
    """
    with torch.enable_grad():
        loss = closure()
    engine.step(lambda: update(None))
    return loss


def refuse_copy(whole: object, protocol: SupportsIndex) -> NoReturn:
    """Raises `UserError`; `__reduce_ex__` of classes whose objects hold an engine."""
    raise UserError(
        f"{type(whole).__name__} communicates, so it cannot be copied or saved as a whole, nor can "
        "an object that holds it (e.g. a scheduler); copy or save its state_dict()"
    )


class Distributed(OptimizerBase):
    """Base class that `distribute` adds to the optimizer's class; passes calls to the engine."""

    _engine: Engine[Options]
    _managed: set[torch.nn.Parameter]
    """Parameters that were trainable when the optimizer was distributed."""
    _local: contextlib.ExitStack | None = None
    before_engine: Hooks | None = None
    """Hooks that were registered before the engine's own, such as those that clip each gradient."""
    former_findings: Mapping[str, object] = {}
    """Findings of an engine that another one has replaced."""
    _scaling: GradScaling | None = None
    """Support by which a GradScaler is noticed, in order to refuse it; None: it is not refused."""

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """State of the parameters after the last step, as far as this rank has it."""
        engine = self._engine
        if engine.pending and not engine.updating:
            engine.settle()
        known: defaultdict[torch.Tensor, Any] = vars(self)["state"]
        return known

    @state.setter
    def state(self, value: defaultdict[torch.Tensor, object]) -> None:
        _ = self.state  # completes updates, which would change the new state
        vars(self)["state"] = value

    def step(self, closure: Closure | None = None) -> object:  # type: ignore[override]  # no overloads
        _check_all_managed(self)
        if self._engine.no_scaler is not None and scaled(self):
            raise UserError(self._engine.no_scaler)
        if closure is None:
            return self._engine.step(super().step)
        return self._engine.step_closure(super().step, closure)

    # Without this mark, Optimizer.load_state_dict wraps the class's step to run step hooks, which
    # the plain step already runs.
    vars(step)["hooked"] = True

    def synchronize(self) -> None:
        """Waits for all communication; then parameters are up to date, and gradients averaged.

        Call it between `backward()` and `step()` before you read or change gradients (clipping,
        GradScaler). Also call it before you read parameters through other tensors that share their
        memory, e.g. a `p.data` taken earlier.
        """
        self._engine.synchronize()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clips the averaged gradients of all parameters, between `backward()` and `step()`.

        Has the same result as `synchronize()` and `torch.nn.utils.clip_grad_norm_`. Some algorithms
        communicate less for it.

        Args:
            max_norm: largest norm of all gradients together.
            norm_type: the p of the norm; may be `inf`.

        Returns:
            The norm before clipping, on all ranks.
        """
        return self._engine.clip_grad_norm(held(self), max_norm, norm_type)

    def statistics(self) -> dict[str, object]:
        """Returns the algorithm's counts on this rank so far, by name (JSON); may be empty."""
        return self._engine.statistics()

    def findings(self) -> dict[str, object]:
        """Returns the algorithm's own measurements and choices; rank 0's values count."""
        return {**self.former_findings, **self._engine.findings()}

    def sender(self) -> Sender | None:
        """Returns the library that sends in place of the communicator, or None."""
        return self._engine.sender()

    def groups(self) -> list[tuple[int, Sequence[torch.nn.Parameter]]]:
        """Returns bytes and parameters of the groups that travel together, in order of start."""
        return self._engine.groups()

    def some_groups(self) -> frozenset[int] | None:
        """Returns the indices in `groups()` of groups with additional transfers; None: unknown."""
        return self._engine.some_groups()

    def no_sync(self) -> AbstractContextManager[None]:
        """Returns a context for gradient accumulation: backward passes send no gradients."""
        return self._engine.no_sync()

    @property
    def local(self) -> bool:
        """True while backward passes send no gradients, as within `no_sync()`.

        MG-WFBP's scripts set it to True to accumulate gradients, and to False before the last pass.
        """
        return self._local is not None

    @local.setter
    def local(self, value: bool) -> None:
        if value and self._local is None:
            self._local = contextlib.ExitStack()
            self._local.enter_context(self._engine.no_sync())
        elif not value and self._local is not None:
            self._local.close()
            self._local = None

    def flush(self) -> None:
        """Applies the gradients that a delayed algorithm keeps for later steps.

        Call it at the end of training. Other algorithms keep none, so it does nothing there.
        """
        self._engine.flush(super().step)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._engine.forget()
        super().zero_grad(set_to_none)

    __reduce_ex__ = refuse_copy

    def close(self) -> None:
        """Flushes and removes the algorithm; the optimizer is then plain again."""
        self.flush()
        scaling = vars(self).pop("_scaling", None)
        if scaling is not None:  # the engine may have declared something else before
            scaling.close()
        self._engine.close()
        vars(self).pop("former_findings", None)
        before = vars(self).pop("before_engine", None)
        if before is not None:
            before.remove()
        del self._engine, self._managed
        _change_class(self, type(self).__mro__[2])

    def state_dict(self) -> StateDict:
        return self._engine.state_dict(super().state_dict)

    def load_state_dict(self, state_dict: StateDict) -> None:
        plain = super().load_state_dict
        self._engine.check_state(state_dict)
        self._engine.load_state_dict(lambda: plain(state_dict))
        self._engine.resume(state_dict)

    def add_param_group(self, param_group: dict[str, object]) -> NoReturn:
        raise UserError(
            "a distributed optimizer accepts no new parameter groups: close() it, add the group, "
            "and wrap it again"
        )


def distribute(optimizer: torch.optim.Optimizer, engine: AnyEngine) -> Distributed:
    """Connects `engine` to `optimizer`; returns the same optimizer object.

    Schedulers, scalers and loggers that hold the object continue to work. Its class becomes a
    subclass of the optimizer's own class.
    """
    plain = type(optimizer)
    name = f"Distributed{plain.__name__}"
    members: dict[str, object] = {"__doc__": plain.__doc__, "step": _untraced_step()}
    if (usual := getattr_static(plain, "state", None)) is not None:
        members["state"] = usual  # e.g. a property that returns the state of an inner optimizer
    _change_class(optimizer, type(name, (Distributed, plain), members))
    assert isinstance(optimizer, Distributed), "its class was changed"
    optimizer._engine = engine
    optimizer._managed = set(_trainable(optimizer))
    if engine.no_scaler is not None:
        # Otherwise the scaler would unscale gradients itself, and not tell the optimizer.
        optimizer._scaling = GradScaling(optimizer)
    engine.hooks.after_load(engine.model, _refuse_replaced)
    return optimizer


@cache
def _untraced_step() -> Callable[..., object]:
    """Returns `Distributed.step`, which `torch.compile(optimizer.step)` runs but does not trace."""
    step = torch.compiler.disable(Distributed.step)
    vars(step)["hooked"] = True
    return cast(Callable[..., object], step)


def _refuse_replaced() -> NoReturn:
    raise UserError(
        "load_state_dict(assign=True) has replaced parameters that the optimizer trains; load with "
        "assign=False, or load before you make the optimizer"
    )


class GradScaling:
    """Support of `scaler.step(optimizer)` by a GradScaler.

    A GradScaler unscales gradients in place without raising their version counters. Each rank
    checks whether its gradients are finite. Both must happen after averaging, or ranks would skip
    different steps. Therefore the optimizer declares that it supports a scale. The scaler then
    always calls the optimizer and sets its attributes `grad_scale` (the scale) and `found_inf` (the
    result of the check).
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._takes_scale = getattr(optimizer, TAKES_SCALE, False)
        vars(optimizer)[TAKES_SCALE] = True

    def refuse(self) -> None:
        """Raises `UserError` if a scaler calls before gradients are averaged."""
        if scaled(self._optimizer):
            self.refuse_early_unscaling()

    def refuse_early_unscaling(self) -> None:
        """Raises `UserError`: a scaler has unscaled this rank's own gradients, not the averages."""
        raise UserError(
            "gradients must be averaged before a GradScaler unscales them: call "
            "optimizer.synchronize() before scaler.unscale_(optimizer) or scaler.step(optimizer)"
        )

    def step(self, update: Update) -> object:
        """Unscales averaged gradients if the scaler asks for this; then updates, or skips."""
        if not scaled(self._optimizer) or self._takes_scale:
            return update()
        attributes = vars(self._optimizer)
        asked = {key: attributes[key] for key in ("found_inf", "grad_scale")}
        if asked["found_inf"].item():
            return None
        if asked["grad_scale"] is not None:
            for param in held(self._optimizer):
                if param.grad is not None:
                    param.grad.div_(asked["grad_scale"])
        attributes.update(dict.fromkeys(asked))  # done; the optimizer cannot take them
        try:
            return update()
        finally:
            attributes.update(asked)

    def close(self) -> None:
        """Restores what the optimizer declared before."""
        vars(self._optimizer)[TAKES_SCALE] = self._takes_scale


def scaled(optimizer: torch.optim.Optimizer) -> bool:
    """Returns True if a GradScaler is calling the optimizer."""
    return hasattr(optimizer, "found_inf")


def _change_class(optimizer: torch.optim.Optimizer, to: type) -> None:
    optimizer.__class__ = to
    attributes = vars(optimizer)
    if "step" not in attributes:
        return
    # An LR scheduler has put a wrapper of the former class's step into the instance. The scheduler
    # expects its mark on the wrapper, and a flag that the optimizer has made a step.
    marked = hasattr(attributes.pop("step"), "_wrapped_by_lr_sched")

    def step(*args: Any, **kwargs: Any) -> object:
        attributes["_opt_called"] = True
        return type(optimizer).step(optimizer, *args, **kwargs)

    vars(step)["_wrapped_by_lr_sched"] = marked
    attributes["step"] = step


def _trained(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None
) -> list[torch.nn.Parameter]:
    if any(torch.nn.parameter.is_lazy(param) for param in model.parameters()):
        raise UserError(
            "a lazy layer of the model has no parameters yet; run one forward pass before you make "
            "the optimizer"
        )
    if optimizer is None:
        return [param for param in model.parameters() if param.requires_grad]
    if isinstance(optimizer, Distributed):
        raise UserError("this optimizer is already distributed; close() it first")
    _refuse_own_step(optimizer)
    wanted = set(_trainable(optimizer))
    params = [param for param in model.parameters() if param in wanted]
    if len(params) != len(wanted):
        if any(map(in_parts, model.parameters())):
            raise UserError(
                "the model is sharded already (fsdp); give one optimizer all parameters of a model"
            )
        raise UserError(
            f"{len(wanted) - len(params)} of the optimizer's parameters are not in the model; "
            "give the model whose parameters the optimizer was made with"
        )
    if not params:
        raise UserError("nothing to train: no parameter of the optimizer requires a gradient")
    return params


def _refuse_own_step(optimizer: torch.optim.Optimizer) -> None:
    """Raises `UserError` if the script has replaced the optimizer's step, which would be lost."""
    step = vars(optimizer).get("step")
    if step is None:
        return
    # A scheduler's wrapper of the class's step, or that of an optimizer that was closed.
    usual = hasattr(step, "_wrapped_by_lr_sched")
    wrapped = getattr(step, "__wrapped__", None)
    kinds = type(optimizer).__mro__
    if usual and (wrapped is None or any(vars(kind).get("step") is wrapped for kind in kinds)):
        return
    raise UserError(
        "the script has replaced step() of this optimizer object, and distributing it would drop "
        "the replacement; replace step() afterwards, or override it in a subclass of the optimizer"
    )


def in_parts(value: object) -> TypeGuard[DTensor]:
    """Returns True for a sharded tensor, of which each rank has a part."""
    # torch takes a second to import DTensor. A script that has not imported it has no such tensor.
    sharded = sys.modules.get("torch.distributed.tensor")
    return sharded is not None and isinstance(value, sharded.DTensor)


def refuse_lbfgs(optimizer: torch.optim.Optimizer, what: str) -> None:
    """Raises `UserError` for LBFGS; `what` names the algorithm, which does not support it."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UserError(
            f"{what} cannot train with LBFGS, since a step of LBFGS runs several backward passes; "
            "use algorithm='allreduce'"
        )


def grouped(
    groups: Iterable[Sequence[torch.nn.Parameter]],
) -> list[tuple[int, Sequence[torch.nn.Parameter]]]:
    """Returns (bytes, parameters) of each group, as `Engine.groups` does."""
    return [(sum(param.nbytes for param in params), params) for params in groups]


def held(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """Returns all parameters of the optimizer, in the order of its groups."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def _trainable(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [param for param in held(optimizer) if param.requires_grad]


def _check_all_managed(optimizer: Distributed) -> None:
    for param in held(optimizer):
        if param.grad is not None and param not in optimizer._managed:
            raise UserError(
                f"a parameter of shape {tuple(param.shape)} was frozen when the optimizer was "
                "distributed, but has a gradient now; close() the optimizer and wrap it again"
            )
