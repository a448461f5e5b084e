"""What a record of a trial holds: all results come from records (`store` keeps them)."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Union, get_args, get_origin, get_type_hints

from common.emulation.config import Fault
from common.emulation.dilation import Calibration
from common.results.records.learned import Data, Learning
from common.results.records.trust import (
    Check,
    CostCheck,
    EngineCosts,
    Modelled,
    Network,
    Strain,
    Systematic,
    mean_step_s,
    sending_costs,
)
from dear.cost.bounds import StepTimes
from dear.cost.fit import CollectiveCost
from dear.errors import UserError

SCHEMA = 1
IMPORTED = "imported"
"""The fabric of records that were made of other programs' logs."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a trial has no result."""

    kind: str | None = None
    message: str
    rank: int | None = None
    """None if it is not one rank's."""
    where: str | None = None
    """What the rank was doing."""


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """Samples per second of all workers together."""

    value: float
    unit: str
    ci_low: float | None
    """Ends of the 95 % interval; of trials that learn, the lowest and the highest run."""
    ci_high: float | None
    n: int
    """Timed steps, or runs."""


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """Where a step's time goes on one rank; the parts add up to `step_s`."""

    forward_s: float
    """`zero_grad`, the forward pass and the loss, without waiting, as the next two."""
    backward_s: float
    update_s: float
    """The call of `optimizer.step()`; updates made elsewhere count where they are made."""
    exposed_comm_s: float | None = None
    """Held up in `Work.wait`; None where an algorithm hides it in the other three."""
    step_s: float | None = None
    """None in old records, whose parts include waiting and do not add up."""
    rank: int | None = None
    """The one that is held up least, for which the others wait; None in old records: rank 0."""


@dataclass(frozen=True, kw_only=True)
class Bound:
    """How short the trial's step could be."""

    kind: str | None
    """Which formula `step_s` follows; None: none is known for the algorithm."""
    step_s: float | None
    """Not below `wire_limit_s`."""
    compute_limit_s: float
    wire_limit_s: float | None
    """None where the links' rate is not known, or the limit does not hold."""


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """Per rank."""

    sent_per_step: int | None = None
    gradients: int | None = None


@dataclass(frozen=True, kw_only=True)
class Group:
    """Tensors that travel together."""

    bytes: int
    tensors: int = 0
    """0: not told."""
    first: str | None = None
    """Name of the parameter that is first in it, and of the last."""
    last: str | None = None
    some: bool | None = None
    """Whether this group has the transfers that only some groups have (with `fsdp`, the second
    all-gather); None: the algorithm does not tell."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What an algorithm has decided by itself, as it was in the end; by rank 0."""

    groups: list[Group] = field(default_factory=list)
    """In the order in which they are started."""
    found: dict[str, Any] = field(default_factory=dict)
    """`dear.training.engine.Engine.findings`; seconds are of what the fabric stands for, but
    `wall_s`."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """When the trial's turn was in each round of its cell: rounds are in random order."""

    seed: int
    """Of the cell's rounds; it follows from the experiment's seed and the cell."""
    positions: list[int] = field(default_factory=list)
    """By repeat, from 0."""


@dataclass(frozen=True, kw_only=True)
class SetAside:
    """A launch that went well but is no result: evidence of why it was done again."""

    repeat: int
    time_scale: float
    reason: str
    iters: list[list[float]] = field(default_factory=list)
    """Step times by block."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """A trial that has ended. Seconds and bytes throughout; older records lack some values."""

    schema: int = SCHEMA
    id: str
    hash: str
    trial: dict[str, Any]
    """As JSON: the options of a record may be those of an older version of the algorithm."""
    fabric: str = "real"
    """real, emulated or imported."""
    time_scale: float = 1.0
    time_scale_reason: str | None = None
    status: str
    """ok, failed, timeout, oom, unsupported or interrupted."""
    error: Failure | None = None
    """None for a trial that is ok; such a trial has all of `check`, `throughput` and `loss`, though
    a loss that is not finite is None."""
    started: str
    """ISO 8601, UTC."""
    duration_s: float
    """Set-up of the workers included."""
    machine: dict[str, Any]
    calibration: Calibration | None = None
    """CPU costs of the machine that the time scale was first chosen by; None where nothing is
    emulated."""
    order: Order | None = None
    set_aside: list[SetAside] = field(default_factory=list)
    network: Network = field(default_factory=Network)
    fault_events: list[dict[str, Any]] = field(default_factory=list)
    iters: list[list[list[float]]] = field(default_factory=list)
    """Step times, by repeat and block; none of trials that learn. Blocks are whole periods of the
    algorithm's schedule, and a block's sum is the time that it took."""
    untimed: list[list[list[float]]] = field(default_factory=list)
    """The same of the steps after the barrier before each block, until all was in flow."""
    period: int = 1
    """Steps after which the algorithm's schedule repeats."""
    evidence: str | None = None
    """The file with raw measurements of the first repeat, from the records' folder; those of others
    stand beside it (see docs/methodology.md)."""
    loss: float | None = None
    breakdown: Breakdown | None = None
    compute: StepTimes | None = None
    costs: dict[str, CollectiveCost] | None = None
    """Of collectives, by operation."""
    cost_check: CostCheck | None = None
    """Of the costs, by the trial that has measured them; those that use them have the same."""
    engine_costs: EngineCosts | None = None
    """Costs of the library's own engine, measured by this trial; None: the communicator sends, or
    they were not measured."""
    bound: Bound | None = None
    plan: Plan | None = None
    """Of the first repeat; None where nothing travels, and in older records."""
    bytes: Bytes = field(default_factory=Bytes)
    check: Check | None = None
    statistics: list[dict[str, Any] | None] | None = None
    """What the algorithm has counted, by rank."""
    throughput: Throughput | None = None
    learning: list[Learning] | None = None
    """By repeat, of trials that train for a time (see docs/methodology.md)."""
    data: Data | None = None
    """What it was that they have learned from; None where it was made up, and in older records."""
    parameters: int | None = None
    cpu_s_per_s: list[float] = field(default_factory=list)
    systematic: Systematic | None = None
    """Of emulated trials that were measured at twice the time scale, too."""
    modelled: Modelled | None = None
    """The step by a second method; None of trials that it is not for, and in older records."""
    strain: list[Strain] = field(default_factory=list)
    """By repeat."""
    unfaithful: bool | None = None
    """Whether ranks of an emulated cluster waited for cores that the real one would have had; None
    where nothing is emulated, or the kernel does not tell."""
    started_by: str | None = None
    notes: list[str] = field(default_factory=list)
    run: str = ""
    """Trials of one cell and one run took turns; others were measured at different times."""

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @property
    def repeats(self) -> list[list[float]]:
        """Step times by repeat."""
        return [[step for block in repeat for step in block] for repeat in self.iters]

    @property
    def label(self) -> str:
        """How tables name the algorithm."""
        return self.trial["label"]

    @property
    def fault(self) -> str | None:
        """What was done to the cluster, in a few words; None for nothing."""
        given = self.trial.get("fault")
        return Fault(**given).title if given else None

    @property
    def hosts(self) -> int:
        """Number of virtual hosts; 0 where there are none."""
        per_host = self.trial.get("ranks_per_host")
        return -(-self.trial["world_size"] // per_host) if per_host else 0

    @property
    def sending_costs(self) -> dict[str, CollectiveCost] | None:
        """Costs by operation of the engine that sent; None: they are not on record."""
        return sending_costs(self.costs, self.engine_costs)

    @property
    def step_s(self) -> float:
        """Elapsed time per step, of all ranks together; only where steps were timed."""
        return mean_step_s(self.iters)

    def to_json(self) -> dict[str, Any]:
        """As it stands in the file; `repeats` once more beside `iters`, for simple readers."""
        return {**dataclasses.asdict(self), "repeats": self.repeats}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Record:
        """What `to_json` gave, now or in an older version."""
        return typed(cls, values)


def typed(hint: Any, value: Any) -> Any:
    """A value from JSON as what the type hint says; keys that it does not know are left out."""
    read = _reader(hint)
    return value if read is None or value is None else read(value)


@functools.cache
def _reader(hint: Any) -> Callable[[Any], Any] | None:
    """What makes the type of a value that is not None; None: it is that already.

    Made once for each type: a record has thousands of numbers, and there may be thousands of it.
    """
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _reader(next(one for one in inner if one is not types.NoneType))
    if origin in (list, tuple):
        read = _reader(inner[0])
        if read is None:  # JSON has no tuples
            return tuple if origin is tuple else None
        return lambda value: origin(None if one is None else read(one) for one in value)
    if origin is dict:
        read = _reader(inner[1])
        if read is None:
            return None
        return lambda value: {k: None if one is None else read(one) for k, one in value.items()}
    if dataclasses.is_dataclass(hint):
        readers = {key: _reader(kind) for key, kind in get_type_hints(hint).items()}

        def made(value: Any) -> Any:
            if isinstance(value, hint):
                return value
            given = {}
            for key, read in readers.items():
                if key in value:
                    one = value[key]
                    given[key] = one if read is None or one is None else read(one)
            return hint(**given)

        return made
    return None


def base_among(compare_to: str, variants: Sequence[tuple[str, str]]) -> int | None:
    """Which of the variants `compare_to` names: by its label, or by an algorithm that has only one.

    Args:
        variants: label and algorithm of each.

    Raises:
        UserError: it is no label, and several are variants of that algorithm.
    """
    for index, (label, _) in enumerate(variants):
        if label == compare_to:
            return index
    fitting = [index for index, (_, name) in enumerate(variants) if name == compare_to]
    if len(fitting) > 1:
        labels = ", ".join(variants[index][0] for index in fitting)
        raise UserError(
            f"compare_to: {compare_to!r} fits several; use the label of one of them: {labels}"
        )
    return fitting[0] if fitting else None


def is_learning(records: Iterable[Record]) -> bool:
    """Whether these are records of trials that train for a time."""
    return any(record.trial.get("learn") for record in records)


def fabric_words(records: Iterable[Record]) -> str:
    """What the numbers were measured on, for titles and captions."""
    records = list(records)
    if all(record.fabric == "real" for record in records):
        return "real processes"
    if all(record.fabric == IMPORTED for record in records):
        return "imported from logs"
    scales = sorted({record.time_scale for record in records})
    scale = " to ".join(f"{value:g}" for value in dict.fromkeys((scales[0], scales[-1])))
    hosts = max(record.hosts for record in records)
    where = f"{hosts} virtual hosts" if hosts else "local processes, compute replayed"
    return f"emulated, {where}, time scale {scale}"
