"""Platforms from the files of configs/networks: one for the hosts, one for the links inside."""

from __future__ import annotations

from common.emulation.links.profile import (
    NetworkProfile,
    network_names,
    network_profile,
    payload_bytes_per_s,
)
from common.virtual.costs.parts import Kind, Medium, Platform, Wire
from dear.errors import UserError

CORE_GB_PER_S = 3.0
"""Rate at which a core receives over TCP and adds, in GB/s. The times of the comm core's regimes
`direct` and `two_hops` grow with the size by n / 2.6 and n / P x 2 / 3.1 GB/s more than the wire
does (costs in docs/records/fidelity), and its reduce-scatter reaches 2.7 GB/s on 25gbe."""
MEMORY = Wire(kind="inside", latency_s=2e-6, bytes_per_s=10e9, medium="memory")
"""Shared memory of a host, per rank: the comm core sums and copies 25 MB of two ranks on two cores
at 8.7 to 10.9 GB/s (docs/records/collectives/local-n2.json), and a small all-reduce takes 1 to 2 us
per meeting."""
INFINIBAND_PAYLOAD = 4096 / 4126
"""Payload of an InfiniBand packet of 4 KiB: 30 bytes are headers and checksums (IBTA 1.4)."""


def platform_of(network: str, inside: str | None = None) -> Platform:
    """Returns the wires and processors of hosts on a network of configs/networks.

    Args:
        inside: file of the links between the GPUs of a host, e.g. `nvlink3`; None: ranks of a host
            use shared memory.

    Raises:
        UserError: there is no such network, or it is of the other kind.
    """
    profile = _profile(network, is_inside=False)
    medium: Medium = "rdma" if profile.rdma else "tcp"
    wires: dict[Kind, Wire] = {
        "inside": wire_inside(inside),
        "between": _wire("between", profile, medium),
    }
    if profile.sites:
        wires["sites"] = Wire(
            kind="sites",
            latency_s=1e-6 * profile.farthest_us,
            bytes_per_s=payload_rate(profile.narrowest_gbps, medium),
            overhead_s=1e-6 * profile.overhead_us,
            medium=medium,
        )
    return Platform(wires=wires, core_bytes_per_s=1e9 * (profile.core_gb_per_s or CORE_GB_PER_S))


def wire_inside(name: str | None) -> Wire:
    """Returns the wire inside a host, from a file of configs/networks; None: shared memory."""
    if name is None:
        return MEMORY
    profile = _profile(name, is_inside=True)
    return _wire("inside", profile, profile.inside or "pcie")


def _profile(name: str, *, is_inside: bool) -> NetworkProfile:
    profile = network_profile(name)
    if (profile.inside is not None) != is_inside:
        of_kind = [
            n for n in network_names() if (network_profile(n).inside is not None) == is_inside
        ]
        place = "inside a host" if is_inside else "between hosts"
        raise UserError(f"{name} is not a network {place} (allowed: {', '.join(of_kind)})")
    return profile


def _wire(kind: Kind, profile: NetworkProfile, medium: Medium) -> Wire:
    return Wire(
        kind=kind,
        latency_s=1e-6 * profile.latency_us,
        bytes_per_s=payload_rate(profile.gbps, medium),
        overhead_s=1e-6 * profile.overhead_us,
        medium=medium,
    )


def payload_rate(gbps: float, medium: Medium) -> float:
    """Returns the payload's rate; files of links inside a host give it without headers."""
    if medium == "tcp":
        return payload_bytes_per_s(gbps)
    return gbps * 1e9 / 8 * (INFINIBAND_PAYLOAD if medium == "rdma" else 1)
