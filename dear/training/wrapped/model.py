"""Models that torch's `fully_shard` has sharded, from the first sharding to whole parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NoReturn, cast

from dear.comm.backends import mismatch_errors
from dear.comm.communicator import Communicator
from dear.errors import UserError
from dear.lazy import torch
from dear.training.engine import in_parts
from dear.training.inflight import InFlight
from dear.training.wrapped.tensors import Parts, Together, full, shard
from dear.training.wrapped.units import blocks_of, places_of, registered, shardable, units_of

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.optim.optimizer import StateDict

    from dear.training.wrapped.units import Place


class ShardedModel:
    """Model whose parameters are sharded, as far as torch can shard them.

    The script's own `Parameter` objects are empty until `release` gives them their values back.

    Args:
        params: trained parameters, those that cannot be sharded, too.
        keep: keeps the whole parameters of a layer from its forward to its backward pass.
        reduce_dtype: dtype in which gradients are sent; None: their own.
        min_bytes: smallest layer that is sharded alone.

    Raises:
        UserError: the model is sharded already, or torch cannot shard it.
    """

    of: dict[torch.Tensor, torch.nn.Parameter]
    """Sharded parameter of each of the script's own parameters."""
    whole = False
    """True while the model has whole parameters."""
    loaded = False
    """True if this rank has loaded state, but has not yet seen that all other ranks have, too."""
    moved = False
    """True if parameters may have another type or device than when they were sharded."""
    _memory: Mapping[Place, torch.Tensor] = {}
    """Memory of the whole parameters."""
    _versions: Sequence[int] = ()
    """Version counters of whole parameters before the last passes."""

    def __init__(
        self,
        model: torch.nn.Module,
        params: Sequence[torch.nn.Parameter],
        communicator: Communicator,
        *,
        keep: bool,
        reduce_dtype: torch.dtype | None,
        min_bytes: float,
    ) -> None:
        from torch.distributed.fsdp import FSDPModule

        if any(isinstance(module, FSDPModule) for module in model.modules()):
            raise UserError(
                "fsdp: the model is sharded already; give one optimizer all parameters of a model"
            )
        self._communicator = communicator
        self._modules = list(model.modules())
        self._before = [_Traces(module) for module in self._modules]
        places = places_of(model)
        able = shardable(places, set(params))
        self._kind = next(((param.dtype, param.device) for param in able), None)
        self.rest = [param for param in params if param not in able]
        """Trained parameters that are not sharded."""
        for work in [communicator.broadcast(param.data, root=0) for param in able]:
            work.wait()  # each rank keeps a part only: they must be parts of one model
        blocks = list(blocks_of(model, min_bytes, places))
        self.root = self._sharded(model, blocks, places, able, keep, reduce_dtype)
        self._sharding = [module for module in self._modules if isinstance(module, FSDPModule)]
        self._places = [place for place in places if place[2] in able]
        self._units, self.freed = units_of(blocks, self._places)
        self.of = {param: registered(module, name) for module, name, param in self._places}
        self._empty = InFlight(_refuse_empty)
        self._parts = Parts()
        self._parts.launch(self.of.values())
        self._guard_collectives()
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
        for param, (module, name) in {param: (m, name) for m, name, param in self._places}.items():
            _copy_hooks(param, registered(module, name))
        self.reshard()
        self._after = [_Traces(module) for module in self._modules]

    def _sharded(
        self,
        model: torch.nn.Module,
        blocks: Sequence[torch.nn.Module],
        places: Sequence[Place],
        able: Mapping[torch.nn.Parameter, None],
        keep: bool,
        reduce_dtype: torch.dtype | None,
    ) -> FSDPModule:
        """Has torch shard the blocks and the rest of the model; returns the model."""
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        group, device = self._communicator.groups[0], next(iter(able), places[0][2]).device.type
        cut = partial(
            fully_shard,
            mesh=DeviceMesh.from_group(group, device),
            mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype),
            ignored_params={param for _, _, param in places if param not in able},
        )
        try:
            for block in blocks:
                cut(block, reshard_after_forward=not keep)
            # Parameters of the model itself are needed again at once; torch's default keeps them.
            return cut(model, reshard_after_forward=False if keep else None)
        except (ValueError, NotImplementedError, AssertionError) as error:
            self._undo()
            for module, name, param in places:
                module._parameters[name] = param
            raise UserError(f"fsdp: torch's fully_shard refuses this model: {error}") from None

    def _guard_collectives(self) -> None:
        from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
            DefaultAllGather,
            DefaultReduceScatter,
        )

        for module in self._sharding:
            module.set_custom_all_gather(cast("AllGather", Together(DefaultAllGather())))
            scatter = cast("ReduceScatter", Together(DefaultReduceScatter()))
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
            vars(module).update(
                __deepcopy__=_refuse_copy,
                __reduce_ex__=_refuse_copy,
                _apply=partial(_convert, self, module),
            )

    def units(self) -> list[tuple[int, Sequence[torch.nn.Parameter]]]:
        """Returns the bytes and the current parameters of each unit that torch sends together."""
        return [
            (
                sum(self.of[param].nbytes for _, _, param in unit),
                [registered(module, name) for module, name, _ in unit],
            )
            for unit in self._units
        ]

    def gather(self) -> None:
        """Gives the model whole, plain parameters; a collective call."""
        for module in self._sharding:
            module.unshard()
        self.whole = True
        self._memory = {(m, name, p): registered(m, name).data for m, name, p in self._places}

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

    def refuse_pass(self) -> None:
        """Raises `UserError` if the last backward pass ended with an error, or if parameters have
        got another type or device since they were sharded."""
        from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

        passing = TrainingState.PRE_BACKWARD, TrainingState.POST_BACKWARD
        if any(group._training_state in passing for group in self._groups()):
            raise UserError(
                "fsdp: the last backward pass ended with an error, after parts of its gradients "
                "were averaged; resume from a checkpoint, or use algorithm='dear'"
            )

        if self.moved:
            with torch._C.DisableTorchFunctionSubclass():
                if any((part.dtype, part.device) != self._kind for part in self.of.values()):
                    raise UserError(_MOVED)
            self.moved = False

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

    def has_unsent(self) -> bool:
        """Returns True if gradients were accumulated without being sent."""
        return any(
            param.unsharded_accumulated_grad is not None
            or (hasattr(param, "_unsharded_param") and param._unsharded_param.grad is not None)
            for group in self._groups()
            for param in group.fsdp_params
        )

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


def _refuse_empty() -> NoReturn:
    raise UserError(
        "fsdp: a parameter that was taken from the model before it was wrapped is empty until "
        "close(); take parameters from model.parameters(), after synchronize() if they must be "
        "whole"
    )


_MOVED = (
    "fsdp: torch cannot train a sharded model that was moved or converted; close() the optimizer "
    "before, and wrap again"
)


def _copy_hooks(param: torch.nn.Parameter, whole: torch.nn.Parameter) -> None:
    """Lets gradient hooks of the script's parameter run on gradients of the whole one of torch."""
    for hook in (param._backward_hooks or {}).values():
        whole.register_hook(hook)
    for hook in (param._post_accumulate_grad_hooks or {}).values():
        whole.register_post_accumulate_grad_hook(hook)


def _convert(
    sharded: ShardedModel,
    module: torch.nn.Module,
    change: Callable[[torch.Tensor], torch.Tensor],
    *args: object,
    **options: object,
) -> torch.nn.Module:
    """Replaces `module._apply`, which `module.to()` and the like call."""
    if sharded.whole:
        sharded.reshard()
    for param in module._parameters.values():
        if in_parts(param):
            # Torch raises an error for another memory format, but not on a rank without elements.
            like = torch.empty([2] * param.dim(), dtype=param.dtype, device=param.device)
            if not change(like).is_contiguous():
                raise UserError(_MOVED)
    sharded.moved = True
    apply: Callable[..., torch.nn.Module] = type(module)._apply
    try:
        return apply(module, change, *args, **options)
    except RuntimeError as error:
        raise UserError(f"{_MOVED} ({error})") from None


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
