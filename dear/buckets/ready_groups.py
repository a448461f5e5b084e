"""Groups of gradients by when they are ready: within a cycle, up to the size of a buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dear.buckets.grouping import by_buffer, by_wait
from dear.buckets.run_order import launch_order

if TYPE_CHECKING:
    from torch.nn import Parameter

    from dear.buckets.run_order import RunOrder


def ready_groups(
    params: Sequence[Parameter],
    dense: Sequence[Parameter],
    order: RunOrder,
    *,
    buffer_bytes: float,
    cycle_s: float | None,
) -> list[list[Parameter]]:
    """Groups of the `dense` ones among `params`, in the order in which they are complete.

    Types and devices are never mixed, nor parameters with and without a gradient in the pass that
    `order` has seen: these would hold up the others.

    Args:
        buffer_bytes: no group is larger, but for a single gradient that is.
        cycle_s: only what arrives in the same cycle is joined, cycles counted from the end of the
            pass; None: whatever comes next.
    """
    waits = {params[i]: wait for i, wait in zip(order.arrivals, order.waits_s, strict=True)}
    wanted = set(dense)
    arrived = [params[i] for i in order.arrivals if params[i] in wanted]
    never = [param for param in dense if param not in waits]
    groups = []
    for same in [*_kinds(arrived), *_kinds(never)]:
        for cycle in _cycles(same, [waits.get(param, 0.0) for param in same], cycle_s):
            sizes = [param.nbytes for param in cycle]
            groups += [[cycle[i] for i in group] for group in by_buffer(sizes, buffer_bytes)]
    return [groups[i] for i in launch_order(groups, params, order)]


def _kinds(params: Sequence[Parameter]) -> list[list[Parameter]]:
    kinds: dict[tuple, list[Parameter]] = {}
    for param in params:
        kinds.setdefault((param.dtype, param.device), []).append(param)
    return list(kinds.values())


def _cycles(
    params: list[Parameter], waits_s: list[float], cycle_s: float | None
) -> list[list[Parameter]]:
    if cycle_s is None:
        return [params]
    # `by_wait` counts from the end of the pass backwards.
    last = len(params) - 1
    cycles = by_wait(waits_s[::-1], cycle_s)
    return [[params[last - i] for i in reversed(cycle)] for cycle in reversed(cycles)]
