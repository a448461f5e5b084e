"""From what the workers wrote to the record of a trial."""

from __future__ import annotations

import math
from typing import Any

from common.harness.trial import Trial
from common.launch.job import Outcome
from common.models.registry import model_entry
from common.results import records
from common.results.records import Record

# Others on the machine using more than this many cores make a number doubtful.
FOREIGN_CORES = 0.25


def make_record(
    trial: Trial,
    results: list[dict[str, Any]],
    outcome: Outcome,
    machine: dict[str, Any],
    started: str,
    duration_s: float,
) -> Record:
    """The record of a trial that has ended.

    Args:
        results: what the workers wrote, one per finished repeat.
        started: ISO 8601, UTC.
        duration_s: time spent on the trial, set-up of the workers included.
    """
    ok = outcome.status == "ok"
    first = results[0] if results else {}
    return {
        "schema": records.SCHEMA,
        "id": trial.id,
        "hash": trial.hash,
        "trial": trial.to_json(),
        "fabric": "real",
        "status": outcome.status,
        "error": None if ok else outcome.error,
        "started": started,
        "duration_s": round(duration_s, 3),
        "machine": machine,
        "network": {"requested": None, "measured": None},
        "repeats": [[step for block in result["iters"] for step in block] for result in results],
        "iters": [result["iters"] for result in results],
        "loss": _finite(results[-1]["loss"]) if ok else None,
        "breakdown": first.get("breakdown"),
        "bytes": {"sent_per_step": first.get("bytes_per_step")},
        "check": _merged_check(results) if ok else None,
        "throughput": _throughput(trial, results) if ok else None,
        "parameters": first.get("parameters"),
        "cpu_s_per_s": [result["cpu_s_per_s"] for result in results],
        "started_by": first.get("started_by"),
        "notes": _notes(trial, results, machine),
    }


def _merged_check(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The comparison with plain training (first repeat) and the worst of all agreements."""
    spread = max(result["check"]["replica_spread"] for result in results)
    first = results[0]["check"]
    return first | {
        "reference_error": _finite(first["reference_error"]),
        "replica_spread": _finite(spread),
        "replicas_agree": spread == 0.0,
    }


def _finite(value: float) -> float | None:
    """JSON knows neither infinity nor nan; a note says what happened."""
    return value if math.isfinite(value) else None


def _throughput(trial: Trial, results: list[dict[str, Any]]) -> dict[str, Any]:
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


def _notes(trial: Trial, results: list[dict[str, Any]], machine: dict[str, Any]) -> list[str]:
    notes = []
    threads = trial.threads_per_rank * trial.world_size
    if trial.launcher == "local" and trial.device == "cpu" and threads > machine["cores"]:
        notes.append(
            f"oversubscribed: {trial.world_size} ranks x {trial.threads_per_rank} threads on "
            f"{machine['cores']} cores"
        )
    if not all(math.isfinite(result["loss"]) for result in results):
        notes.append("training diverged: the loss is not finite; lower optimizer.lr")
    foreign = max((result["foreign_cpu_s_per_s"] for result in results), default=0.0)
    if foreign > FOREIGN_CORES:
        notes.append(f"disturbed: other processes used {foreign:.1f} cores meanwhile")
    return notes
