"""Ranks for a notebook: the engines of an ipyparallel cluster become one job, without MPI.

    cluster = ipyparallel.Cluster(n=4)
    client = cluster.start_and_connect_sync(activate=True)
    dear.comm.interactive.assign_ranks(client)
    %px import dear; dear.init()

`examples/notebooks/consensus.ipynb` shows it from start to end. Engines may be on several hosts.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import Any

from dear.errors import UserError


def assign_ranks(client: Any) -> list[int]:
    """Tells each engine its place in the job of all of them, as torchrun would, for `dear.init`.

    It sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the
    environments of the engines, which must be able to import `dear`. On one host engine i becomes
    rank i; with several hosts the ranks of each are neighbours.

    Args:
        client: an `ipyparallel.Client`.

    Returns:
        The engines' numbers in the order of their ranks: `client[assign_ranks(client)]` is a view
        of all ranks in order.

    Raises:
        UserError: there is no engine, or one has joined a job already.
    """
    places = {number: client[number].apply_sync(_place) for number in client.ids}
    if not places:
        raise UserError("the cluster has no engines: start some, and wait_for_engines()")
    joined = [number for number, (_, in_job) in places.items() if in_job]
    if joined:
        raise UserError(
            f"engine {joined[0]} has joined a job already: call shutdown() on all engines first"
        )
    hosts = list(dict.fromkeys(host for host, _ in places.values()))
    order = sorted(places, key=lambda number: hosts.index(places[number][0]))
    shared = {
        "WORLD_SIZE": len(order),
        "MASTER_ADDR": hosts[0] if len(hosts) > 1 else "127.0.0.1",
        "MASTER_PORT": client[order[0]].apply_sync(_free_port),
    }
    for rank, number in enumerate(order):
        here = [other for other in order if places[other][0] == places[number][0]]
        place = {"RANK": rank, "LOCAL_RANK": here.index(number), "LOCAL_WORLD_SIZE": len(here)}
        variables = {name: str(value) for name, value in (place | shared).items()}
        client[number].apply_sync(_enter, variables)
    return order


def _place() -> tuple[str, bool]:
    """On an engine: its host, and whether it has joined a job."""
    runtime = sys.modules.get("dear.comm.runtime")
    return socket.gethostname(), runtime is not None and runtime.is_initialized()


def _free_port() -> int:
    """On the engine of rank 0, where `dear.init` opens it."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def _enter(variables: dict[str, str]) -> None:
    """On an engine."""
    os.environ.pop("DEAR_STORE", None)  # of a job that the notebook itself may be part of
    os.environ.update(variables)
