"""Training that is wrong in one way each, on top of algorithms that are right."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from common.harness.trial import Briefing, Trial
from common.harness.worker import rank, throughput
from common.harness.worker.checking import plain_training
from common.harness.worker.checking.checker import check_training
from common.models.replay.pace import Pace, set_pace
from common.results.records.trust import Check
from dear.algorithms.asynchronous.asyncddp import AsyncExchange
from dear.algorithms.asynchronous.push_sum import PushSumExchange
from dear.algorithms.synchronous.allreduce import AllReduce
from dear.algorithms.synchronous.wfbp import AveragingEngine
from dear.comm import runtime
from dear.training.algorithm import algorithm_class
from dear.training.parameters.exchange import BucketExchange
from dear.training.parameters.windows import WindowAlgorithm, WindowExchange
from tests.system import made

Fault = Callable[["Wrong", list[torch.Tensor]], None]


class Wrong(AveragingEngine):
    """Averages after the pass, and does something wrong with it in some steps.

    Args:
        steps: which, by number from 1.
    """

    name = ""
    steps: Callable[[int], bool] = staticmethod(lambda step: True)

    def __init__(self, replica: Any) -> None:
        super().__init__(replica, replica.params, overlap=False)
        self.at, self.last = 1, []
        self.noise = torch.Generator().manual_seed(5)
        if self.name == "stale forward":
            self.old = self.new = [p.detach().clone() for p in self.params]
            self.hooks.before_forward([self.model], lambda module: self._set(self.old))

    def ready(self, unit: int) -> None:
        if self.name == "one rank ignored" and self.steps(self.at) and runtime.rank() == 1:
            for param in self.params:
                param.grad.zero_()
        super().ready(unit)

    def passed(self) -> None:
        super().passed()
        gradients = [param.grad for param in self.params]
        fresh = [gradient.clone() for gradient in gradients]
        if self.steps(self.at):
            self._spoil(gradients)
        self.last = fresh

    def step(self, update: Any) -> Any:
        lost = self.name == "lost" and self.steps(self.at)
        if self.name == "stale forward":
            self._set(self.new)
        super().step((lambda: None) if lost else update)
        if self.name == "stale forward":
            self.old, self.new = self.new, [p.detach().clone() for p in self.params]
        self.at += 1

    def settle(self) -> None:
        if self.name == "stale forward":
            self._set(self.new)

    def _set(self, values: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for param, value in zip(self.params, values, strict=True):
                param.copy_(value)

    def _spoil(self, gradients: list[torch.Tensor]) -> None:
        kind, _, much = self.name.partition(" ")
        small = sorted(gradients, key=lambda tensor: tensor.numel())
        if kind == "factor":
            torch._foreach_mul_(gradients, float(much))
        if kind == "noise":
            for gradient in gradients:
                share = float(much) * gradient.norm() / gradient.numel() ** 0.5
                gradient += share * torch.randn(gradient.shape, generator=self.noise)
        if kind == "losing":
            torch._foreach_zero_(small[: int(much)])
        if kind == "doubling":
            torch._foreach_mul_(small[: int(much)], 2.0)
        if self.name == "stale" and self.last:
            for gradient, last in zip(gradients, self.last, strict=True):
                gradient.copy_(last)


def always(step: int) -> bool:
    return True


def first(step: int) -> bool:
    return step == 1


def third(step: int) -> bool:
    return step == 3


def late(step: int) -> bool:
    return step > 2


PROGRAMS: dict[str, tuple[str, Callable[[int], bool]]] = {
    **{f"factor {f}": (f"factor {f}", always) for f in ("1.01", "1.019", "1.021")},
    "one rank contributes nothing": ("one rank ignored", always),
    "gradients of the step before": ("stale", always),
    "first step lost": ("lost", first),
    "third step lost": ("lost", third),
    "noise of 1 %": ("noise 0.01", always),
    "noise of 5 %": ("noise 0.05", always),
    **{f"smallest {n} lost": (f"losing {n}", always) for n in (1, 4, 30, 107)},
    **{f"smallest {n} doubled": (f"doubling {n}", always) for n in (1, 4, 50)},
    "forward on the parameters of the step before": ("stale forward", always),
    "no update after step 2": ("lost", late),
    "factor 10 after step 2": ("factor 10", late),
    "one rank ignored after step 2": ("one rank ignored", late),
    "stale after step 2": ("stale", late),
}
"""Programs by what is wrong, and when."""
FEW_TENSORS = sorted(name for name in PROGRAMS if name.split()[1] not in ("30", "50", "107"))
"""Programs that mean something in a model of some tensors."""


def spoilt(name: str) -> Any:
    """All-reduce, wrong like that, within the context."""
    what, when = PROGRAMS[name]
    kind = type("Spoilt", (Wrong,), {"name": what, "steps": staticmethod(when)})
    return mock.patch.object(AllReduce, "engine", lambda self, replica: kind(replica))


def mixing_nothing(name: str) -> Any:
    """The algorithm of that name, whose messages travel and are forgotten, within the context."""
    algorithm = algorithm_class(name)
    if issubclass(algorithm, WindowAlgorithm):
        return forgetting(algorithm.exchange)
    module = __import__(algorithm.__module__, fromlist=["*"])
    exchanges = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, BucketExchange)
    ]
    (kind,) = [e for e in exchanges if not any(e in other.__mro__[1:] for other in exchanges)]
    return forgetting(kind)


def forgetting(kind: type[BucketExchange]) -> Any:
    """Lets exchanges of this kind wait for what has come and change nothing, in the context."""

    def mix(self: Any, bucket: Any, steps: int) -> None:
        before = bucket.values.clone()
        right(self, bucket, steps)
        bucket.values.copy_(before)
        bucket.push() if hasattr(bucket, "push") else None
        bucket.touched()

    right = kind.mix
    return mock.patch.object(kind, "mix", mix)


def leaking(_: str) -> Any:
    """Push-sum, which loses a tenth of what a rank keeps, weights and values alike."""
    right = PushSumExchange.share

    def share(self: Any, bucket: Any, steps: int) -> None:
        right(self, bucket, steps)
        self._kept[bucket] *= 0.9

    return mock.patch.object(PushSumExchange, "share", share)


@contextlib.contextmanager
def too_stale(_: str) -> Iterator[None]:
    """Asyncddp, whose ranks send nothing after the third step and wait for nobody."""

    def share(self: Any, bucket: Any, steps: int) -> None:
        if steps <= 3:
            WindowExchange.share(self, bucket, steps)

    with (
        mock.patch.object(AsyncExchange, "share", share),
        mock.patch.object(AsyncExchange, "_catch_up", lambda self, *_: None),
    ):
        yield


PHASES = [
    "timing collectives",
    "training plainly, to compare with",
    "wrapping the model",
    "comparing with plain training",
    "warming up",
    "measuring",
    "tracing some more steps",
    "comparing all steps with a reference",
    "counting operations",
    "checking that the replicas agree",
    "leaving",
]
"""Phases of a first repeat, in order."""


def checked(trial: dict[str, Any], spoil: tuple[Callable[[str], Any], str] | None) -> Check:
    """Returns, on a rank, the harness's check of a trial whose algorithm is spoilt like that."""
    it, build = Trial.from_json(trial), rank.build
    replayed = "@" in it.model
    if replayed:  # seven tensors of all kinds instead of its own
        build = lambda *given: made.workload(runtime.rank())  # noqa: E731
    set_pace(Pace(0.02, None))
    try:
        with (
            mock.patch("dear.shutdown"),
            mock.patch.object(rank, "build", build),
            # Of a machine, not of a program; all take longer than the training here.
            mock.patch.object(throughput, "canary_s", lambda communicator: 0.1),
            mock.patch.object(throughput.evidence, "host_costs", lambda *given: []),
            mock.patch.object(plain_training, "SHORT_S", 0.0),
            tempfile.TemporaryDirectory() as folder,
            spoil[0](spoil[1]) if spoil else mock.MagicMock(),
        ):
            workload = rank.make_workload(it, torch.device("cpu"))
            if it.learn is not None:
                return check_training(it, workload)
            briefing = Briefing(folder=Path(folder), time_scale=0.02, costs={})
            phases: list[str] = []
            result = throughput.time_steps(it, briefing, workload, 0, phases.append)
            assert phases == PHASES, phases
    finally:
        set_pace(Pace(1.0, None))
    return dataclasses.replace(result.check)


def begun(trial: dict[str, Any], repeat: int) -> tuple[Any, ...]:
    """Returns, on a rank, how a training trial begins: weights, batch and random state."""
    drawn: list[Any] = []

    def learn(trial: Trial, briefing: Any, workload: Any, *_: Any) -> None:
        tensors = [*workload.model.state_dict().values(), *workload.inputs, *workload.targets]
        drawn.extend([[tensor.tolist() for tensor in tensors], torch.rand(3).tolist()])

    try:
        with (
            mock.patch("dear.init"),
            mock.patch.object(rank, "learn", learn),
            tempfile.TemporaryDirectory() as folder,
        ):
            briefing = Briefing(folder=Path(folder), time_scale=1.0, costs={})
            rank._run(Trial.from_json(trial), briefing, repeat, lambda phase: None)
    finally:
        set_pace(Pace(1.0, None))
    return tuple(drawn)


def unreferenced(name: str) -> Any:
    """No algorithm has a reference, within the context."""
    return mock.patch("dear.algorithms.reference.reference_of", lambda name, options: None)
