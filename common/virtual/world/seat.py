"""Place of a virtual rank in this process: what a process has once, each virtual rank has too."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist

from common.models.replay import pace
from common.virtual.world import group
from common.virtual.world.communicator import VirtualCommunicator
from common.virtual.world.device import Arithmetic, VirtualPace
from common.virtual.world.network import Network
from dear.comm import runtime
from dear.comm.environment import RankFacts


class Seat:
    """State of torch.distributed, dear and the replay, as a virtual rank sees it.

    A call makes the rank the one whose code runs.
    """

    def __init__(self, network: Network, memory_bytes_per_s: float) -> None:
        shape = network.shape
        self.network, self._device = network, VirtualPace(network)
        # Each thread has a mode of its own.
        network.inside = partial(Arithmetic, self._device, memory_bytes_per_s)
        network.take_turn = lambda: network.events.sit(self)
        self._facts = RankFacts(
            launcher="virtual",
            rank=network.rank,
            world_size=shape.ranks,
            local_rank=network.rank % shape.ranks_per_host,
            local_world_size=shape.ranks_per_host,
        )
        self._communicator: VirtualCommunicator | None = None
        self._world = _world()

    def __call__(self) -> None:
        dist.distributed_c10d._world = self._world
        group.use(self.network)
        pace.set_pace(self._device)
        runtime.become(self._facts, self._communicator)

    @contextlib.contextmanager
    def joined(self) -> Iterator[VirtualCommunicator]:
        """Makes the calling thread this rank of a torch.distributed job; yields the communicator.

        Must run within `kept`.
        """
        self.network.take_turn()
        rank, size = self.network.rank, self.network.shape.ranks
        with self.network.inside():
            dist.init_process_group(group.NAME, rank=rank, world_size=size, store=dist.HashStore())
            try:
                world = dist.group.WORLD
                assert world is not None
                self._communicator = VirtualCommunicator(self.network, world)
                self()
                yield self._communicator
            finally:
                self()
                dist.destroy_process_group()


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Returns a context after which the state of the process is what it was before."""
    if group.NAME.upper() not in dir(dist.Backend):
        dist.Backend.register_backend(
            group.NAME,
            lambda store, rank, size, timeout: group.VirtualGroup(rank, size),
            devices=["cpu"],
        )
    before = runtime.become(None, None)
    world, device = dist.distributed_c10d._world, pace.current()
    hook = sys.excepthook  # torch puts the rank before every line of later errors
    # Each rank registers its groups by the same names, in its own thread.
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    try:
        yield
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        dist.distributed_c10d._world = world
        pace.set_pace(device)
        runtime.become(*before)
        sys.excepthook = hook


def _world() -> SimpleNamespace:
    """Returns the state of torch.distributed before there is any group."""
    names = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag")
    return SimpleNamespace(
        default_pg=None,
        group_count=0,
        comms=[],
        pg_coalesce_state={},
        pg_config_info=[],
        **{name: {} for name in names},
    )
