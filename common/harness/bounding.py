"""The bound beside a result: how short the trial's step could be, and how much of that it reaches.

Everything is in seconds of what the fabric stands for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.harness import collective_costs
from common.harness.trial import BASELINE, Trial
from dear.algorithm import algorithm_class
from dear.bounds import (
    StepTimes,
    comm_times,
    compute_limit_s,
    reached,
    step_bound_s,
    wire_limit_s,
)

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
        result: of the first repeat: `compute`, `costs`, `gradient_bytes`.
        step_s: the trial's step time, as tables state it.
        network: the record's.

    Returns:
        `kind` (None: none is known for the algorithm), `step_s`, `compute_limit_s`,
        `wire_limit_s` (None where the links' rate is not known, or the limit does not hold),
        `reached`.
    """
    if not result.get("compute"):
        return None
    compute = StepTimes(**result["compute"])
    kind, bound_s = _bound(trial, result, compute)
    return {
        "kind": kind,
        "step_s": bound_s,
        "compute_limit_s": compute_limit_s(compute, trial.world_size),
        "wire_limit_s": _wire_limit_s(trial, result, network),
        "reached": None if bound_s is None else reached(bound_s, step_s),
    }


def _bound(
    trial: Trial, result: Mapping[str, Any], compute: StepTimes
) -> tuple[str | None, float | None]:
    if _alone(trial):
        return ALONE, compute_limit_s(compute)
    kind = algorithm_class(trial.algorithm).bound
    if kind is None or not result.get("costs"):
        return kind, None
    comm = comm_times(result["gradient_bytes"], collective_costs.from_json(result["costs"]))
    return kind, step_bound_s(kind, compute, comm, trial.world_size)


def _wire_limit_s(
    trial: Trial, result: Mapping[str, Any], network: Mapping[str, Any]
) -> float | None:
    requested = network.get("requested")
    if not requested or trial.hosts is None or _alone(trial):
        return None
    if algorithm_class(trial.algorithm).capabilities.consistency not in ("synchronous", "delayed"):
        return None
    # Ranks of one host need no link to average among themselves.
    return wire_limit_s(result["gradient_bytes"], trial.hosts, requested["gbps"] * 1e9 / 8)


def _alone(trial: Trial) -> bool:
    return trial.algorithm == BASELINE or trial.world_size == 1
