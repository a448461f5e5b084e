"""How the links of virtual hosts get their rate, delay, jitter and loss.

Two ways, and `choose` between them. `tc`: a bridge of the kernel whose ports tbf and netem shape.
`switch`: a program of ours between the ends of the cables, which needs nothing of the kernel but
veth devices and packet sockets, and knows sites. Both count bytes as common/emulation/network.py
says.
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


def check(asked: Literal["auto", "switch", "tc"], profiles: Iterable[NetworkProfile]) -> None:
    """Raises `UserError` if links of the kind that was asked for cannot do one of the profiles."""
    for profile in profiles:
        if asked == "tc" and profile.sites:
            raise UserError(
                f"cluster.links: tc knows no sites, which network {profile.name!r} has; use switch"
            )


def choose(asked: Literal["auto", "switch", "tc"], profiles: Sequence[NetworkProfile]) -> Links:
    """The kind that was asked for; for `auto` that which can do all of the profiles.

    That is `tc` where the kernel has netem and no profile has sites: the kernel forwards at half
    the CPU time, and what can be compared with other people's emulations is theirs, too.

    Raises:
        UserError: as `check`, or the switch is not built.
    """
    check(asked, profiles)
    sites = any(profile.sites for profile in profiles)
    if asked == "tc" or (asked == "auto" and has_netem() and not sites):
        return KernelLinks()
    return SwitchedLinks()
