"""Draws faults: what happens to which rank of which job, when, under which launcher."""

from __future__ import annotations

import dataclasses
import functools
import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.emulation import sandbox
from dear.training.algorithm import algorithm_class, algorithm_names
from tests.faults.kinds import KINDS, Kind

STEPS = 6
"""Steps of a drawn job; a fault comes before one of them, or within it."""
STEPS_DURING = 80
"""Steps where the fault comes some time after the beginning of a step."""
COLLECTIVES = "collectives"
"""Program that calls collectives of random kind and size, without an algorithm."""
_FILE = "fault.json"
_WORLDS = (2, 2, 3, 4)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Fault with the job that meets it; `seed` and `index` determine everything else."""

    seed: int
    index: int
    kind: str
    program: str
    """Algorithm that the ranks train with, or `COLLECTIVES`."""
    world: int
    launcher: str
    """Launcher by name; `bare`: nobody ends ranks when one fails; `driver`: a whole sweep."""
    fabric: str
    """`local`, `emulated` (a host for each rank) or `predicted` (ranks of a virtual clock)."""
    transport: str
    """COMM_CORE_TRANSPORT of the ranks."""
    backend: str
    victim: int
    step: int
    moment: str
    """`before` the step, in its `backward` pass, or `during`: so many ms later, wherever it is."""
    delay_ms: int

    @property
    def how(self) -> Kind:
        return KINDS[self.kind]

    @property
    def steps(self) -> int:
        """Steps of a job in which all ranks make equally many."""
        return STEPS_DURING if self.moment == "during" else STEPS

    @property
    def title(self) -> str:
        """Description in one line."""
        when = f"{self.moment} step {self.step}"
        when += f" + {self.delay_ms} ms" if self.moment == "during" else ""
        place = f"{self.launcher}, {self.fabric}, {self.transport}, {self.backend}"
        return f"{self.kind} of rank {self.victim} of {self.world}, {when}: {self.program}, {place}"

    @property
    def family(self) -> str:
        """Consistency of the algorithm, or `COLLECTIVES`."""
        if self.program == COLLECTIVES:
            return COLLECTIVES
        return algorithm_class(self.program).capabilities.consistency

    def save(self, folder: Path) -> None:
        """Writes the fault into the folder that its ranks read."""
        (folder / _FILE).write_text(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def load(cls, folder: Path) -> Fault:
        """Reads the fault that `save` wrote."""
        return cls(**json.loads((folder / _FILE).read_text()))


def draw(seed: int, index: int, kinds: Sequence[str] = (), **fixed: str) -> Fault:
    """Returns the fault of this number.

    Args:
        kinds: kinds to draw from; empty: all that can happen on this machine.
        fixed: fields that are not drawn, such as `backend` or `launcher`.
    """
    random_ = random.Random(f"{seed} {index}")
    names = [name for name in kinds or KINDS if launchers(KINDS[name])]
    kind = random_.choices(names, [KINDS[name].share for name in names])[0]
    how = KINDS[kind]
    launcher, fabric = random_.choice(launchers(how))
    families = {name: algorithm_class(name) for name in trained()}
    by_family: dict[str, list[str]] = {COLLECTIVES: [COLLECTIVES]}
    for name, algorithm in families.items():
        by_family.setdefault(algorithm.capabilities.consistency, []).append(name)
    allowed = [family for family in by_family if family in how.families]
    program = random_.choice(by_family[random_.choice(allowed)])
    world = random_.choice(_WORLDS)
    moments = ["before", "during", "backward"][: 2 + (program != COLLECTIVES)]
    if how.in_the_program:
        moments.remove("during")
    drawn = {
        "program": program,
        "world": world,
        "launcher": launcher,
        "fabric": fabric,
        "transport": random_.choice(("auto", "tcp")),
        "backend": "comm_core",
        "victim": random_.randrange(world),
        "step": random_.randrange(STEPS),
        "moment": random_.choice(moments),
        "delay_ms": random_.randrange(1, 60),
    }
    return Fault(seed=seed, index=index, kind=kind, **{**drawn, **fixed})


@functools.cache
def trained() -> Sequence[str]:
    """Algorithms that this machine has; Horovod has processes of its own, and is compared with."""
    return [
        name
        for name in algorithm_names()
        if name != "horovod" and algorithm_class(name).unavailable() is None
    ]


def launchers(kind: Kind) -> list[tuple[str, str]]:
    """Pairs of launcher and fabric under which this machine can have faults of this kind."""
    return [place for place in kind.places if _can(*place)]


@functools.cache
def _can(launcher: str, fabric: str) -> bool:
    if fabric == "emulated" and sandbox.unable() is not None:
        return False
    return launcher != "mpirun" or shutil.which("mpirun") is not None
