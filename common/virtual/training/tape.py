"""Tape of a virtual rank: what its program asked of the network, to play on another clock.

A program that never acts on a time asks the same on a cluster of any speed, of any network. So one
run of an algorithm's file gives its steps on all of them: a tape is played on links with other
costs, and its compute takes the times of another profile. A program that acts on times has no tape,
as one that measures first, asks whether a transfer has ended, or runs callbacks and threads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from common.models.profile import Profile
from common.models.replay.plan import Unit, Work, parts
from common.virtual.costs.parts import Shape
from common.virtual.setting import Setting
from common.virtual.training.moment import Moment
from common.virtual.world.alike import Alike
from common.virtual.world.network import Group, Transfer
from dear.training.algorithm import algorithm_class

KEPT = 8
"""Number of programs whose tapes a process keeps."""


class _Sent(NamedTuple):
    """Start of a transfer; the fields are arguments of `Alike._start`."""

    operation: str
    nbytes: int
    legs: tuple[Shape, ...]
    queue: Hashable
    priority: int
    groups: int


class _Awaited(NamedTuple):
    """Wait for transfers, by their index among all of the tape."""

    transfers: tuple[int, ...]


Call: TypeAlias = float | int | _Sent | _Awaited
"""Compute of some seconds, compute of the part of the profile with this index, or a call of the
network."""
Phase: TypeAlias = list[Call]
Tape: TypeAlias = tuple[Phase, ...]
"""Calls before the first step, in each of its three phases, before the second step, and so on."""


class TapeOverError(Exception):
    """The steps of the tape are over."""


class Taped(Alike):
    """Network that records what the rank's program asks of it."""

    def __init__(self, profile: Profile, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._parts = parts(profile)  # kept, so that none of the numbers below is used again
        self._places = {id(part): place for place, part in enumerate(self._parts)}
        self._phases: list[Phase] = [[]]
        self._numbers: dict[Transfer, int] = {}
        self._looked = False

    def tape(self) -> Tape | None:
        """Returns the tape so far; None if the program may have acted on a time."""
        return None if self._looked else tuple(self._phases)

    def look(self) -> None:
        self._looked = True

    def read(self) -> Moment:
        return Moment(self.clock(), self.look)

    def mark(self) -> float:
        self._phases.append([])
        return super().mark()

    def compute(self, seconds: float, part: Work | Unit | None = None) -> None:
        self._phases[-1].append(float(seconds) if part is None else self._places[id(part)])
        super().compute(seconds, part)

    def wait(self, transfers: Sequence[Transfer]) -> None:
        numbers = tuple(self._numbers[transfer] for transfer in transfers)
        self._phases[-1].append(_Awaited(numbers))
        super().wait(transfers)

    def reach(self, source: int, target: int, nbytes: int, effect: Callable[[], Any]) -> Transfer:
        self.look()  # others read what is written without a wait
        return super().reach(source, target, nbytes, effect)

    def windows(self, group: Group, window: Any) -> Mapping[int, Sequence[Any]]:
        self.look()
        return super().windows(group, window)

    def _start(
        self,
        operation: str,
        nbytes: int,
        legs: Sequence[Shape],
        effect: Callable[[], Any],
        queue: Hashable,
        priority: int = 0,
        ranks: Sequence[int] | None = None,
        groups: int = 1,
    ) -> Transfer:
        sent = _Sent(operation, nbytes, tuple(legs), queue, priority, groups)
        self._phases[-1].append(sent)
        transfer = super()._start(operation, nbytes, legs, effect, queue, priority, ranks, groups)
        self._numbers[transfer] = len(self._numbers)
        return transfer


class Played(Alike):
    """Network on which a tape asks what the program would have asked."""

    def __init__(self, profile: Profile, tape: Tape, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._seconds = [part.seconds for part in parts(profile)]
        self._phases = iter(tape)
        self._sent: list[Transfer] = []

    def play(self) -> None:
        """Makes the calls of the next phase; raises `TapeOverError` if there is none."""
        phase = next(self._phases, None)
        if phase is None:
            raise TapeOverError
        for call in phase:
            if isinstance(call, float):
                self.compute(call)
            elif isinstance(call, int):
                self.compute(self._seconds[call])
            elif isinstance(call, _Sent):
                operation, nbytes, legs, queue, priority, groups = call
                self._sent.append(
                    self._start(
                        operation, nbytes, legs, _nothing, queue, priority=priority, groups=groups
                    )
                )
            else:
                self.wait([self._sent[number] for number in call.transfers])


def _nothing() -> None:
    """Stands for the arrival of values."""


def program_of(setting: Setting) -> Hashable:
    """Returns what decides what the program of a rank asks for, unless it acts on a time."""
    algorithm = None if setting.algorithm is None else algorithm_class(setting.algorithm)
    return (
        _untimed(setting.profile),
        algorithm,
        repr(setting.options),
        setting.shape,
        setting.engine,
        setting.optimizer,
        setting.momentum,
    )


@functools.lru_cache(maxsize=16)
def _untimed(profile: Profile) -> Hashable:
    """Returns all of a profile that a replayed model has, except for the times of its parts."""
    return (
        profile.modules,
        tuple((param.name, param.shape) for param in profile.parameters),
        tuple(profile.shared.items()),
        profile.frozen,
        profile.memory_bytes_per_s,
        tuple(
            (part.module, tuple(unit.params for unit in part.units))
            for part in parts(profile)
            if isinstance(part, Work)
        ),
    )


class Tapes:
    """Tapes of the last programs; None for a program that acts on times."""

    def __init__(self) -> None:
        self._tapes: dict[Hashable, Tape | None] = {}

    def __contains__(self, program: Hashable) -> bool:
        return program in self._tapes

    def of(self, program: Hashable) -> Tape | None:
        return self._tapes[program]

    def keep(self, program: Hashable, tape: Tape | None) -> None:
        """Adds the tape of a program, and drops that of the oldest one."""
        self._tapes[program] = tape
        while len(self._tapes) > KEPT:
            del self._tapes[next(iter(self._tapes))]

    def clear(self) -> None:
        self._tapes.clear()
