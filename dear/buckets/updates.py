"""An optimizer's update of a part: some of its parameters, later, or with other gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dear.buckets.halves import Decoupled
from dear.comm.communicator import Communicator, buffer
from dear.lazy import torch


def with_gradients(
    gradients: Mapping[torch.nn.Parameter, torch.Tensor | None], update: Callable[[], Any]
) -> Any:
    """`update()` while each `p.grad` is what `gradients` says."""
    kept = {param: param.grad for param in gradients}
    try:
        for param, gradient in gradients.items():
            param.grad = gradient
        return update()
    finally:
        for param, gradient in kept.items():
            param.grad = gradient


def has_hooks(optimizer: Any) -> bool:
    """True if there are step hooks, which expect all parameters and gradients at once."""
    before, after = _hooks(optimizer)
    return bool(before or after)


def run_hooks(optimizer: Any, update: Callable[[], Any]) -> Any:
    """`update()` between the optimizer's step hooks, as its own step would run them."""
    before, after = _hooks(optimizer)
    for hook in before:
        hook(optimizer, (), {})
    result = update()
    for hook in after:
        hook(optimizer, (), {})
    return result


def _hooks(optimizer: Any) -> tuple[list[Any], list[Any]]:
    from torch.optim import optimizer as base

    every, own = base._global_optimizer_pre_hooks, optimizer._optimizer_step_pre_hooks
    before = [*every.values(), *own.values()]
    every, own = base._global_optimizer_post_hooks, optimizer._optimizer_step_post_hooks
    return before, [*own.values(), *every.values()]


class PartialUpdate:
    """Lets `optimizer` update group by group, later than its `step()` was called.

    Args:
        plain: the optimizer's own class.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, plain: type[torch.optim.Optimizer]
    ) -> None:
        self._optimizer: Any = optimizer
        self._plain = plain
        self._hyperparameters: list[dict[str, Any]] = []

    def possible(self) -> bool:
        """True if updating group by group equals updating all parameters at once.

        So it is for torch's own optimizers (but for LBFGS). Of others that is not known, and step
        hooks expect the whole step.
        """
        of_torch = f"{self._plain.__module__}.".startswith("torch.optim.")
        return of_torch and not has_hooks(self._optimizer)

    def note(self) -> None:
        """Keeps the hyper-parameters: schedulers change them later, some in place."""
        self._hyperparameters = [
            {
                key: value.clone() if torch.is_tensor(value) else value
                for key, value in group.items()
                if key != "params"
            }
            for group in self._optimizer.param_groups
        ]

    def run(self, gradients: Mapping[torch.nn.Parameter, torch.Tensor | None]) -> None:
        """Updates the parameters in `gradients`, with the hyper-parameters of the last `note`."""
        groups = self._optimizer.param_groups
        self._optimizer.param_groups = [
            {**hyper, "params": [param for param in group["params"] if param in gradients]}
            for hyper, group in zip(self._hyperparameters, groups, strict=True)
        ]
        device = next(iter(gradients)).device.type
        try:
            # State made by the first step must outlive an evaluation, and the update is no part of
            # a forward pass that runs in lower precision.
            with torch.inference_mode(False), torch.autocast(device, enabled=False):
                with_gradients(gradients, lambda: self._plain.step(self._optimizer))
        finally:
            self._optimizer.param_groups = groups


class Replicated:
    """Between two halves, every rank updates everything: the second half carries mean gradients.

    Buckets are numbered in the order in which the next forward pass needs them. With torch's own
    optimizers a bucket is updated just before its layers run, with the hyper-parameters that
    `step()` saw. Of others it is not known whether updating bucket by bucket equals updating all at
    once, and step hooks expect the whole step: these update in `step()`.

    Args:
        plain: the optimizer's own class.
        frozen: leave updates and second halves out: wrong on purpose.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        plain: type[torch.optim.Optimizer],
        parts: Sequence[Decoupled],
        communicator: Communicator,
        *,
        frozen: bool,
    ) -> None:
        self.parts = parts
        self.frozen = frozen
        self.unused: set[torch.nn.Parameter] = set()
        """Parameters that no rank has a gradient for in this step."""
        self._partial = PartialUpdate(optimizer, plain)
        self._means = [
            buffer(part.bucket.gradients, part.bucket.gradients.numel(), communicator)
            for part in parts
        ]
        self._views = [
            part.bucket.views(mean) for part, mean in zip(parts, self._means, strict=True)
        ]

    def step(self, update: Callable[[], Any], arrival: Sequence[int]) -> set[int]:
        """Starts second halves; returns the buckets that `finish` must be called for.

        Args:
            update: the optimizer's own step, with its hooks.
            arrival: buckets in the order in which their first halves end.
        """
        for index in arrival:
            self.parts[index].finish_reduce()
        if self.frozen:
            return set()
        started = [i for i, part in enumerate(self.parts) if not idle(part, self.unused)]
        for index in started:
            self.parts[index].start_gather_mean(self._means[index])
        if not self._partial.possible():
            means: dict[torch.nn.Parameter, torch.Tensor | None] = {}
            for index in range(len(self.parts)):
                means |= self._take(index)
            with_gradients(means, update)
            return set()
        self._partial.note()
        return set(started)

    def step_averaged(self, update: Callable[[], Any]) -> Any:
        """Updates from gradients that are averages already; returns with nothing in flight."""
        return None if self.frozen else update()

    def finish(self, index: int) -> None:
        """Makes the parameters of a bucket current."""
        self._partial.run(self._take(index))

    def _take(self, index: int) -> dict[torch.nn.Parameter, torch.Tensor | None]:
        with torch.inference_mode(False):
            self.parts[index].finish_gather()
        pairs = zip(self.parts[index].bucket.params, self._views[index], strict=True)
        return {param: None if param in self.unused else view for param, view in pairs}


def idle(part: Decoupled, unused: set[torch.nn.Parameter]) -> bool:
    """True if no rank has a gradient for anything in the bucket: nothing to update."""
    return bool(unused) and unused.issuperset(part.bucket.params)
