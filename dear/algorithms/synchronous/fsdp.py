"""PyTorch's fully sharded data parallelism."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dear.algorithms.synchronous.wfbp import AveragingEngine
from dear.buckets.compressors import HalfOptions
from dear.buckets.grouping import MIB
from dear.cost.overlap import Overlap, Transfer
from dear.errors import UserError
from dear.lazy import torch
from dear.options import at_least
from dear.training.algorithm import Algorithm, Capabilities
from dear.training.engine import Replica, step_after_closure

_Place = tuple[Any, str, Any]
"""A module, and the name and the parameter that is registered there."""


class Fsdp(Algorithm):
    """PyTorch FSDP2 (`fully_shard`; Zhao et al., VLDB 2023, arXiv 2304.11277): ZeRO-2 and ZeRO-3.

    Each rank holds 1/P of parameters, gradients and optimizer state. Layers of lists and sequences
    are gathered before they run; gradients are scattered as soon as a layer's are there. Parameters
    that cannot be cut (scalars, other types than most, not contiguous ones) are averaged as by
    `wfbp`. All ranks must use the same parameters in every pass.
    Invariant: after `backward()` returns, each sharded parameter (a DTensor) has this rank's part
    of the mean gradient. `state_dict()` of model and optimizer are whole, and calls for every rank;
    after `synchronize()` without a backward pass the model has whole, plain parameters.
    Bytes move: parameters before a layer's forward (and, stage 3, backward), gradients after its
    backward pass.
    Cost per step and rank: per layer one all-gather (stage 3: two) and one reduce-scatter, each
    (P-1)/P of its bytes.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(HalfOptions):
        """How much is kept, in which type gradients travel, and what travels together."""

        stage: Literal[2, 3] = 3
        """As in ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054): 3 frees whole parameters after
        the forward pass and gathers them again; 2 keeps them until the backward pass has used
        them."""
        min_mb: float = 1.0
        """Layers of a ModuleList or Sequential with so many MB of 2^20 bytes travel by themselves;
        all that is left travels together."""

        def __post_init__(self) -> None:
            at_least("option of fsdp 'min_mb'", self.min_mb, 0)

        def narrowed(self, gradient: torch.Tensor, size: int) -> torch.Tensor:
            """torch divides behind the rounding."""
            return gradient.to(self.wire) / size

    capabilities = Capabilities(consistency="synchronous")
    bound = "sharded"

    @classmethod
    def overlap_of(cls, options: Options) -> Overlap:
        # The host's order. On a GPU streams wait, not the host, which so runs ahead of them. What
        # belongs to no layer of a list is not gathered twice.
        gathered = Transfer(kind="gather", carries=("parameters",), starts="layer", awaited="layer")
        again = dataclasses.replace(gathered, starts="ahead", awaited="ahead", buckets="some")
        scattered = Transfer(kind="reduce", starts="gradient", awaited="gradient")
        return Overlap(transfers=(gathered, *[again] * (options.stage == 3), scattered))

    def refuse(self, replica: Replica) -> None:
        optimizer = replica.optimizer
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UserError(
                "fsdp cannot train with LBFGS, which joins all parameters; use "
                "algorithm='allreduce'"
            )
        if any(group.get("fused") for group in optimizer.param_groups) and not isinstance(
            optimizer, torch.optim.Adam
        ):
            raise UserError(
                f"fsdp cannot train with {type(optimizer).__name__}(fused=True), which torch has "
                "not for sharded tensors; use fused=False"
            )

    def engine(self, replica: Replica) -> _FsdpEngine:
        return _FsdpEngine(replica)


class _FsdpEngine(AveragingEngine):
    """Averages the parameters that cannot be cut; the others are torch's."""

    def __init__(self, replica: Replica) -> None:
        self._sharded = ShardedModel(replica)
        super().__init__(replica, self._sharded.rest)
        self._point_to(self._sharded.of)
        self.resume({})
        self._paused = False
        self._unsent = False
        self._fresh = False
        """There may be gradients that no step has used."""
        self.hooks.before_forward([self.model], self._before_forward)

    def step(self, update: Callable[[], Any]) -> Any:
        self._send_unsent()
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
        """The units that torch shards, and each tensor that it cannot."""
        return [*self._sharded.units(), *super().groups()]

    def some_groups(self) -> frozenset[int]:
        """Those whose parameters torch frees after the forward pass."""
        return self._sharded.freed

    def clip_grad_norm(
        self, params: Sequence[torch.nn.Parameter], max_norm: float, norm_type: float
    ) -> Any:
        self.synchronize()
        # torch takes no sharded and whole gradients together.
        held = [param for param in params if param.grad is not None]
        kinds = [[p for p in held if _in_parts(p.grad) == sharded] for sharded in (True, False)]
        norms = [
            full(torch.nn.utils.get_total_norm([param.grad for param in kind], norm_type))
            for kind in kinds
            if kind
        ]
        total = norms[0] if len(norms) == 1 else torch.nn.utils.get_total_norm(norms, norm_type)
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        with torch.no_grad():
            for param in held:
                local = param.grad.to_local() if _in_parts(param.grad) else param.grad
                local.mul_(factor.to(local.device))
        return total

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self._paused, before = True, self._paused
        self.model.set_requires_gradient_sync(False)
        try:
            with super().no_sync():
                yield
        finally:
            self._paused = before
            self.model.set_requires_gradient_sync(not before)

    def forget(self) -> None:
        if self._unsent:
            self._sharded.drop_unsent()
            self._unsent = False
        super().forget()

    def close(self) -> None:
        super().close()
        state = self.whole_state()
        self._sharded.release()
        own = {sharded: param for param, sharded in self._sharded.of.items()}
        self._point_to(own)
        self.optimizer.state.clear()
        self.optimizer.state.update({own.get(param, param): s for param, s in state.items()})

    def _before_forward(self, module: torch.nn.Module) -> None:
        if self._sharded.whole:
            self._sharded.reshard()
        if module.training and torch.is_grad_enabled():
            self._fresh = True
            # A pass that is sent carries what was accumulated before.
            self._unsent = self._paused

    def _send_unsent(self) -> None:
        if self._unsent:
            self._unsent = False
            self._sharded.send_unsent()

    def _point_to(self, other: dict[Any, Any]) -> None:
        for group in self.optimizer.param_groups:
            group["params"][:] = [other.get(param, param) for param in group["params"]]

    def resume(self, state: dict[str, Any]) -> None:
        """Cuts whole state, of the script's own parameters or of sharded ones, into parts."""
        held = self.optimizer.state
        for param, sharded in self._sharded.of.items():
            known = held.pop(param, None) or held.get(sharded)
            if known:
                held[sharded] = {
                    key: shard(value, sharded) if _whole(value, sharded) else value
                    for key, value in known.items()
                }

    def whole_state(self) -> dict[torch.nn.Parameter, Any]:
        state = self.optimizer.state
        return {
            param: {key: full(value) for key, value in state[param].items()}
            for param in self.held
            if param in state
        }


def _whole(value: Any, param: Any) -> bool:
    return type(value) is torch.Tensor and value.dim() > 0 and value.shape == param.shape


class ShardedModel:
    """Shards what can be sharded of the parameters that are trained or frozen.

    The script's own `Parameter` objects stay empty meanwhile, and get their values back at the end.

    Raises:
        UserError: the model is sharded already, or torch cannot shard it.
    """

    def __init__(self, replica: Replica) -> None:
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
        """Those that the optimizer trains and that are not sharded."""
        for work in [communicator.broadcast(param.data, root=0) for param in able]:
            work.wait()  # each rank keeps a part only: they must be parts of one model
        settings: dict[str, Any] = {
            "mesh": DeviceMesh.from_group(communicator.groups[0], params[0].device.type),
            "mp_policy": MixedPrecisionPolicy(reduce_dtype=replica.options.wire),
            "ignored_params": {p for _, _, p in places if p not in able},
        }
        try:
            blocks = list(_blocks(model, replica.options.min_mb * MIB, places))
            for block in blocks:
                fully_shard(block, reshard_after_forward=not keep, **settings)
            # What the whole model owns is needed again at once; torch's default keeps it.
            fully_shard(model, reshard_after_forward=False if keep else None, **settings)
        except (ValueError, NotImplementedError, AssertionError) as error:
            self._undo()
            for module, name, param in places:
                module._parameters[name] = param
            raise UserError(f"fsdp: torch's fully_shard refuses this model: {error}") from None
        self._sharding = [module for module in self._modules if isinstance(module, FSDPModule)]
        self._places = [place for place in places if place[2] in able]
        self._units, self.freed = _units(blocks, self._places)
        self.of = {param: module._parameters[name] for module, name, param in self._places}
        """The sharded parameter for each of the script's own."""
        for param, sharded in self.of.items():
            if param.grad is not None:
                sharded.grad = shard(param.grad, sharded)
                param.grad = None
            param.data = param.data.new_empty(0)
        self.whole = False
        # Before torch's own, which make parts of whole parameters without looking at them.
        self._handles = [
            handle
            for module in dict.fromkeys(module for module, _, _ in self._places)
            for handle in (
                module.register_state_dict_pre_hook(lambda *_: self.reshard()),
                module.register_state_dict_post_hook(lambda *given: self._give(*given)),
                module.register_load_state_dict_pre_hook(self._take),
            )
        ]
        self.gather()  # torch registers the rest of its hooks, which `release` must know
        self.reshard()
        self._after = [_Traces(module) for module in self._modules]

    def units(self) -> list[tuple[int, Sequence[torch.nn.Parameter]]]:
        """What torch sends together: bytes, and parameters as the model has them now."""
        return [
            (
                sum(self.of[param].nbytes for _, _, param in unit),
                [module._parameters[name] for module, name, _ in unit],
            )
            for unit in self._units
        ]

    def gather(self) -> None:
        """Lets the model have whole, plain parameters; a collective call."""
        for module in self._sharding:
            module.unshard()
        self.whole = True

    def reshard(self) -> None:
        """Lets the model have its parts again, with what was written to whole parameters since."""
        if self.whole:
            self.whole = False
            with torch.no_grad():
                for module, name, param in self._places:
                    now = module._parameters[name]
                    if not _in_parts(now):
                        self.of[param].copy_(shard(now.detach(), self.of[param]))
        for module in self._sharding:
            module.reshard()

    def drop_unsent(self) -> None:
        """Forgets gradients that were accumulated without being sent."""
        for group in self._groups():
            for param in group.fsdp_params:
                param.unsharded_accumulated_grad = None
                if hasattr(param, "_unsharded_param"):
                    param._unsharded_param.grad = None

    def send_unsent(self) -> None:
        """Brings gradients together that were accumulated without being sent."""
        self._sharding[0]._get_fsdp_state()._root_post_backward_final_callback()

    def release(self) -> None:
        """Makes the model the plain one it was, with whole values and gradients; collective."""
        self.reshard()
        for handle in self._handles:
            handle.remove()
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

    def _groups(self) -> Iterator[Any]:
        for module in self._sharding:
            state = module._get_fsdp_state()
            # torch 2.13 has several groups per module, 2.11 one at most.
            groups = getattr(state, "_fsdp_param_groups", None)
            yield from [state._fsdp_param_group] if groups is None else groups

    def _give(
        self, module: torch.nn.Module, state: dict[str, Any], prefix: str, metadata: Any
    ) -> None:
        for name in module._parameters:
            value = state.get(prefix + name)
            if _in_parts(value):
                state[prefix + name] = full(value)

    def _take(self, module: torch.nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        self.reshard()
        for name, param in module._parameters.items():
            value = state.get(prefix + name)
            plain = torch.is_tensor(value) and not _in_parts(value)
            # Torch itself complains about other shapes.
            if plain and _in_parts(param) and value.shape == param.shape:
                state[prefix + name] = shard(value.to(param.device, param.dtype), param)


class _Traces:
    """What a module looks like: its class, its attributes, its hooks."""

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
        """Takes out what is in these traces and was not there `before`."""
        module = self._module
        module.__class__ = before._class
        for name in self._names - before._names:
            module.__dict__.pop(name, None)
        for name, kept in before._hooks.items():
            for key in self._hooks[name] - kept:
                vars(module)[name].pop(key, None)


def full(value: Any) -> Any:
    """The whole of a tensor that lies in parts, in memory of its own; a collective call."""
    return value.full_tensor().contiguous() if _in_parts(value) else value


def shard(value: torch.Tensor, like: Any) -> Any:
    """This rank's part of a whole `value`, as `like` is sharded; copies, sends nothing."""
    from torch.distributed.tensor import distribute_tensor

    part = distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
    return part.clone()


def _in_parts(value: Any) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)


def _places(model: torch.nn.Module) -> list[_Place]:
    """Every place where a parameter is registered, shared ones several times."""
    return [
        (module, name, param)
        for module in model.modules()
        for name, param in module._parameters.items()
        if param is not None
    ]


def _shardable(
    places: Sequence[_Place],
    trained: set[torch.nn.Parameter],
) -> dict[torch.nn.Parameter, None]:
    """The parameters that can be cut along their first dimension and share one type."""
    sizes: dict[Any, int] = {}
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
    blocks: Sequence[torch.nn.Module], places: Sequence[_Place]
) -> tuple[list[list[_Place]], frozenset[int]]:
    """Where the trained parameters of each unit are: of each block, the last one first, and of
    what is left; and which units are blocks."""
    first: dict[Any, _Place] = {}
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
    places: Sequence[_Place],
) -> Iterator[torch.nn.Module]:
    """Layers of lists and sequences that are large and share no parameter with what is outside."""
    listed = isinstance(model, (torch.nn.ModuleList, torch.nn.Sequential))
    for child in model.children():
        inside = set(child.modules())
        own = {param for module, _, param in places if module in inside}
        alone = not any(param in own and module not in inside for module, _, param in places)
        large = sum(param.nbytes for param in own) >= min_bytes
        runs = type(child).forward is not torch.nn.Module.forward
        if listed and own and large and alone and runs:
            yield child
        else:
            yield from _blocks(child, min_bytes, places)
