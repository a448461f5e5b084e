"""Predicted training steps: the file of an algorithm trains a replayed model on virtual ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from common.models.profile import Profile
from common.models.replay.model import workload
from common.models.replay.pace import paced
from common.models.workload import Workload
from common.virtual.costs.parts import Shape
from common.virtual.foresee import foresee, share_on_wire
from common.virtual.setting import Setting, Several, Step
from common.virtual.training.several import train
from common.virtual.training.tape import Played, Taped, TapeOverError, Tapes, program_of
from common.virtual.world.alike import Alike
from common.virtual.world.communicator import VirtualCommunicator
from common.virtual.world.network import Network, Transfer
from common.virtual.world.seat import Seat, kept
from common.virtual.world.trace import STEPS, Gradient, Recorder, Trace
from dear.cost.event_model.step import Prediction, State, steady
from dear.errors import UserError
from dear.options import Options
from dear.training.algorithm import algorithm_class

TAPES = Tapes()
"""Tapes of the programs that ran last in this process."""
MOST = 16
"""Largest number of ranks that run one by one only because their neighbours differ."""
RANK_0 = "rank 0 stands for all, though their neighbours differ"
"""Note on a step in a larger world."""


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
                f"{setting.algorithm}: {sender} cannot run on ranks that differ; leave out "
                "what makes them differ, or use `run`"
            )
        if sender is not None:
            return _modelled(setting, sender)
        if unlike and shape.ranks > 1:
            alone = at_own_pace(setting.algorithm, setting.options)
            return _of_several(train(setting, period, alone, partial(_Training, setting)))
    step = _of_one(setting, period)
    return dataclasses.replace(step, note=RANK_0) if differ else step


def _of_one(setting: Setting, period: int) -> Step:
    """Returns the step of a rank that stands for all: from its program's tape, or from a run."""

    def settled(steps: _Steps) -> Step:
        for _ in range(setting.options.settling_steps()):
            steps.step()
        return steps.mean(steady(steps.step, period))

    program = program_of(setting)
    tape = TAPES.of(program) if program in TAPES else None
    if tape is not None:
        # A program may go on after an error, so the file must run to see it.
        with contextlib.suppress(TapeOverError, UserError):
            return settled(_Playing(_network(partial(Played, setting.profile, tape), setting)))
    if tape is not None or program not in TAPES:
        network = _network(partial(Taped, setting.profile), setting)
        try:
            with _training(setting, network) as training:
                step = settled(training)
                TAPES.keep(program, network.tape())
                return step
        except (TypeError, RuntimeError):  # code wants a number, not a `Moment`; others go on
            TAPES.keep(program, None)
    with _training(setting, _network(Alike, setting)) as training:
        return settled(training)


def traced(setting: Setting) -> Trace:
    """Runs the algorithm until its step times repeat, and traces the steps after that.

    Raises:
        UserError, UnmodelledError: as for `predicted`; or another library starts the transfers, or
            the ranks differ.
    """
    share_on_wire(setting.options)  # refuses compressions
    period, shape = 1, setting.shape
    if setting.algorithm is not None:
        kind = algorithm_class(setting.algorithm)
        period = kind.period(setting.options, shape.ranks, shape.ranks_per_host)
        sender = kind.sends_by(setting.options)
        if sender is not None:
            raise UserError(
                f"no trace of {sender}: its library does not run on the virtual cluster"
            )
    if setting.disturbances or setting.rank_profiles or setting.budget_s is not None:
        raise UserError("no trace of ranks that differ; leave out what makes them differ")
    with _training(setting, _network(Alike, setting)) as training:
        for _ in range(setting.options.settling_steps()):
            training.step()
        steady(training.step, period)
        return training.trace(period * math.ceil(STEPS / period))


def alone_s(setting: Setting) -> float:
    """Returns the step of a single worker with the devices and the optimizer of a setting; if
    workers differ, the mean time of a step of all of them (see `Several.step_s`)."""
    profiles = setting.rank_profiles or (setting.profile,)
    steps = [_alone_s(p, setting.optimizer, setting.momentum) for p in profiles]
    return statistics.harmonic_mean(steps) if setting.rank_profiles else steps[0]


@functools.lru_cache
def _alone_s(profile: Profile, optimizer: str, momentum: float) -> float:
    plain = Setting(
        profile=profile,
        algorithm=None,
        shape=Shape(hosts=1),
        costs=lambda hosts, ranks_per_host: {},
        engine="",
        optimizer=optimizer,
        momentum=momentum,
    )
    return predicted(plain).step_s


def _unlike(setting: Setting) -> bool:
    """Returns True if ranks differ even if their neighbours do not."""
    assert setting.algorithm is not None, "a single rank has no others"
    timed = setting.budget_s is not None
    alone = at_own_pace(setting.algorithm, setting.options)
    differ = setting.disturbances or setting.rank_profiles or not setting.together
    return bool(differ) or (timed and alone)


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


class _Steps:
    """Steps of a rank, and what was measured of each."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.marks: list[tuple[float, float, float, float]] = []
        self._waits: list[float] = []
        self._messages: list[int] = []

    def phases(self) -> Sequence[Callable[[], object]]:
        """Returns the calls of a step: forward pass, backward pass and update."""
        raise NotImplementedError

    def step(self) -> State:
        """Trains a step; returns its state."""
        network = self.network
        network.transfers, network.waits = [], []
        marks = [network.mark()]
        for phase in self.phases():
            phase()
            marks.append(network.mark())
        self.marks.append((marks[0], marks[1], marks[2], marks[3]))
        self._waits.append(math.fsum(end - start for start, end in network.waits))
        self._messages.append(len(network.transfers))
        return network.clock() - marks[0], *network.ages_s()

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


class _Playing(_Steps):
    """Steps of a tape."""

    def __init__(self, network: Played) -> None:
        super().__init__(network)
        self._play = network.play

    def phases(self) -> Sequence[Callable[[], object]]:
        return [self._play] * 3

    def step(self) -> State:
        self._play()  # what comes before the first step, or between two
        return super().step()


class _Training(_Steps):
    """Steps of an algorithm's file."""

    def __init__(
        self,
        setting: Setting,
        seat: Seat,
        communicator: VirtualCommunicator,
        load: Workload | None = None,
    ) -> None:
        super().__init__(seat.network)
        self._load = workload(setting.profiles[communicator.rank], None) if load is None else load
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

    def phases(self) -> Sequence[Callable[[], object]]:
        return self._forward, self._backward, self._optimizer.step

    def _forward(self) -> None:
        self._optimizer.zero_grad()
        self._loss = self._load.loss()

    def _backward(self) -> None:
        self._loss.backward()
        del self._loss

    def statistics(self) -> Mapping[str, Any]:
        """Returns the algorithm's counters."""
        counters: Mapping[str, Any] = self._optimizer.statistics()
        return counters

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


NetworkT = TypeVar("NetworkT", bound=Alike)


def _network(kind: Callable[..., NetworkT], setting: Setting) -> NetworkT:
    return kind(
        setting.shape,
        setting.costs,
        engine=setting.engine,
        priorities=setting.engine == "comm_core",
    )


@contextlib.contextmanager
def _training(setting: Setting, network: Alike) -> Iterator[_Training]:
    load = workload(setting.profile, None)  # here, because arithmetic is slow in the mode below
    seat = Seat(network, setting.profile.memory_bytes_per_s)
    with kept(), seat.joined() as communicator:
        yield _Training(setting, seat, communicator, load)
