"""Settings in which one thing costs nearly nothing, to show how much of a step it takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import cache
from typing import Literal, TypeVar

from common.virtual.costs.parts import Composed, Timing
from common.virtual.passes import UnmodelledError
from common.virtual.setting import Setting
from dear.cost.event_model.link import Cost
from dear.cost.fit import AlphaBeta, CollectiveCost

Part = Literal["start_up", "bytes", "messages", "compute"]
"""Thing that costs nearly nothing: the start-up of a message, its bytes, both, or the device."""
LEFT = 1e-3
"""Share that is left of a cost. It is not 0, because algorithms divide by costs that they measure;
at a thousandth, a step is right to the digits that are shown."""
LineT = TypeVar("LineT", bound=AlphaBeta)


def without(setting: Setting, part: Part) -> Setting:
    """Returns the setting with a thousandth (`LEFT`) of a part's time.

    The algorithm plans anew: one that measures costs measures the changed ones.
    """
    if part == "compute":
        profile = setting.profile.slowed(LEFT)
        rate = setting.profile.memory_bytes_per_s / LEFT
        return dataclasses.replace(
            setting, profile=dataclasses.replace(profile, memory_bytes_per_s=rate)
        )

    def costs(hosts: int, ranks_per_host: int) -> Mapping[str, Cost]:
        whole = setting.costs(hosts, ranks_per_host)
        return {name: cost_without(cost, part) for name, cost in whole.items()}

    return dataclasses.replace(setting, costs=costs)


def cost_without(cost: Cost, part: Part) -> Cost:
    """Returns the cost of a collective with a thousandth of a part's time.

    Raises:
        UnmodelledError: the start-up of the cost is not known.
    """
    alpha = LEFT if part in ("start_up", "messages") else 1.0
    beta = LEFT if part in ("bytes", "messages") else 1.0
    if isinstance(cost, Composed):
        return dataclasses.replace(cost, timing=cache(_timing(cost, alpha, beta)))
    if isinstance(cost, CollectiveCost):
        smaller = tuple(_line(line, alpha, beta) for line in cost.smaller)
        return dataclasses.replace(_line(cost, alpha, beta), smaller=smaller)
    if isinstance(cost, AlphaBeta):
        return _line(cost, alpha, beta)
    raise UnmodelledError(f"the start-up of a {type(cost).__name__} cost is not known")


def _timing(cost: Composed, alpha: float, beta: float) -> Callable[[float], Timing]:
    """Returns the timings, with factors of what does not depend on the bytes, and of the rest.

    The link is occupied by the overhead of messages, too: as long as by a message of one byte.
    """

    def timing(nbytes: float) -> Timing:
        whole, least = cost.timing(nbytes), cost.timing(1.0)
        overhead_s = min(least.link_s, whole.link_s)
        return Timing(
            latency_s=alpha * whole.latency_s,
            link_s=alpha * overhead_s + beta * (whole.link_s - overhead_s),
            core_s=beta * whole.core_s,
        )

    return timing


def _line(line: LineT, alpha: float, beta: float) -> LineT:
    queued_s = line.queued_alpha_s
    return dataclasses.replace(
        line,
        alpha_s=alpha * line.alpha_s,
        beta_s_per_byte=beta * line.beta_s_per_byte,
        queued_alpha_s=None if queued_s is None else alpha * queued_s,
    )
