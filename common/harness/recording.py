"""From what the workers wrote to the record of a trial."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from common.harness.bounding import bound_record
from common.harness.trial import Trial
from common.launch.job import Outcome
from common.models.registry import model_entry
from common.results import records
from common.results.records import Record

# Others on the machine using more than this many cores make a number doubtful.
FOREIGN_CORES = 0.25
# An emulated cluster on a machine busier than this (fraction of its cores) is not to be believed.
SATURATED = 0.85

REAL: Mapping[str, Any] = MappingProxyType(
    {
        "fabric": "real",
        "time_scale": 1.0,
        "network": {"requested": None, "measured": None},
        "fault_events": (),
    }
)
"""What `Fabric.describe` says where nothing is emulated."""


def make_record(
    trial: Trial,
    results: list[dict[str, Any]],
    outcome: Outcome,
    machine: dict[str, Any],
    started: str,
    duration_s: float,
    fabric: Mapping[str, Any] = REAL,
) -> Record:
    """The record of a trial that has ended.

    Args:
        results: what the workers wrote, one per finished repeat.
        started: ISO 8601, UTC.
        duration_s: time spent on the trial, set-up of the workers included.
        fabric: what `Fabric.describe` says.
    """
    ok = outcome.status == "ok"
    first = results[0] if results else {}
    throughput = _throughput(trial, results) if ok else None
    return {
        "schema": records.SCHEMA,
        "id": trial.id,
        "hash": trial.hash,
        "trial": trial.to_json(),
        "fabric": fabric["fabric"],
        "time_scale": fabric["time_scale"],
        "time_scale_reason": fabric.get("time_scale_reason"),
        "status": outcome.status,
        "error": None if ok else outcome.error,
        "started": started,
        "duration_s": round(duration_s, 3),
        "machine": machine,
        "network": fabric["network"],
        "fault_events": list(fabric["fault_events"]),
        "repeats": [[step for block in result["iters"] for step in block] for result in results],
        "iters": [result["iters"] for result in results],
        "loss": _finite(results[-1]["loss"]) if ok else None,
        "breakdown": _breakdown(results),
        "compute": first.get("compute"),
        "costs": first.get("costs"),
        "bound": _bound(trial, first, throughput, fabric),
        "bytes": {
            "sent_per_step": first.get("bytes_per_step"),
            "gradients": first.get("gradient_bytes"),
        },
        "check": _check(trial, results) if ok else None,
        "statistics": first.get("statistics"),
        "throughput": throughput,
        "learning": [_clean(result["learning"]) for result in results] if trial.learn else None,
        "parameters": first.get("parameters"),
        "cpu_s_per_s": [result["cpu_s_per_s"] for result in results],
        "foreign_cpu_s_per_s": [result["foreign_cpu_s_per_s"] for result in results],
        "unfaithful": _unfaithful(fabric, results, machine),
        "started_by": first.get("started_by"),
        "notes": _notes(trial, results, machine, fabric),
    }


def samples_per_s(trial: Trial, result: dict[str, Any]) -> float:
    """Of all workers together, in one repeat."""
    if trial.learn is not None:
        return result["samples_per_s"]
    steps = sorted(step for block in result["iters"] for step in block)
    return trial.batch_size * trial.world_size / steps[len(steps) // 2]


def _breakdown(results: list[dict[str, Any]]) -> dict[str, Any] | None:
    """That of the repeat whose steps took neither longest nor shortest; its parts add up."""
    found = [result["breakdown"] for result in results if result.get("breakdown")]
    found.sort(key=lambda parts: parts["step_s"])
    return found[(len(found) - 1) // 2] if found else None


def _bound(
    trial: Trial,
    first: dict[str, Any],
    throughput: dict[str, Any] | None,
    fabric: Mapping[str, Any],
) -> dict[str, Any] | None:
    if throughput is None:
        return None
    # The median step that the table's throughput stands for.
    step_s = trial.batch_size * trial.world_size / throughput["value"]
    return bound_record(trial, first, step_s, fabric["network"])


def _busy(results: list[dict[str, Any]]) -> float:
    """CPU seconds that the whole machine spent per second, in the busiest repeat."""
    return max((r["cpu_s_per_s"] + r["foreign_cpu_s_per_s"] for r in results), default=0.0)


def _unfaithful(
    fabric: Mapping[str, Any], results: list[dict[str, Any]], machine: dict[str, Any]
) -> bool | None:
    """Whether the machine was too busy to be the emulated cluster; None where it was none.

    All virtual hosts share its cores: ranks that wait for a core wait for something that the real
    cluster would have had.
    """
    if fabric["fabric"] != "emulated":
        return None
    return _busy(results) > SATURATED * machine["cores"]


def _check(trial: Trial, results: list[dict[str, Any]]) -> dict[str, Any]:
    if trial.learn is None:
        return _merged_check(results)
    # Not compared with plain training: what it has learned tells.
    checks = [result["check"] for result in results]
    agree = [check["replicas_agree"] for check in checks]
    return {
        "matches_reference": None,
        "replicas_agree": None if None in agree else all(agree),
        "replica_spread": _worst(checks, "replica_spread"),
        "consensus_distance": _worst(checks, "consensus_distance"),
    }


def _worst(checks: list[dict[str, Any]], key: str) -> float | None:
    values = [check[key] for check in checks]
    return None if None in values else _finite(max(values))


def _merged_check(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The comparison with plain training (first repeat) and the worst of all agreements."""
    checks = [result["check"] for result in results]
    merged = checks[0] | {
        "reference_error": _finite(checks[0]["reference_error"]),
        "replica_spread": _finite(max(check["replica_spread"] for check in checks)),
        "replicas_agree": all(_agree(check) for check in checks),
    }
    if "consensus_distance" in merged:
        apart = max(check["consensus_distance"] for check in checks)
        merged["consensus_distance"] = _finite(apart)
    return merged


def _agree(check: Mapping[str, Any]) -> bool:
    # Of replicas that are meant to differ the worker has judged how far they are apart.
    if "consensus_distance" in check:
        return check["replicas_agree"]
    return check["replica_spread"] == 0.0


def _finite(value: float) -> float | None:
    """JSON knows neither infinity nor nan; a note says what happened."""
    return value if math.isfinite(value) else None


def _clean(value: Any) -> Any:
    """The same without numbers that JSON does not know."""
    if isinstance(value, dict):
        return {key: _clean(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_clean(inner) for inner in value]
    return _finite(value) if isinstance(value, float) else value


def _throughput(trial: Trial, results: list[dict[str, Any]]) -> dict[str, Any]:
    if trial.learn is not None:
        return _rate_of_runs(trial, results)
    # numpy only here: a dry run must not pay for it.
    from common.results.stats import throughput

    steps = [[step for block in result["iters"] for step in block] for result in results]
    estimate = throughput(steps, trial.batch_size * trial.world_size)
    return {
        "value": estimate.value,
        "unit": f"{model_entry(trial.model).sample_unit}/s",
        "ci_low": estimate.low,
        "ci_high": estimate.high,
        "n": estimate.n,
    }


def _rate_of_runs(trial: Trial, results: list[dict[str, Any]]) -> dict[str, Any]:
    """Of whole runs: their median, lowest and highest; of a single one there is no interval."""
    rates = sorted(samples_per_s(trial, result) for result in results)
    several = len(rates) > 1
    return {
        "value": statistics.median(rates),
        "unit": f"{model_entry(trial.model).sample_unit}/s",
        "ci_low": rates[0] if several else None,
        "ci_high": rates[-1] if several else None,
        "n": len(rates),
    }


def _notes(
    trial: Trial,
    results: list[dict[str, Any]],
    machine: dict[str, Any],
    fabric: Mapping[str, Any],
) -> list[str]:
    notes = []
    threads = trial.threads_per_rank * trial.world_size
    real = fabric["fabric"] == "real"
    if real and trial.launcher == "local" and trial.device == "cpu" and threads > machine["cores"]:
        notes.append(
            f"oversubscribed: {trial.world_size} ranks x {trial.threads_per_rank} threads on "
            f"{machine['cores']} cores"
        )
    if not all(math.isfinite(result["loss"]) for result in results):
        notes.append("training diverged: the loss is not finite; lower optimizer.lr")
    for repeat, result in enumerate(results):
        for rank in result.get("lost_ranks", ()):
            notes.append(f"rank {rank} was killed (repeat {repeat}); the others went on without it")
    foreign = max((result["foreign_cpu_s_per_s"] for result in results), default=0.0)
    if _unfaithful(fabric, results, machine):
        notes.append(f"unfaithful: {_busy(results):.1f} of {machine['cores']} cores were busy")
    # On virtual hosts the kernel's work for the links is nobody's.
    if real and foreign > FOREIGN_CORES:
        notes.append(f"disturbed: other processes used {foreign:.1f} cores meanwhile")
    return notes
