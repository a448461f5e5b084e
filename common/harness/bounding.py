"""The bound beside a result: how short the trial's step could be, and how much of that it reaches.

Everything is in seconds of what the fabric stands for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.harness import collective_costs
from common.harness.trial import BASELINE, Trial
from dear.cost.bounds import (
    Bound,
    CommTimes,
    StepTimes,
    comm_times,
    compute_limit_s,
    exchange_times,
    exchange_wire_limit_s,
    reached,
    step_bound_s,
    wire_limit_s,
)
from dear.topology.traffic import Traffic
from dear.training.algorithm import algorithm_class, algorithm_options

ALONE = "compute"
"""The kind of bound where nothing is communicated."""


def bound_record(
    trial: Trial,
    result: Mapping[str, Any],
    step_s: float,
    network: Mapping[str, Any],
) -> dict[str, Any] | None:
    """The record's `bound`, or None if the compute was not measured.

    Args:
        result: of the first repeat: `compute`, `costs`, `gradient_bytes`, `local_size`.
        step_s: the trial's step time, as tables state it.
        network: the record's.

    Returns:
        `kind` (None: none is known for the algorithm), `step_s` (not below `wire_limit_s`),
        `compute_limit_s`, `wire_limit_s` (None where the links' rate is not known, or the limit
        does not hold), `reached`.
    """
    if not result.get("compute"):
        return None
    compute = StepTimes(**result["compute"])
    kind, bound_s = _bound(trial, result, compute)
    wire_s = _wire_limit_s(trial, result, network)
    if bound_s is not None and wire_s is not None:
        bound_s = max(bound_s, wire_s)  # measured costs are good to some per cent only
    return {
        "kind": kind,
        "step_s": bound_s,
        "compute_limit_s": compute_limit_s(compute, trial.world_size),
        "wire_limit_s": wire_s,
        "reached": None if bound_s is None else reached(bound_s, step_s),
    }


def _bound(
    trial: Trial, result: Mapping[str, Any], compute: StepTimes
) -> tuple[str | None, float | None]:
    if _alone(trial):
        return ALONE, compute_limit_s(compute)
    kind = _kind(trial)
    if kind is None or not result.get("costs"):
        return kind, None
    # Ranks whose links differ wait for each other sooner or later.
    each = _comm_times(trial, result)
    return kind, max(step_bound_s(kind, compute, comm, trial.world_size) for comm in each)


def _comm_times(trial: Trial, result: Mapping[str, Any]) -> list[CommTimes]:
    """By host, or one for all."""
    nbytes, costs = result["gradient_bytes"], collective_costs.from_json(result["costs"])
    traffic = _traffic(trial, result)
    if traffic is None:
        return [comm_times(nbytes, costs)]
    per_host = _ranks_per_host(trial, result)
    return exchange_times(nbytes, traffic.loads(per_host), costs, per_host)


def _kind(trial: Trial) -> Bound | None:
    options = algorithm_options(trial.algorithm, trial.options)
    return algorithm_class(trial.algorithm).bound_of(options)


def _traffic(trial: Trial, result: Mapping[str, Any]) -> Traffic | None:
    options = algorithm_options(trial.algorithm, trial.options)
    local_size = result.get("local_size") or trial.ranks_per_host or 1
    return algorithm_class(trial.algorithm).traffic(options, trial.world_size, local_size)


def _ranks_per_host(trial: Trial, result: Mapping[str, Any]) -> int:
    """Ranks that share a link; on one host alone, each has its own."""
    together = trial.ranks_per_host or result.get("local_size") or 1
    return 1 if together >= trial.world_size else together


def _wire_limit_s(
    trial: Trial, result: Mapping[str, Any], network: Mapping[str, Any]
) -> float | None:
    requested = network.get("requested")
    if not requested or trial.hosts is None or _alone(trial):
        return None
    if _kind(trial) == "asynchronous":
        return None  # what the links cannot carry is left out
    nbytes, bytes_per_s = result["gradient_bytes"], requested["gbps"] * 1e9 / 8
    traffic = _traffic(trial, result)
    if traffic is not None:
        loads = traffic.loads(trial.ranks_per_host)
        return exchange_wire_limit_s(nbytes, loads, bytes_per_s)
    if algorithm_class(trial.algorithm).capabilities.consistency not in ("synchronous", "delayed"):
        return None
    # Ranks of one host need no link to average among themselves.
    return wire_limit_s(nbytes, trial.hosts, bytes_per_s)


def _alone(trial: Trial) -> bool:
    return trial.algorithm == BASELINE or trial.world_size == 1
