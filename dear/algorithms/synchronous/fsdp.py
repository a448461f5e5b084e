"""PyTorch's fully sharded data parallelism."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, NoReturn, SupportsIndex, TypeGuard, TypeVar, cast

from dear.algorithms.synchronous.wfbp import AveragingEngine
from dear.buckets.compressors import HalfOptions
from dear.buckets.grouping import MIB
from dear.buckets.updates import element_wise
from dear.comm.backends import mismatch_errors
from dear.cost.overlap import Overlap, Transfer
from dear.errors import UserError
from dear.lazy import torch
from dear.options import at_least
from dear.training.algorithm import Algorithm, Capabilities
from dear.training.engine import Replica, Update, held, step_after_closure
from dear.training.gradients import in_parts
from dear.training.inflight import InFlight, Mixin, as_plain

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.optim.optimizer import StateDict

    Place = tuple[torch.nn.Module, str, torch.nn.Parameter]
    """Module, name and parameter of a registration."""

T = TypeVar("T")


class Fsdp(Algorithm["Fsdp.Options"]):
    """PyTorch FSDP2 (`fully_shard`; Zhao et al., VLDB 2023, arXiv 2304.11277): ZeRO-2 and ZeRO-3.

    Each rank holds 1/P of parameters, gradients and optimizer state. Each layer of a ModuleList or
    Sequential is gathered before it runs. Its gradients are reduce-scattered when all of them have
    arrived. Parameters that cannot be cut (scalars, rarer types, not contiguous ones) are averaged
    as by `wfbp`. All ranks must use the same parameters in every pass.
    Invariant: after `backward()` returns, each sharded parameter (a DTensor) has this rank's part
    of the mean gradient. `state_dict()` of model and optimizer is whole, and a collective call.
    After `synchronize()` without a backward pass the model has whole, plain parameters.
    Bytes move: parameters before a layer's forward (and, stage 3, backward), gradients after its
    backward pass.
    Cost per step and rank: per layer one all-gather (stage 3: two) and one reduce-scatter, each
    (P-1)/P of its bytes.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(HalfOptions):
        """Stage of ZeRO, dtype in which gradients are sent, and layers that are sharded alone."""

        stage: Literal[2, 3] = 3
        """Stage of ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054): 3 frees whole parameters after
        the forward pass and gathers them again; 2 keeps them until the backward pass has used
        them."""
        min_mb: float = 1.0
        """Smallest layer of a ModuleList or Sequential that is sharded and sent alone, in MB of
        2^20 bytes; the rest of the model is sharded and sent together."""

        def __post_init__(self) -> None:
            at_least("fsdp option 'min_mb'", self.min_mb, 0)

        def narrowed(self, gradient: torch.Tensor, size: int) -> torch.Tensor:
            """Returns the gradient in the `wire` dtype, undivided: torch divides after rounding."""
            return gradient.to(self.wire) / size

    capabilities = Capabilities(consistency="synchronous")
    bound = "sharded"
    candidates = ({"stage": 2},)

    @classmethod
    def overlap_of(cls, options: Options) -> Overlap:
        # The order is the host's: on a GPU streams wait, and the host runs ahead of them.
        # Parameters outside the layers of lists are not gathered twice.
        gathered = Transfer(kind="gather", carries=("parameters",), starts="layer", awaited="layer")
        again = dataclasses.replace(gathered, starts="ahead", awaited="ahead", buckets="some")
        scattered = Transfer(kind="reduce", starts="gradient", awaited="gradient")
        return Overlap(transfers=(gathered, *[again] * (options.stage == 3), scattered))

    def refuse(self, replica: Replica[Options]) -> None:
        optimizer = replica.optimizer
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UserError(
                "fsdp cannot train with LBFGS, which joins all parameters; use "
                "algorithm='allreduce'"
            )
        kind = type(optimizer)
        if f"{kind.__module__}.".startswith("torch.optim.") and not element_wise(optimizer):
            raise UserError(
                f"fsdp cannot train with {kind.__name__}, which needs whole tensors, and each rank "
                "has parts of them; use another optimizer, or algorithm='dear'"
            )
        if any(group.get("fused") for group in optimizer.param_groups) and not isinstance(
            optimizer, torch.optim.Adam
        ):
            raise UserError(
                f"fsdp cannot train with {type(optimizer).__name__}(fused=True): torch does "
                "not support it for sharded tensors; use fused=False"
            )

    def engine(self, replica: Replica[Options]) -> _FsdpEngine:
        return _FsdpEngine(replica)


class _FsdpEngine(AveragingEngine):
    """Engine that averages the parameters that cannot be cut; torch averages the others."""

    def __init__(self, replica: Replica[Fsdp.Options]) -> None:
        _agree_on_state(replica)
        self._sharded = ShardedModel(replica)
        super().__init__(replica, self._sharded.rest)
        self._point_to(self._sharded.of)
        self.resume({})
        self._sharded.meet()
        self._paused = False
        self._unsent = False
        self._fresh = False
        """True if there may be gradients that no step has used."""
        self.hooks.before_forward([self.model], self._before_forward)
        self.hooks.around_forward(self.model, lambda args, kwargs: None, _refuse_second_derivatives)
        owners = {module for module in self.model.modules() if module._parameters}
        self.hooks.before_forward(owners, _refuse_parts, last=True)

    def step(self, update: Update) -> object:
        self._send_unsent()
        self._sharded.refuse_written()
        self._sharded.reshard()  # an evaluation may have left whole parameters behind
        return super().step(update)

    step_closure = step_after_closure

    def stepped(self) -> None:
        self._fresh = False

    def synchronize(self) -> None:
        self._send_unsent()
        super().synchronize()
        if not self._fresh:
            self._sharded.reshard()
            self._sharded.gather()

    def groups(self) -> list[tuple[int, Sequence[torch.nn.Parameter]]]:
        """Returns the units that torch shards, and each tensor that it cannot shard."""
        return [*self._sharded.units(), *super().groups()]

    def some_groups(self) -> frozenset[int]:
        """Returns the units with parameters that torch frees after the forward pass."""
        return self._sharded.freed

    def clip_grad_norm(
        self, params: Sequence[torch.nn.Parameter], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        self.synchronize()
        # torch takes no sharded and whole gradients together.
        gradients = [param.grad for param in params if param.grad is not None]
        kinds = [[g for g in gradients if in_parts(g) == sharded] for sharded in (True, False)]
        norms = [full(torch.nn.utils.get_total_norm(kind, norm_type)) for kind in kinds if kind]
        total = norms[0] if len(norms) == 1 else torch.nn.utils.get_total_norm(norms, norm_type)
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        with torch.no_grad():
            for gradient in gradients:
                local = gradient.to_local() if in_parts(gradient) else gradient
                local.mul_(factor.to(local.device))
        return total

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self._paused, before = True, self._paused
        self._let_sync(False)
        try:
            with super().no_sync():
                yield
        finally:
            self._paused = before
            self._let_sync(not before)

    def _let_sync(self, allowed: bool) -> None:
        self._sharded.root.set_requires_gradient_sync(allowed)
        # `p.grad` is this rank's gradient meanwhile, as with other algorithms.
        self._sharded.root.set_reshard_after_backward(allowed)

    def forget(self) -> None:
        if self._unsent:
            self._sharded.drop_unsent()
            self._unsent = False
        super().forget()

    def close(self) -> None:
        super().close()
        state = self.whole_state()
        self._sharded.release()
        plain: dict[torch.Tensor, torch.Tensor] = {
            sharded: param for param, sharded in self._sharded.of.items()
        }
        self._point_to(plain)
        self.optimizer.state.clear()
        self.optimizer.state.update({plain.get(param, param): s for param, s in state.items()})

    def _before_forward(self, module: torch.nn.Module) -> None:
        self._sharded.refuse_half_sent()
        self._sharded.meet()
        if self._sharded.whole:
            self._sharded.reshard()
        if module.training and torch.is_grad_enabled():
            self._fresh = True
            # A pass that is sent includes the gradients accumulated before.
            self._unsent = self._paused

    def _send_unsent(self) -> None:
        if self._unsent:
            self._unsent = False
            self._sharded.send_unsent()

    def _point_to(self, other: Mapping[torch.Tensor, torch.Tensor]) -> None:
        for group in self.optimizer.param_groups:
            group["params"][:] = [other.get(param, param) for param in group["params"]]

    def resume(self, state: StateDict) -> None:
        """Cuts whole state of the script's parameters, or of the sharded ones, into parts."""
        self._sharded.loaded = True
        states = self.optimizer.state
        for param, sharded in self._sharded.of.items():
            known = states.pop(param, None) or states.get(sharded)
            if known:
                states[sharded] = {
                    key: shard(value, sharded) if _whole(value, sharded) else value
                    for key, value in known.items()
                }

    def whole_state(self) -> Mapping[torch.Tensor, dict[str, object]]:
        self._sharded.meet()
        state = self.optimizer.state
        return {
            param: {key: full(value) for key, value in state[param].items()}
            for param in held(self.optimizer)
            if param in state
        }


def _agree_on_state(replica: Replica[Fsdp.Options]) -> None:
    """Raises `UserError` on all ranks if only some have optimizer state; collective."""
    state = replica.optimizer.state
    known = [sorted(state.get(param, ())) for param in replica.params]
    everyone = replica.communicator.gather_objects(known)
    for rank, other in enumerate(everyone):
        if other != everyone[0]:
            raise UserError(
                f"fsdp: the optimizers of rank 0 and rank {rank} hold different state; each rank "
                "holds a part, so every rank must load the whole checkpoint"
            )


def _refuse_second_derivatives(output: object) -> None:
    """Makes a backward pass raise `UserError` if it builds a graph (`create_graph=True`)."""
    from torch.utils._pytree import tree_leaves

    def refuse(gradient: torch.Tensor) -> None:
        if torch.is_grad_enabled():
            raise UserError(
                "fsdp cannot differentiate twice (create_graph=True): the graph would hold whole "
                "parameters that are freed; use algorithm='dear' or 'allreduce'"
            )

    for tensor in tree_leaves(output):
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            tensor.register_hook(refuse)


def _refuse_parts(module: torch.nn.Module) -> None:
    """Raises `UserError` if the module is about to run on parts of its parameters."""
    if any(in_parts(param) for param in module._parameters.values()):
        raise UserError(
            f"fsdp: a {type(module).__name__} is called outside of the model's forward(), but "
            "its parameters are whole only inside: call model(...) itself, or use algorithm='dear'"
        )


def _whole(value: object, param: torch.Tensor) -> TypeGuard[torch.Tensor]:
    return type(value) is torch.Tensor and value.dim() > 0 and value.shape == param.shape


class ShardedModel:
    """Model whose parameters are sharded, as far as torch can shard them.

    The script's own `Parameter` objects are empty until `release` gives them their values back.

    Raises:
        UserError: the model is sharded already, or torch cannot shard it.
    """

    of: dict[torch.Tensor, torch.nn.Parameter]
    """Sharded parameter of each of the script's own parameters."""
    whole = False
    """True while the model has whole parameters."""
    loaded = False
    """True if this rank has loaded state, but has not yet seen that all other ranks have, too."""
    _memory: Mapping[Place, torch.Tensor] = {}
    """Memory of the whole parameters."""
    _versions: Sequence[int] = ()
    """Version counters of whole parameters before the last passes."""

    def __init__(self, replica: Replica[Fsdp.Options]) -> None:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        model, params, communicator = replica.model, replica.params, replica.communicator
        keep = replica.options.stage == 2
        if any(isinstance(module, FSDPModule) for module in model.modules()):
            raise UserError(
                "fsdp: the model is sharded already; give one optimizer all parameters of a model"
            )
        self._modules = list(model.modules())
        self._before = [_Traces(module) for module in self._modules]
        places = _places(model)
        able = _shardable(places, set(params))
        self.rest = [param for param in params if param not in able]
        """Trained parameters that are not sharded."""
        for work in [communicator.broadcast(param.data, root=0) for param in able]:
            work.wait()  # each rank keeps a part only: they must be parts of one model
        cut = partial(
            fully_shard,
            mesh=DeviceMesh.from_group(communicator.groups[0], params[0].device.type),
            mp_policy=MixedPrecisionPolicy(reduce_dtype=replica.options.wire),
            ignored_params={p for _, _, p in places if p not in able},
        )
        try:
            blocks = list(_blocks(model, replica.options.min_mb * MIB, places))
            for block in blocks:
                cut(block, reshard_after_forward=not keep)
            # Parameters of the model itself are needed again at once; torch's default keeps them.
            self.root = cut(model, reshard_after_forward=False if keep else None)
        except (ValueError, NotImplementedError, AssertionError) as error:
            self._undo()
            for module, name, param in places:
                module._parameters[name] = param
            raise UserError(f"fsdp: torch's fully_shard refuses this model: {error}") from None
        self._sharding = [module for module in self._modules if isinstance(module, FSDPModule)]
        self._places = [place for place in places if place[2] in able]
        self._units, self.freed = _units(blocks, self._places)
        self.of = {param: _registered(module, name) for module, name, param in self._places}
        self._empty = InFlight(_refuse_empty)
        self._parts = _Parts()
        self._parts.launch(self.of.values())
        self._guard_collectives()
        self._communicator = communicator
        self._give_up_own()
        # They must run before torch's hooks, which read whole parameters as if they were parts.
        self._handles = [
            handle
            for module in dict.fromkeys(module for module, _, _ in self._places)
            for handle in (
                module.register_state_dict_pre_hook(lambda *_: self._before_state()),
                module.register_state_dict_post_hook(lambda *given: self._give(*given)),
                module.register_load_state_dict_pre_hook(self._take),
            )
        ]
        self.gather()  # torch registers the rest of its hooks, which `release` must know
        self.reshard()
        self._after = [_Traces(module) for module in self._modules]

    def _guard_collectives(self) -> None:
        from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
            DefaultAllGather,
            DefaultReduceScatter,
        )

        for module in self._sharding:
            module.set_custom_all_gather(cast("AllGather", _Together(DefaultAllGather())))
            scatter = cast("ReduceScatter", _Together(DefaultReduceScatter()))
            module.set_custom_reduce_scatter(scatter)

    def _give_up_own(self) -> None:
        """Empties the script's own parameters; later uses of them or the whole model raise."""
        for plain, sharded in self.of.items():
            if plain.grad is not None:
                sharded.grad = shard(plain.grad, sharded)
                plain.grad = None
            plain.data = plain.data.new_empty(0)
        self._empty.launch(self.of)
        for module in self._modules:
            vars(module).update(__deepcopy__=_refuse_copy, __reduce_ex__=_refuse_copy)

    def units(self) -> list[tuple[int, Sequence[torch.nn.Parameter]]]:
        """Returns the bytes and the current parameters of each unit that torch sends together."""
        return [
            (
                sum(self.of[param].nbytes for _, _, param in unit),
                [_registered(module, name) for module, name, _ in unit],
            )
            for unit in self._units
        ]

    def gather(self) -> None:
        """Gives the model whole, plain parameters; a collective call."""
        for module in self._sharding:
            module.unshard()
        self.whole = True
        self._memory = {(m, name, p): _registered(m, name).data for m, name, p in self._places}

    def reshard(self) -> None:
        """Shards the model again, with the present values of the whole parameters."""
        if self.whole:
            self.whole = False
            with torch.no_grad():
                for (module, name, param), memory in self._memory.items():
                    now = module._parameters.get(name)
                    if now is None or now.shape != memory.shape:
                        raise UserError(
                            f"fsdp: parameter {name!r} was taken away or got another shape; "
                            "close() the optimizer first, and wrap again"
                        )
                    if not in_parts(now):
                        self.of[param].copy_(shard(now.detach(), self.of[param]))
                        now.data = memory  # the script may have given it other memory
            self._memory = {}
        for module in self._sharding:
            module.reshard()
        self._versions = self._now()

    def meet(self) -> None:
        """Waits until all other ranks have loaded state, if this rank has.

        Raises:
            UserError: another rank has loaded none, if the backend can detect this.
        """
        if self.loaded:
            self.loaded = False
            try:
                self._communicator.barrier()
            except mismatch_errors() as error:
                raise UserError(
                    "fsdp: this rank has loaded state and another rank has not; each rank holds a "
                    f"part, so every rank must load the whole checkpoint ({error})"
                ) from None

    def _before_state(self) -> None:
        self.meet()
        self.reshard()

    def refuse_half_sent(self) -> None:
        """Raises `UserError` if the last backward pass ended with an error."""
        from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

        passing = TrainingState.PRE_BACKWARD, TrainingState.POST_BACKWARD
        if any(group._training_state in passing for group in self._groups()):
            raise UserError(
                "fsdp: the last backward pass ended with an error, after parts of its gradients "
                "were averaged; resume from a checkpoint, or use algorithm='dear'"
            )

    def refuse_written(self) -> None:
        """Raises `UserError` if a pass has written to whole parameters, which torch discards."""
        if not self.whole and self._now() != self._versions:
            raise UserError(
                "fsdp: parameters were changed during a forward or backward pass (an embedding "
                "with max_norm?), but fsdp drops such changes when it shards parameters again; use "
                "another algorithm, e.g. 'dear'"
            )

    def _now(self) -> list[int]:
        return [
            param._unsharded_param._version
            for group in self._groups()
            for param in group.fsdp_params
            if hasattr(param, "_unsharded_param")
        ]

    def drop_unsent(self) -> None:
        """Forgets gradients that were accumulated without being sent."""
        for group in self._groups():
            for param in group.fsdp_params:
                param.unsharded_accumulated_grad = None
                if hasattr(param, "_unsharded_param"):
                    param._unsharded_param.grad = None

    def send_unsent(self) -> None:
        """Averages gradients that were accumulated without being sent."""
        self._sharding[0]._get_fsdp_state()._root_post_backward_final_callback()

    def release(self) -> None:
        """Makes the model plain again, with whole values and gradients; a collective call."""
        self.reshard()
        for handle in self._handles:
            handle.remove()
        self._empty.land(self.of)
        self._parts.land(self.of.values())
        with torch.no_grad():
            for param, sharded in self.of.items():
                gradient = None if sharded.grad is None else full(sharded.grad)
                param.data = full(sharded.detach())
                param.requires_grad_(sharded.requires_grad)
                param.grad = gradient
        for module, name, param in self._places:
            module._parameters[name] = param
        self._undo()

    def _undo(self) -> None:
        from torch.distributed import _composable_state

        after = getattr(self, "_after", None) or [_Traces(module) for module in self._modules]
        for module, before, now in zip(self._modules, self._before, after, strict=True):
            now.remove_all_but(before)
            _composable_state._module_state_mapping.pop(module, None)

    def _groups(self) -> Iterator[FSDPParamGroup]:
        for module in self._sharding:
            state = module._get_fsdp_state()
            # torch 2.13 has several groups per module, 2.11 one at most.
            groups = getattr(state, "_fsdp_param_groups", None)
            yield from filter(None, [state._fsdp_param_group] if groups is None else groups)

    def _give(
        self, module: torch.nn.Module, state: StateDict, prefix: str, metadata: object
    ) -> None:
        for name in module._parameters:
            value = state.get(prefix + name)
            if in_parts(value):
                state[prefix + name] = full(value)

    def _take(self, module: torch.nn.Module, state: StateDict, prefix: str, *_: object) -> None:
        self.reshard()
        self.loaded = True
        for name, param in module._parameters.items():
            value = state.get(prefix + name)
            if not in_parts(param) or not isinstance(value, torch.Tensor) or in_parts(value):
                continue
            if value.shape == param.shape:  # torch raises an error for other shapes
                state[prefix + name] = shard(value.to(param.device, param.dtype), param)


@contextlib.contextmanager
def _together() -> Iterator[None]:
    """Raises `UserError` where the ranks call different operations; adds a note to other errors."""
    advice = (
        "fsdp: each rank holds a part of the parameters, so all ranks must run the same passes, "
        "and load state, call state_dict() and synchronize() together"
    )
    try:
        yield
    except mismatch_errors() as error:
        raise UserError(f"{advice}; one of them did not: {error}") from None
    except RuntimeError as error:
        error.add_note(advice)
        raise


class _Together:
    """Collective of torch's FSDP; raises `UserError` where the ranks call different operations."""

    def __init__(self, collective: AllGather | ReduceScatter) -> None:
        self._call: Callable[..., object] = collective.__call__
        self.allocate = collective.allocate

    def __call__(self, *args: object, **kwargs: object) -> object:
        with _together():
            return self._call(*args, **kwargs)


class _Part(Mixin):
    """Mixin for the class of a sharded parameter."""

    __slots__ = ()

    @property
    def data(self) -> torch.Tensor:
        value: torch.Tensor = as_plain(self, operator.attrgetter("data"))
        return value

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        raise UserError(
            "fsdp: a value that is assigned to `.data` of a sharded parameter would be lost; call "
            "optimizer.synchronize() before, or copy_() the value into the parameter"
        )

    def __deepcopy__(self, memo: dict[int, object]) -> object:
        return as_plain(self, lambda param: copy.deepcopy(param, memo))

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[object, ...]:
        return as_plain(self, lambda param: param.__reduce_ex__(protocol))


def _explained(
    cls: type,
    func: Callable[..., object],
    types: Sequence[type],
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
) -> object:
    """Runs torch's `func` with a sharded parameter; raises `UserError` if torch cannot."""
    if func is torch.autograd.grad:
        raise UserError(
            "fsdp: torch.autograd.grad() has no gradients of sharded parameters; "
            "call backward(), or use algorithm='dear'"
        )
    try:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
    except (RuntimeError, TypeError) as error:
        raise UserError(
            f"fsdp: torch cannot run {getattr(func, '__name__', func)}() on a sharded "
            f"parameter ({error}); call optimizer.synchronize() before, or use algorithm='dear'"
        ) from None
    if in_parts(result) and not isinstance(result, _Part):
        kind = next(kind for kind in types if issubclass(kind, _Part))
        setattr(result, "__class__", kind)  # noqa: B010  (mypy has no other way)
    return result


class _Parts(InFlight):
    """Sharded parameters of one engine."""

    mixin = _Part
    function = staticmethod(_explained)

    def __init__(self) -> None:
        super().__init__(lambda: None)


def _refuse_empty() -> NoReturn:
    raise UserError(
        "fsdp: a parameter that was taken from the model before it was wrapped is empty until "
        "close(); take parameters from model.parameters(), after synchronize() if they must be "
        "whole"
    )


def _refuse_copy(*_: object) -> NoReturn:
    raise UserError(
        "fsdp: a sharded model cannot be copied or saved whole: copy or save its state_dict(), "
        "which is whole"
    )


class _Traces:
    """Class, attributes and hooks of a module."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._class = type(module)
        self._names = set(vars(module))
        self._hooks = {
            name: set(value)
            for name, value in vars(module).items()
            if "_hooks" in name and isinstance(value, dict)
        }

    def remove_all_but(self, before: _Traces) -> None:
        """Removes from the module everything that is not in the traces `before`."""
        module = self._module
        module.__class__ = before._class
        for name in self._names - before._names:
            module.__dict__.pop(name, None)
        for name, kept in before._hooks.items():
            for key in self._hooks[name] - kept:
                vars(module)[name].pop(key, None)


def full(value: T) -> T | torch.Tensor:
    """Returns the whole of a sharded tensor, in its own memory; a collective call."""
    if not in_parts(value):
        return value
    if not value.placements[0].is_shard():
        return value.full_tensor()
    # `full_tensor()` does the same, but its errors have lost their class.
    rows, *rest = value.shape
    mesh = value.device_mesh
    mine = value.to_local()
    padded = mine.new_zeros((-(-rows // mesh.size()), *rest))
    padded[: len(mine)] = mine
    whole = padded.new_empty((mesh.size() * len(padded), *rest))
    with _together():
        mesh.get_group()._allgather_base(whole, padded).wait()
    return whole[:rows].clone() if len(whole) > rows else whole


def shard(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns a copy of this rank's part of a whole `value`, sharded like `like`; sends nothing."""
    from torch.distributed.tensor import distribute_tensor

    assert in_parts(like)
    part = distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
    return part.clone()


def _places(model: torch.nn.Module) -> list[Place]:
    """Returns all registrations of parameters; a shared parameter has several."""
    return [
        (module, name, param)
        for module in model.modules()
        for name, param in module._parameters.items()
        if param is not None
    ]


def _registered(module: torch.nn.Module, name: str) -> torch.nn.Parameter:
    param = module._parameters[name]
    assert param is not None
    return param


def _shardable(
    places: Sequence[Place],
    trained: set[torch.nn.Parameter],
) -> dict[torch.nn.Parameter, None]:
    """Returns the parameters that can be cut along their first dimension and share a type."""
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    for param in trained:
        kind = param.dtype, param.device
        sizes[kind] = sizes.get(kind, 0) + param.nbytes
    main = max(sizes, key=lambda kind: (sizes[kind], str(kind)))
    return {
        param: None
        for _, _, param in places
        if (param in trained or not param.requires_grad)
        and (param.dtype, param.device) == main
        and param.is_floating_point()
        and param.dim() > 0
        and param.numel() > 0
        and param.is_contiguous()
    }


def _units(
    blocks: Sequence[torch.nn.Module], places: Sequence[Place]
) -> tuple[list[list[Place]], frozenset[int]]:
    """Returns the registrations of trained parameters by unit, and the indices of the blocks.

    Units are the blocks, the last one first, and the rest of the model.
    """
    first: dict[torch.nn.Parameter, Place] = {}
    for place in places:
        if place[2].requires_grad:
            first.setdefault(place[2], place)
    left = dict(reversed(first.items()))
    units = []
    for block in reversed(blocks):
        modules = set(block.modules())
        inside = [param for param, (module, _, _) in left.items() if module in modules]
        units.append([left.pop(param) for param in inside])
    units = [unit for unit in units if unit]
    return [*units, *[list(left.values())] * bool(left)], frozenset(range(len(units)))


def _blocks(
    model: torch.nn.Module,
    min_bytes: float,
    places: Sequence[Place],
) -> Iterator[torch.nn.Module]:
    """Yields large layers of lists and sequences that share no parameter with other modules."""
    listed = isinstance(model, (torch.nn.ModuleList, torch.nn.Sequential))
    for child in model.children():
        inside = set(child.modules())
        params = {param for module, _, param in places if module in inside}
        alone = not any(param in params and module not in inside for module, _, param in places)
        large = sum(param.nbytes for param in params) >= min_bytes
        runs = type(child).forward is not torch.nn.Module.forward
        if listed and params and large and alone and runs:
            yield child
        else:
            yield from _blocks(child, min_bytes, places)
