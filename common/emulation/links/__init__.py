"""Links between virtual hosts: rate, delay, jitter and loss."""

from common.emulation.links.choice import check, choose
from common.emulation.links.tc import has_netem

__all__ = ["check", "choose", "has_netem"]
