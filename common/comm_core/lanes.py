"""A lane: one process group of a `Communicator`, with the streams that feed it."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

from .collectives import Channel
from .groups import backends_of
from .streams import DeviceStream, HostStream

log = logging.getLogger("comm_core")

# Backends that run the collectives of a group one after another, in the order of the calls. Gloo
# does not: it runs two at a time.
_ORDERED = frozenset({"comm_core"})


class Lane:
    """One process group, and a stream for each device whose tensors use it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.backends = backends_of(group)
        ordered = self.backends.get("cpu") in _ORDERED
        self.host = HostStream(ordered)
        self.devices: dict[torch.device, DeviceStream] = {}
        self.channel = Channel(group, dist.get_world_size(group), ordered)

    def stream(self, device: torch.device) -> HostStream | DeviceStream:
        """The stream for tensors of `device`."""
        if device.type == "cpu":
            return self.host
        if device not in self.devices:
            self.devices[device] = DeviceStream(device)
        return self.devices[device]

    def idle(self) -> bool:
        """True if nothing is queued or under way."""
        return all(stream.idle() for stream in (self.host, *self.devices.values()))

    def close(self) -> None:
        """Ends the streams, then lets go of the process group."""
        for stream in (self.host, *self.devices.values()):
            stream.close()
        try:
            dist.destroy_process_group(self.channel.group)
        except (ValueError, AssertionError):
            log.debug("torch.distributed has already let go of this process group")
