"""One repeat of a trial, and the facts of the fabric that it ran on."""

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
    """The call of `optimizer.step()`, without waiting. An update that runs elsewhere counts in the
    phase that it runs in."""
    exposed_comm_s: float | None = None
    """Waiting in `Work.wait`; None if the algorithm waits inside the other three phases."""
    step_s: float
    rank: int = 0
    """The rank that waits least: the others wait for it."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Tensors that travel together."""

    bytes: int
    tensors: int = 0
    """0: not reported."""
    first: str | None = None
    """Names of its first and last parameter."""
    last: str | None = None
    some: bool | None = None
    """True if the group has the transfers that only some groups have (with `fsdp`, the second
    all-gather); None: not reported."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Decisions of the algorithm itself at the end of the repeat, by rank 0."""

    groups: list[Group] = field(default_factory=list)
    """Groups in the order in which they start."""
    found: JsonObject = field(default_factory=dict)
    """`dear.training.engine.Engine.findings`; times are in seconds of the modelled cluster, except
    `wall_s`."""


@dataclass(frozen=True, kw_only=True)
class DeviceUse:
    """Memory and arithmetic of the timed steps; None: unknown."""

    memory_bytes: list[int | None] | None = None
    """Peaks in the timed blocks, by rank: of torch's allocations on a GPU, else of the process's
    resident memory."""
    flops: int | None = None
    """Multiplications and additions of the forward and backward pass of a rank's batch."""
    peak_flops: float | None = None
    """Published peak of a rank's device per second, for the trial's type."""
    unknown: str | None = None
    """Reason why a value is missing."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """One repeat of a trial, as rank 0 writes it. Times are in seconds of the modelled cluster."""

    iters: list[list[float]] = field(default_factory=list)
    """Step times by block; empty for a trial that learns. A block is a whole number of periods of
    the algorithm's schedule, and its sum is the time that the block took."""
    untimed: list[list[float]] = field(default_factory=list)
    """Times of the steps before each block, which fill the pipeline after the barrier."""
    period: int = 1
    """Steps after which the algorithm's schedule repeats."""
    evidence: str | None = None
    """Name of the file with raw measurements, in the trial's folder (docs/methodology.md)."""
    samples_per_s: float | None = None
    """Throughput of all workers together, of a trial that learns."""
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
    """Memory of a repeat after the first, or the first repeat's arithmetic; None: learns."""
    started_by: str | None = None
    """Launcher that the ranks found in their environment."""
    compute: StepTimes | None = None
    """Only the first repeat has this field and the next five."""
    costs: dict[str, CollectiveCost] | None = None
    """Costs of collectives, by operation."""
    cost_check: CostCheck | None = None
    """Check of `costs` by the trial that measured them. Trials that reuse the costs copy it."""
    engine_costs: EngineCosts | None = None
    """Costs of the library's own engine, if it sends by one."""
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
    """Facts of the fabric that a trial ran on; the defaults describe a real cluster."""

    kind: Literal["real", "emulated"] = "real"
    time_scale: float = 1.0
    time_scale_reason: str | None = None
    calibration: Calibration | None = None
    """CPU costs of this machine, by which the first time scale was chosen; None if real."""
    network: Network = field(default_factory=Network)
    fault_events: list[JsonObject] = field(default_factory=list)


REAL = FabricFacts()
