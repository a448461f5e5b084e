"""From what the workers wrote to the record of a trial, with the bound beside its result.

The bound says how short the trial's step could be, and how much of that it reaches. Everything is
in seconds of what the fabric stands for.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from common.emulation.dilation import Calibration
from common.emulation.links.profile import payload_bytes_per_s
from common.harness import notes
from common.harness.trial import BASELINE, Trial
from common.launch.job import Outcome
from common.models.registry import model_entry
from common.results.records import Bound, Breakdown, Bytes, Failure, Plan, Record, Throughput, typed
from common.results.records.learned import Data, Learning
from common.results.records.trust import (
    Check,
    CostCheck,
    EngineCosts,
    Network,
    Strain,
    elapsed_per_step_s,
    sending_costs,
)
from common.results.second import modelled
from dear.cost.bounds import (
    CommTimes,
    StepTimes,
    Traffic,
    comm_times,
    compute_limit_s,
    exchange_times,
    exchange_wire_limit_s,
    step_bound_s,
    wire_limit_s,
)
from dear.cost.fit import CollectiveCost
from dear.training.algorithm import algorithm_class

ALONE = "compute"
"""The kind of bound where nothing is communicated."""


# Of costs that are not to be believed: what a fit misses beyond chance, what chance alone does, and
# what changes from begin to end. Then something else has used the network or the machine, or the
# engine has ways of sending that the fit does not know.
COST_MISFIT, COST_NOISE, COST_DRIFT = 0.05, 0.15, 0.1


@dataclass(frozen=True, kw_only=True)
class Result:
    """One repeat of a trial, as its rank 0 writes it; seconds of what the fabric stands for."""

    iters: list[list[float]] = field(default_factory=list)
    """Step times, by block; none of a trial that learns."""
    untimed: list[list[float]] = field(default_factory=list)
    """Of the steps before each block."""
    period: int = 1
    """Steps after which the algorithm's schedule repeats."""
    evidence: str | None = None
    """The file's name in the trial's folder (`worker.evidence`)."""
    samples_per_s: float | None = None
    """Of a trial that learns: all workers together."""
    bytes_per_step: int | None = None
    cpu_s_per_s: float
    strain: Strain = field(default_factory=Strain)
    breakdown: Breakdown | None = None
    loss: float
    check: Check
    statistics: list[dict[str, Any] | None] | None = None
    learning: Learning | None = None
    data: Data | None = None
    parameters: int | None = None
    gradient_bytes: int | None = None
    started_by: str | None = None
    compute: StepTimes | None = None
    """As the next six, in the first repeat only."""
    costs: dict[str, CollectiveCost] | None = None
    cost_check: CostCheck | None = None
    """Of `costs`, by the trial that has measured them."""
    engine_costs: EngineCosts | None = None
    """Costs of the library's own engine, if it sends by one."""
    plan: Plan | None = None
    local_size: int | None = None
    """Ranks on a host."""
    lost_ranks: list[int] = field(default_factory=list)
    """Ranks that were killed, where the others went on and did well."""

    @property
    def steps(self) -> list[float]:
        """The step times of all blocks."""
        return [step for block in self.iters for step in block]

    def stepping_s(self, trial: Trial) -> float:
        """How long the trial stepped, warm-up included, as if its steps took as long as timed ones;
        in seconds of what the fabric stands for.
        """
        if trial.learn is not None:
            if trial.learn.epochs is None:
                return trial.learn.budget_s
            return max(rank.elapsed_s for rank in self.learning.ranks if rank)
        before = [step for block in self.untimed for step in block]
        warm_up = trial.measure.warmup_steps * elapsed_per_step_s(self.steps)
        return math.fsum((*self.steps, *before, warm_up))

    def rate(self, trial: Trial) -> float:
        """Samples per second of all workers together."""
        if self.samples_per_s is not None:
            return self.samples_per_s
        return trial.batch_size * trial.world_size / elapsed_per_step_s(self.steps)


@dataclass(frozen=True, kw_only=True)
class FabricFacts:
    """What of the fabric belongs into a record; as it is, of one where nothing is emulated."""

    fabric: str = "real"
    time_scale: float = 1.0
    time_scale_reason: str | None = None
    calibration: Calibration | None = None
    network: Network = field(default_factory=Network)
    fault_events: list[dict[str, Any]] = field(default_factory=list)


REAL = FabricFacts()


def make_record(
    trial: Trial,
    results: Sequence[Result],
    outcome: Outcome,
    machine: dict[str, Any],
    started: str,
    duration_s: float,
    fabric: FabricFacts = REAL,
    run: str = "",
) -> Record:
    """The record of a trial that has ended, with a result per finished repeat.

    The other arguments are fields of `Record`.
    """
    ok = outcome.status == "ok"
    first = results[0] if results else None
    throughput = _throughput(trial, results) if ok else None
    emulated = fabric.fabric == "emulated"
    strain = [result.strain for result in results]
    unfaithful = notes.unfaithful(strain) if emulated else None
    record = Record(
        id=trial.id,
        hash=trial.hash,
        trial=trial.to_json(),
        **{key.name: getattr(fabric, key.name) for key in dataclasses.fields(fabric)},
        status=outcome.status,
        error=None if ok else typed(Failure, outcome.error),
        started=started,
        duration_s=round(duration_s, 3),
        machine=machine,
        iters=[result.iters for result in results],
        untimed=[result.untimed for result in results],
        period=first.period if first else 1,
        evidence=f"{trial.id}/{first.evidence}" if first and first.evidence else None,
        loss=_finite(results[-1].loss) if ok else None,
        breakdown=_breakdown(results),
        compute=first and first.compute,
        costs=first and first.costs,
        cost_check=first and first.cost_check,
        engine_costs=first and first.engine_costs,
        bound=_bound(trial, first, fabric.network) if first and throughput else None,
        plan=first and first.plan,
        bytes=Bytes(sent_per_step=first.bytes_per_step, gradients=first.gradient_bytes)
        if first
        else Bytes(),
        check=_check(results) if ok else None,
        statistics=first and first.statistics,
        throughput=throughput,
        learning=[_finite(result.learning) for result in results] if trial.learn else None,
        data=first and first.data,
        parameters=first and first.parameters,
        cpu_s_per_s=[result.cpu_s_per_s for result in results],
        strain=strain,
        unfaithful=unfaithful,
        started_by=first and first.started_by,
        notes=_notes(trial, results, machine, emulated, unfaithful),
        run=run,
    )
    return dataclasses.replace(record, modelled=modelled(record))


def _breakdown(results: Sequence[Result]) -> Breakdown | None:
    """That of the repeat whose steps took neither longest nor shortest; its parts add up."""
    found = [result.breakdown for result in results if result.breakdown is not None]
    found.sort(key=lambda parts: parts.step_s or 0.0)
    return found[(len(found) - 1) // 2] if found else None


def _check(results: Sequence[Result]) -> Check:
    """The comparison with plain training (first repeat) and the worst of all agreements."""
    checks = [result.check for result in results]

    def worst(key: str) -> float | None:
        values = [getattr(check, key) for check in checks]
        return None if None in values else max(values)

    # After a training at ranks' own pace one may be dead: nobody looks then.
    agree = [check.replicas_agree for check in checks if check.replicas_agree is not None]
    return _finite(
        dataclasses.replace(
            checks[0],
            replicas_agree=all(agree) if agree else None,
            replica_spread=worst("replica_spread"),
            consensus_distance=worst("consensus_distance"),
        )
    )


def _finite(value: Any) -> Any:
    """The same with None for infinity and nan, which JSON does not know."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if dataclasses.is_dataclass(value):
        found = {key: _finite(inner) for key, inner in vars(value).items()}
        return dataclasses.replace(value, **found)
    return value


def _throughput(trial: Trial, results: Sequence[Result]) -> Throughput:
    unit = f"{model_entry(trial.model).sample_unit}/s"
    if trial.learn is not None:
        # Of whole runs: their median, lowest and highest; of a single one there is no interval.
        rates = sorted(result.rate(trial) for result in results)
        low, high = (rates[0], rates[-1]) if len(rates) > 1 else (None, None)
        value = statistics.median(rates)
        return Throughput(value=value, unit=unit, ci_low=low, ci_high=high, n=len(rates))
    # numpy only here: a dry run must not pay for it.
    from common.results.stats import throughput

    found = throughput([result.steps for result in results], trial.batch_size * trial.world_size)
    return Throughput(value=found.value, unit=unit, ci_low=found.low, ci_high=found.high, n=found.n)


def _notes(
    trial: Trial,
    results: Sequence[Result],
    machine: dict[str, Any],
    emulated: bool,
    unfaithful: bool | None,
) -> list[str]:
    found: list[str | None] = []
    strain = [result.strain for result in results]
    threads = trial.threads_per_rank * trial.world_size
    crowded = trial.launcher == "local" and trial.device == "cpu" and threads > machine["cores"]
    if not emulated:
        on = (
            f"{trial.world_size} ranks x {trial.threads_per_rank} threads on "
            f"{machine['cores']} cores"
        )
        found.append(notes.oversubscribed(strain, on if crowded else None))
    if not all(math.isfinite(result.loss) for result in results):
        found.append("training diverged: the loss is not finite; lower optimizer.lr")
    for repeat, result in enumerate(results):
        for rank in result.lost_ranks:
            found.append(f"rank {rank} was killed (repeat {repeat}); the others went on without it")
    # One word for all repeats.
    disturbed = next(filter(None, (notes.disturbed(each, emulated) for each in strain)), None)
    found.append(disturbed or notes.beside(strain))
    if results:
        found.append(notes.not_stationary([result.iters for result in results], results[0].period))
        check, costs = results[0].cost_check, results[0].engine_costs
        found.append(check and _doubtful_costs(check))
        if costs is not None:
            check = CostCheck(residual=costs.error, noise=costs.noise, drift=0.0)
            found.append(_doubtful_costs(check, f"costs of {costs.engine}"))
    if unfaithful:
        found.append(notes.unfaithful_note([result.strain for result in results]))
    return [note for note in found if note is not None]


def _doubtful_costs(check: CostCheck, what: str = "costs of collectives") -> str | None:
    noise, doubtful = check.noise or 0.0, f"{what} are doubtful"
    if check.misfit > COST_MISFIT:
        return f"{doubtful}: their fit is {check.misfit:.0%} off, beside {noise:.0%} of noise"
    if noise > COST_NOISE:
        return f"{doubtful}: repeats of the same message differ by {noise:.0%}"
    if abs(check.drift) > COST_DRIFT:
        return f"{doubtful}: {check.drift:+.0%} from begin to end"
    return None


def _bound(trial: Trial, first: Result, network: Network) -> Bound | None:
    """None if the compute was not measured."""
    compute = first.compute
    if compute is None:
        return None
    kind: str | None = ALONE
    bound_s, wire_s = compute_limit_s(compute), None
    if trial.algorithm != BASELINE and trial.world_size > 1:
        algorithm = algorithm_class(trial.algorithm)
        kind = algorithm.bound_of(trial.options)
        local_size = first.local_size or trial.ranks_per_host or 1
        traffic = algorithm.traffic(trial.options, trial.world_size, local_size)
        if kind != "asynchronous":  # what the links cannot carry is left out
            wire_s = _wire_limit_s(trial, first, traffic, network)
        bound_s = None
        # Traffic between some of the ranks is costed by the communicator's `exchange`.
        costs = first.costs if traffic else sending_costs(first.costs, first.engine_costs)
        known = first.engine_costs is not None or algorithm.sends_by(trial.options) is None
        if kind is not None and costs and known:
            # Ranks whose links differ wait for each other sooner or later.
            each = _comm_times(trial, first, costs, traffic)
            bound_s = max(step_bound_s(kind, compute, comm, trial.world_size) for comm in each)
            # Measured costs are good to some per cent only.
            bound_s = bound_s if wire_s is None else max(bound_s, wire_s)
    return Bound(
        kind=kind,
        step_s=bound_s,
        compute_limit_s=compute_limit_s(compute, trial.world_size),
        wire_limit_s=wire_s,
    )


def _comm_times(
    trial: Trial, first: Result, costs: dict[str, CollectiveCost], traffic: Traffic | None
) -> list[CommTimes]:
    """By host, or one for all."""
    if traffic is None:
        return [comm_times(first.gradient_bytes, costs)]
    # Ranks that share a link; on one host alone, each has its own.
    per_host = trial.ranks_per_host or first.local_size or 1
    per_host = 1 if per_host >= trial.world_size else per_host
    return exchange_times(first.gradient_bytes, traffic.loads(per_host), costs, per_host)


def _wire_limit_s(
    trial: Trial, first: Result, traffic: Traffic | None, network: Network
) -> float | None:
    if not network.requested or trial.hosts is None:
        return None
    bytes_per_s = payload_bytes_per_s(network.requested["gbps"])
    if traffic is not None:
        loads = traffic.loads(trial.ranks_per_host)
        return exchange_wire_limit_s(first.gradient_bytes, loads, bytes_per_s)
    consistency = algorithm_class(trial.algorithm).capabilities.consistency
    if consistency not in ("synchronous", "delayed"):
        return None
    # Ranks of one host need no link to average among themselves.
    return wire_limit_s(first.gradient_bytes, trial.hosts, bytes_per_s)
