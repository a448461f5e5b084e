"""Costs of collectives on a network: given, measured there, or composed for an engine."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from common.emulation.links.profile import NetworkProfile, network_profile
from common.virtual.costs.engines import costs_of, ring_of
from common.virtual.costs.networks import platform_of
from common.virtual.costs.parts import COSTS, CostsOf, Platform, Shape
from dear.cost.calibrated import NetworkCosts
from dear.cost.fit import AlphaBeta, Cost
from dear.errors import UserError

PLAIN_LINKS = ("sites", "trace", "jitter_us", "loss_percent")
"""Keys of a network file that predictions do not model."""


@dataclass(frozen=True, kw_only=True)
class Links:
    """Costs of collectives on a network, and their relative error."""

    costs: CostsOf
    error: float
    platform: Platform | None = None
    """Wires that the costs are composed of; None: they are measured or given."""


def given_links(cost: AlphaBeta, ranks: int) -> Links:
    """Returns the costs that follow from the cost of an all-reduce of all ranks, by a ring."""
    platform = ring_of(cost, ranks)
    return Links(
        costs=lambda hosts, local: costs_of("ring", platform, Shape(hosts=hosts * local)),
        error=COSTS,
    )


def links_of(
    network: str,
    shape: Shape,
    engine: str,
    inside: str | None,
    changed: Callable[[Platform], Platform] | None = None,
) -> Links:
    """Returns what collectives of an engine cost on a network.

    Args:
        network: a file of configs/networks, or a path to a user's file.
        shape: all hosts and ranks.
        inside: links between the GPUs of a host; None: PCIe 4 for NCCL, else shared memory.
        changed: function that replaces the network's wires. With it, the measured costs of the
            network are not used.

    Raises:
        UserError: predictions do not model the network, the engine cannot use its links, or its
            measured costs are of other ranks or another engine.
    """
    profile = network_profile(network)
    for key in PLAIN_LINKS:
        if getattr(profile, key):
            raise UserError(f"network {profile.name}: predictions do not model `{key}:`")
    platform = platform_of(network, inside or ("pcie4" if engine == "nccl" else None))
    measured = profile.costs
    if changed is not None:
        platform, measured = changed(platform), None

    @functools.cache
    def composed(hosts: int, local: int) -> Mapping[str, Cost]:
        return costs_of(engine, platform, Shape(hosts=hosts, ranks_per_host=local))

    composed(shape.hosts, shape.ranks_per_host)  # refuses links that the engine cannot use
    if measured is None:
        return Links(costs=composed, error=COSTS, platform=platform)
    _check_measured(profile, measured, engine, shape)

    def known(hosts: int, local: int) -> Mapping[str, Cost]:
        if (hosts, local) != (shape.hosts, shape.ranks_per_host):
            return composed(hosts, local)
        return {**composed(hosts, local), **measured.collective_costs()}

    residuals = [cost.residual_rms for cost in measured.by_operation().values()]
    return Links(costs=known, error=max(residuals))


def _check_measured(
    profile: NetworkProfile, measured: NetworkCosts, engine: str, shape: Shape
) -> None:
    here = (engine, shape.ranks, shape.ranks_per_host)
    local = measured.ranks_per_host or shape.ranks_per_host
    there = (measured.engine, measured.world_size, local)
    if here != there:
        raise UserError(
            f"network {profile.name}: its costs are of {there[0]} with {there[1]} ranks, "
            f"{there[2]} per host, but this is {here[0]} with {here[1]} ranks, {here[2]} per host; "
            "calibrate there, or use a network without measured costs"
        )
