"""Evidence for the validity of a trial: its training, its links, its costs, and its machine."""

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

    Args:
        iters: step times in seconds, by repeat and block.
    """
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
    "oversubscribed",
    "relaunch",
    "stopped",
    "time scale",
    "unfaithful",
]
"""Subject of a note."""


@dataclass(frozen=True, kw_only=True)
class Note:
    """A remark on a record."""

    kind: NoteKind
    text: str
    """Text for readers. Code asks for the kind."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """Comparison of a trial with the training that it should be. None: not compared."""

    replicas_agree: bool | None = None
    matches_reference: bool | None = None
    """Equal to the reference, in the first steps and at the end."""
    replica_spread: float | None = None
    """Largest difference of a parameter element between ranks; None also if it is infinite."""
    reference_error: float | None = None
    """Largest error of a tensor after the first steps, relative to how far the reference moved it;
    None also if it is not finite."""
    consensus_distance: float | None = None
    """Distance of the ranks from their mean; None also if it is not finite."""
    judged_by: Literal["reference", "invariants", "replicas"] | None = None
    """Standard of comparison: the serial reference, invariants that hold for any order of the
    ranks, or only the other replicas."""
    worst_tensor: str | None = None
    """Name of the tensor with the largest error, in the first steps or at the end."""
    end_error: float | None = None
    """The same over all steps of the first repeat, timed steps included."""
    finding: str | None = None
    """Error that was found, or reason why nothing was compared; None if all was right."""

    @property
    def verdict(self) -> Literal["yes", "NO", "unchecked"]:
        """Returns whether the training was right, as far as it was compared."""
        comparisons = (self.replicas_agree, self.matches_reference)
        if False in comparisons:
            return "NO"
        return "unchecked" if None in comparisons else "yes"


@dataclass(frozen=True, kw_only=True)
class Systematic:
    """The same trial at twice the time scale k: the part of its step that does not scale."""

    time_scale: float
    """2k."""
    iters: list[list[list[float]]]
    """Step times at 2k, in seconds of the modelled cluster, by repeat and block."""
    step_s: float
    """T(k), the mean step of the record itself (`Record.step_s`)."""

    @property
    def repeats(self) -> list[list[float]]:
        """Step times at 2k, in seconds, by repeat."""
        return [[step for block in repeat for step in block] for repeat in self.iters]

    @property
    def relative(self) -> float:
        """|T(k) - T(2k)| / T(k)."""
        return abs(self.step_s - mean_step_s(self.iters)) / self.step_s


@dataclass(frozen=True, kw_only=True)
class Modelled:
    """Step by the event model (`common.virtual`), which shares no code with emulation."""

    step_s: float | None = None
    """None: not computed."""
    exposed_s: float | None = None
    """Part of `step_s` that waits for communication."""
    reason: str | None = None
    """Reason why the step was not computed."""

    def off(self, step_s: float) -> float | None:
        """Returns how much longer a measured step is, relative to the model's step."""
        return None if self.step_s is None else step_s / self.step_s - 1


@dataclass(frozen=True, kw_only=True)
class Strain:
    """Load on the machine while steps were timed; the worst machine, if there are several."""

    core_wait: float | None = None
    """Seconds that all threads of a rank together waited for a core, per second of timed steps, for
    the rank that waited longest; None if the kernel does not count waits."""
    late: float | None = None
    """Extra compute time for lack of cores, in seconds per second, for the rank with the most. Time
    that the time scale leaves free does not count. None if compute is replayed: it makes up for
    waits."""
    main_wait: float | None = None
    """The same for training threads alone, which issue all work and delay the step."""
    fell_behind: float = 0.0
    """Change of the delay of hosts behind their replayed devices, from begin to end, in seconds per
    second, as the mean over ranks. A delay that a host made up for is in the steps."""
    foreign_cores: float = 0.0
    """Cores that other processes used, of those that the ranks may use; mean over timed steps."""
    steal_cores: float = 0.0
    """Cores that other virtual machines took."""
    throttled_s: float = 0.0
    """Seconds of this machine for which a control group's limit stopped a rank."""
    canary_s: list[float] | None = None
    """Seconds that a fixed workload took before and after the timed steps."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """Links as requested and as measured; `requested` is None on a real network."""

    requested: JsonObject | None = None
    measured: list[JsonObject] | None = None
    """Rate of each link alone."""
    together: list[JsonObject] = field(default_factory=list)
    """Rate that each host received from the host before it while all hosts sent."""
    delays: list[JsonObject] = field(default_factory=list)
    """One-way delays from each host to the next and between sites, all measured at once."""
    links: str | None = None
    """Shaper of the links: tc or switch."""
    congestion: str | None = None
    """TCP's congestion control."""
    switch: JsonObject | None = None
    """Counters and lateness of the switch while all links were busy."""
    launches: list[JsonObject] = field(default_factory=list)
    """Counters of the switch for each launch of the trial, with its `repeat`, and `rate_changes` if
    the network has a trace."""
    off_percent: float | None = None
    """Difference of the worst link from its request, in per cent."""
    flagged: bool | None = None
    """True if a link is too far from its request."""
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class CostCheck:
    """Quality of the fitted costs of collectives, as relative errors."""

    residual: float
    """Error of the fit to one half of the repeats, judged by the other half: root mean square over
    sizes, for the operation that fits worst."""
    noise: float
    """Difference of the two halves of the same operation, which no fit can beat."""
    drift: float
    """Change of the largest messages' times from the trial's begin to its end, for the operation
    that changed most."""

    @property
    def misfit(self) -> float:
        """Part of the residual that sampling error does not explain: the fit has another shape."""
        return math.sqrt(max(0.0, self.residual**2 - self.noise**2))


@dataclass(frozen=True, kw_only=True)
class EngineCosts:
    """Costs of all-reduces by a library's own engine, such as Horovod's."""

    engine: str
    """Name of the engine (`dear.cost.foreign.Sender`)."""
    all_reduce: CollectiveCost
    """Cost of one tensor."""
    fused: CollectiveCost | None = None
    """Cost of two tensors in one buffer, by their total bytes; None: the engine fuses none."""
    pair: CollectiveCost | None = None
    """Cost of two tensors that start together in two buffers, by their total bytes."""
    error: float
    """Relative error of a fit to one half of the repeats, judged by the other half: the root mean
    square over sizes, of the worst of these costs."""
    noise: float
    """Relative difference of the two halves themselves, which no fit can beat."""


def sending_costs(
    costs: dict[str, CollectiveCost] | None, engine: EngineCosts | None
) -> dict[str, CollectiveCost] | None:
    """Returns the costs by operation of the sender: the library's engine, or the communicator."""
    return costs if engine is None else {"all_reduce": engine.all_reduce}
