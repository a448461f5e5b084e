"""Whether a trial's numbers may be believed: was it the right training, on the right links, on a
machine that was not too busy?"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from dear.cost.fit import CollectiveCost


def elapsed_per_step_s(steps: Sequence[float]) -> float:
    """Of a repeat, from the times of its steps; all in seconds."""
    return math.fsum(steps) / len(steps)


def mean_step_s(iters: Iterable[Iterable[Sequence[float]]]) -> float:
    """Elapsed time per step in seconds: of each repeat, then their mean.

    Args:
        iters: step times by repeat and block.
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
    "not stationary",
    "oversubscribed",
    "relaunch",
    "stopped",
    "time scale",
    "unfaithful",
]
"""What a note is about."""


@dataclass(frozen=True, kw_only=True)
class Note:
    """A remark on a record."""

    kind: NoteKind
    text: str
    """For readers. Code asks for the kind."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """Whether it was the right training. None: not compared."""

    replicas_agree: bool | None = None
    matches_reference: bool | None = None
    """What the trial was compared with is what it did, in the first steps and to the end."""
    replica_spread: float | None = None
    """Largest difference of any parameter element between ranks; None also if it is infinite."""
    reference_error: float | None = None
    """Of the tensor that was farthest off after the first steps, relative to how far it should have
    moved; None also if it is not finite, as the next but one."""
    consensus_distance: float | None = None
    judged_by: Literal["reference", "invariants", "replicas"] | None = None
    """What it was compared with: its serial reference, what holds for whatever order ranks came in,
    or nothing but the other replicas. None in older records, whose comparison knew less."""
    worst_tensor: str | None = None
    """The one that was farthest off, in the first steps or at the end, whichever is worse."""
    end_error: float | None = None
    """The same as `reference_error` over all steps of the first repeat, timed ones included."""
    finding: str | None = None
    """What was wrong, or why nothing was compared; None where all was right."""

    @property
    def verdict(self) -> Literal["yes", "NO", "unchecked"]:
        """Whether the training was right, as far as it was looked at."""
        found = (self.replicas_agree, self.matches_reference)
        if False in found:
            return "NO"
        return "unchecked" if None in found else "yes"


@dataclass(frozen=True, kw_only=True)
class Systematic:
    """The same trial at another time scale: what of its step does not scale."""

    time_scale: float
    """Twice the record's own, k."""
    iters: list[list[list[float]]]
    """Step times there, in seconds of what is emulated, by repeat and block."""
    step_s: float
    """T(k): the mean step of the record itself, `Record.step_s`."""

    @property
    def repeats(self) -> list[list[float]]:
        """Step times there by repeat."""
        return [[step for block in repeat for step in block] for repeat in self.iters]

    @property
    def relative(self) -> float:
        """|T(k) - T(2k)| / T(k)."""
        return abs(self.step_s - mean_step_s(self.iters)) / self.step_s


@dataclass(frozen=True, kw_only=True)
class Modelled:
    """The step of a trial by a second method, which shares no code with its emulation
    (`common.virtual`)."""

    step_s: float | None = None
    """None: it could not be computed."""
    exposed_s: float | None = None
    """Of that, waits for communication."""
    reason: str | None = None
    """Why it could not."""

    def off(self, step_s: float) -> float | None:
        """By how much a measured step is longer, relative to the model's."""
        return None if self.step_s is None else step_s / self.step_s - 1


@dataclass(frozen=True, kw_only=True)
class Strain:
    """How hard the machine was pressed while steps were timed; of several machines, the worst."""

    core_wait: float | None = None
    """Of the rank that waited longest: seconds that its threads, all together, waited for a core,
    per second of timed steps; None where the kernel does not tell."""
    late: float | None = None
    """Where compute is real: seconds per second by which the rank that suffered most computed
    longer because it had no core; what a time scale leaves room for makes nothing longer. None also
    where compute is replayed, which makes up for them."""
    main_wait: float | None = None
    """As `core_wait`, of the threads that train alone: they issue all work and hold up the step."""
    fell_behind: float = 0.0
    """Where compute is replayed: by how much more hosts were behind their devices in the end than
    in the beginning, seconds per second, the mean of the ranks; below 0: less. What a host has made
    up for by then is in the steps."""
    foreign_cores: float = 0.0
    """Of the cores that the ranks may use, used by other processes in the mean over the timed
    steps."""
    steal_cores: float = 0.0
    """Taken by other virtual machines."""
    throttled_s: float = 0.0
    """Seconds of this machine for which a limit of its control group kept a rank from running."""
    canary_s: list[float] | None = None
    """What a fixed piece of work took before and after."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """The links, as asked for and as measured; None on a real network."""

    requested: dict[str, Any] | None = None
    measured: list[dict[str, Any]] | None = None
    """Of each link by itself."""
    together: list[dict[str, Any]] = field(default_factory=list)
    """What each host received from the one before it, all of them sending at once."""
    delays: list[dict[str, Any]] = field(default_factory=list)
    """One way, of each host to the next and between each two sites, all at once; emulated."""
    links: str | None = None
    """What shapes them: tc, or switch."""
    congestion: str | None = None
    """TCP's congestion control."""
    switch: dict[str, Any] | None = None
    """What the switch counted while all links were busy, and how late it was."""
    launches: list[dict[str, Any]] = field(default_factory=list)
    """The same of each launch of the trial, with its `repeat`; and `rate_changes` where the network
    has a trace."""
    off_percent: float | None = None
    flagged: bool | None = None
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class CostCheck:
    """Whether the fits of collectives may be believed."""

    residual: float
    """How far one half of the repeats is off the fit to the other half, as a share: the root of the
    mean square over sizes, of the operation that fits worst. Of older records, whose `noise` is
    None: the median over sizes of how far all are off the fit to themselves."""
    noise: float | None = None
    """How far the halves are off each other, of the same operation: no fit can be nearer."""
    drift: float
    """By how much longer the largest messages took at the trial's end than at its begin, as a
    share: of the operation that changed most."""

    @property
    def misfit(self) -> float:
        """What of the residual chance does not explain: the fit is of another shape."""
        return math.sqrt(max(0.0, self.residual**2 - (self.noise or 0.0) ** 2))


@dataclass(frozen=True, kw_only=True)
class EngineCosts:
    """Costs of all-reduces of an engine that sends in place of the communicator, as Horovod's."""

    engine: str
    """Its name (`dear.cost.foreign.Sender`)."""
    all_reduce: CollectiveCost
    """Of one tensor."""
    fused: CollectiveCost | None = None
    """Of two tensors in one buffer, by their bytes together; None: it joins none."""
    pair: CollectiveCost | None = None
    """Of two tensors that start together and are not joined, by their total bytes."""
    error: float
    """Relative error of a fit to one half of the repeats, judged by the other half: the root mean
    square over sizes, of the worst of these costs."""
    noise: float
    """Relative difference of the two halves themselves, which no fit can beat."""


def sending_costs(
    costs: dict[str, CollectiveCost] | None, own: EngineCosts | None
) -> dict[str, CollectiveCost] | None:
    """Costs by operation of what sent: an engine of its own, else the communicator."""
    return costs if own is None else {"all_reduce": own.all_reduce}
