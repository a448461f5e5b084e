"""Choice between the kinds of links.

`tc` is a bridge of the kernel whose ports are shaped by tbf and netem. `switch` is a program of
this project between the ends of the links; it needs only veth devices and packet sockets, and it
supports sites. Both count bytes as common/emulation/hosts/network.py describes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from common.emulation.links.base import Links
from common.emulation.links.profile import NetworkProfile
from common.emulation.links.switched import SwitchedLinks
from common.emulation.links.tc import KernelLinks, has_netem
from dear.errors import UserError


def check(kind: str, profiles: Iterable[NetworkProfile]) -> None:
    """Raises `UserError` if links of this kind cannot apply one of the profiles."""
    for profile in profiles:
        if profile.inside is not None:
            raise UserError(
                f"network {profile.name!r} describes links inside a host ({profile.inside}); "
                "emulated hosts need a network between hosts, such as 10gbe"
            )
        if kind == "tc" and profile.sites:
            raise UserError(
                f"cluster.links: tc does not support sites, which network {profile.name!r} has; "
                "use switch"
            )
        if kind == "tc" and profile.jitter_us:
            raise UserError(
                f"cluster.links: tc reorders packets by the jitter of network {profile.name!r}, "
                "which TCP takes for losses; use switch"
            )


def choose(kind: str, profiles: Sequence[NetworkProfile]) -> Links:
    """Returns links of this kind (`auto`, `switch` or `tc`) that can apply all profiles. `auto`
    means `tc` if the kernel has netem and no profile has sites or jitter, else `switch`. `tc` is
    preferred: it needs half the CPU time, and other emulations use it, too. Raises `UserError` as
    `check` does, or if the switch is not built."""
    check(kind, profiles)
    special = any(profile.sites or profile.jitter_us for profile in profiles)
    if kind == "tc" or (kind == "auto" and has_netem() and not special):
        return KernelLinks()
    return SwitchedLinks()
