"""Record of a trial: made from its workers' results, with a lower bound of the step, and notes.

All times are in seconds of the modelled cluster (on an emulated cluster: real time / time scale).
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Any

from common.emulation.links.profile import payload_bytes_per_s
from common.harness.running import notes
from common.harness.trial import BASELINE, Trial
from common.launch.job import Outcome
from common.models.registry import model_entry
from common.results.records import (
    REAL,
    Bound,
    Breakdown,
    FabricFacts,
    Failure,
    Record,
    Result,
    Throughput,
    typed,
)
from common.results.records.trust import (
    Check,
    CostCheck,
    Network,
    Note,
    elapsed_per_step_s,
    sending_costs,
)
from common.results.timed.event_model import modelled, trial_passes
from common.virtual.limit import limit_s
from common.virtual.passes import UnmodelledError
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
"""Kind of lower bound for a trial without communication."""


def stepping_s(result: Result, trial: Trial) -> float:
    """Returns the time that a repeat spent in steps, in seconds of the modelled cluster.

    The time of a warm-up step is assumed to be that of a timed step.
    """
    if trial.learn is not None:
        if trial.learn.epochs is None:
            return trial.learn.budget_s
        return max(rank.elapsed_s for rank in result.learning.ranks if rank)
    before = [step for block in result.untimed for step in block]
    warm_up = trial.measure.warmup_steps * elapsed_per_step_s(result.steps)
    return math.fsum((*result.steps, *before, warm_up))


def samples_per_s(result: Result, trial: Trial) -> float:
    """Returns the throughput of a repeat, of all workers together."""
    if result.samples_per_s is not None:
        return result.samples_per_s
    return trial.batch_size * trial.world_size / elapsed_per_step_s(result.steps)


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
    """Returns the record of a trial that has ended.

    Args:
        results: result of each finished repeat.

    The other arguments are fields of `Record`.
    """
    ok = outcome.status == "ok"
    measured = ok or (outcome.status == "interrupted" and bool(results))
    throughput = _throughput(trial, results) if measured else None
    emulated = fabric.kind == "emulated"
    strain = [result.strain for result in results]
    unfaithful = notes.unfaithful(strain) if emulated else None
    record = Record(
        id=trial.id,
        hash=trial.hash,
        trial=trial.to_json(),
        fabric=fabric,
        status=outcome.status,
        error=None if ok else typed(Failure, outcome.error),
        started=started,
        duration_s=round(duration_s, 3),
        machine=machine,
        run=run,
        results=_finite(list(results)),
        check=_check(results) if measured else None,
        throughput=throughput,
        breakdown=_breakdown(results),
        bound=_bound(trial, results[0], fabric.network) if ok else None,
        unfaithful=unfaithful,
        notes=_notes(trial, results, machine, emulated, unfaithful),
    )
    return dataclasses.replace(record, modelled=modelled(record))


def _breakdown(results: Sequence[Result]) -> Breakdown | None:
    """Returns the breakdown of the repeat with the median step; its parts add up."""
    breakdowns = [result.breakdown for result in results if result.breakdown is not None]
    breakdowns.sort(key=lambda parts: parts.step_s)
    return breakdowns[(len(breakdowns) - 1) // 2] if breakdowns else None


def _check(results: Sequence[Result]) -> Check:
    """Returns the first repeat's check against plain training, with the worst agreement of any."""
    checks = [result.check for result in results]

    def worst(key: str) -> float | None:
        values = [getattr(check, key) for check in checks]
        return None if None in values else max(values)

    # If ranks train at their own pace and one died, agreement is not checked.
    agree = [check.replicas_agree for check in checks if check.replicas_agree is not None]
    return _finite(
        dataclasses.replace(
            checks[0],
            replicas_agree=all(agree) if agree else None,
            finding=next((c.finding for c in checks if c.verdict == "NO"), checks[0].finding),
            replica_spread=worst("replica_spread"),
            consensus_distance=worst("consensus_distance"),
        )
    )


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if dataclasses.is_dataclass(value):
        fields = {key: _finite(inner) for key, inner in vars(value).items()}
        return dataclasses.replace(value, **fields)
    return value


def _throughput(trial: Trial, results: Sequence[Result]) -> Throughput:
    unit = f"{model_entry(trial.model).sample_unit}/s"
    if trial.learn is not None:
        # Median, lowest and highest of whole runs; a single run has no interval.
        rates = sorted(samples_per_s(result, trial) for result in results)
        low, high = (rates[0], rates[-1]) if len(rates) > 1 else (None, None)
        value = statistics.median(rates)
        return Throughput(value=value, unit=unit, ci_low=low, ci_high=high, n=len(rates))
    # The import is here, because numpy would slow down a dry run.
    from common.results.stats import throughput

    rate = throughput([result.steps for result in results], trial.batch_size * trial.world_size)
    return Throughput(value=rate.value, unit=unit, ci_low=rate.low, ci_high=rate.high, n=rate.n)


def _notes(
    trial: Trial,
    results: Sequence[Result],
    machine: dict[str, Any],
    emulated: bool,
    unfaithful: bool | None,
) -> list[Note]:
    strain = [result.strain for result in results]
    written = [notes.no_comm_core(trial.backend), notes.ordinary_priority(strain)]
    threads = trial.threads_per_rank * trial.world_size
    crowded = trial.launcher == "local" and trial.device == "cpu" and threads > machine["cores"]
    if not emulated:
        on = (
            f"{trial.world_size} ranks x {trial.threads_per_rank} threads on "
            f"{machine['cores']} cores"
        )
        written.append(notes.oversubscribed(strain, on if crowded else None))
    if not all(result.loss is not None and math.isfinite(result.loss) for result in results):
        text = "diverged: the loss is not finite; lower optimizer.lr"
        written.append(Note(kind="diverged", text=text))
    for repeat, result in enumerate(results):
        for rank in result.lost_ranks:
            text = f"rank {rank} was killed (repeat {repeat}); the other ranks continued without it"
            written.append(Note(kind="killed", text=text))
    # All repeats share one note.
    disturbed = next(filter(None, (notes.disturbed(each, emulated) for each in strain)), None)
    written.append(disturbed or notes.beside(strain))
    if results:
        written.append(
            notes.not_stationary([result.iters for result in results], results[0].period)
        )
        check, costs = results[0].cost_check, results[0].engine_costs
        written.append(check and notes.costs(check))
        if costs is not None:
            check = CostCheck(residual=costs.error, noise=costs.noise, drift=0.0)
            written.append(notes.costs(check, f"costs of {costs.engine}"))
    if unfaithful:
        written.append(notes.unfaithful_note(strain))
    return [note for note in written if note is not None]


def _bound(trial: Trial, first: Result, network: Network) -> Bound | None:
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
        if kind != "asynchronous":  # such an algorithm skips what the links cannot carry
            wire_s = _wire_limit_s(trial, first, traffic, network)
        bound_s = None
        # Messages to some ranks have the costs of the communicator's `exchange`.
        costs = first.costs if traffic else sending_costs(first.costs, first.engine_costs)
        known = first.engine_costs is not None or algorithm.sends_by(trial.options) is None
        if getattr(trial.options, "compression", "none") != "none":
            kind, wire_s = None, None  # nobody knows how many bytes travel
        if kind is not None and costs and known:
            # If links differ, all ranks finally wait for the slowest.
            each = _comm_times(trial, first, costs, traffic)
            bound_s = max(step_bound_s(kind, compute, comm, trial.world_size) for comm in each)
            # Measured costs have errors of some per cent.
            bound_s = max(bound_s, wire_s or 0.0)
            if traffic is None:
                bound_s = max(bound_s, _layers_limit_s(trial, compute, kind, each[0], wire_s))
    return Bound(
        kind=kind,
        step_s=bound_s,
        compute_limit_s=compute_limit_s(compute, trial.world_size),
        wire_limit_s=wire_s,
    )


def _layers_limit_s(
    trial: Trial, compute: StepTimes, kind: str, comm: CommTimes, wire_s: float | None
) -> float:
    """Returns the bound from the times when the profile's gradients are ready; 0: there is none."""
    try:
        passes = trial_passes(trial.to_json(), compute.update_s)
    except UnmodelledError:
        return 0.0
    return limit_s(passes, kind, comm, wire_s or 0.0) or 0.0


def _comm_times(
    trial: Trial, first: Result, costs: dict[str, CollectiveCost], traffic: Traffic | None
) -> list[CommTimes]:
    """Returns the communication times of a step by host; a single one if hosts are equal."""
    if traffic is None:
        return [comm_times(first.gradient_bytes, costs)]
    # Ranks of a host share its link. On a single host each rank has its own.
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
    # Ranks of one host average among themselves without a link.
    return wire_limit_s(first.gradient_bytes, trial.hosts, bytes_per_s)
