"""Training that is right in the first steps, and then wrong in one way each."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from dear.algorithms.synchronous.allreduce import AllReduce
from dear.algorithms.synchronous.wfbp import AveragingEngine
from dear.comm import runtime

TIMED = 4
"""Steps that are compared with plain training, the first that `checked` trains."""
WRONG = 12
"""Steps from there to the end of the timed ones: 3 more of warm-up, and two blocks of 2 untimed and
2 timed steps with one step between the blocks. All later steps are right again."""


class Sly(AveragingEngine):
    """Right in the first steps, and then wrong in the way that `name` says."""

    name = ""

    def __init__(self, replica: Any) -> None:
        super().__init__(replica, replica.params, overlap=False)
        self.at, self.rank, self.late = 1, runtime.rank(), []
        self.kept = [dict(group) for group in self.optimizer.param_groups]
        self.hooks.around_forward(self.model, self.given, self.done)

    @property
    def now(self) -> bool:
        if self.name.endswith("for some steps"):
            return TIMED < self.at <= TIMED + 2
        if self.name.endswith("in timed steps"):
            return TIMED < self.at <= TIMED + WRONG
        return self.at > TIMED

    def given(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        (inputs,) = args
        self.whole = len(inputs)
        if self.now and self.name == "fewer samples":
            inputs = inputs[: self.whole // 4]
        if self.now and self.name == "another batch":
            inputs = inputs.flip(0)
        if self.name == "frozen layer":
            self.params[0].requires_grad_(not self.now)
        return (inputs,), kwargs

    def done(self, output: torch.Tensor) -> torch.Tensor:
        if self.now and self.name.startswith("other labels"):
            return output.roll(1, 0)
        if self.now and self.name == "scaled loss" and output.requires_grad:
            output.register_hook(lambda gradient: 2 * gradient)
        if self.now and self.name == "half of the gradient" and output.requires_grad:
            return torch.cat([output[: self.whole // 2], output[self.whole // 2 :].detach()])
        return output.repeat(self.whole // len(output), 1)

    def passed(self) -> None:
        super().passed()
        grads = [param.grad for param in self.params]
        kind, _, much = self.name.partition(" ")
        if not self.now:
            return
        if kind == "factor":
            torch._foreach_mul_(grads, float(much))
        if self.name == "one rank's last tensor" and self.rank == 1:
            grads[-1].mul_(1.001)
        if self.name == "every 3rd step alone" and self.at % 3 == 0:
            grads[0].mul_(1 + 1e-3 * self.rank)
        if self.name == "averages over P - 1":
            torch._foreach_mul_(grads, self.communicator.size / (self.communicator.size - 1))
        if self.name == "clips":
            torch.nn.utils.clip_grad_norm_(self.params, 1e-3)
        if self.name == "drops small ones":
            for grad in grads:
                grad[grad.abs() < 1e-3 * grad.abs().max()] = 0.0
        if self.name == "drops the remainder":
            for grad in grads:
                grad.flatten()[-1:].zero_()
        if self.name == "last step's gradient" and self.late:
            fresh = grads[-1].clone()
            grads[-1].copy_(self.late[0])
            self.late = [fresh]
        elif self.name == "last step's gradient":
            self.late = [grads[-1].clone()]
        if self.name == "noise":
            for grad in grads:
                grad *= 1 + 1e-3 * torch.rand(
                    grad.shape, generator=torch.Generator().manual_seed(1)
                )

    def step(self, update: Any) -> Any:
        groups = self.optimizer.param_groups
        real = [dict(group) for group in groups]
        if self.name.startswith("old "):
            key = self.name.partition(" ")[2]
            for group, kept in zip(groups, self.kept, strict=True):
                group[key] = kept[key]
        super().step(update)
        if self.name == "updates twice" and self.at == TIMED + 3:
            super().step(update)
        for group, right in zip(groups, real, strict=True):
            group.update({key: right[key] for key in right if key != "params"})
        if self.now and self.name == "evaluation mode":
            self.model.eval()
        self.at += 1


SLY = (
    *("factor 1.001", "one rank's last tensor", "every 3rd step alone", "averages over P - 1"),
    *("clips", "drops small ones", "drops the remainder", "last step's gradient", "noise"),
    *("updates twice", "evaluation mode", "fewer samples", "another batch", "old lr"),
    *("old momentum", "old weight_decay", "other labels", "scaled loss", "half of the gradient"),
    *("frozen layer", "other labels in timed steps"),
)
"""Programs that go wrong behind the steps that are compared with plain training."""


def own_reference(_: str) -> Any:
    """Synchronous by its word, and by its reference a sum that has rank 0's gradients only."""

    def first(ranks: Any, options: Any) -> Iterator[None]:
        while True:
            ranks.g = ranks.g[0]
            ranks.update()
            yield

    def passed(self: Any) -> None:
        AveragingEngine.passed(self)
        for param in self.params:
            self.communicator.broadcast(param.grad, root=0).wait()

    def ready(self: Any, unit: int) -> None:
        if runtime.rank():
            for param in self.params:
                param.grad.zero_()
        else:
            for param in self.params:
                param.grad.mul_(self.communicator.size)
        AveragingEngine.ready(self, unit)

    kind = type("Made", (AveragingEngine,), {"ready": ready, "passed": passed})
    stack = contextlib.ExitStack()
    stack.enter_context(
        mock.patch.object(
            AllReduce, "engine", lambda self, replica: kind(replica, replica.params, overlap=False)
        )
    )
    stack.enter_context(
        mock.patch("dear.algorithms.reference.reference_of", lambda name, options: first)
    )
    return stack


class Stale(AveragingEngine):
    """Forward passes of some layers read what the step before has left, behind the first steps.

    Args:
        name: of the layers, what their names begin with.
    """

    name = ""

    def __init__(self, replica: Any) -> None:
        super().__init__(replica, replica.params, overlap=False)
        named = self.model.named_parameters()
        self.stale = [param for name, param in named if name.startswith(self.name)]
        self.at, self.old, self.new = 1, self._copies(), self._copies()
        self.hooks.before_forward([self.model], lambda module: self._begin())

    def step(self, update: Any) -> Any:
        self._set(self.new)
        super().step(update)
        self.old, self.new = self.new, self._copies()
        self.at += 1

    def _begin(self) -> None:
        if self.at > TIMED:
            self._set(self.old)

    def _copies(self) -> list[torch.Tensor]:
        return [param.detach().clone() for param in self.stale]

    def _set(self, values: list[torch.Tensor]) -> None:
        with torch.no_grad():
            torch._foreach_copy_(self.stale, values)


class CatchesUp(AveragingEngine):
    """Keeps gradients behind the first steps, and makes updates when somebody looks.

    Args:
        name: "all" catches up when all layers are watched, or when it is asked to synchronize;
            "watched" also for those that are watched, in each step; "never" hands out rank 0's
            parameters instead.
    """

    name = ""

    def __init__(self, replica: Any) -> None:
        super().__init__(replica, replica.params, overlap=False)
        self.at, self.update, self.right = 1, lambda: None, True
        self.kept: dict[torch.nn.Parameter, list[torch.Tensor]] = {p: [] for p in self.params}
        self.layers = [m for m in self.model.modules() if m._parameters]
        self.hooks.before_forward([self.model], lambda module: self._look())

    def ready(self, unit: int) -> None:
        if self.right:
            super().ready(unit)

    def passed(self) -> None:
        if self.right:
            super().passed()

    def step(self, update: Any) -> Any:
        self.update = update
        if self.right or self.name == "never":
            update()
        else:
            for param, gradients in self.kept.items():
                gradients.append(param.grad.clone())
        self.at += 1

    def synchronize(self) -> None:
        super().synchronize()
        if self.name == "never" and self.at > TIMED:
            for param in self.params:
                self.communicator.broadcast(param.data, root=0).wait()
        self._make(self.params)

    def _look(self) -> None:
        watched = [layer for layer in self.layers if layer._forward_pre_hooks]
        self.right = self.at <= TIMED or len(watched) == len(self.layers)
        if self.right:
            self._make(self.params)
        elif self.name == "watched":
            self._make([p for layer in watched for p in layer.parameters() if p in self.kept])

    def _make(self, params: list[torch.nn.Parameter]) -> None:
        """The updates that these have missed, in their order."""
        while any(self.kept[param] for param in params):
            for param in self.params:
                param.grad = None
            for param in params:
                if self.kept[param]:
                    param.grad = self.kept[param].pop(0)
                    self.communicator.all_reduce(param.grad, op="mean").wait()
            self.update()
            for param in params:
                param.grad = None


class Buffers(AveragingEngine):
    """Sets the running means of batch norms to 7.

    Args:
        name: "at once", in every step; "late", behind the first; "rank", on rank 1 alone then;
            "inside", in the forward pass then; "end", when it is asked to synchronize then.
    """

    name = ""

    def __init__(self, replica: Any) -> None:
        super().__init__(replica, replica.params, overlap=False)
        self.at = 1
        for module in self.model.modules():
            if isinstance(module, torch.nn.BatchNorm2d) and self.name == "inside":
                self.hooks.after_forward(module, lambda layer: self._spoil([layer]))

    def step(self, update: Any) -> Any:
        super().step(update)
        self.at += 1
        if self.name in ("at once", "late") or (self.name == "rank" and runtime.rank() == 1):
            self._spoil(self.model.modules())

    def synchronize(self) -> None:
        super().synchronize()
        if self.name == "end":
            self._spoil(self.model.modules())

    def _spoil(self, modules: Any) -> None:
        if self.at > TIMED or self.name == "at once":
            for module in modules:
                if isinstance(module, torch.nn.BatchNorm2d):
                    module.running_mean.data.fill_(7.0)  # autograd does not see it


def engine_of(kind: type[AveragingEngine], name: str) -> Any:
    """All-reduce, whose engine is of that kind and is called so, within the context."""
    engine = type("Made", (kind,), {"name": name})
    return mock.patch.object(AllReduce, "engine", lambda self, replica: engine(replica))


sly = functools.partial(engine_of, Sly)
stale = functools.partial(engine_of, Stale)
catching_up = functools.partial(engine_of, CatchesUp)
buffers = functools.partial(engine_of, Buffers)
