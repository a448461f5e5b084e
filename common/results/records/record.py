"""The record of a trial that has ended: one JSON line of `records.jsonl` (see `store`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from common.emulation.config import Fault
from common.results.records.learned import Learning
from common.results.records.reading import JsonObject, typed
from common.results.records.result import REAL, Breakdown, FabricFacts, Result
from common.results.records.trust import (
    Check,
    Foreseen,
    Modelled,
    Note,
    Strain,
    Systematic,
    mean_step_s,
    sending_costs,
)
from dear.cost.fit import CollectiveCost
from dear.errors import UserError
from dear.options import settings

SCHEMA = 2
"""Version of the format. Records of another version are refused."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Reason why a trial has no result."""

    kind: str | None = None
    message: str
    rank: int | None = None
    """Rank that failed; None if no single rank did."""
    where: str | None = None
    """Phase in which the rank was, such as the warm-up."""


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """Samples per second of all workers together."""

    value: float
    unit: str
    ci_low: float | None
    """Ends of the 95 % interval; for training trials, the lowest and highest run."""
    ci_high: float | None
    n: int
    """Number of timed steps, or of runs."""


@dataclass(frozen=True, kw_only=True)
class Bound:
    """Lower bounds of the trial's step time, in seconds."""

    kind: str | None
    """Name of the formula of `step_s`; None: no formula is known for the algorithm."""
    step_s: float | None
    """Bound from what the algorithm can overlap; at least `wire_limit_s`."""
    compute_limit_s: float
    wire_limit_s: float | None
    """Bound by the links; None if their rate is unknown, or the limit does not apply."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """Position of the trial in each round. A cell is the trials that are compared with each other.
    In each round, they run one after the other, in a random order."""

    seed: int
    """Seed of the orders, computed from the experiment's seed and the cell."""
    positions: list[int] = field(default_factory=list)
    """Position by repeat, from 0."""


@dataclass(frozen=True, kw_only=True)
class SetAside:
    """Repeat that ended well but is not used, for example because other load disturbed it. The
    repeat was then measured again, in a new launch of the ranks."""

    repeat: int
    time_scale: float
    reason: str
    iters: list[list[float]] = field(default_factory=list)
    """Step times in seconds, by block."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """A trial that has ended. Times are in seconds, sizes in bytes."""

    schema: int = SCHEMA
    id: str
    hash: str
    trial: JsonObject
    fabric: FabricFacts = REAL
    status: str
    """State: ok, failed, timeout, oom, unsupported or interrupted."""
    error: Failure | None = None
    """Reason of a failure; None if the trial is ok. A trial that is ok has `check` and
    `throughput`, as has an interrupted trial with results."""
    started: str
    """ISO 8601, UTC."""
    duration_s: float
    """Wall-clock time of all launches, set-up of the workers included."""
    machine: JsonObject
    run: str = ""
    """Name of the run of the sweep. Trials of the same cell and run were interleaved."""
    order: Order | None = None
    set_aside: list[SetAside] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    check: Check | None = None
    """Comparison of the first repeat with plain training; how far replicas agree, in the worst
    repeat."""
    throughput: Throughput | None = None
    breakdown: Breakdown | None = None
    """Breakdown of the repeat with the median step."""
    bound: Bound | None = None
    systematic: Systematic | None = None
    """Steps at twice the time scale; None if they were not measured."""
    modelled: Modelled | None = None
    """Step computed by the event model; None if the model does not cover the algorithm."""
    foreseen: Foreseen | None = None
    """Step on the virtual cluster, computed after the sweep (`store.save_foreseen`)."""
    unfaithful: bool | None = None
    """True if ranks of an emulated cluster waited for a core, which real ranks would not. None if
    nothing is emulated, or if the kernel does not count waits."""
    notes: list[Note] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @property
    def label(self) -> str:
        """Name of the algorithm in tables."""
        return self.trial["label"]

    @property
    def fault(self) -> str | None:
        """Fault that was injected, in a few words; None if none was."""
        given = self.trial.get("fault")
        return Fault(**given).title if given else None

    @property
    def hosts(self) -> int:
        """Number of virtual hosts; 0 on a real cluster."""
        per_host = self.trial.get("ranks_per_host")
        return -(-self.trial["world_size"] // per_host) if per_host else 0

    @property
    def first(self) -> Result | None:
        """Result of the first repeat, the only one that measures costs and compute."""
        return self.results[0] if self.results else None

    @property
    def iters(self) -> list[list[list[float]]]:
        """Step times in seconds, by repeat and block."""
        return [result.iters for result in self.results]

    @property
    def repeats(self) -> list[list[float]]:
        """Step times in seconds, by repeat."""
        return [result.steps for result in self.results]

    @property
    def timed(self) -> bool:
        """True if any step was timed."""
        return any(result.iters for result in self.results)

    @property
    def strain(self) -> list[Strain]:
        """Load on the machine, by repeat."""
        return [result.strain for result in self.results]

    @property
    def learning(self) -> list[Learning]:
        """Training runs, by repeat; empty if the trial timed steps."""
        return [result.learning for result in self.results if result.learning is not None]

    @property
    def evidence(self) -> str | None:
        """Path of the first repeat's raw measurements, relative to the folder of the records."""
        name = self.first and self.first.evidence
        return f"{self.id}/{name}" if name else None

    @property
    def sending_costs(self) -> dict[str, CollectiveCost] | None:
        """Costs by operation of the library that sent the messages; None if not recorded."""
        return self.first and sending_costs(self.first.costs, self.first.engine_costs)

    @property
    def step_s(self) -> float:
        """Mean elapsed time per step in seconds; only for trials with timed steps."""
        return mean_step_s(self.iters)

    def setting(self, key: str) -> str:
        """Returns a setting of the trial as tables show it; `-` if it has none."""
        return str((self.fault if key == "fault" else self.trial.get(key)) or "-")

    def to_json(self) -> JsonObject:
        """Returns the record as a JSON object."""
        values = dataclasses.asdict(dataclasses.replace(self, results=[]))
        del values["foreseen"]  # is in a file of its own
        return values | {"results": [settings(result) for result in self.results]}

    @classmethod
    def from_json(cls, values: JsonObject) -> Record:
        """Builds a record from the output of `to_json`."""
        return typed(cls, values)


def base_among(compare_to: str, variants: Sequence[tuple[str, str]]) -> int | None:
    """Returns the index of the variant that `compare_to` names; None if there is none. `compare_to`
    is a label, or an algorithm with a single variant. `variants` has the label and the algorithm of
    each. Raises `UserError` if `compare_to` is no label, but an algorithm with several variants."""
    for index, (label, _) in enumerate(variants):
        if label == compare_to:
            return index
    fitting = [index for index, (_, name) in enumerate(variants) if name == compare_to]
    if len(fitting) > 1:
        labels = ", ".join(variants[index][0] for index in fitting)
        raise UserError(
            f"compare_to: {compare_to!r} names several trials; use the label of one: {labels}"
        )
    return fitting[0] if fitting else None


def is_learning(records: Iterable[Record]) -> bool:
    """Returns whether these are training trials (`learn:`)."""
    return any(record.trial.get("learn") for record in records)


def machine_words(records: Sequence[Record]) -> str:
    """Returns on which machine the records were measured; of several, the first one and how many
    others there are."""
    known: dict[str, None] = {}
    for record in records:
        machine = record.machine
        torch = (machine.get("packages") or {}).get("torch", "unknown")
        known[
            f"on {machine.get('cores', '?')} cores ({machine.get('cpu', 'unknown CPU')}), "
            f"torch {torch}, commit {machine.get('commit', 'unknown')}"
        ] = None
    first, *others = known
    return first + (f", and {len(others)} more machines or commits" if others else "")


def fabric_words(records: Iterable[Record]) -> str:
    """Returns in a few words on what cluster the records were measured, for captions."""
    records = list(records)
    if all(record.fabric.kind == "real" for record in records):
        return "real processes"
    scales = sorted({record.fabric.time_scale for record in records})
    scale = " to ".join(f"{value:g}" for value in dict.fromkeys((scales[0], scales[-1])))
    hosts = max(record.hosts for record in records)
    where = f"{hosts} virtual hosts" if hosts else "local processes, compute replayed"
    return f"emulated, {where}, time scale {scale}"
