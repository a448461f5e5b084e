"""Results of one repeat of a trial, and facts about the cluster (fabric) that it ran on.

Seconds of an emulated cluster are real seconds / time scale.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from common.emulation.dilation import Calibration
from common.results.records.learned import Data, Learning
from common.results.records.reading import JsonObject
from common.results.records.trust import Check, CostCheck, EngineCosts, Network, Strain
from dear.cost.bounds import StepTimes
from dear.cost.fit import CollectiveCost
from dear.options import LATER


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """Phases of a step on one rank, in seconds; they add up to `step_s`."""

    forward_s: float
    """`zero_grad`, the forward pass and the loss, without waiting."""
    backward_s: float
    """The backward pass, without waiting."""
    update_s: float
    """The call of `optimizer.step()`, without waiting. Updates outside this call count in the phase
    in which they run."""
    exposed_comm_s: float | None = None
    """Waiting in `Work.wait`; None if the algorithm waits inside the other three phases."""
    step_s: float
    rank: int = 0
    """Number of the rank. It is the rank that waits least: the others wait for it."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Gradients that are sent together (a bucket)."""

    bytes: int
    tensors: int = 0
    """Number of gradients; 0: not reported."""
    first: str | None = None
    """Names of the first and last parameter."""
    last: str | None = None
    some: bool | None = None
    """True if the group has the transfers that only some groups have (with `fsdp`, the second
    all-gather); None: not reported."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Decisions of the algorithm about its messages, at the end of the repeat, on rank 0."""

    groups: list[Group] = field(default_factory=list)
    """Groups in the order in which they start."""
    found: JsonObject = field(default_factory=dict)
    """`dear.training.engine.Engine.findings`; times are in seconds of the modelled cluster, except
    `wall_s`."""


@dataclass(frozen=True, kw_only=True)
class DeviceUse:
    """Use of memory and arithmetic units in the timed steps; None: unknown."""

    memory_bytes: list[int | None] | None = None
    """Peak memory in the timed blocks, by rank: torch's allocations on a GPU, else the resident
    memory of the process."""
    flops: int | None = None
    """Multiplications and additions of the forward and backward pass of a rank's batch."""
    peak_flops: float | None = None
    """Published peak of a rank's device in operations per second, for the trial's dtype."""
    unknown: str | None = None


@dataclass(frozen=True, kw_only=True)
class Result:
    """One repeat of a trial, as rank 0 writes it. Times are in seconds of the modelled cluster."""

    iters: list[list[float]] = field(default_factory=list)
    """Step times by block; empty for a training trial. A block is timed as a whole: its step times
    add up to the elapsed time. It has a whole number of periods."""
    untimed: list[list[float]] = field(default_factory=list)
    """Times of the steps between the barrier and each block, which are not counted."""
    period: int = 1
    """Number of steps after which the algorithm's schedule repeats."""
    evidence: str | None = None
    """Name of the file with raw measurements, in the trial's folder (docs/methodology.md)."""
    samples_per_s: float | None = None
    """Throughput of all workers together, for a training trial."""
    bytes_per_step: int | None = None
    """Bytes that rank 0 sent per step."""
    cpu_s_per_s: float
    strain: Strain = field(default_factory=Strain)
    breakdown: Breakdown | None = None
    loss: float | None = None
    """Loss of the last step; None if it is not finite."""
    check: Check
    statistics: list[JsonObject | None] | None = None
    """Counters of the algorithm, by rank."""
    learning: Learning | None = None
    data: Data | None = None
    """Training and test data; None if the data are synthetic."""
    parameters: int | None = None
    gradient_bytes: int | None = None
    use: DeviceUse | None = field(default=None, metadata=LATER)
    """Memory of a later repeat, or arithmetic of the first; None: a training trial."""
    started_by: str | None = None
    """Launcher by which the ranks were started, as their environment says."""
    compute: StepTimes | None = None
    """Times of the compute alone. Only the first repeat has this field and the five after it."""
    costs: dict[str, CollectiveCost] | None = None
    cost_check: CostCheck | None = None
    """Quality of `costs`. Trials that reuse another trial's costs copy it."""
    engine_costs: EngineCosts | None = None
    """Costs of the algorithm's library, if the library sends messages itself (Horovod)."""
    plan: Plan | None = None
    local_size: int | None = None
    """Ranks on a host."""
    lost_ranks: list[int] = field(default_factory=list)
    """Ranks that were killed while the others went on and ended well."""

    @property
    def steps(self) -> list[float]:
        """The step times of all blocks."""
        return [step for block in self.iters for step in block]


@dataclass(frozen=True, kw_only=True)
class FabricFacts:
    """Facts about the cluster that a trial ran on; the defaults describe a real cluster."""

    kind: Literal["real", "emulated"] = "real"
    time_scale: float = 1.0
    time_scale_reason: str | None = None
    calibration: Calibration | None = None
    """CPU costs of this machine, from which the time scale was chosen; None on a real cluster."""
    network: Network = field(default_factory=Network)
    fault_events: list[JsonObject] = field(default_factory=list)


REAL = FabricFacts()
