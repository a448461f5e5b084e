"""What holds for ranks that wait for nobody, whatever order they came in.

Nothing tells which of a neighbour's values a rank has averaged with, so there is no path that it
must have taken. But where each rank would be alone is known from its own gradients. Averaging moves
ranks from there towards each other, every tensor of them, without moving their mean much, and with
no more bytes than the algorithm declares. Values are no staler than it declares, and weights
that travel with them are positive and add up to the number of ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from common.harness.trial import Trial
from common.harness.worker.checking.correctness import Farthest, rounding
from common.harness.worker.checking.serial import Reference, Sample, again, alone
from common.harness.worker.checking.witness import Testimony
from dear.cost.bounds import Message
from dear.training.algorithm import algorithm_class

LEAST_ROUNDS = 3.0
"""With fewer messages from each neighbour (on average) nothing can be said: the first brings what
the receiver has, too."""
CLOSER = 0.25
"""Share of the way from each rank alone to all in step that ranks must have come together, where
every message was sent; less where the links could not carry all."""
DRIFT = 0.5
"""How far the mean of all ranks may be from where it would be without averaging, relative to how
far it moved and to how far ranks alone are apart. Stale values move it a little."""
TOUCHED = 1e-3
"""A tensor that differs from the rank alone by less, relative to how far ranks alone are apart, has
not been averaged."""
HEADERS = 1.02
"""Bytes that may be sent, relative to what is declared: messages carry steps and weights."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """What was found."""

    right: bool | None
    """None: nothing could be said."""
    finding: str | None
    """None where all holds."""
    drift: Farthest
    """Of the mean, of the worst tensor."""


def hold(
    trial: Trial,
    reference: Reference | None,
    seen: Sequence[Testimony],
    local_size: int,
    sent_bytes: int,
    parameter_bytes: int,
    counted: Sequence[dict[str, Any]],
    changed: int | None = None,
) -> Held:
    """Looks at all of them.

    Args:
        reference: with all ranks in step.
        sent_bytes: by all ranks together, since the first step.
        parameter_bytes: of one replica.
        counted: by rank, the statistics of the algorithm, when nothing was under way any more.
        changed: as of `again`.
    """
    sample = Sample(seen)
    start = np.stack([one.start for one in seen]).astype(np.float64)
    end = np.stack([one.end for one in seen]).astype(np.float64)
    apart = _last(again(trial, alone, seen, local_size, changed))
    distance = sample.norms(_from_mean(apart)).max(axis=0)
    moved = sample.norms(np.broadcast_to(apart.mean(0) - start.mean(0), end.shape))
    drift = sample.farthest(
        sample.norms(np.broadcast_to(end.mean(0) - apart.mean(0), end.shape)), moved + distance
    )
    together = 0.0
    if reference is not None:
        in_step = _last(again(trial, reference, seen, local_size, changed))
        together = _typical(sample.norms(_from_mean(in_step)), distance)
    came = _typical(sample.norms(_from_mean(end)), distance)
    # Where ranks alone would not differ, as without a gradient, there is nothing to average.
    differs = distance > sample.norms(start).max(axis=0) * rounding(
        trial.dtype, sample.steps, mixed=True
    )
    untouched = differs & (sample.norms(end - apart).max(axis=0) <= TOUCHED * distance)
    declared = _declared(trial, local_size, sample.steps) * parameter_bytes
    rounds = sample.steps // getattr(trial.options, "every", 1) * min(1.0, sent_bytes / declared)
    due = CLOSER * min(1.0, sent_bytes / declared)
    right, finding = False, None
    if broken := _too_stale(trial, counted) or _leaking(trial, counted, sample.steps):
        finding = broken
    elif not np.isfinite(end).all() or drift.error > DRIFT:
        finding = f"the mean of {drift.tensor} has gone elsewhere than gradients have moved it"
    elif sent_bytes > HEADERS * declared:
        finding = f"{sent_bytes:,} bytes were sent, and at most {declared:,.0f} are declared"
    elif rounds < LEAST_ROUNDS and sent_bytes:
        right, finding = None, f"{rounds:.1f} messages from each neighbour are too few to tell"
    elif came > 1 - due * (1 - together):
        finding = f"ranks are as far apart as {came:.2f} of each alone; in step {together:.2f}"
    elif untouched.any():
        finding = f"{seen[0].names[int(untouched.argmax())]} was never averaged"
    return Held(right=right if finding else True, finding=finding, drift=drift)


def _too_stale(trial: Trial, counted: Sequence[dict[str, Any]]) -> str | None:
    """Where a rank has used older values than the options allow."""
    limit = getattr(trial.options, "max_staleness", None)
    if limit is None:
        return None
    for rank, one in enumerate(counted):
        for peer, age in one["staleness"].items():
            if age["uses"] and age["max"] > limit:
                return (
                    f"rank {rank} used values of rank {peer} that were {age['max']} steps behind; "
                    f"at most {limit} are declared"
                )
    return None


def _leaking(trial: Trial, counted: Sequence[dict[str, Any]], steps: int) -> str | None:
    """Where weights that travel with values are lost, made or not positive; kept by bucket."""
    if not all("p" in one for one in counted):
        return None
    own = np.array([one["p"] for one in counted])
    if not (own > 0).all():
        return f"the weight of a rank's values is {own.min():.3g}, and all must be positive"
    totals = own.sum(axis=0) + np.array([one["p_arrived"] for one in counted]).sum(axis=0)
    worst = totals[np.abs(totals - trial.world_size).argmax()]
    if abs(worst / trial.world_size - 1) > rounding(trial.dtype, steps, mixed=True):
        return f"weights of values add up to {worst:.6g}, and must to {trial.world_size}"
    return None


def _last(path: Iterable[np.ndarray]) -> np.ndarray:
    return deque(path, maxlen=1)[0]


def _from_mean(x: np.ndarray) -> np.ndarray:
    return x - x.mean(axis=0)


def _typical(norms: np.ndarray, distance: np.ndarray) -> float:
    """Of the farthest rank, the median over the tensors, relative to `distance`."""
    return float(np.median(norms.max(axis=0)[distance > 0] / distance[distance > 0]))


def _declared(trial: Trial, local_size: int, steps: int) -> float:
    """Sizes of all messages of all ranks in so many steps, in units of the parameters."""
    made = algorithm_class(trial.algorithm).traffic(trial.options, trial.world_size, local_size)
    shares = [
        sum(part.share * (1 if isinstance(part, Message) else len(part.ranks)) for part in step)
        for step in made.steps
    ]
    return sum(shares[step % len(shares)] for step in range(steps))
