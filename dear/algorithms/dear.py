"""DeAR: decoupled all-reduce, pipelined with both passes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from dear.algorithm import Algorithm, Capabilities
from dear.algorithm import Options as AlgorithmOptions
from dear.backward import BackwardSchedule
from dear.engine import Engine, distribute, trained_parameters
from dear.errors import UserError
from dear.fusion import MIB, FlatBuffer, fuse, layers
from dear.grad_scaling import GradScaling
from dear.lazy import torch
from dear.options import positive
from dear.readers import ReaderMap

if TYPE_CHECKING:
    from torch.nn import Module, Parameter
    from torch.optim import Optimizer

    from dear.communicator import Communicator, Work


class Dear(Algorithm):
    """DeAR (Zhang et al., ICDCS 2023, arXiv 2302.12445).

    An all-reduce is a reduce-scatter and an all-gather. The first half of each group of layers runs
    in the backward pass, the second half in the next forward pass, just before the layers need it.
    Invariant: whoever reads parameters by a forward or a state dict sees those after the last
    `step()`; between `backward()` and `step()` `p.grad` is still this rank's own gradient.
    Bytes move: reduce-scatter in the backward pass, all-gather from `step()` into the next forward.
    Cost per step and rank: one reduce-scatter and one all-gather per group, together 2 (P-1)/P of
    the model's bytes, as many as an all-reduce.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options(AlgorithmOptions):
        """Which tensors travel together."""

        fusion: Literal["threshold", "none"] = "threshold"
        """`threshold`: neighbouring layers up to `threshold_mb`; `none`: every tensor alone."""
        threshold_mb: float = 25.0
        """Size below which layers are joined, in MB of 2^20 bytes."""

        def __post_init__(self) -> None:
            positive("option of dear 'threshold_mb'", self.threshold_mb)

    capabilities = Capabilities(consistency="synchronous")

    def wrap(
        self, model: Module, optimizer: Optimizer, communicator: Communicator, options: Options
    ) -> tuple[Module, Optimizer]:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UserError(
                "dear cannot train with LBFGS, whose step runs several backward passes of its own; "
                "use algorithm='allreduce'"
            )
        params = trained_parameters(model, optimizer)
        if options.fusion == "none":
            groups = [[param] for param in params]
        else:
            groups = fuse(layers(model, params), options.threshold_mb * MIB)
        return model, distribute(optimizer, _DearEngine(model, optimizer, communicator, groups))


class _Group:
    """Gradients that travel together, and how far they have got."""

    def __init__(self, params: list[Parameter], communicator: Communicator) -> None:
        self.buffer = FlatBuffer(params, communicator.size)
        self.shard = self.buffer.data.new_empty(self.buffer.data.numel() // communicator.size)
        self.scatter: Work | None = None
        self.gather: Work | None = None
        self.packed: list[tuple[torch.Tensor | None, int]] = []
        """Each gradient tensor as it was packed, with its version, to notice later changes."""

    def start_scatter(self, communicator: Communicator) -> None:
        if self.scatter is not None:  # a further backward pass: its sum replaces what was sent
            self.scatter.wait()
        self.buffer.pack()
        self.packed = [
            (p.grad, p.grad._version if p.grad is not None else 0) for p in self.buffer.params
        ]
        self._sampled = self._sample()
        self.scatter = communicator.reduce_scatter(self.shard, self.buffer.data, op="mean")

    def scaled_in_place(self) -> bool:
        """True if a gradient's values are not those that were packed; waits for the device.

        Finds what a GradScaler does, which leaves version counters as they are.
        """
        now = self._sample()
        return now is not None and not torch.equal(now, self._sampled)

    def _sample(self) -> torch.Tensor | None:
        """Some bytes of the last gradient; as bytes, so that nan equals nan."""
        for param in reversed(self.buffer.params):
            if param.grad is not None and param.grad.numel():
                count = min(8, param.grad.numel())
                return param.grad.as_strided((count,), (1,)).clone().view(torch.uint8)
        return None

    def start_gather(self, communicator: Communicator) -> None:
        self.gather = communicator.all_gather(self.buffer.data, self.shard)

    def finish(self) -> list[tuple[Parameter, torch.Tensor | None]]:
        """Each parameter with its average gradient, a view that the next scatter overwrites."""
        self.gather.wait()
        self.gather = None
        return self.buffer.gradients()

    def check_unchanged(self) -> None:
        for param, (gradient, version) in zip(self.buffer.params, self.packed, strict=True):
            if param.grad is not gradient or (
                gradient is not None and gradient._version != version
            ):
                raise UserError(
                    f"the gradient of a parameter of shape {tuple(param.shape)} was changed "
                    "between backward() and step(); call optimizer.synchronize() before "
                    "clipping or unscaling, so that the change applies to the averaged gradient"
                )
        self.packed.clear()


class _DearEngine(Engine):
    """Decides when each group is scattered, gathered and applied.

    `step()` waits for the reduce-scatters, starts all all-gathers and returns. The update of a
    group is made when the first module that may read one of its parameters is about to run, with
    the hyper-parameters that `step()` saw.
    """

    def __init__(
        self,
        model: Module,
        optimizer: Optimizer,
        communicator: Communicator,
        groups: list[list[Parameter]],
    ) -> None:
        super().__init__(model, communicator)
        self._optimizer = optimizer
        self._plain_class = type(optimizer)
        self._groups = [_Group(params, communicator) for params in groups]
        self._pending: set[int] = set()
        self._hyperparameters: list[dict[str, Any]] = []
        self._averaged = False
        self._scaling = GradScaling(optimizer)
        self._schedule = BackwardSchedule(
            self.hooks, groups, communicator, launch=self._launch, finish=lambda: None
        )
        self._readers = ReaderMap(model, groups)
        self.hooks.before_forward(model.modules(), self._before_forward)
        self.hooks.before_state_dict(model, self.settle)

    def step(self, update: Callable[[], Any]) -> Any:
        if self._averaged and not self._schedule.unsent:
            # The caller has synchronized, and perhaps clipped: the gradients are final.
            self._averaged = False
            self._schedule.restart()
            return self._scaling.step(update)
        self._scaling.refuse()
        self._schedule.run_if_missing()
        self._schedule.restart()
        self._start_gathers()
        self._pending = set(range(len(self._groups)))
        self._readers.freeze()
        if not self._may_split():
            return self._update_at_once(update)
        # Schedulers change hyper-parameters after this call, some of them in place.
        self._hyperparameters = [
            {
                key: value.clone() if torch.is_tensor(value) else value
                for key, value in group.items()
                if key != "params"
            }
            for group in self._optimizer.param_groups
        ]
        for index in self._readers.unread():
            self._apply(index)
        return None

    def step_closure(self, update: Callable[[Callable[[], Any]], Any], closure: Any) -> Any:
        # Optimizers other than LBFGS call the closure once, before they update.
        with torch.enable_grad():
            loss = closure()
        self.step(lambda: update(None))
        return loss

    def settle(self) -> None:
        for index in sorted(self._pending):
            self._apply(index)

    def synchronize(self) -> None:
        self.settle()
        if self._schedule.unsent:
            self._schedule.run_if_missing()
        if self._schedule.passed and not self._averaged:
            if any(group.scaled_in_place() for group in self._groups):
                self._scaling.refuse_early_unscaling()
            self._start_gathers()
            for group in self._groups:
                for param, gradient in group.finish():
                    param.grad = None if gradient is None else gradient.clone()
            self._averaged = True

    def no_sync(self) -> AbstractContextManager[None]:
        return self._schedule.paused()

    def forget(self) -> None:
        self._schedule.forget()
        self._averaged = False

    def close(self) -> None:
        super().close()
        self._readers.freeze()
        self._scaling.close()

    def _launch(self, index: int) -> None:
        if index in self._pending:
            # The layers of this group did not run since the last step; its buffer is needed now.
            self._apply(index)
        self._averaged = False
        self._groups[index].start_scatter(self.communicator)

    def _start_gathers(self) -> None:
        for group in self._groups:
            group.check_unchanged()
        for group in self._groups:
            group.scatter.wait()
            group.scatter = None
        for group in self._groups:
            group.start_gather(self.communicator)

    def _before_forward(self, module: Module) -> None:
        self._readers.called(module)
        if not self._pending:
            return
        if not (self.model.training and torch.is_grad_enabled()):
            # An evaluation may read parameters where training never does.
            self.settle()
        else:
            for index in self._readers.groups_of(module):
                if index in self._pending:
                    self._apply(index)

    def _apply(self, index: int) -> None:
        # State made by the first step must outlive an evaluation, and the update is no part of a
        # forward pass that runs in lower precision.
        device = self._groups[index].buffer.data.device.type
        with torch.inference_mode(False), torch.autocast(device, enabled=False):
            self._update(index)

    def _update(self, index: int) -> None:
        self._pending.discard(index)
        gradients = dict(self._groups[index].finish())
        groups = self._optimizer.param_groups
        kept = {param: param.grad for param in gradients}
        self._optimizer.param_groups = [
            {**hyper, "params": [param for param in group["params"] if param in gradients]}
            for hyper, group in zip(self._hyperparameters, groups, strict=True)
        ]
        try:
            for param, gradient in gradients.items():
                param.grad = gradient
            self._plain_class.step(self._optimizer)
        finally:
            self._optimizer.param_groups = groups
            for param, gradient in kept.items():
                param.grad = gradient

    def _update_at_once(self, update: Callable[[], Any]) -> Any:
        self._pending.clear()
        kept = {}
        for group in self._groups:
            for param, gradient in group.finish():
                kept[param] = param.grad
                param.grad = gradient
        try:
            return update()
        finally:
            for param, gradient in kept.items():
                param.grad = gradient

    def _may_split(self) -> bool:
        """True if updating group by group equals updating all parameters at once.

        So it is for torch's own optimizers (LBFGS is refused). Of others that is not known, and
        step hooks expect the whole step: these update in `step()`, which then waits.
        """
        from torch.optim import optimizer as base

        hooked = (
            self._optimizer._optimizer_step_pre_hooks
            or self._optimizer._optimizer_step_post_hooks
            or base._global_optimizer_pre_hooks
            or base._global_optimizer_post_hooks
        )
        return f"{self._plain_class.__module__}.".startswith("torch.optim.") and not hooked
