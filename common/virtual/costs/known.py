"""Costs of collectives on a network: given, measured there, or composed for an engine."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from common.emulation.links.profile import network_profile
from common.virtual.costs.engines import ENGINES, OPERATIONS, costs_of, ring_of
from common.virtual.costs.networks import platform_of
from common.virtual.costs.parts import COSTS, CostsOf, Platform, Shape
from dear.cost.calibrated import NetworkCosts
from dear.cost.event_model.link import Cost, Scaled
from dear.cost.fit import AlphaBeta
from dear.errors import UserError

PLAIN_LINKS = ("sites", "trace", "jitter_us", "loss_percent")
"""Keys of a network file that predictions do not model."""


@dataclass(frozen=True, kw_only=True)
class Links:
    """Costs of collectives on a network, and their relative errors."""

    costs: CostsOf
    measured: Shape | None = None
    """Hosts and ranks whose costs are measured, as far as `residuals` has the operation."""
    residuals: Mapping[str, float] = field(default_factory=dict)
    """Relative error of each measured cost; that of composed and given costs is `COSTS`."""
    platform: Platform | None = None
    """Wires that the costs are composed of; None: they are measured or given."""
    note: str | None = None
    """Sentence about costs that are composed although the network has measured ones."""

    def within(self, sign: int) -> CostsOf:
        """Returns the costs; with a `sign` (-1 or 1), at an end of their ranges."""
        if not sign:
            return self.costs

        def costs(hosts: int, local: int) -> Mapping[str, Cost]:
            here = Shape(hosts=hosts, ranks_per_host=local)
            errors = self.residuals if here == self.measured else {}
            return {
                name: Scaled(cost=cost, factor=1 + sign * errors.get(name, COSTS))
                for name, cost in self.costs(hosts, local).items()
            }

        return costs


def given_links(cost: AlphaBeta, ranks: int) -> Links:
    """Returns the costs that follow from the cost of an all-reduce of all ranks, by a ring."""
    platform = ring_of(cost, ranks)
    return Links(costs=lambda hosts, local: costs_of("ring", platform, Shape(hosts=hosts * local)))


def links_of(
    network: str,
    shape: Shape,
    engine: str,
    inside: str | None,
    changed: Callable[[Platform], Platform] | None = None,
    *,
    varied: bool = False,
) -> Links:
    """Returns what collectives of an engine cost on a network.

    The measured costs of a network do not count for an algorithm's own library.

    Args:
        network: name of a file of configs/networks, or a bandwidth such as `2.5gbit`.
        shape: all hosts and ranks.
        inside: links between the GPUs of a host; None: PCIe 4 for NCCL, else shared memory.
        changed: function that replaces the network's wires. With it, the measured costs of the
            network are not used.
        varied: where the measured costs are of other ranks, costs are composed.

    Raises:
        UserError: predictions do not model the network, the engine cannot use its links, or its
            measured costs are of other ranks or another engine.
    """
    profile = network_profile(network)
    for key in PLAIN_LINKS:
        if getattr(profile, key):
            raise UserError(f"network {profile.name}: predictions do not model `{key}:`")
    platform = platform_of(network, inside or ("pcie4" if engine == "nccl" else None))
    if changed is not None:
        platform = changed(platform)

    @functools.cache
    def composed(hosts: int, local: int) -> Mapping[str, Cost]:
        return costs_of(engine, platform, Shape(hosts=hosts, ranks_per_host=local))

    composed(shape.hosts, shape.ranks_per_host)  # refuses links that the engine cannot use
    measured = profile.costs
    if measured is None:
        return Links(costs=composed, platform=platform)
    note = f"network {profile.name}: its measured costs are of {_where(measured, shape)}; "
    if why := _why_composed(measured, engine, shape, changed is not None, varied):
        return Links(costs=composed, platform=platform, note=note + why)
    if not _is_measured(measured, engine, shape):
        raise UserError(
            f"network {profile.name}: its costs are of {_where(measured, shape)}, but this is "
            f"{engine} with {_ranks(shape.ranks, shape.ranks_per_host)}; calibrate there, or use a "
            "network without measured costs"
        )
    return _measured_links(measured, shape, composed, note)


def _why_composed(
    measured: NetworkCosts, engine: str, shape: Shape, changed: bool, varied: bool
) -> str | None:
    """Returns which costs are composed if none of the measured ones count; None: some count."""
    if ENGINES[engine].of_library and engine != measured.engine:
        return f"those of {engine} are composed"
    if changed:
        return "on changed links, all costs are composed"
    if varied and not _is_measured(measured, engine, shape):
        return "elsewhere, costs are composed"
    return None


def _measured_links(measured: NetworkCosts, shape: Shape, composed: CostsOf, note: str) -> Links:
    known = measured.collective_costs()

    def costs(hosts: int, local: int) -> Mapping[str, Cost]:
        here = composed(hosts, local)
        return here | known if (hosts, local) == (shape.hosts, shape.ranks_per_host) else here

    missing = [name for name in OPERATIONS if name not in known]
    return Links(
        costs=costs,
        measured=shape,
        residuals={name: cost.residual_rms for name, cost in measured.by_operation().items()},
        note=f"{note}those of {', '.join(missing)} are composed" if missing else None,
    )


def _is_measured(measured: NetworkCosts, engine: str, shape: Shape) -> bool:
    local = measured.ranks_per_host or shape.ranks_per_host
    there = (measured.engine, measured.world_size, local)
    return there == (engine, shape.ranks, shape.ranks_per_host)


def _where(measured: NetworkCosts, shape: Shape) -> str:
    local = measured.ranks_per_host or shape.ranks_per_host
    return f"{measured.engine} with {_ranks(measured.world_size, local)}"


def _ranks(ranks: int, local: int) -> str:
    return f"{ranks} ranks, {local} per host"
