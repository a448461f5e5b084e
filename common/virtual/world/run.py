"""Predicted training steps: the file of an algorithm trains a replayed model on virtual ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from common.models.profile import Profile
from common.models.replay.model import workload
from common.models.replay.pace import paced
from common.virtual.costs.faults import Disturbance
from common.virtual.costs.parts import Shape
from common.virtual.foresee import foresee, share_on_wire
from common.virtual.passes import update_s_of
from common.virtual.step import Prediction, State, steady
from common.virtual.world.alike import Alike
from common.virtual.world.communicator import VirtualCommunicator
from common.virtual.world.network import CostsOf, Transfer
from common.virtual.world.seat import Seat, kept
from common.virtual.world.several import Several, train
from dear.errors import UserError
from dear.options import Options
from dear.training.algorithm import algorithm_class

MOST = 16
"""Largest number of ranks that run one by one only because their neighbours differ."""
RANK_0 = "rank 0 stands for all, though their neighbours differ"
"""Note on a step in a larger world."""


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
    disturbances: tuple[Disturbance, ...] = ()
    """Changes of hosts."""
    budget_s: float | None = None
    """Seconds of training; None: until the steps repeat."""
    together: bool = True
    """True lets one rank stand for all if they do the same."""

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
    """Method, if not every rank runs the algorithm's file, or one of equal ranks."""
    several: Several | None = None
    """Training of each rank; None: one rank stands for all."""


def predicted(setting: Setting) -> Step:
    """Runs the algorithm until its step times repeat, and returns the steady step.

    Raises:
        UserError: the algorithm refuses the setting, or needs what the virtual cluster lacks.
        UnmodelledError: part of a step takes time that is not modelled, such as a compression.
    """
    share_on_wire(setting.options)  # refuses compressions
    period, shape, differ = 1, setting.shape, False
    if setting.algorithm is not None:
        kind = algorithm_class(setting.algorithm)
        period = kind.period(setting.options, shape.ranks, shape.ranks_per_host)
        differ = _neighbours_differ(setting)
        unlike = _unlike(setting) or (differ and shape.ranks <= MOST)
        sender = kind.sends_by(setting.options)
        if sender is not None and unlike:
            raise UserError(
                f"{setting.algorithm}: {sender} cannot run on ranks that differ; leave the fault "
                "out, or use `run`"
            )
        if sender is not None:
            return _modelled(setting, sender)
        if unlike and shape.ranks > 1:
            alone = at_own_pace(setting.algorithm, setting.options)
            return _of_several(train(setting, period, alone, partial(_Training, setting)))
    with _training(setting) as training:
        for _ in range(setting.options.settling_steps()):
            training.step()
        step = training.mean(steady(training.step, period))
    return dataclasses.replace(step, note=RANK_0) if differ else step


def _unlike(setting: Setting) -> bool:
    """Returns True if ranks differ even if their neighbours do not."""
    assert setting.algorithm is not None, "a single rank has no others"
    timed = setting.budget_s is not None
    alone = at_own_pace(setting.algorithm, setting.options)
    return bool(setting.disturbances) or not setting.together or (timed and alone)


def _neighbours_differ(setting: Setting) -> bool:
    """Returns True if ranks wait for neighbours, of which some have more, or farther ones."""
    assert setting.algorithm is not None, "a single rank has no neighbours"
    if at_own_pace(setting.algorithm, setting.options):
        return False
    kind, shape = algorithm_class(setting.algorithm), setting.shape
    traffic = kind.traffic(setting.options, shape.ranks, shape.ranks_per_host)
    return traffic is not None and not traffic.alike(shape.ranks_per_host)


def _of_several(several: Several) -> Step:
    """Returns the mean of the steps of all ranks; the rest is rank 0's."""
    steps = several.steps
    return dataclasses.replace(
        steps[0],
        step_s=several.step_s,
        exposed_s=statistics.fmean(step.exposed_s for step in steps),
        messages=statistics.fmean(step.messages or 0 for step in steps),
        several=several,
    )


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


def at_own_pace(algorithm: str, options: Options) -> bool:
    """Returns True if no rank waits for another."""
    consistency = algorithm_class(algorithm).capabilities.consistency
    return consistency == "asynchronous" and not options.in_step()


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
    def __init__(self, setting: Setting, seat: Seat, communicator: VirtualCommunicator) -> None:
        self.network = seat.network
        self._load = workload(setting.profile, None)
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

    def step(self) -> State:
        """Trains a step; returns its state."""
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
        return network.clock() - began, *network.ages_s()

    def statistics(self) -> Mapping[str, Any]:
        """Returns the algorithm's counters."""
        counters: Mapping[str, Any] = self._optimizer.statistics()
        return counters

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


@contextlib.contextmanager
def _training(setting: Setting) -> Iterator[_Training]:
    network = Alike(
        setting.shape,
        setting.costs,
        engine=setting.engine,
        priorities=setting.engine == "comm_core",
    )
    seat = Seat(network, setting.profile.memory_bytes_per_s)
    with kept(), seat.joined() as communicator:
        yield _Training(setting, seat, communicator)
