"""Lower bound of the step time from the moments at which gradients come and parameters are read."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from common.virtual.passes import Passes
from dear.cost.bounds import CommTimes


def limit_s(passes: Passes, kind: str, comm: CommTimes, wire_s: float = 0.0) -> float | None:
    """Returns the lower bound of the seconds per step for an algorithm whose bound is of this kind.

    `dear.cost.bounds.step_bound_s` knows only how long each pass takes. This bound also knows that
    a gradient cannot be sent before it is there, and that a layer waits only for its own
    parameters.

    - `wfbp`: all gradients that come at t or later are sent between t and the update.
    - `dear` and `cross_iteration`: those of them that the next forward pass reads by u are sent
      between t and u. The device computes from u to the next t besides.

    Each step takes at least as long as the worst of these stretches and the compute outside it.

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
    """Returns the largest of the seconds to send what layers up to one need, less its start."""
    sent = accumulate(nbytes_by_layer)
    return max(
        per_byte_s * nbytes - start_s for nbytes, start_s in zip(sent, starts_s, strict=True)
    )
