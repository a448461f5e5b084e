"""Changes of a host, and the faults of an experiment as such changes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from common.emulation.config import Fault
from common.emulation.links.profile import network_profile
from common.virtual.costs.engines import costs_of
from common.virtual.costs.networks import payload_rate
from common.virtual.costs.parts import Platform, Shape
from dear.cost.event_model.link import Cost, Scaled
from dear.errors import UserError

MODELLED = ("slow_host", "link_rate", "link_delay")
"""Kinds of faults that change speed, and nothing else."""


@dataclass(frozen=True, kw_only=True)
class Disturbance:
    """Change of a host for a time."""

    host: int
    compute: float = 1.0
    """Factor by which its compute takes longer."""
    costs: Callable[[int, int], Mapping[str, Cost]] | None = None
    """Costs of its messages that start meanwhile, from the hosts and ranks per host of their group;
    None: unchanged."""
    from_s: float = 0.0
    """Seconds after the measurement has begun."""
    until_s: float = math.inf


def check(fault: Fault | None, *, timed: bool) -> None:
    """Raises `UserError` for a fault that predictions do not model.

    Args:
        timed: training ends after a given time.
    """
    if fault is None:
        return
    if fault.kind not in MODELLED:
        raise UserError(
            f"faults: predictions model {', '.join(MODELLED)}, but not {fault.kind}; leave it out, "
            "or use `run`"
        )
    if not timed and (fault.at_s or fault.for_s is not None):
        raise UserError(
            f"faults: {fault.title}: a fault that begins later or ends needs `learn.budget_s:`, "
            "the time for which the predicted ranks train"
        )


def disturbances(
    fault: Fault | None, engine: str, hosts: int, platform: Platform | None, factor: float = 1.0
) -> tuple[Disturbance, ...]:
    """Returns the change that a fault makes, if there is any.

    Args:
        hosts: number of hosts.
        platform: wires from which costs are composed; None: costs are measured or given.
        factor: factor of all costs.

    Raises:
        UserError: the fault's host does not exist, or the fault changes a link, but costs are not
            composed.
    """
    if fault is None:
        return ()
    assert fault.host is not None, "all modelled kinds have a host"
    if fault.host >= hosts:
        raise UserError(f"faults: {fault.title}: host {fault.host} is not one of {hosts} hosts")
    until_s = math.inf if fault.for_s is None else fault.at_s + fault.for_s
    change = Disturbance(host=fault.host, from_s=fault.at_s, until_s=until_s)
    if fault.kind == "slow_host":
        assert fault.factor is not None, "checked with the fault"
        return (dataclasses.replace(change, compute=fault.factor),)
    if platform is None:
        raise UserError(
            f"faults: {fault.kind}: needs costs that are composed for the network, but they are "
            "measured or given; name a network without measured costs"
        )
    wire = platform.wire("between")
    if fault.rate is not None:
        wire = dataclasses.replace(
            wire, bytes_per_s=payload_rate(network_profile(fault.rate).gbps, wire.medium)
        )
    if fault.delay_us is not None:
        wire = dataclasses.replace(wire, latency_s=fault.delay_us / 1e6)
    changed = dataclasses.replace(platform, wires={**platform.wires, "slow": wire})

    def costs(hosts: int, ranks_per_host: int) -> Mapping[str, Cost]:
        shape = Shape(hosts=hosts, ranks_per_host=ranks_per_host)
        composed = costs_of(engine, changed, shape)
        return {name: Scaled(cost=cost, factor=factor) for name, cost in composed.items()}

    return (dataclasses.replace(change, costs=costs),)
