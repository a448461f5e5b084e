"""PyTorch's fully sharded data parallelism."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from dear.algorithms.synchronous._sharded_model import ShardedModel, full, shard
from dear.buckets.compression import HalfOptions, refuse_types, wire_dtype
from dear.buckets.grouping import MIB
from dear.errors import UserError
from dear.lazy import torch
from dear.options import at_least
from dear.training.algorithm import Algorithm, Capabilities
from dear.training.alone import AloneEngine
from dear.training.backward import BackwardSchedule
from dear.training.engine import Engine, distribute, trained_parameters
from dear.training.gradients import GradientAverager

if TYPE_CHECKING:
    from torch.nn import Module, Parameter
    from torch.optim import Optimizer

    from dear.comm.communicator import Communicator


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

    capabilities = Capabilities(consistency="synchronous")
    bound = "sharded"

    def wrap(
        self, model: Module, optimizer: Optimizer, communicator: Communicator, options: Options
    ) -> tuple[Module, Optimizer]:
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
        params = trained_parameters(model, optimizer)
        refuse_types(params, options)
        if communicator.size == 1:
            return model, distribute(optimizer, AloneEngine(model, communicator))
        sharded = ShardedModel(
            model,
            params,
            communicator,
            min_bytes=options.min_mb * MIB,
            keep=options.stage == 2,
            reduce_dtype=wire_dtype(options.compression),
        )
        engine = _FsdpEngine(model, optimizer, communicator, sharded, options)
        return model, distribute(optimizer, engine)


class _FsdpEngine(Engine):
    def __init__(
        self,
        model: Module,
        optimizer: Optimizer,
        communicator: Communicator,
        sharded: ShardedModel,
        options: Fsdp.Options,
    ) -> None:
        super().__init__(model, communicator)
        self._fsdp: Any = model
        self._optimizer: Any = optimizer
        self._sharded = sharded
        self._point_to(sharded.of)
        self._shard_state()
        self._averager = averager = GradientAverager(sharded.rest, communicator, options)
        self._schedule = BackwardSchedule(
            self.hooks,
            [[param] for param in sharded.rest],
            communicator,
            launch=lambda unit: averager.launch(sharded.rest[unit]),
            finish=averager.finish,
        )
        self._paused = False
        self._unsent = False
        self._fresh = False
        """There may be gradients that no step has used."""
        self.hooks.before_forward([model], self._before_forward)

    def step(self, update: Callable[[], Any]) -> Any:
        self._send_unsent()
        if self._sharded.rest:
            self._schedule.run_if_missing()
            self._schedule.restart()
        self._sharded.reshard()  # an evaluation may have left whole parameters behind
        result = update()
        self._fresh = False
        return result

    step_closure = Engine.step_after_closure

    def synchronize(self) -> None:
        self._send_unsent()
        if self._schedule.unsent:
            self._schedule.run_if_missing()
        if not self._fresh:
            self._sharded.reshard()
            self._sharded.gather()

    def clip_grad_norm(self, params: Sequence[Parameter], max_norm: float, norm_type: float) -> Any:
        return full(super().clip_grad_norm(params, max_norm, norm_type))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self._paused, before = True, self._paused
        self._fsdp.set_requires_gradient_sync(False)
        try:
            with self._schedule.paused():
                yield
        finally:
            self._paused = before
            self._fsdp.set_requires_gradient_sync(not before)

    def forget(self) -> None:
        if self._unsent:
            self._sharded.drop_unsent()
            self._unsent = False
        self._averager.forget()
        self._schedule.forget()

    def state_dict(self, plain: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        kept = self._optimizer.state
        self._optimizer.state = self._whole_state()
        try:
            return plain()
        finally:
            self._optimizer.state = kept

    def load_state_dict(self, plain: Callable[[], None]) -> None:
        plain()
        self._shard_state()

    def close(self) -> None:
        super().close()
        state = self._whole_state()
        self._sharded.release()
        own = {sharded: param for param, sharded in self._sharded.of.items()}
        self._point_to(own)
        self._optimizer.state.clear()
        self._optimizer.state.update({own.get(param, param): s for param, s in state.items()})

    def _before_forward(self, module: Module) -> None:
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
        for group in self._optimizer.param_groups:
            group["params"][:] = [other.get(param, param) for param in group["params"]]

    def _shard_state(self) -> None:
        """Cuts whole state, of the script's own parameters or of sharded ones, into parts."""
        state = self._optimizer.state
        for param, sharded in self._sharded.of.items():
            known = state.pop(param, None) or state.get(sharded)
            if known:
                state[sharded] = {
                    key: shard(value, sharded) if _whole(value, sharded) else value
                    for key, value in known.items()
                }

    def _whole_state(self) -> dict[Any, Any]:
        """State as of whole parameters, by the optimizer's parameters; a collective call."""
        held = [param for group in self._optimizer.param_groups for param in group["params"]]
        return {
            param: {key: full(value) for key, value in self._optimizer.state[param].items()}
            for param in held
            if param in self._optimizer.state
        }


def _whole(value: Any, param: Any) -> bool:
    return type(value) is torch.Tensor and value.dim() > 0 and value.shape == param.shape
