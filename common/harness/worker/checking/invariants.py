"""Invariants of asynchronous algorithms, which hold for any order of messages.

A rank may average with newer or older values of a neighbour, so many results are right. But the
recorded gradients tell where each rank would be if it trained alone (without averaging). The checks
are:

- Averaging moves ranks towards each other, in every tensor, and their mean moves little.
- No more bytes are sent than the algorithm declares.
- Values that a rank averages with are not older (staler) than the algorithm declares.
- Weights that are sent with values are positive, and their sum is the number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from common.harness.trial import Trial
from common.harness.worker.checking.deviation import Deviation, rounding
from common.harness.worker.checking.serial import RecordedJob, Reference, isolated
from common.results.records.trust import Check
from dear.cost.bounds import Message
from dear.training.algorithm import algorithm_class

Statistics = Mapping[str, Any]
LEAST_ROUNDS = 3.0
"""Smallest number of messages from each neighbour (on average) for a verdict. The first message has
no effect, because sender and receiver start with equal values."""
CLOSER = 0.25
"""Least effect of averaging, relative to its effect in lockstep, if every message was sent. (The
effect is how much smaller the distance between ranks is than between ranks that train alone.)"""
DRIFT = 0.5
"""Largest distance of the mean of all ranks from the mean of ranks alone, relative to the movement
of that mean plus the distance between ranks alone. Stale values move the mean a little."""
STALE = 1.0
"""Largest age of the values that a rank averages with, in steps (on average), for a verdict on the
mean. Averaging with values that are s steps old slows the mean down to 1 / (1 + s) at worst. That
is DRIFT for 1; on a busy machine, values are older, and right training misses DRIFT."""
TOUCHED = 1e-3
"""Smallest distance of a rank's tensor from that of the rank alone, relative to the distance
between ranks alone. A tensor with a smaller distance was never averaged."""
HEADERS = 1.02
"""Largest ratio of sent to declared bytes. It is above 1: messages also carry steps and weights."""


def check_invariants(
    job: RecordedJob,
    reference: Reference | None,
    sent_bytes: int,
    parameter_bytes: int,
    statistics: Sequence[Statistics],
) -> Check:
    """Checks all invariants.

    Args:
        reference: reference with all ranks in lockstep.
        sent_bytes: bytes that all ranks together sent since the first step.
        parameter_bytes: size of one replica.
        statistics: the algorithm's counts by rank, after all messages have arrived.
    """
    trial, start, end = job.trial, job.start, job.end
    alone = job.end_of(isolated)
    distance = job.norms(_from_mean(alone)).max(axis=0)
    drift = _drift(job, alone, distance)
    in_step = 0.0
    if reference is not None:
        in_step = _spread(job.norms(_from_mean(job.end_of(reference))), distance)
    spread = _spread(job.norms(_from_mean(end)), distance)
    # If ranks alone do not differ (all gradients are zero), averaging has no visible effect.
    noise = rounding(trial.dtype, job.steps, mixed=True)
    differs = distance > job.norms(start).max(axis=0) * noise
    alike = job.norms(end - alone) <= TOUCHED * distance
    declared = _declared(trial, job.local_size, job.steps) * parameter_bytes
    sent_share = min(1.0, sent_bytes / declared)
    rounds = job.steps // getattr(trial.options, "every", 1) * sent_share
    astray, stale = drift.error > DRIFT, _age(statistics)
    right: bool | None = False
    if broken := _too_stale(trial, statistics) or _leaking(trial, statistics, job.steps):
        finding = broken
    elif not np.isfinite(end).all() or (astray and stale <= STALE):
        finding = f"the mean of {drift.tensor} over ranks is not where gradients moved it"
    elif sent_bytes > HEADERS * declared:
        finding = f"{sent_bytes:,} bytes were sent, and at most {declared:,.0f} are declared"
    elif rounds < LEAST_ROUNDS and sent_bytes:
        right, finding = None, f"{rounds:.1f} messages from each neighbour are too few for a check"
    elif astray:
        right, finding = None, f"values were {stale:.1f} steps old, too old to check their mean"
    elif spread > 1 - CLOSER * sent_share * (1 - in_step):
        finding = (
            f"ranks are {spread:.2f} times as far apart as ranks that train alone; ranks in step "
            f"would be {in_step:.2f} times as far apart"
        )
    elif unaveraged := _unaveraged(job, alike, differs):
        right, finding = unaveraged
    else:
        right, finding = True, None
    return Check(
        judged_by="invariants",
        matches_reference=right,
        finding=finding,
        worst_tensor=drift.tensor,
        end_error=drift.error,
    )


def _unaveraged(
    job: RecordedJob, alike: np.ndarray, differs: np.ndarray
) -> tuple[bool | None, str] | None:
    """Returns verdict and finding if a tensor was never averaged, or a rank never averaged.

    Args:
        alike: `[ranks, tensors]`, True where the rank has the values of training alone.
        differs: `[tensors]`, True where ranks that train alone differ.
    """
    untouched = differs & alike.all(axis=0)
    if untouched.any():
        return False, f"{job.names[int(untouched.argmax())]} was never averaged"
    lonely = (alike | ~differs).all(axis=1) & differs.any()
    if not lonely.any():
        return None
    # No verdict: on a busy machine, a rank may end before anything has arrived.
    rank = int(lonely.argmax())
    return None, f"rank {rank} has the values of training alone: it averaged with no other rank"


def _drift(job: RecordedJob, alone: np.ndarray, distance: np.ndarray) -> Deviation:
    """Returns how far the mean of all ranks is from that of ranks alone."""
    start, end = job.start.mean(0), job.end.mean(0)
    moved = job.norms(np.broadcast_to(alone.mean(0) - start, job.end.shape))
    away = job.norms(np.broadcast_to(end - alone.mean(0), job.end.shape))
    return job.worst(away, moved + distance)


def _too_stale(trial: Trial, statistics: Sequence[Statistics]) -> str | None:
    limit = getattr(trial.options, "max_staleness", None)
    if limit is None:
        return None
    for rank, counts in enumerate(statistics):
        for peer, age in counts["staleness"].items():
            if age["uses"] and age["max"] > limit:
                return (
                    f"rank {rank} used values of rank {peer} that were {age['max']} steps behind; "
                    f"at most {limit} are declared"
                )
    return None


def _age(statistics: Sequence[Statistics]) -> float:
    """Returns the mean age of the values from the peer whose values are the oldest."""
    ages = [age["mean"] for counts in statistics for age in counts["staleness"].values()]
    return max((age for age in ages if age is not None), default=0.0)


def _leaking(trial: Trial, statistics: Sequence[Statistics], steps: int) -> str | None:
    if not all("p" in counts for counts in statistics):
        return None
    weights = np.array([counts["p"] for counts in statistics])
    if not (weights > 0).all():
        return f"the weight of a rank's values must be positive, but is {weights.min():.3g}"
    arrived = np.array([counts["p_arrived"] for counts in statistics])
    totals = weights.sum(axis=0) + arrived.sum(axis=0)
    worst = totals[np.abs(totals - trial.world_size).argmax()]
    if abs(worst / trial.world_size - 1) > rounding(trial.dtype, steps, mixed=True):
        return f"weights of values must add up to {trial.world_size}, but add up to {worst:.6g}"
    return None


def _from_mean(x: np.ndarray) -> np.ndarray:
    return x - x.mean(axis=0)


def _spread(norms: np.ndarray, distance: np.ndarray) -> float:
    """Returns the norm of the farthest rank relative to `distance`, as the median over tensors."""
    return float(np.median(norms.max(axis=0)[distance > 0] / distance[distance > 0]))


def _declared(trial: Trial, local_size: int, steps: int) -> float:
    """Returns the size of all ranks' messages by `traffic()`, in units of all parameters."""
    traffic = algorithm_class(trial.algorithm).traffic(trial.options, trial.world_size, local_size)
    shares = [
        sum(part.share * (1 if isinstance(part, Message) else len(part.ranks)) for part in step)
        for step in traffic.steps
    ]
    return sum(shares[step % len(shares)] for step in range(steps))
