"""Setting of a prediction, and what is predicted: the steady step, of one rank or of each."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.models.profile import Profile
from common.virtual.costs.faults import Disturbance
from common.virtual.costs.parts import CostsOf, Shape
from common.virtual.passes import update_s_of
from common.virtual.world.trace import Timed
from dear.cost.event_model.link import Cost, Scaled
from dear.options import Options


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
    rank_profiles: tuple[Profile, ...] = ()
    """Layer profile of each rank, if not all have the same number of samples per step."""
    disturbances: tuple[Disturbance, ...] = ()
    """Changes of hosts."""
    budget_s: float | None = None
    """Seconds of training; None: until the steps repeat."""
    together: bool = True
    """True lets one rank stand for all if they do the same."""

    @property
    def profiles(self) -> tuple[Profile, ...]:
        """Layer profile of each rank."""
        return self.rank_profiles or (self.profile,) * self.shape.ranks

    @property
    def update_s(self) -> float:
        """Seconds of an update of all parameters on one rank."""
        tensors = 7 if self.optimizer == "adamw" else 5 if self.momentum else 3
        return update_s_of(self.profile, tensors)


def shifted(setting: Setting, costs: float, compute: float) -> Setting:
    """Returns the setting with costs of collectives and times of compute that are larger by these
    relative errors, such as -0.1."""

    def scaled(hosts: int, ranks_per_host: int) -> Mapping[str, Cost]:
        middle = setting.costs(hosts, ranks_per_host)
        return {name: Scaled(cost=cost, factor=1 + costs) for name, cost in middle.items()}

    return dataclasses.replace(
        setting,
        profile=setting.profile.slowed(1 + compute),
        rank_profiles=tuple(profile.slowed(1 + compute) for profile in setting.rank_profiles),
        costs=scaled if costs else setting.costs,
    )


@dataclass(frozen=True, kw_only=True)
class Step:
    """Predicted step in the steady state; times in seconds."""

    step_s: float
    exposed_s: float
    """Part of `step_s` in which the device waits for transfers."""
    phases_s: tuple[float, float, float]
    """Forward pass, backward pass and update, with the waits in them."""
    transfers: tuple[Timed, ...]
    """Transfers of the last step."""
    began_s: float
    """Start of the last step on the clock of its transfers."""
    messages: float | None
    """Transfers per step; None: not counted."""
    note: str | None = None
    """Method, if not every rank runs the algorithm's file, or one of equal ranks."""
    several: Several | None = None
    """Training of each rank; None: one rank stands for all."""


@dataclass(frozen=True, kw_only=True)
class Several:
    """Training of all ranks of a cluster, in the order of the ranks."""

    steps: tuple[Step, ...]
    """Mean step of each rank."""
    statistics: tuple[Mapping[str, Any], ...]
    """Counters of the algorithm on each rank since its first step."""

    @property
    def step_s(self) -> float:
        """Mean time in which all ranks together make as many steps as there are ranks."""
        return len(self.steps) / math.fsum(1 / step.step_s for step in self.steps)

    def samples(self, batches: Sequence[int]) -> float:
        """Returns the samples of all ranks in the time `step_s`, from those of each rank's step."""
        rates = [size / step.step_s for size, step in zip(batches, self.steps, strict=True)]
        return self.step_s * math.fsum(rates)

    @property
    def slowest_s(self) -> float:
        """Step of the slowest rank."""
        return max(step.step_s for step in self.steps)

    @property
    def staleness(self) -> tuple[float, float] | None:
        """Mean age of the values of the stalest neighbour, and the largest age, in steps; None:
        not counted."""
        ages = [age for rank in self.statistics for age in rank.get("staleness", {}).values()]
        used = [age for age in ages if age["uses"]]
        return (max(a["mean"] for a in used), max(a["max"] for a in used)) if used else None
