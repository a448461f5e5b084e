"""Implementations of the links between virtual hosts: rate, delay, jitter and loss.

`tc` is a bridge of the kernel whose ports are shaped by tbf and netem. `switch` is a program of
this project between the ends of the links; it needs only veth devices and packet sockets, and it
supports sites. `choose` selects one. Both count bytes as common/emulation/network.py describes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from common.emulation.config import NetworkProfile
from common.emulation.links.base import Links
from common.emulation.links.switched import SwitchedLinks
from common.emulation.links.tc import KernelLinks, has_netem
from dear.errors import UserError

__all__ = ["KernelLinks", "Links", "SwitchedLinks", "check", "choose", "has_netem"]


def check(kind: Literal["auto", "switch", "tc"], profiles: Iterable[NetworkProfile]) -> None:
    """Raises `UserError` if links of this kind cannot apply one of the profiles."""
    for profile in profiles:
        if kind == "tc" and profile.sites:
            raise UserError(
                f"cluster.links: tc does not support sites, which network {profile.name!r} has; "
                "use switch"
            )


def choose(kind: Literal["auto", "switch", "tc"], profiles: Sequence[NetworkProfile]) -> Links:
    """Returns links of this kind; for `auto`, of a kind that can apply all profiles.

    `auto` means `tc` if the kernel has netem and no profile has sites, else `switch`: the kernel
    forwards at half the CPU time, and results are comparable with other emulations based on it.

    Raises:
        UserError: as for `check`, or the switch is not built.
    """
    check(kind, profiles)
    sites = any(profile.sites for profile in profiles)
    if kind == "tc" or (kind == "auto" and has_netem() and not sites):
        return KernelLinks()
    return SwitchedLinks()
