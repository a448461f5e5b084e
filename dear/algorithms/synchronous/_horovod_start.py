"""Starts Horovod in a job that has its ranks: what horovodrun would do, and its settings."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from dear.buckets.grouping import MIB
from dear.comm.runtime import address_of
from dear.errors import UserError

if TYPE_CHECKING:
    from horovod.runner.common.util.hosts import SlotInfo

    from dear.comm.communicator import Communicator
    from dear.comm.environment import RankFacts

_VARIABLES = {
    "fusion_threshold_mb": "HOROVOD_FUSION_THRESHOLD",
    "cycle_time_ms": "HOROVOD_CYCLE_TIME",
    "cache_capacity": "HOROVOD_CACHE_CAPACITY",
    "autotune": "HOROVOD_AUTOTUNE",
}
_running: dict[str, Any] = {}
"""The values of options with which Horovod has been started here."""


def start(communicator: Communicator, options: Any) -> None:
    """Joins Horovod's own job of the same ranks, with its settings from `options`.

    Raises:
        UserError: Horovod runs already, with other settings than these.
    """
    import horovod.torch as hvd

    from dear.comm import runtime

    wanted = {name: getattr(options, name) for name in ("controller", *_VARIABLES)}
    if hvd.is_initialized():
        _refuse_others(wanted)
        return
    facts = runtime.facts()
    if options.controller == "mpi":
        if facts.launcher != "Open MPI" or not hvd.mpi_built():
            raise UserError(
                "option of horovod controller='mpi' needs mpirun and a Horovod built with MPI "
                f"(started by: {facts.launcher}; built with MPI: {bool(hvd.mpi_built())})"
            )
        os.environ["HOROVOD_CONTROLLER"] = os.environ["HOROVOD_CPU_OPERATIONS"] = "mpi"
    else:
        _rendezvous(communicator, facts)
    with _settings(wanted):
        hvd.init()
    _running.clear()
    _running.update(wanted)
    runtime.at_shutdown(hvd.shutdown)


def _refuse_others(wanted: dict[str, Any]) -> None:
    import horovod.torch as hvd

    now = _running
    if not now:  # the script has started it itself
        now = {**dict.fromkeys(_VARIABLES), "autotune": False}
        now["controller"] = "mpi" if hvd.mpi_enabled() else "gloo"
    for name, value in wanted.items():
        if value != now[name]:
            raise UserError(
                f"option of horovod {name!r}={value}: Horovod runs in this process already, with "
                f"{name}={now[name]}, and reads its settings only when it starts"
            )


@contextlib.contextmanager
def _settings(wanted: dict[str, Any]) -> Iterator[None]:
    """The environment variables that Horovod reads while it starts; afterwards as they were."""
    values = {}
    for name, variable in _VARIABLES.items():
        value = wanted[name]
        if name == "fusion_threshold_mb" and value is not None:
            value = int(value * MIB)
        if value is not None and value is not False:
            values[variable] = "1" if value is True else str(value)
    before = {variable: os.environ.get(variable) for variable in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for variable, value in before.items():
            if value is None:
                del os.environ[variable]
            else:
                os.environ[variable] = value


def _rendezvous(communicator: Communicator, facts: RankFacts) -> None:
    """Does what horovodrun would: a key-value server on rank 0, and the ranks' places."""
    from horovod.runner.http.http_server import RendezvousServer

    from dear.comm import runtime

    host, address, interface = _whereabouts(facts)
    slots = _slots(communicator.gather_objects((host, facts.local_rank)))
    where = (address, 0)
    if facts.rank == 0:
        server = RendezvousServer()
        where = (address, server.start())
        server.init(slots)
        runtime.at_shutdown(server.stop)
    address, port = communicator.broadcast_object(where)
    slot = slots[facts.rank]
    os.environ.update(
        HOROVOD_CONTROLLER="gloo",
        HOROVOD_CPU_OPERATIONS="gloo",
        HOROVOD_GLOO_IFACE=interface,
        HOROVOD_GLOO_RENDEZVOUS_ADDR=address,
        HOROVOD_GLOO_RENDEZVOUS_PORT=str(port),
        HOROVOD_HOSTNAME=slot.hostname,
        HOROVOD_RANK=str(slot.rank),
        HOROVOD_SIZE=str(slot.size),
        HOROVOD_LOCAL_RANK=str(slot.local_rank),
        HOROVOD_LOCAL_SIZE=str(slot.local_size),
        HOROVOD_CROSS_RANK=str(slot.cross_rank),
        HOROVOD_CROSS_SIZE=str(slot.cross_size),
    )


def _whereabouts(facts: RankFacts) -> tuple[str, str, str]:
    """This host's name, its address for the other ranks, and the interface of that address."""
    if facts.one_host:
        return "localhost", "127.0.0.1", "lo"
    name = socket.gethostname()
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    address = address_of(interface) if interface else socket.gethostbyname(name)
    if address is None:
        raise UserError(f"GLOO_SOCKET_IFNAME={interface}: {name} has no such interface with IPv4")
    return name, address, interface


def _slots(places: Sequence[tuple[str, int]]) -> list[SlotInfo]:
    """Horovod's view of the ranks, whose hosts and numbers on them are `places`."""
    from horovod.runner.common.util.hosts import SlotInfo

    slots = []
    for rank, (host, local_rank) in enumerate(places):
        alike = [other for other, number in places if number == local_rank]
        slots.append(
            SlotInfo(
                hostname=host,
                rank=rank,
                local_rank=local_rank,
                cross_rank=alike.index(host),
                size=len(places),
                local_size=sum(other == host for other, _ in places),
                cross_size=len(alike),
            )
        )
    return slots
