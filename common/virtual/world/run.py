"""Predicted training steps: the file of an algorithm trains a replayed model on virtual ranks."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from common.models.profile import Profile
from common.models.replay import pace
from common.models.replay.model import workload
from common.models.replay.pace import paced
from common.virtual.costs.parts import Shape
from common.virtual.foresee import foresee, share_on_wire
from common.virtual.passes import update_s_of
from common.virtual.step import Prediction, steady
from common.virtual.world.communicator import VirtualCommunicator
from common.virtual.world.device import Arithmetic, VirtualPace
from common.virtual.world.group import job
from common.virtual.world.network import CostsOf, Network, Transfer
from common.virtual.world.trace import STEPS, Gradient, Recorder, Trace
from dear.comm import runtime
from dear.comm.environment import RankFacts
from dear.errors import UserError
from dear.options import Options
from dear.training.algorithm import algorithm_class


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Setting of a prediction."""

    profile: Profile
    algorithm: str | None
    """Name of an algorithm; None: the plain optimizer on one rank."""
    options: Options = field(default_factory=Options)
    shape: Shape
    costs: CostsOf
    engine: str
    """Library whose collectives `costs` are of."""
    optimizer: str = "sgd"
    momentum: float = 0.9

    @property
    def update_s(self) -> float:
        """Seconds of an update of all parameters on one rank."""
        tensors = 7 if self.optimizer == "adamw" else 5 if self.momentum else 3
        return update_s_of(self.profile, tensors)


@dataclass(frozen=True, kw_only=True)
class Step:
    """Predicted step in the steady state; times in seconds."""

    step_s: float
    exposed_s: float
    """Part of `step_s` in which the device waits for transfers."""
    phases_s: tuple[float, float, float]
    """Forward pass, backward pass and update, with the waits in them."""
    transfers: tuple[Transfer, ...]
    """Transfers of the last step."""
    began_s: float
    """Start of the last step on the clock of its transfers."""
    messages: float | None
    """Transfers per step; None: not counted."""
    note: str | None = None
    """Method, if the algorithm's file did not run."""


def predicted(setting: Setting) -> Step:
    """Runs the algorithm until its step times repeat, and returns the steady step.

    Raises:
        UserError: the algorithm refuses the setting, or needs what the virtual cluster lacks.
        UnmodelledError: part of a step takes time that is not modelled, such as a compression.
    """
    period, sender = _way(setting)
    if sender is not None:
        return _modelled(setting, sender)
    with _training(setting) as training:
        for _ in range(setting.options.settling_steps()):
            training.step()
        return training.mean(steady(training.step, period))


def traced(setting: Setting) -> Trace:
    """Runs the algorithm until its step times repeat, and traces the steps after that.

    Raises:
        UserError, UnmodelledError: as for `predicted`; or another library starts the transfers.
    """
    period, sender = _way(setting)
    if sender is not None:
        raise UserError(f"no trace of {sender}: its library does not run on the virtual cluster")
    with _training(setting) as training:
        for _ in range(setting.options.settling_steps()):
            training.step()
        steady(training.step, period)
        return training.trace(period * math.ceil(STEPS / period))


def _way(setting: Setting) -> tuple[int, str | None]:
    """Returns after how many steps a rank does the same, and the library that starts transfers."""
    share_on_wire(setting.options)  # refuses compressions
    if setting.algorithm is None:
        return 1, None
    kind, shape = algorithm_class(setting.algorithm), setting.shape
    period = kind.period(setting.options, shape.ranks, shape.ranks_per_host)
    return period, kind.sends_by(setting.options)


def stated(setting: Setting) -> Prediction:
    """Returns the step by the event model, which follows the algorithm's statement, not its file.

    Raises:
        UnmodelledError: the event model does not cover the algorithm.
    """
    assert setting.algorithm is not None, "the event model needs an algorithm"
    shape = setting.shape
    costs = setting.costs(shape.hosts, shape.ranks_per_host)
    return foresee(
        setting.profile, setting.algorithm, setting.options, costs, shape.ranks, setting.update_s
    )


def _modelled(setting: Setting, sender: str) -> Step:
    """Returns the step of an algorithm whose transfers another library starts."""
    step, profile = stated(setting), setting.profile
    return Step(
        step_s=step.step_s,
        exposed_s=step.exposed_s,
        phases_s=(profile.forward_s, profile.backward_s, setting.update_s),
        transfers=(),
        began_s=0.0,
        messages=None,
        note=f"model of {sender}'s cycles and fusion; its library does not run",
    )


def slowest(ranks: int, relative_std: float) -> float:
    """Returns the expected compute of the slowest of `ranks` / that of a single rank.

    Their compute is normal. The expected largest of P standard normal values is about the quantile
    (P - 0.375) / (P + 0.25) (Blom, 1958).
    """
    if ranks == 1 or not relative_std:
        return 1.0
    quantile = (ranks - 0.375) / (ranks + 0.25)
    return 1 + relative_std * statistics.NormalDist().inv_cdf(quantile)


class _Training:
    def __init__(self, setting: Setting, network: Network, communicator: Any) -> None:
        self.network = network
        self._load = workload(setting.profile, None)
        self._plain = self._load.model
        kind: Any = torch.optim.AdamW if setting.optimizer == "adamw" else torch.optim.SGD
        kind = paced(kind, setting.profile.memory_bytes_per_s)
        momentum = {"momentum": setting.momentum} if setting.optimizer == "sgd" else {}
        params = self._load.model.parameters()
        self._optimizer = kind(params, lr=0.01, foreach=True, **momentum)
        if setting.algorithm is not None:
            algorithm = algorithm_class(setting.algorithm)()
            self._load.model, self._optimizer = algorithm.wrap(
                self._load.model, self._optimizer, communicator, setting.options
            )
        self.marks: list[tuple[float, float, float, float]] = []
        self._waits: list[float] = []
        self._messages: list[int] = []

    def step(self) -> float:
        """Trains a step; returns its seconds."""
        network = self.network
        network.transfers, network.waits = [], []
        began = network.clock()
        self._optimizer.zero_grad()
        loss = self._load.loss()
        forward = network.clock()
        loss.backward()
        backward = network.clock()
        self._optimizer.step()
        self.marks.append((began, forward, backward, network.clock()))
        self._waits.append(math.fsum(end - start for start, end in network.waits))
        self._messages.append(len(network.transfers))
        return network.clock() - began

    def mean(self, steps: int) -> Step:
        """Returns the mean of the last steps."""
        marks = self.marks[-steps:]
        phases = [statistics.fmean(m[i + 1] - m[i] for m in marks) for i in range(3)]
        return Step(
            step_s=(marks[-1][3] - marks[0][0]) / len(marks),
            exposed_s=statistics.fmean(self._waits[-steps:]),
            phases_s=(phases[0], phases[1], phases[2]),
            transfers=tuple(self.network.transfers),
            began_s=marks[-1][0],
            messages=statistics.fmean(self._messages[-steps:]),
        )

    def trace(self, steps: int) -> Trace:
        """Trains further steps; returns their trace."""
        recorder = self.network.recorder = Recorder()
        sent: list[Transfer] = []
        waits_s: list[tuple[float, float]] = []

        def watch(name: str) -> Callable[[torch.Tensor], None]:
            def ready(gradient: torch.Tensor) -> None:
                now_s = self.network.clock()
                recorder.gradients.append(
                    Gradient(name=name, nbytes=gradient.nbytes, ready_s=now_s)
                )

            return ready

        named = self._plain.named_parameters()
        hooks = [param.register_hook(watch(name)) for name, param in named if param.requires_grad]
        for _ in range(steps):
            self.step()
            sent += self.network.transfers
            waits_s += self.network.waits
        self.network.recorder = None
        for hook in hooks:
            hook.remove()
        self.network.wait(sent)
        return recorder.trace(self.marks[-steps:], waits_s)


@contextlib.contextmanager
def _training(setting: Setting) -> Iterator[_Training]:
    shape = setting.shape
    network = Network(
        shape, setting.costs, engine=setting.engine, priorities=setting.engine == "comm_core"
    )
    device = VirtualPace(network)
    network.apart = device.apart
    # Each thread has a mode of its own.
    network.inside = partial(Arithmetic, device, setting.profile.memory_bytes_per_s)
    facts = RankFacts(
        launcher="virtual",
        rank=0,
        world_size=shape.ranks,
        local_rank=0,
        local_world_size=shape.ranks_per_host,
    )
    before = pace.current()
    pace.set_pace(device)
    try:
        with job(network) as world, network.inside():
            communicator = VirtualCommunicator(network, world)
            with runtime.joined(facts, communicator):
                yield _Training(setting, network, communicator)
    finally:
        pace.set_pace(before)
