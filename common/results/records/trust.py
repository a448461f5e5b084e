"""Checks of a trial: of its training, its links, its costs, and the load on its machine."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from common.results.records.reading import JsonObject
from dear.cost.fit import CollectiveCost


def elapsed_per_step_s(steps: Sequence[float]) -> float:
    """Returns the mean step time of a repeat, in seconds."""
    return math.fsum(steps) / len(steps)


def mean_step_s(iters: Iterable[Iterable[Sequence[float]]]) -> float:
    """Returns the elapsed time per step in seconds: the mean over repeats of each repeat's mean.
    `iters` are step times in seconds, by repeat and block."""
    repeats = [[step for block in repeat for step in block] for repeat in iters]
    return statistics.fmean(map(elapsed_per_step_s, repeats))


NoteKind = Literal[
    "beside",
    "costs",
    "disturbed",
    "diverged",
    "interrupted",
    "killed",
    "no comm core",
    "not stationary",
    "ordinary priority",
    "oversubscribed",
    "relaunch",
    "stopped",
    "time scale",
    "unfaithful",
]


@dataclass(frozen=True, kw_only=True)
class Note:
    """Remark on a record."""

    kind: NoteKind
    text: str
    """Text for readers; code uses the kind."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """Comparison of a trial with correct training. None: not compared."""

    replicas_agree: bool | None = None
    matches_reference: bool | None = None
    """True if parameters equal the reference's, after the first steps and at the end."""
    replica_spread: float | None = None
    """Largest difference of a parameter element between ranks; None also if it is infinite."""
    reference_error: float | None = None
    """Largest error of a parameter tensor after the first steps, divided by how far these steps
    moved the reference's tensor. None also if it is not finite."""
    consensus_distance: float | None = None
    """Distance of the ranks from their mean; None also if it is not finite."""
    judged_by: Literal["reference", "invariants", "replicas"] | None = None
    """Standard of the comparison: a serial reference, invariants that hold for any order of the
    ranks, or only the other ranks' replicas."""
    worst_tensor: str | None = None
    """Name of the tensor with the largest error, in the first steps or at the end."""
    end_error: float | None = None
    """Same as `reference_error`, after all steps of the first repeat (timed steps, too)."""
    finding: str | None = None
    """Description of an error, or reason why nothing was compared; None if all is right."""

    @property
    def verdict(self) -> Literal["yes", "NO", "unchecked"]:
        """`yes` if the training was right, `NO` if it was wrong, `unchecked` if not compared."""
        comparisons = (self.replicas_agree, self.matches_reference)
        if False in comparisons:
            return "NO"
        return "unchecked" if None in comparisons else "yes"


@dataclass(frozen=True, kw_only=True)
class Systematic:
    """Measurement of the same trial at twice its time scale k. An emulation with time scale k runs
    k times slower than real time. Ideally, the step time in emulated seconds does not depend on
    k."""

    time_scale: float
    """Time scale of this measurement, 2k."""
    iters: list[list[list[float]]]
    """Step times at 2k, in emulated seconds, by repeat and block."""
    step_s: float
    """Mean step time T(k) of the record (`Record.step_s`)."""

    @property
    def repeats(self) -> list[list[float]]:
        """Step times at 2k, in seconds, by repeat."""
        return [[step for block in repeat for step in block] for repeat in self.iters]

    @property
    def step_2k_s(self) -> float:
        """Mean step time T(2k)."""
        return mean_step_s(self.iters)

    @property
    def relative(self) -> float:
        """Relative change of the step time, |T(k) - T(2k)| / T(k)."""
        return abs(self.step_s - self.step_2k_s) / self.step_s


@dataclass(frozen=True, kw_only=True)
class Modelled:
    """Step computed by the event model (`common.virtual`), which shares no code with emulation."""

    step_s: float | None = None
    """None: not computed."""
    exposed_s: float | None = None
    """Part of `step_s` that waits for communication."""
    reason: str | None = None

    def off(self, step_s: float) -> float | None:
        """Returns how much longer a measured step is, relative to the model's step."""
        return None if self.step_s is None else step_s / self.step_s - 1


@dataclass(frozen=True, kw_only=True)
class Foreseen:
    """Step of the trial on the virtual cluster, which runs the algorithm's file (`predict`)."""

    step_s: float | None = None
    """None: not predicted."""
    costs_of: str | None = None
    """Model of the trial whose measured costs of collectives were used."""
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class Strain:
    """Load on the machine while steps were timed; of several machines, the worst. Shares of time
    are seconds per second of timed steps."""

    core_wait: float | None = None
    """Share of the time for which the threads of a rank, added up, waited for a core; for the rank
    that waited longest. None if the kernel does not count waits."""
    late: float | None = None
    """Share of the time by which compute took longer for lack of cores, for the rank with the most.
    Waits in time that the time scale leaves free do not count. None for replayed compute, which
    waits less afterwards and so makes up for the delay."""
    main_wait: float | None = None
    """Share of the time for which the training thread of a rank waited for a core."""
    fell_behind: float = 0.0
    """Share of the time by which the host fell behind its replayed device from the first to the
    last step, as the mean over ranks. Delays that the host caught up are not in it."""
    foreign_cores: float = 0.0
    """Mean number of cores that other processes used, of those that the ranks may use."""
    steal_cores: float = 0.0
    """Mean number of cores that other virtual machines took."""
    throttled_s: float = 0.0
    """Real seconds for which the CPU limit of a control group stopped a rank."""
    canary_s: list[float] | None = None
    """Real seconds that a fixed computation (the canary) took before and after the timed steps."""
    helpers_hurried: bool | None = None
    """True if the threads beside the training threads had real-time priority on all ranks, False if
    the system did not permit it. None if they need none, or must not have it (`hurry_helpers`)."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """Links as requested and as measured; `requested` is None on a real network."""

    requested: JsonObject | None = None
    measured: list[JsonObject] | None = None
    """Rate of each link alone."""
    together: list[JsonObject] = field(default_factory=list)
    """Rates at which each host received from its predecessor while all hosts sent."""
    delays: list[JsonObject] = field(default_factory=list)
    """One-way delays from each host to the next and between sites, all measured at once."""
    links: str | None = None
    """Program that limits the links: tc (the kernel) or switch (this project's)."""
    congestion: str | None = None
    """TCP's congestion control."""
    switch: JsonObject | None = None
    """Counters of the switch, and how late it sent frames, while all links were busy."""
    launches: list[JsonObject] = field(default_factory=list)
    """Counters of the switch by launch, with the number of the `repeat`, and with `rate_changes` if
    the network has a trace (links whose rate changes over time)."""
    off_percent: float | None = None
    """Difference of the worst link from the requested rate, in per cent."""
    flagged: bool | None = None
    """True if a link differs too much from what was requested."""
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class CostCheck:
    """Quality of the fitted costs of collectives, as relative errors."""

    residual: float
    """Error of a fit to one half of the repeats, compared with the other half: root mean square
    over sizes, for the operation that fits worst."""
    noise: float
    """Difference of the two halves for the same operation; no fit can have a smaller error."""
    drift: float
    """Change of the times of the largest messages from the trial's start to its end, for the
    operation that changed most."""

    @property
    def misfit(self) -> float:
        """Part of the residual that noise does not explain: the costs have another shape."""
        return math.sqrt(max(0.0, self.residual**2 - self.noise**2))


@dataclass(frozen=True, kw_only=True)
class EngineCosts:
    """Costs of all-reduces by a library that sends messages itself, such as Horovod."""

    engine: str
    """Name of the library (`dear.cost.foreign.Sender`)."""
    all_reduce: CollectiveCost
    """Cost of one tensor."""
    fused: CollectiveCost | None = None
    """Cost of two tensors in one buffer, by their total bytes; None: the library never does so."""
    pair: CollectiveCost | None = None
    """Cost of two tensors that start together in two buffers, by their total bytes."""
    error: float
    """Relative error of a fit to one half of the repeats, compared with the other half: root mean
    square over sizes, for the worst of these costs."""
    noise: float
    """Relative difference of the two halves; no fit can have a smaller error."""


def sending_costs(
    costs: dict[str, CollectiveCost] | None, engine: EngineCosts | None
) -> dict[str, CollectiveCost] | None:
    """Returns the costs, by operation, of the library that sends, or else of the communicator."""
    return costs if engine is None else {"all_reduce": engine.all_reduce}
