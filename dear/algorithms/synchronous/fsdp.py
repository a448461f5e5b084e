"""PyTorch's fully sharded data parallelism."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeGuard

from dear.algorithms.synchronous.wfbp import AveragingEngine
from dear.buckets.compressors import HalfOptions
from dear.buckets.grouping import MIB
from dear.buckets.updates import element_wise
from dear.cost.overlap import Overlap, Transfer
from dear.errors import UserError
from dear.lazy import torch
from dear.options import at_least
from dear.training.algorithm import Algorithm, Capabilities
from dear.training.engine import Replica, Update, held, in_parts, step_after_closure
from dear.training.hooks import refuse_later_hooks
from dear.training.wrapped.model import ShardedModel
from dear.training.wrapped.tensors import full, shard

if TYPE_CHECKING:
    from torch.optim.optimizer import StateDict


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
            """Returns the gradient in the `wire` dtype. In fp16, torch divides it by a power of two
            before the sum, and the sum by the rest."""
            return gradient.to(self.wire) / self._before(size)

        def mean(self, total: torch.Tensor, size: int) -> torch.Tensor:
            return total * (self._before(size) / size)

        def _before(self, size: int) -> int:
            """Divisor before the sum: the power of two at which torch's factors are balanced."""
            factor = 1
            while self.compression == "fp16" and size % factor == 0 and size / factor > factor:
                factor *= 2
            return factor

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
        if any(_sparse(module, replica.params) for module in replica.model.modules()):
            raise UserError(
                "fsdp cannot send the sparse gradients of an embedding; build it with sparse=False,"
                " or use algorithm='dadt'"
            )
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
        self._sharded = ShardedModel(
            replica.model,
            replica.params,
            replica.communicator,
            keep=replica.options.stage == 2,
            reduce_dtype=replica.options.wire,
            min_bytes=replica.options.min_mb * MIB,
        )
        super().__init__(replica, self._sharded.rest)
        self.schedule.carries_all = False
        self._point_to(self._sharded.of)
        self.resume({})
        self._sharded.meet()
        self._paused = False
        self._fresh = False
        """True if there may be gradients that no step has used."""
        self.hooks.before_forward([self.model], self._before_forward)
        self.hooks.around_forward(self.model, lambda args, kwargs: None, self._after_forward)
        owners = {module for module in self.model.modules() if module._parameters}
        self.hooks.before_forward(owners, _refuse_parts, last=True)

    def step(self, update: Update) -> object:
        with torch._C.DisableTorchFunctionSubclass():
            refuse_later_hooks(self._sharded.of.values())  # parts have no gradient in the pass
        self._sharded.refuse_pass()
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
        self._sharded.drop_unsent()
        super().forget()

    def close(self) -> None:
        self._fresh = True  # keeps `synchronize` from gathering parts: `release` does that itself
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
        self._sharded.refuse_pass()
        self._sharded.meet()
        if self._sharded.whole:
            self._sharded.reshard()

    def _after_forward(self, output: object) -> None:
        """Watches for a backward pass; a model in eval mode may be trained, too."""
        from torch.utils._pytree import tree_leaves

        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(self._passing)

    def _passing(self, gradient: torch.Tensor) -> None:
        if torch.is_grad_enabled():
            raise UserError(
                "fsdp cannot differentiate twice (create_graph=True): the graph would hold whole "
                "parameters that are freed; use algorithm='dear' or 'allreduce'"
            )
        self._fresh = True

    def _send_unsent(self) -> None:
        if self._sharded.has_unsent():
            self._let_sync(True)  # also in a step under `no_sync()`
            self._sharded.send_unsent()
            self._let_sync(not self._paused)

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


def _sparse(module: torch.nn.Module, trained: Sequence[torch.nn.Parameter]) -> bool:
    """Returns True for an embedding whose gradient is sparse."""
    weight = getattr(module, "weight", None)
    return getattr(module, "sparse", False) is True and any(weight is param for param in trained)


def _refuse_parts(module: torch.nn.Module) -> None:
    """Raises `UserError` if the module is about to run on parts of its parameters."""
    if any(in_parts(param) for param in module._parameters.values()):
        raise UserError(
            f"fsdp: a {type(module).__name__} is called outside of the model's forward(), but "
            "its parameters are whole only inside: call model(...) itself, or use algorithm='dear'"
        )


def _whole(value: object, param: torch.Tensor) -> TypeGuard[torch.Tensor]:
    return type(value) is torch.Tensor and value.dim() > 0 and value.shape == param.shape
