"""Lower bound of the step time, from when gradients are ready and when parameters are read."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from common.virtual.passes import Passes
from dear.cost.bounds import CommTimes


def limit_s(passes: Passes, kind: str, comm: CommTimes, wire_s: float = 0.0) -> float | None:
    """Returns the lower bound of the seconds per step, for an algorithm's kind of bound.

    `dear.cost.bounds.step_bound_s` uses only the duration of each pass. This bound also uses that a
    gradient cannot be sent before it is ready, and that a layer waits only for its own parameters.

    - `wfbp`: gradients that are ready at time t or later are sent between t and the update.
    - `dear` and `cross_iteration`: those of them whose parameters the next forward pass reads
      before time u are sent between t and u. From u to the next t, the device computes.

    A step takes at least the longest of these intervals plus the compute outside it.

    Args:
        kind: bound of the algorithm (`dear.cost.bounds.Bound`).
        comm: seconds of a step's collectives, all messages together.
        wire_s: shortest time that the links take for a step (`dear.cost.bounds.wire_limit_s`).

    Returns:
        Seconds, or None for any other kind of bound.
    """
    gradients = passes.gradients
    if not gradients:
        return None
    halves_s = comm.reduce_scatter_s + comm.all_gather_s
    comm_s = max(halves_s if kind == "dear" else comm.all_reduce_s, wire_s)
    per_byte_s = comm_s / passes.nbytes
    forward_s = sum(passes.forward_s)
    if kind == "wfbp":
        sent = list(accumulate(gradient.nbytes for gradient in reversed(gradients)))[::-1]
        last_s = max(
            gradient.ready_s + per_byte_s * nbytes
            for gradient, nbytes in zip(gradients, sent, strict=True)
        )
        return forward_s + max(passes.backward_s, last_s) + passes.update_s
    if kind not in ("dear", "cross_iteration"):
        return None
    starts_s = [0.0, *accumulate(passes.forward_s)][:-1]
    nbytes_by_layer = [0] * len(passes.forward_s)
    longest_s = 0.0
    for gradient in reversed(gradients):
        nbytes_by_layer[gradient.layer] += gradient.nbytes
        stretch_s = _longest(nbytes_by_layer, starts_s, per_byte_s)
        longest_s = max(longest_s, forward_s + gradient.ready_s + stretch_s)
    return longest_s


def _longest(nbytes_by_layer: Sequence[int], starts_s: Sequence[float], per_byte_s: float) -> float:
    """Returns the largest delay of a layer: time to send the bytes up to it, minus its start."""
    sent = accumulate(nbytes_by_layer)
    return max(
        per_byte_s * nbytes - start_s for nbytes, start_s in zip(sent, starts_s, strict=True)
    )
